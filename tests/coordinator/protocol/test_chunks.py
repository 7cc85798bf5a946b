"""Chunks: every slot once, the longest first and with the fastest; and which one a rank may claim when."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.protocol.chunks import (
    Chunks,
    Pace,
    RankLoad,
    RankTimings,
    choose_chunks,
    cut_into_chunks,
    made_of,
    measured,
    paces_of,
    updated_paces,
    with_guests,
)

FAST, SLOW = Pace(400, 100.0, 4), Pace(100, 100.0, 4)
IDLE = RankLoad(open_work=0.0, pace=None, still_s=0.0, width=4)
paces = st.builds(Pace, st.integers(1, 10_000), st.floats(0.1, 1e4), st.integers(1, 512))


@given(
    slots=st.sets(st.integers(0, 999), max_size=300),
    ranks=st.sets(st.integers(0, 40), min_size=1, max_size=12),
    data=st.data(),
)
def test_every_slot_is_in_one_chunk(slots: set[int], ranks: set[int], data: st.DataObject) -> None:
    known = data.draw(st.dictionaries(st.sampled_from(sorted(ranks)), paces))
    some = st.dictionaries(st.sampled_from(sorted(slots)), st.floats(1, 1e5)) if slots else st.just({})
    costs = data.draw(some)
    made = cut_into_chunks(sorted(slots), costs, sorted(ranks), known)
    chunked = [slot for chunk in made.chunks for slot in chunk.slots]
    assert sorted(chunked) == sorted(slots) and all(chunk.slots for chunk in made.chunks)
    assert made.first.keys() == ranks and Chunks.from_json(made.as_json()) == made
    if costs:
        usual = sum(costs.values()) / len(costs)
        expected = [costs.get(slot, usual) for slot in chunked]
        assert expected == sorted(expected, reverse=True)


def test_the_fastest_rank_begins_with_the_longest_groups_and_has_most_of_the_list() -> None:
    made = cut_into_chunks(range(100), {slot: 1.0 + slot for slot in range(100)}, [0, 1], {0: SLOW, 1: FAST})
    assert made.first[1] == 0 and made.chunks[0].dearest == 100.0
    of_fast = sum(chunk.work for chunk in made.chunks[: made.first[0]])
    assert 0.75 < of_fast / sum(chunk.work for chunk in made.chunks) < 0.85


def test_chunks_of_a_place_become_smaller_down_to_single_groups() -> None:
    sizes = [
        len(chunk.slots)
        for chunk in cut_into_chunks(range(90), dict.fromkeys(range(90), 2.0), [0], {}).chunks
    ]
    assert sizes[0] == 30 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 1


def test_no_chunk_is_large_whose_costs_nobody_knows() -> None:
    sizes = [len(chunk.slots) for chunk in cut_into_chunks(range(96), {}, [0], {}).chunks]
    assert sizes[0] == 4 and sizes == sorted(sizes, reverse=True) and sizes[-1] == 1


def test_three_nodes_claim_512_groups_in_at_most_60_chunks() -> None:
    assert len(cut_into_chunks(range(512), {}, range(3), {0: FAST, 1: SLOW, 2: SLOW}).chunks) <= 60


def test_a_place_that_a_rank_can_have_in_flight_at_once_is_one_chunk() -> None:
    made = cut_into_chunks(range(8), {}, [0, 1], {0: SLOW, 1: SLOW})
    assert [len(chunk.slots) for chunk in made.chunks] == [4, 4]


def test_a_rank_takes_its_own_place_first() -> None:
    made = cut_into_chunks(range(30), {}, [0, 1, 2], {})
    numbers = range(len(made.chunks))
    for rank, first in made.first.items():
        assert choose_chunks(made, rank, numbers, IDLE)[0] == first
    last = max(made.first, key=lambda rank: made.first[rank])
    own = range(made.first[last], len(made.chunks))
    assert choose_chunks(made, last, [number for number in numbers if number not in own], IDLE)[0] == 0


def test_a_slow_rank_leaves_the_last_long_group_to_a_fast_one() -> None:
    made = cut_into_chunks([0, 1], {0: 1000.0, 1: 10.0}, [0, 1], {0: FAST, 1: SLOW})
    assert choose_chunks(made, 1, [0], IDLE) == []
    assert choose_chunks(made, 0, [0], IDLE) == [0]


@pytest.mark.parametrize("too_slow", [2.0, 10.0, 100.0])
def test_a_rank_that_was_measured_in_a_bad_moment_gets_groups_again(too_slow: float) -> None:
    paces = {0: Pace(100, 10.0, 64), 1: Pace(100, 10.0 * too_slow, 64)}
    shares: list[int] = []
    for _ in range(14):
        chunks = cut_into_chunks(range(64), {}, [0, 1], paces)
        mine = sum(len(chunk.slots) for chunk in chunks.chunks[chunks.first[1] :])
        shares.append(mine)
        paces = updated_paces(paces, {rank: Pace(100, 10.0, 64) for rank in ((0, 1) if mine else (0,))})
    assert shares[0] < 32 and shares[-1] == 32


def test_a_rank_without_work_is_never_taken_for_faster_than_all_that_have_worked() -> None:
    paces = {0: Pace(100, 10.0, 64), 1: Pace(0, 0.0, 8), 2: Pace(10, 20.0, 8)}
    for _ in range(30):
        paces = updated_paces(
            paces_of({str(rank): pace for rank, pace in paces.items()}), {0: Pace(100, 10.0, 64)}
        )
    assert paces[2].per_group == pytest.approx(paces[0].per_group) and 1 not in paces
    assert updated_paces(paces, {}) == paces


def test_what_nobody_claims_is_claimed_in_the_end() -> None:
    """The fast rank may be gone, or have become slow."""
    made = cut_into_chunks([0, 1], {0: 1000.0, 1: 10.0}, [0, 1], {0: FAST, 1: SLOW})
    waited = [
        still_s
        for still_s in range(0, 2000, 10)
        if choose_chunks(made, 1, [0], IDLE._replace(still_s=still_s))
    ]
    assert waited and waited[0] < 1000


def test_a_slow_rank_leaves_nothing_to_one_that_is_lost() -> None:
    made = cut_into_chunks([0, 1], {0: 1000.0, 1: 10.0}, [0, 1], {0: FAST, 1: SLOW})
    assert choose_chunks(made, 1, [0], IDLE) == [] and choose_chunks(made, 1, [0], IDLE, lost=[0]) == [0]
    known = dict.fromkeys(range(3), Pace(400, 100.0, 64))
    three = cut_into_chunks(range(60), {}, [0, 1, 2], known)
    me = IDLE._replace(width=64, open_work=9.5)
    assert choose_chunks(three, 0, [1, 2], me) == [] and choose_chunks(three, 0, [1, 2], me, lost=[1]) == [
        1,
        2,
    ]


def test_a_rank_that_has_become_slow_leaves_to_others_what_was_for_it() -> None:
    made = cut_into_chunks([0, 1], {0: 1000.0, 1: 10.0}, [0, 1], {0: FAST, 1: SLOW})
    assert choose_chunks(made, 0, [0], IDLE._replace(pace=0.1)) == []


def test_a_rank_holds_no_more_than_its_share_of_all() -> None:
    made = cut_into_chunks(range(100), {}, [0, 1], {0: FAST, 1: SLOW})
    free = range(len(made.chunks))
    assert choose_chunks(made, 1, free, IDLE._replace(open_work=19.0))
    assert choose_chunks(made, 1, free, IDLE._replace(open_work=20.0)) == []


def test_a_rank_that_is_early_takes_nobody_elses_whole_place() -> None:
    paces = dict.fromkeys(range(3), Pace(400, 100.0, 64))
    made = cut_into_chunks(range(60), {}, [0, 1, 2], paces)
    assert [len(chunk.slots) for chunk in made.chunks] == [20, 20, 20]
    me = IDLE._replace(width=64)
    assert choose_chunks(made, 0, [0, 1, 2], me)[0] == 0
    assert choose_chunks(made, 0, [1, 2], me._replace(open_work=19.5)) == []
    assert choose_chunks(made, 0, [1, 2], me) == [1, 2], "nobody else came, and it has nothing left to do"


def test_a_rank_that_nobody_knows_holds_half_its_share_until_a_group_has_ended() -> None:
    made = cut_into_chunks(range(100), {}, [0, 1], {})
    free = range(len(made.chunks))
    holding = IDLE._replace(open_work=30.0)
    assert choose_chunks(made, 1, free, holding) == []
    assert choose_chunks(made, 1, free, holding._replace(pace=2.0))


def test_a_rank_alone_holds_all_at_once() -> None:
    made = cut_into_chunks(range(100), {}, [0], {})
    free = list(range(len(made.chunks)))[-3:]
    assert choose_chunks(made, 0, free, IDLE._replace(open_work=80.0)) == free


def test_a_rank_that_is_new_beside_known_ones_takes_half_its_share_at_once() -> None:
    made = cut_into_chunks(range(128), {}, [0, 1], {1: Pace(400, 100.0, 64)})
    me, mine = IDLE._replace(width=64), 0.0
    free = list(range(len(made.chunks)))
    while chosen := choose_chunks(made, 0, free, me._replace(open_work=mine)):
        mine += made.chunks[chosen[0]].work
        free.remove(chosen[0])
    assert 32 <= mine <= 64


def test_work_is_measured_in_seconds_on_a_node_of_pace_1_where_groups_wait_for_tools() -> None:
    """All groups have two tokens; the second node takes three times as long."""
    made = {0: RankTimings({0: 1.0, 1: 4.0, 2: 2.0}, 4), 1: RankTimings({3: 3.0, 4: 12.0, 5: 6.0}, 8)}
    tokens = dict.fromkeys(range(6), 2)
    costs, paces = measured(made, tokens, {})
    assert paces[0].per_group == pytest.approx(3 * paces[1].per_group, rel=1e-3)
    assert [costs[slot] / costs[0] for slot in range(6)] == pytest.approx([1, 4, 2, 1, 4, 2])
    again = {0: RankTimings({3: 1.0, 4: 4.0}, 4), 1: RankTimings({2: 6.0}, 8)}
    later, paces = measured(again, tokens, costs)
    assert paces[0].per_group == pytest.approx(3 * paces[1].per_group, rel=1e-3)
    assert later == pytest.approx(costs), "also of those whose seconds nobody knows"


def test_cost_of_a_new_task_is_taken_from_its_tokens_in_the_unit_of_the_others() -> None:
    made = {0: RankTimings({0: 2.0, 1: 8.0}, 4), 1: RankTimings({2: 5.0}, 4)}
    costs, paces = measured(made, {0: 10, 1: 40, 2: 50}, {0: 1.0, 1: 4.0})
    assert paces[0].per_group == pytest.approx(0.5) and paces[1].per_group == pytest.approx(1.0)
    assert costs == pytest.approx({0: 1.0, 1: 4.0, 2: 5.0})


@given(
    made=st.dictionaries(
        st.integers(0, 3), st.dictionaries(st.integers(0, 9), st.floats(0, 1e6)), max_size=4
    ),
    tokens=st.dictionaries(st.integers(0, 9), st.integers(1, 9999)),
    expected=st.dictionaries(st.integers(0, 9), st.floats(0, 1e6)),
)
def test_whatever_nodes_have_measured_gives_costs_and_paces(
    made: dict[int, dict[int, float]], tokens: dict[int, int], expected: dict[int, float]
) -> None:
    document = {str(rank): [seconds, 4] for rank, seconds in made.items()}
    costs, paces = measured(made_of(document), tokens, expected)
    assert costs.keys() == tokens.keys() and min(costs.values(), default=0.0) >= 0.0
    known = paces_of({str(rank): pace for rank, pace in paces.items()})
    cut_into_chunks(sorted(tokens), costs, range(4), known)


def test_a_guest_of_which_nothing_is_known_begins_at_the_end_and_counts_as_slow() -> None:
    paces = {0: Pace(80, 10.0, 8), 1: Pace(20, 10.0, 8)}
    made = cut_into_chunks(range(100), dict.fromkeys(range(100), 1.0), [0, 1], paces)
    numbers = list(range(len(made.chunks)))
    assert choose_chunks(made, 1000, numbers, IDLE)[0] == numbers[-1]
    slow = choose_chunks(made, 1000, numbers, IDLE._replace(open_work=9.0))
    fast = choose_chunks(made, 1000, numbers, IDLE._replace(open_work=9.0, pace=8.0))
    assert not slow and fast  # a measured one holds its share of all


def test_a_guest_that_is_measured_has_its_place_and_one_that_is_not_that_of_the_slowest() -> None:
    paces = {0: Pace(80, 10.0, 8), 1: Pace(20, 10.0, 4)}
    assert with_guests(paces, {1000}) == {**paces, 1000: paces[1]}
    assert with_guests({**paces, 1000: Pace(9, 1.0, 8)}, {1000})[1000].work == 9
    assert with_guests({}, {1000}) == {}
