"""The chunks of guests: what the master waits for, gives back and rests on; and what is left of a chunk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.collector import guest_chunks
from coordinator.collector.guest_chunks import (
    Contribution,
    GuestChunks,
    GuestContributions,
    GuestsPresent,
    OwnChunks,
    rest_of,
)
from coordinator.directory.claims import ClaimListing, Claims
from coordinator.directory.file_names import parse_claim_name
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.directory.parts import PartWriter
from coordinator.protocol.chunks import Chunk
from rollout.engine_places import Meter
from rollout.storage import files
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN, group, tombstone

GUEST = GUESTS + 3
PATIENCE_S = 30.0


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    for directory in (made.claims, made.trajectories("train", 1)):
        files.make_directory(directory)
    return made


def claims(run_dir: RunDir, rank: int, incarnation: int = 1) -> Claims:
    return Claims(run_dir, 2, 1, 2, rank, incarnation=incarnation)


def as_master(run_dir: RunDir, here: Mapping[int, int], *lost: int) -> GuestChunks:
    return GuestChunks(claims(run_dir, 0), lambda: GuestsPresent(lost, here), PATIENCE_S)


def look(
    chunks: GuestChunks, run_dir: RunDir, found: GuestContributions | None = None
) -> tuple[list[int], int]:
    shown = claims(run_dir, 0).look()
    numbers = [number for number in sorted(shown.claimed) if number not in shown.back]
    return chunks.look(numbers, shown, found or GuestContributions())


def write(run_dir: RunDir, rank: int, *groups: Group) -> Any:
    writer = PartWriter(run_dir, "train", 1, rank, 2, ORIGIN)
    for each in groups:
        writer.add(each)
    return writer.flush()


def test_row_is_open_while_a_guest_that_is_there_makes_a_chunk(run_dir: RunDir) -> None:
    guest = claims(run_dir, GUEST)
    guest.take_part(GUEST)
    assert guest.take([4]) == 4 and claims(run_dir, 1).take([5]) == 5
    assert look(as_master(run_dir, {GUEST: 1}), run_dir) == ([4], 0)
    guest.say_made(4, {"parts": {"a": "b"}, "uncounted": 2, "seconds": {"7": 0.5}, "width": 3})
    master, found = as_master(run_dir, {}, GUEST), GuestContributions()
    assert look(master, run_dir, found) == ([], 2) and look(master, run_dir, found) == ([], 0)
    assert found == GuestContributions({"a": "b"}, {str(GUEST): ({"7": 0.5}, 3)})
    assert not claims(run_dir, 0).look().back


def test_what_a_guest_has_made_is_read_at_the_end_although_a_mount_hides_its_names(run_dir: RunDir) -> None:
    guest = claims(run_dir, GUEST)
    assert guest.take([4]) == 4
    hidden = ClaimListing({4}, set(), set(), set())
    master, found = as_master(run_dir, {GUEST: 1}), GuestContributions()
    assert master.look([4], hidden, found, is_tail=True) == ([4], 0)
    guest.say_made(4, {"parts": {"a": "b"}, "uncounted": 0, "seconds": {}, "width": 3})
    assert master.look([4], hidden, found) == ([4], 0), "there is other work"
    assert master.look([4], hidden, found, is_tail=True) == ([], 0) and found.parts == {"a": "b"}


@pytest.mark.parametrize(
    ("here", "lost"),
    [({}, [GUEST]), ({GUEST: 2}, []), ({GUEST: 1}, [GUEST])],
    ids=["lost", "newer", "silent"],
)
def test_chunk_of_a_guest_that_is_gone_is_back_and_has_another_number(
    run_dir: RunDir, here: dict[int, int], lost: list[int]
) -> None:
    guest = claims(run_dir, GUEST)
    guest.take_part(GUEST)
    guest.take([4])
    master = as_master(run_dir, here, *lost)
    assert look(master, run_dir) == ([4], 0)
    assert claims(run_dir, 1).look().back == {4} and look(master, run_dir) == ([], 0)


def test_chunk_of_somebody_who_was_never_seen_is_back_after_a_while(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links, who is killed between two calls leaves an empty claim: nobody knows whose."""
    waited_s = 0.0

    class Clock:
        def __init__(self, _step_s: float) -> None:
            pass

        def look(self) -> float:
            return waited_s

    monkeypatch.setattr(guest_chunks, "Stopwatch", Clock)
    claims(run_dir, GUEST).take_part(GUEST)
    claims(run_dir, GUEST + 1).take([4])
    (run_dir.claims / "e0002.i000001.p02.c000005").touch()
    master = as_master(run_dir, {})
    assert look(master, run_dir) == ([4, 5], 0) and not claims(run_dir, 0).look().back
    waited_s = PATIENCE_S + 1
    assert look(master, run_dir) == ([4, 5], 0) and claims(run_dir, 0).look().back == {4, 5}


def test_without_guests_no_claim_is_read(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        claims(run_dir, 1).take([number])
    files.operations.clear()
    assert look(as_master(run_dir, {}), run_dir) == ([], 0)
    assert files.operations == {"list": 1}


def test_master_removes_what_guests_have_said_who_may_be_gone(run_dir: RunDir) -> None:
    told: list[Path] = []
    guest = claims(run_dir, GUEST)
    guest.take_part(GUEST)
    for number in (4, 5):
        guest.take([number])
    guest.say_made(4, {"parts": {}, "uncounted": 0, "seconds": {}, "width": 1})
    mine = Claims(run_dir, 2, 1, 2, 0, told.append)
    master = GuestChunks(mine, lambda: GuestsPresent([GUEST], {}), PATIENCE_S)
    for _ in range(3):
        look(master, run_dir)
    names = {path.name for path in run_dir.claims.iterdir() if parse_claim_name(path.name)}
    assert {path.name for path in told} == names and len(told) < 8


def test_guest_says_that_a_chunk_is_made_once_all_of_it_is_durable(run_dir: RunDir) -> None:
    mine, meter = claims(run_dir, GUEST), Meter(4)
    own = OwnChunks(mine, meter, lambda made: made.slot != 8)
    own.begin(2, [7, 8], Contribution())
    own.begin(3, [9], Contribution())
    own.begin(12, [], Contribution({"old": "sha"}, 1))  # a guest before had finished all of it
    assert mine.read_made(12) == {"parts": {"old": "sha"}, "uncounted": 1, "seconds": {}, "width": 4}
    meter.seconds = {7: 0.25, 8: 0.5}
    first = write(run_dir, GUEST, group(8))
    own.make_durable(first)
    assert mine.look().finished == {12}
    second = write(run_dir, GUEST, group(7))
    own.make_durable(second)
    assert mine.read_made(2) == {
        "parts": {first.name: first.sha256, second.name: second.sha256},
        "uncounted": 1,
        "seconds": {"7": 0.25, "8": 0.5},
        "width": 4,
    }
    assert mine.look().finished == {2, 12}


def test_rest_of_a_chunk_is_what_no_guest_has_finished(run_dir: RunDir) -> None:
    """What a guest has given up is made again: the cause may be its machine."""
    part = write(run_dir, GUEST, group(1), tombstone(2), group(9))
    write(run_dir, 1, group(3))  # a node names its own parts
    directory = run_dir.trajectories("train", 1)
    chunk = Chunk([1, 2, 3], [1.0, 1.0, 1.0])
    slots, contribution = rest_of(chunk, directory, ORIGIN, lambda made: made.slot != 1)
    assert slots == [2, 3]
    assert contribution == Contribution({part.name: part.sha256}, 1)
