"""Epochs: what a board means for a node, who is silent, and that an epoch has one owner."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.file_names import Beat, Flag, Record
from coordinator.directory.layout import RunDir
from coordinator.protocol.exits import NodeEnded
from coordinator.protocol.judge import Judge
from coordinator.protocol.liveness import Silence
from coordinator.protocol.records import EpochRecord, Records, claim
from coordinator.protocol.snapshot import Board
from coordinator.protocol.verdict import Event, Verdict, decide
from coordinator.settings.loading import build
from rollout.storage import files
from tests.coordinator.examples import board, record, run_dir_at
from tests.paths import REPOSITORY

BEAT_S = 2.0
TIMEOUT_S = 30.0
CURRENT = record(epoch=2)

ALIVE = (Beat(2, 0, 1, 5), Beat(2, 1, 1, 5), Beat(2, 2, 1, 5))
FAILED = Flag(2, 5, 7, 1, "failed")
GAVE_UP = Flag(2, 5, 7, 0, "gave_up")
STOPPED = Flag(2, 5, 7, 0, "stopped")
LEFT = Flag(2, 5, 7, 1, "left")
TRAINER_FAILED = Flag(2, 5, 10, 2, "trainer_failed")
RETURNED = Beat(2, 2, 2, 0)


def verdict(
    *entries: Beat | Flag | Record,
    rank: int = 0,
    incarnation: int = 1,
    newest: EpochRecord = CURRENT,
    silent_s: Mapping[int, float] | None = None,
    known: bool = False,
) -> Verdict | None:
    seen = board(*ALIVE, *entries)
    return decide(seen, newest, CURRENT, rank, incarnation, silent_s or {}, TIMEOUT_S, known)


# ---- decide


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_happens_while_all_beat(rank: int) -> None:
    assert verdict(Flag(2, 5, 7, 0, "ok"), Flag(2, 0, 0, 1, "enter"), rank=rank) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("flag", "event"), [(FAILED, Event.FAILED), (GAVE_UP, Event.GAVE_UP), (STOPPED, Event.STOPPED)]
)
def test_call_ends_the_row_of_every_node(rank: int, flag: Flag, event: Event) -> None:
    assert verdict(flag, rank=rank) == Verdict(event, flag.rank, flag)


@pytest.mark.parametrize("rank", [0, 1])
def test_call_of_another_epoch_means_nothing(rank: int) -> None:
    calls = [flag._replace(epoch=1) for flag in (FAILED, GAVE_UP, STOPPED, LEFT, TRAINER_FAILED)]
    assert verdict(*calls, rank=rank) is None


def test_first_of_several_failures_is_the_same_for_all_nodes() -> None:
    later = Flag(2, 5, 8, 0, "failed")
    assert verdict(later, FAILED, rank=0) == verdict(FAILED, later, rank=2) == Verdict(
        Event.FAILED, 1, FAILED
    )  # fmt: skip


def test_master_finds_the_silent_worker() -> None:
    assert verdict(silent_s={1: 29.9, 2: 30.0}) == Verdict(Event.SILENT, 2)


def test_worker_judges_the_master_alone() -> None:
    assert verdict(rank=1, silent_s={0: 0.0, 2: 99.0}) is None
    assert verdict(rank=1, silent_s={0: 30.0, 2: 99.0}) == Verdict(Event.SILENT, 0)


def test_node_never_judges_itself() -> None:
    assert verdict(rank=0, silent_s={0: 99.0}) is None
    assert verdict(rank=1, silent_s={1: 99.0}) is None


def test_master_hears_that_a_worker_left() -> None:
    assert verdict(LEFT) == Verdict(Event.LEFT, 1, LEFT)


def test_all_who_left_are_lost_at_once_until_another_process_of_theirs_beats() -> None:
    judge = Judge(RunDir(Path()), 0, build({"cluster.num_nodes": 3}))
    both = (LEFT, LEFT._replace(rank=2))
    found = verdict(*both)
    assert found and found.rank == 1
    assert judge.lost(found, board(*ALIVE, *both), CURRENT) == {1, 2}
    assert judge.lost(None, board(*ALIVE, *both, RETURNED), CURRENT) == {1}
    assert (
        judge.lost(None, board(*ALIVE, *both), record(epoch=3))
        == judge.lost(None, board(*both), None)
        == set()
    )


def test_worker_that_left_is_the_masters_affair() -> None:
    assert verdict(LEFT, rank=2) is None


def test_worker_hears_that_the_master_left() -> None:
    flag = LEFT._replace(rank=0)
    assert verdict(flag, rank=2) == Verdict(Event.LEFT, 0, flag)


def test_master_sees_that_a_worker_was_restarted() -> None:
    assert verdict(RETURNED) == Verdict(Event.RETURNED, 2)


def test_worker_leaves_a_restarted_peer_to_the_master() -> None:
    assert verdict(RETURNED, rank=1) is None


def test_lower_incarnation_that_still_beats_means_nothing() -> None:
    assert verdict(Beat(1, 2, 0, 999)) is None


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_failed_trainer_is_told_until_it_is_known(rank: int) -> None:
    expected = Verdict(Event.TRAINER_FAILED, 2, TRAINER_FAILED)
    assert verdict(TRAINER_FAILED, rank=rank) == expected
    assert verdict(TRAINER_FAILED, rank=rank, known=True) is None


@pytest.mark.parametrize("kind", ["lobby", "full"])
def test_newer_record_sends_a_worker_to_the_next_epoch(kind: Any) -> None:
    members = {} if kind == "lobby" else None
    assert verdict(rank=1, newest=record(3, kind, members)) == Verdict(Event.NEW_EPOCH)


def test_newer_record_that_omits_this_rank_sends_it_to_the_next_epoch_too() -> None:
    assert verdict(rank=1, newest=record(3, members={0: 1, 2: 1})) == Verdict(Event.NEW_EPOCH)


@pytest.mark.parametrize("rank", [0, 1])
def test_finished_record_ends_the_run(rank: int) -> None:
    assert verdict(rank=rank, newest=record(3, "finished")) == Verdict(Event.FINISHED)


def test_newer_process_of_a_worker_in_the_record_supersedes_it() -> None:
    newest = record(3, members={0: 1, 1: 2, 2: 1})
    assert verdict(rank=1, newest=newest) == Verdict(Event.SUPERSEDED, 1)
    assert verdict(rank=1, incarnation=2, newest=newest) == Verdict(Event.NEW_EPOCH)


@pytest.mark.parametrize("kind", ["lobby", "full", "finished"])
def test_record_of_another_master_supersedes_the_master(kind: Any) -> None:
    newest = record(3, kind, {}, master_incarnation=2)
    assert verdict(newest=newest) == Verdict(Event.SUPERSEDED, 0)


def test_own_record_does_not_supersede_the_master() -> None:
    assert verdict(newest=record(3)) == Verdict(Event.NEW_EPOCH)


PRIORITIES: list[tuple[Event, dict[str, Any], tuple[Beat | Flag, ...]]] = [
    (Event.NEW_EPOCH, {"newest": record(3)}, ()),
    (Event.FAILED, {}, (FAILED,)),
    (Event.GAVE_UP, {}, (GAVE_UP,)),
    (Event.STOPPED, {}, (STOPPED,)),
    (Event.RETURNED, {}, (RETURNED,)),
    (Event.LEFT, {}, (LEFT,)),
    (Event.SILENT, {"silent_s": {1: 99.0}}, ()),
    (Event.TRAINER_FAILED, {}, (TRAINER_FAILED,)),
]
"""What the master makes of a board on which everything happens at once: the first of these."""


@pytest.mark.parametrize("first", range(len(PRIORITIES)), ids=[event.name for event, *_ in PRIORITIES])
def test_what_comes_first_decides(first: int) -> None:
    # A lost peer comes before a failed trainer, since the former causes the latter.
    event = PRIORITIES[first][0]
    arguments: dict[str, Any] = {}
    entries: list[Beat | Flag] = []
    for _, more, shown in reversed(PRIORITIES[first:]):
        arguments |= more
        entries += shown
    found = verdict(*entries, **arguments)
    assert found is not None and found.event is event


# ---- silence


def heard(counter: int, incarnation: int = 1) -> Board:
    return board(Beat(2, 1, incarnation, counter))


def test_silence_is_the_time_between_listings_that_show_nothing_new() -> None:
    silence = Silence(BEAT_S)
    for now_s in (100.0, 101.0, 103.0, 104.5):
        silence.observe(heard(7), [1], now_s)
    assert silence.silent_s == {1: pytest.approx(4.5)}


def test_silence_goes_on_between_two_listings() -> None:
    silence = Silence(BEAT_S)
    silence.observe(heard(7), [1], 100.0)
    silence.observe(heard(7), [1], 101.0)
    assert silence.so_far(102.5) == {1: 2.5}
    assert silence.so_far(100_000.0) == {1: 1.0 + 2 * BEAT_S}, "this process stood"
    silence.observe(heard(7), [1], 103.0)
    assert silence.silent_s == {1: 3.0}


def test_frozen_observer_condemns_nobody() -> None:
    silence = Silence(BEAT_S)
    silence.observe(heard(7), [1], 100.0)
    silence.observe(heard(7), [1], 100_000.0)
    assert silence.silent_s[1] == 2 * BEAT_S


def test_clock_that_stands_still_counts_nothing() -> None:
    silence = Silence(BEAT_S)
    for _ in range(1000):
        silence.observe(heard(7), [1], 100.0)
    assert silence.silent_s[1] == 0.0


@pytest.mark.parametrize("moved", [heard(8), heard(0, incarnation=2)])
def test_beat_that_moves_ends_the_silence(moved: Board) -> None:
    silence = Silence(BEAT_S)
    silence.observe(heard(7), [1], 100.0)
    silence.observe(heard(7), [1], 103.0)
    silence.observe(moved, [1], 104.0)
    assert silence.silent_s[1] == 0.0


@pytest.mark.parametrize("stale", [board(), heard(6), heard(9, incarnation=0)])
def test_stale_listing_is_no_sign_of_life(stale: Board) -> None:
    silence = Silence(BEAT_S)
    silence.observe(heard(7), [1], 100.0)
    silence.observe(stale, [1], 103.0)
    silence.observe(heard(7), [1], 104.0)
    assert silence.silent_s[1] == 4.0


def test_rank_that_no_listing_shows_is_silent_from_the_first_one_on() -> None:
    silence = Silence(BEAT_S)
    for now_s in (100.0, 102.0, 104.0):
        silence.observe(board(), [1], now_s)
    assert silence.silent_s[1] == 4.0


def test_each_rank_has_its_own_silence() -> None:
    silence = Silence(BEAT_S)
    for step, now_s in enumerate((100.0, 102.0, 104.0)):
        silence.observe(board(Beat(2, 1, 1, step), Beat(2, 2, 1, 0)), [1, 2], now_s)
    assert silence.silent_s == {1: 0.0, 2: 4.0}


def test_admission_counts_anew_from_the_next_listing_on() -> None:
    silence = Silence(BEAT_S)
    silence.observe(heard(7), [1], 100.0)
    silence.observe(heard(7), [1], 103.0)
    silence.restart([1])
    assert silence.silent_s[1] == 0.0
    silence.observe(heard(7), [1], 200.0)
    assert silence.silent_s[1] == 0.0
    silence.observe(heard(7), [1], 201.0)
    assert silence.silent_s[1] == 1.0


# ---- claims and records


CLAIMS = 150


CLAIMANT = """
import errno, json, os, sys
from pathlib import Path
from coordinator.protocol.records import claim, new_token
from coordinator.directory.layout import RunDir
from tests.coordinator.examples import record

