"""A listing of protocol/ as a board: the newest of everything, whatever else lies there."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.directory.file_names import Beat, Flag, ProfileRequest, Record, parse_protocol_name
from coordinator.protocol import snapshot
from coordinator.protocol.snapshot import parse
from tests.coordinator.examples import board

SMALL = st.integers(0, 3)
ENTRIES = st.one_of(
    st.builds(Beat, SMALL, SMALL, SMALL, SMALL),
    st.builds(
        Flag,
        SMALL,
        SMALL,
        SMALL,
        SMALL,
        st.sampled_from(["ok", "ok.json", "enter", "enter.json", "failed", "left"]),
    ),
    st.builds(Record, SMALL),
)


def test_board_of_an_empty_listing_is_empty() -> None:
    empty = parse([])
    assert (empty.records, empty.beats, empty.flags, empty.calls) == ((), {}, frozenset(), ())
    assert empty.newest_epoch() == 0 and empty.highest_incarnation(0) == 0


def test_foreign_names_are_not_on_the_board() -> None:
    assert parse([".nfs0001", ".e0001.epoch.json.aa.tmp", "e0001.epoch.json~", "notes.txt"]) == parse([])


def test_requests_for_profiles_are_on_the_board_whatever_else_is_there() -> None:
    asked = [ProfileRequest(1, "0badcafe"), ProfileRequest(0, "00c0ffee")]
    names = [*(request.name for request in asked), "profile.r0001.xyz", "profile.r1.0badcafe"]
    assert parse([*names, Record(1).name]).profiles == tuple(asked)
    assert asked[0].is_answer("profile.i000007.0badcafe.txt")
    assert not asked[0].is_answer("profile.i000007.0badcafe.json.gz")
    assert not asked[1].is_answer("profile.i000007.0badcafe.txt")


def test_name_is_parsed_in_the_first_listing_alone_and_forgotten_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []

    def counted(name: str) -> Any:
        parsed.append(name)
        return parse_protocol_name(name)

    monkeypatch.setattr(snapshot, "parse_protocol_name", counted)
    names = [Flag(1, number, 2, 0, "ok").name for number in range(6)]
    before = parse([])
    for first in range(4):
        before = parse(names[first : first + 3], before)
        assert before == parse(names[first : first + 3])
        del parsed[-3:]  # of the comparison
        assert list(before.entries) == names[first : first + 3]
    assert parsed == names


def test_newest_beat_is_that_of_the_highest_incarnation() -> None:
    seen = board(Beat(1, 1, 1, 900), Beat(3, 1, 2, 4), Beat(3, 1, 2, 5), Beat(1, 2, 1, 7))
    assert seen.beats == {1: Beat(3, 1, 2, 5), 2: Beat(1, 2, 1, 7)}
    assert seen.highest_incarnation(1) == 2


def test_records_are_listed_highest_first() -> None:
    assert board(Record(2), Record(10), Record(9)).records == (10, 9, 2)


def test_newest_epoch_counts_beats_too() -> None:
    assert board(Record(2), Beat(7, 1, 1, 0)).newest_epoch() == 7


def test_flagged_ranks_are_those_of_this_very_row_and_kind() -> None:
    seen = board(
        Flag(2, 5, 7, 0, "ok"),
        Flag(2, 5, 7, 2, "ok.json"),
        Flag(2, 0, 0, 3, "enter"),
        Flag(2, 5, 7, 1, "failed"),
        Flag(2, 5, 8, 3, "ok"),
        Flag(2, 6, 7, 4, "ok"),
        Flag(1, 5, 7, 5, "ok"),
    )
    assert seen.done(2, 5, 7) == {0: Flag(2, 5, 7, 0, "ok"), 2: Flag(2, 5, 7, 2, "ok.json")}
    assert seen.done(2, 0, 0) == {3: Flag(2, 0, 0, 3, "enter")}


def test_calls_are_the_flags_that_end_something() -> None:
    failed, left = Flag(2, 5, 7, 1, "failed"), Flag(3, 0, 0, 2, "left")
    seen = board(Flag(2, 0, 0, 1, "enter"), left, Flag(2, 5, 7, 0, "ok"), failed)
    assert seen.calls == (failed, left)
    assert seen.called(2, "failed") == [failed] and seen.called(3, "failed") == []


@given(st.lists(ENTRIES, max_size=30), st.randoms(use_true_random=False))
def test_board_does_not_depend_on_the_order_of_the_listing(
    entries: list[Beat | Flag | Record], order: random.Random
) -> None:
    names = list(dict.fromkeys(entry.name for entry in entries))
    shuffled = order.sample(names, len(names))
    assert parse(names) == parse(shuffled)
