import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.settings.placement import Place, crews_of, parse_place


def test_ranges_are_inclusive_and_joined_by_commas() -> None:
    assert parse_place(["rollout=0-2, 5", "train=3,4"]) == {"rollout": {0, 1, 2, 5}, "train": {3, 4}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["rollout=0-3"], "add --place train=DEVICES"),
        (["rollout=0", "rollout=1"], "once each"),
        (["rollout=", "train=1"], "--place rollout=: give"),
        (["actor=0", "train=1"], "--place actor=0: give"),
        (["0-3", "train=1"], "--place 0-3: give"),
        (["rollout=0-", "train=1"], "'0-' is not a range of devices"),
        (["rollout=x", "train=1"], "'x' is not a range of devices"),
        (["rollout=0-99999999999", "train=0"], "there are no 99999999999 devices"),
        (["rollout=3-1", "train=0"], r"'3-1' ends before it begins; e.g. 1-3"),
        (["rollout=0-3", "train=3-4"], "device 3 would generate and train"),
    ],
)
def test_what_cannot_be_placed_is_refused(given: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_place(given)


def test_devices_are_numbered_through_the_machines_and_divide_one() -> None:
    crews = crews_of(parse_place(["rollout=0-5", "train=6-8"]), [4, 4, 1])
    assert crews == {
        "rollout": (Place(0, (0, 1, 2, 3)), Place(1, (0, 1))),
        "train": (Place(1, (2, 3)), Place(2, (0,))),
    }


def test_without_a_placement_or_with_equal_sets_there_is_one_crew() -> None:
    everything = {"main": (Place(0, (0, 1)), Place(1, (0,)))}
    assert crews_of(None, [2, 1]) == crews_of(parse_place(["rollout=0-2", "train=0-2"]), [2, 1]) == everything


def test_device_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"no devices 3, 4; the machines have 3 devices \(rank 0: 2, rank 1: 1\)"
    ):
        crews_of(parse_place(["rollout=0", "train=3,4"]), [2, 1])


def test_machine_without_work_is_refused() -> None:
    with pytest.raises(ValueError, match="no device of rank 1 generates or trains"):
        crews_of(parse_place(["rollout=0", "train=2"]), [1, 1, 1])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_every_placed_device_is_in_one_crew(counts: list[int], data: st.DataObject) -> None:
    total = sum(counts)
    rollout = data.draw(st.sets(st.integers(0, total - 1), max_size=total))
    train = set(range(total)) - rollout
    if not rollout or not train:
        return
    texts = [f"rollout={','.join(map(str, rollout))}", f"train={','.join(map(str, train))}"]
    crews = crews_of(parse_place(texts), counts)
    found = [
        (place.machine, device) for places in crews.values() for place in places for device in place.devices
    ]
    assert sorted(found) == [
        (machine, device) for machine, count in enumerate(counts) for device in range(count)
    ]