def refuse(*_names):
    raise OSError(errno.EPERM, "Operation not permitted")

root, links, claims, hear, tell = sys.argv[1:]
if links != "links":
    os.link = refuse
won = []
for number in range(1, int(claims) + 1):
    wanted = record(number, token=new_token())
    os.write(int(tell), b"x")
    os.read(int(hear), 1)
    if claim(RunDir(Path(root)), wanted):
        won.append(number)
print(json.dumps(won))
"""
"""Claims every number at the moment when the other one does."""


@pytest.mark.parametrize("links", ["links", "no links"])
def test_epoch_that_two_processes_claim_at_once_has_exactly_one_owner(tmp_path: Path, links: str) -> None:
    run_dir_at(tmp_path)
    pipes = [os.pipe(), os.pipe()]
    claimants = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMANT, str(tmp_path), links, str(CLAIMS), str(hear), str(tell)],
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(hear, tell),
        )
        for (hear, _), (_, tell) in (pipes, reversed(pipes))
    ]
    for descriptor in (descriptor for pipe in pipes for descriptor in pipe):
        os.close(descriptor)
    won: list[int] = []
    for claimant in claimants:
        said, _ = claimant.communicate(timeout=60)
        assert claimant.returncode == 0
        won += json.loads(said)
    assert sorted(won) == list(range(1, CLAIMS + 1))
    temporary = [name for name in os.listdir(tmp_path / "protocol") if files.is_temporary(name)]
    by_which_they_agreed = [name for name in temporary if ".claim" in name or ".verdict" in name]
    assert temporary == ([] if links == "links" else by_which_they_agreed)


def test_claim_whose_reply_was_lost_is_still_won(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, link = run_dir_at(tmp_path), os.link

    def lossy(source: Path, target: Path) -> None:
        link(source, target)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "link", lossy)
    assert claim(run_dir, record(1, token="mine"))
    assert not claim(run_dir, record(1, token="other"))


def test_record_reads_back_as_it_was_claimed(tmp_path: Path) -> None:
    run_dir, claimed = run_dir_at(tmp_path), record(4)
    assert claim(run_dir, claimed)
    assert Records(run_dir).newest([4]) == claimed


def test_torn_or_foreign_record_is_climbed_over(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    whole = record(2)
    assert claim(run_dir, whole)
    for number, content in enumerate([b"", b'{"epoch": 4', b"[]", b'{"epoch": 6}', b"\xff"], start=3):
        assert claim(run_dir, record(number))
        (run_dir.entry(Record(number))).write_bytes(content)
    assert Records(run_dir).newest(range(1, 8)) == whole
    assert Records(run_dir).newest([3, 4]) is None


def test_record_that_is_listed_but_gone_is_climbed_over(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    assert claim(run_dir, record(2))
    assert Records(run_dir).newest([2, 9]) == record(2)


def test_record_is_read_once_when_it_is_whole_and_again_while_it_is_torn(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    path = run_dir.entry(Record(3))
    path.write_bytes(b"{")
    records = Records(run_dir)
    assert records.newest([3]) is None
    path.write_bytes(record(3).model_dump_json().encode())
    assert records.newest([3]) == record(3)
    path.unlink()
    assert records.newest([3]) == record(3)


@pytest.mark.parametrize("there", ["of another run", "made-up", None])
def test_record_of_another_run_ends_a_node_whose_directory_has_become_that_runs(
    tmp_path: Path, there: str | None
) -> None:
    run_dir, mine = run_dir_at(tmp_path), record(2)
    assert claim(run_dir, mine)
    assert claim(run_dir, record(3).model_copy(update={"run_id": "of another run"}))
    if there:
        run_dir.run_json.write_text(json.dumps({"run_id": there}))
    records = Records(run_dir, "made-up")
    if there == "of another run":
        with pytest.raises(
            NodeEnded, match=r"this node works for made-up.*: give its new place as --log-path"
        ):
            records.newest([2, 3])
    else:
        assert records.newest([2, 3]) == mine, "a node of the other run has not yet found out"
    assert records.is_replaced == (there == "of another run")


def test_record_is_plain_json_on_disk(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    claim(run_dir, record(2))
    document = json.loads(run_dir.entry(Record(2)).read_text())
    assert document["kind"] == "full" and document["members"]["1"]["incarnation"] == 1
    assert document["settings"]["cluster"]["num_nodes"] == 3
