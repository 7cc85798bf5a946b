"""What a node shows of itself and sees of others: beats, waits, verdicts."""

import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from watchdog.events import FileMovedEvent

from coordinator.directory.file_names import Beat, Flag, Record, parse_protocol_name
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.protocol import heartbeat, watch
from coordinator.protocol.exits import NodeEnded
from coordinator.protocol.file_events import Waker
from coordinator.protocol.judge import Judge
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import claim
from coordinator.protocol.snapshot import Board, parse, ranks_text
from coordinator.protocol.verdict import Event, Verdict
from coordinator.protocol.watch import SAY_AGAIN_S, Watch
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings
from rollout.storage import files
from rollout.storage.files import SharedFsError
from tests.coordinator.examples import record, run_dir_at, write_json
from tests.paths import REPOSITORY

STARTER = """
import errno, json, os, sys
from pathlib import Path
from coordinator.settings.tree import RunSettings
from coordinator.protocol.file_events import Waker
from coordinator.directory.layout import RunDir
from coordinator.protocol.watch import Watch

def refuse(*_names):
    raise OSError(errno.EPERM, "Operation not permitted")

root, links, epoch = sys.argv[1:]
if links != "links":
    os.link = refuse
print("ready", flush=True)
sys.stdin.readline()
taken = []
for rank in range(25 if links == "links" else 4):  # without links a loser waits for 2 s
    watch = Watch(
        RunDir(Path(root)), rank, RunSettings(), lambda: {"pid": 1}, end_training=lambda: None,
    )
    watch.begin(0, int(epoch))
    taken.append(watch.incarnation)
print(json.dumps(taken), flush=True)
os._exit(0)
"""
"""Takes an incarnation of each of several ranks, as other processes do meanwhile."""

CLUSTER = ClusterSettings(num_nodes=3, poll_max_s=0.5)
FAST = ClusterSettings(num_nodes=3, beat_s=0.01, node_timeout_s=30)


Make = Callable[..., Watch]
STALL_S = 60.0


def told(cluster: ClusterSettings) -> RunSettings:
    """Settings in which any phase may stand still for STALL_S."""
    return build(
        {
            **{f"cluster.{name}": value for name, value in cluster.model_dump(exclude_none=True).items()},
            "rollout.stall_timeout_s": STALL_S / 2,
            "engine.start_timeout_s": STALL_S / 4,
            "trainer.stall_timeout_s": STALL_S,
        }
    )


ENDED_TRAININGS: list[int] = []
"""Ranks whose fence has ended the training job."""


@pytest.fixture
def make(run_dir: RunDir) -> Iterator[Make]:
    """Makes watches, and closes them."""
    made: list[Watch] = []

    def make_one(rank: int = 1, cluster: ClusterSettings = CLUSTER, **said: Any) -> Watch:
        made.append(
            Watch(
                run_dir,
                rank,
                told(cluster),
                lambda: {"host": "node", **said},
                end_training=lambda: ENDED_TRAININGS.append(rank),
            )
        )
        return made[-1]

    yield make_one
    for each in made:
        each.close()


def beats(run_dir: RunDir, rank: int = 1) -> list[Beat]:
    found = map(parse_protocol_name, files.listing(run_dir.protocol_of(rank)))
    return sorted(entry for entry in found if isinstance(entry, Beat) and entry.rank == rank)


def until(condition: Callable[[], bool], within_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not so within {within_s} s"
        time.sleep(0.002)


def raise_flag(run_dir: RunDir, flag: Flag) -> Flag:
    (run_dir.entry(flag)).write_text("{}")
    return flag


class Clock:
    """In place of the watch's clock and of the event that it pauses on: a pause lets time pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, paused: Watch) -> None:
        self.now_s = 1000.0
        self.pauses_s: list[float] = []
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        monkeypatch.setattr(paused, "_wake", self)

    def wait(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s

    def clear(self) -> None:
        pass

    def set(self) -> None:
        pass


# ---- waiting


def never(_board: Board) -> None:
    return None


def nothing() -> None:
    return None


def nobody() -> str:
    return "nobody"


def test_wait_returns_at_once_what_is_ready(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    assert waiter.wait(lambda _board: "ready", nothing, nobody) == "ready"
    assert clock.pauses_s == []


def test_wait_takes_an_empty_result_for_a_result(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, waiter := make())
    assert waiter.wait(lambda _board: 0, nothing, nobody) == 0


def test_wait_returns_once_a_listing_shows_it(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    flag = Flag(2, 5, 7, 0, "ok")

    def check() -> None:
        if len(clock.pauses_s) == 10:
            raise_flag(run_dir, flag)

    assert waiter.wait(lambda board: flag if flag in board.flags else None, check, nobody) == flag
    assert len(clock.pauses_s) == 11


def test_pauses_are_a_twentieth_of_the_time_waited_within_limits(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    assert waiter.wait(never, nothing, nobody, timeout_s=60.0) is None
    waited_s = 0.0
    for pause_s in clock.pauses_s:
        planned_s = min(max(0.05 * waited_s, 0.001), CLUSTER.poll_max_s)
        assert planned_s <= pause_s <= 1.4 * planned_s
        waited_s += pause_s
    assert max(clock.pauses_s) > 0.4 and len(clock.pauses_s) < 400


def test_pauses_of_two_waiters_differ(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    waiter.wait(never, nothing, nobody, timeout_s=0.1)
    first, clock.pauses_s = clock.pauses_s, []
    waiter.wait(never, nothing, nobody, timeout_s=0.1)
    assert first != clock.pauses_s


@pytest.mark.parametrize("timeout_s", [0.0, 0.01, 5.0])
def test_wait_ends_soon_after_its_deadline(
    make: Make, monkeypatch: pytest.MonkeyPatch, timeout_s: float
) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    assert waiter.wait(never, nothing, nobody, timeout_s) is None
    assert timeout_s < clock.now_s - 1000.0 <= timeout_s + 0.61


def test_what_is_ready_at_the_deadline_is_returned(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)
    late = 1000.0 + 5.0
    assert waiter.wait(lambda _b: "late" if clock.now_s > late else None, nothing, nobody, 5.0) == "late"


def test_wait_raises_what_the_check_raises(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    waiter = make()
    clock = Clock(monkeypatch, waiter)

    def check() -> None:
        if len(clock.pauses_s) == 3:
            raise RuntimeError("over")

    with pytest.raises(RuntimeError, match="over"):
        waiter.wait(never, check, nobody)


def test_long_wait_says_who_is_missing_every_half_minute(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Clock(monkeypatch, waiter := make())
    with caplog.at_level(logging.INFO):
        waiter.wait(never, nothing, lambda: "rank 2", 3.5 * SAY_AGAIN_S)
    said_s = [float(line.getMessage().split()[1]) for line in caplog.records]
    assert said_s == [pytest.approx(number * SAY_AGAIN_S, abs=1.5) for number in (1, 2, 3)]
    assert all(line.getMessage().endswith(" s for rank 2") for line in caplog.records)


def publish_whole(path: Path) -> None:
    files.publish(path, b"{}", durable=False)


@pytest.mark.parametrize("publish", [publish_whole, files.mark])
def test_file_event_cuts_a_wait_short(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, publish: Callable[[Path], None]
) -> None:
    waiter = make(cluster=ClusterSettings(num_nodes=3, poll_max_s=60.0))
    waiter.begin(0, 2)
    flag = Flag(2, 5, 7, 0, "ok")
    looks = iter([0.0])  # it has begun just now, and at its first look 1000 s have passed: it pauses for 50
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: next(looks, 1000.0)))
    paused = threading.Event()

    def publish_then() -> None:
        assert paused.wait(60.0)
        publish(run_dir.entry(flag))

    publisher = threading.Thread(target=publish_then)
    publisher.start()
    started_s = time.monotonic()
    waited = waiter.wait(lambda board: True if flag in board.flags else None, paused.set, nobody)
    publisher.join()
    assert waited and time.monotonic() - started_s < 20.0


@pytest.mark.parametrize(
    ("name", "wakes"),
    [
        (Flag(2, 5, 7, 0, "ok").name, True),
        (Flag(2, 5, 7, 2, "failed").name, True),
        (Record(3).name, True),
        (Beat(2, 1, 1, 5).name, False),
        (".nfs0001", False),
    ],
)
def test_event_wakes_unless_it_is_a_heartbeat(name: str, wakes: bool) -> None:
    wake = threading.Event()
    Waker(wake).on_any_event(FileMovedEvent("/run/.temporary", f"/run/protocol/{name}"))
    assert wake.is_set() is wakes


# ---- beats


def test_first_beat_takes_the_next_incarnation(make: Make, run_dir: RunDir) -> None:
    beating = make()
    beating.begin(incarnation_floor=4, epoch=7)
    assert beating.incarnation == 5
    assert beats(run_dir)[-1][:3] == (7, 1, 5)


@pytest.mark.parametrize(
    ("other", "incarnation"),
    [
        (Beat(0, 1, 5, 0), 6),
        (Beat(7, 1, 5, 0), 6),
        (Beat(6, 1, 5, 1), 6),
        (Beat(8, 1, 5, 9), 6),
        (Beat(7, 1, 8, 2), 9),
        (Beat(7, 1, 4, 99), 5),
        (Beat(7, 2, 5, 0), 5),
    ],
)
def test_incarnation_that_another_process_has_taken_is_passed_over(
    make: Make, run_dir: RunDir, other: Beat, incarnation: int
) -> None:
    # It may have started a moment ago, in another epoch, and be at its second beat already.
    (run_dir.entry(other)).write_text("{}")
    beating = make()
    beating.begin(4, 7)
    assert beating.incarnation == incarnation
    shown = {(beat.rank, beat.incarnation) for beat in beats(run_dir)}
    assert shown == {(1, incarnation)} | ({(1, other.incarnation)} if other.rank == 1 else set())


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_processes_of_a_rank_that_start_at_once_in_different_epochs_get_their_own_incarnations(
    run_dir: RunDir, links: bool
) -> None:
    command = [sys.executable, "-c", STARTER, str(run_dir.root), "links" if links else "no links"]
    starters = [
        subprocess.Popen(
            [*command, str(epoch)], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for epoch in (2, 3, 4)
    ]
    taken: list[list[int]] = []
    for starter in starters:
        assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
    for starter in starters:
        assert starter.stdin is not None
        starter.stdin.write("\n")
        starter.stdin.flush()
    for starter in starters:
        said, _ = starter.communicate(timeout=30)
        assert starter.returncode == 0
        taken.append(json.loads(said))
    for rank, incarnations in enumerate(zip(*taken, strict=True)):
        assert len(set(incarnations)) == len(starters), f"rank {rank}: {incarnations}"


def test_two_processes_that_describe_themselves_alike_get_two_incarnations(make: Make) -> None:
    # Containers may share host name, network and process numbers.
    first, second = make(pid=1), make(pid=1)
    first.begin(0, 2)
    second.begin(0, 2)
    assert {first.incarnation, second.incarnation} == {1, 2}


def test_beat_stays_until_its_successor_has_had_time_to_be_seen(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: now_s))
    beating = make(phase="train_rollout", cluster=ClusterSettings(num_nodes=3, beat_s=10.0))
    beating.begin(0, 2)
    for _ in range(8):
        now_s += 4.0
        beating.beat()
    assert [beat.counter for beat in beats(run_dir)] == [6, 7, 8, 9], "beat 6 was the newest until 8 s ago"
    last = beats(run_dir)[-1]
    said = json.loads((run_dir.entry(last)).read_text())
    assert said["host"] == "node" and said["phase"] == "train_rollout"


def test_node_beats_by_itself(make: Make, run_dir: RunDir) -> None:
    make(cluster=FAST).begin(0, 2)
    until(lambda: bool(beats(run_dir)) and beats(run_dir)[-1].counter > 5)


def test_announced_epoch_is_that_of_the_next_beat(make: Make, run_dir: RunDir) -> None:
    beating = make()
    beating.begin(0, 2)
    beating.heart.beat(9)
    last = beats(run_dir)[-1]
    assert (last.epoch, last.counter) == (9, 2)


def test_admitted_node_beats_in_its_epoch(make: Make, run_dir: RunDir) -> None:
    beating = make()
    beating.begin(0, 2)
    beating.admit(record(6), told(CLUSTER))
    beating.beat()
    assert beats(run_dir)[-1].epoch == 6


def test_last_beat_stays_and_no_other_follows(make: Make, run_dir: RunDir) -> None:
    state = {"state": "running"}
    beating = Watch(run_dir, 1, told(FAST), lambda: dict(state), end_training=ENDED_TRAININGS.clear)
    beating.begin(0, 2)
    state["state"] = watch.ENDED
    beating.close()
    *_, last = shown = beats(run_dir)
    assert json.loads((run_dir.entry(last)).read_text())["state"] == watch.ENDED and len(shown) <= 2
    time.sleep(10 * FAST.beat_s)
    assert beats(run_dir) == shown


def test_node_that_gathers_in_what_is_the_directory_of_another_run_by_now_ends_and_leaves_no_beat(
    run_dir: RunDir,
) -> None:
    gathering = Watch(run_dir, 0, told(CLUSTER), dict, ENDED_TRAININGS.clear, run_id="moved away")
    gathering.begin(0, 2)
    write_json(run_dir.run_json, {"run_id": "made-up"})
    assert claim(run_dir, record(1))
    with pytest.raises(NodeEnded, match="is of another run now"):
        gathering.look(own_too=True)
    gathering.close()
    assert beats(run_dir, rank=0) == []


def test_beat_of_the_master_says_how_long_it_has_heard_nothing(make: Make, run_dir: RunDir) -> None:
    master = make(rank=0)
    master.begin(0, 2)
    master.admit(record(), told(CLUSTER))
    master.silence.silent_s = {1: 1.23, 2: 0.0}
    master.beat()
    last = beats(run_dir, rank=0)[-1]
    assert json.loads((run_dir.entry(last)).read_text())["silent_s"] == {"1": 1.2, "2": 0.0}


def test_newest_beat_of_a_peer_is_read(make: Make, run_dir: RunDir) -> None:
    reader = make(rank=0)
    assert reader.heartbeat(2) == {}
    (run_dir.entry(Beat(2, 2, 1, 8))).write_text('{"done": 8}')
    (run_dir.entry(Beat(2, 2, 1, 9))).write_text('{"done": 9}')
    assert reader.heartbeat(2) == {"done": 9}


@pytest.mark.parametrize("content", ["", '{"done": '])
def test_torn_beat_of_a_peer_says_nothing(make: Make, run_dir: RunDir, content: str) -> None:
    (run_dir.entry(Beat(2, 2, 1, 8))).write_text(content)
    assert make(rank=0).heartbeat(2) == {}


# ---- verdicts


def test_call_sets_the_verdict_and_stops_actions(make: Make, run_dir: RunDir) -> None:
    watching = make(rank=0)
    watching.admit(record(), told(CLUSTER))
    watching.look()
    assert watching.verdict is None and not watching.stop.is_set()
    flag = raise_flag(run_dir, Flag(2, 5, 7, 2, "failed"))
    watching.look()
    assert watching.verdict == Verdict(Event.FAILED, 2, flag) and watching.stop.is_set()


def test_first_verdict_stays_until_the_next_admission(make: Make, run_dir: RunDir) -> None:
    watching = make()
    watching.admit(record(), told(CLUSTER))
    raise_flag(run_dir, Flag(2, 5, 7, 0, "stopped"))
    watching.look()
    raise_flag(run_dir, Flag(2, 5, 7, 0, "failed"))
    watching.look()
    assert watching.verdict is not None and watching.verdict.event is Event.STOPPED
    watching.admit(record(3), told(CLUSTER))
    watching.look()
    assert watching.verdict is None and not watching.stop.is_set()


def test_beats_come_while_a_listing_stands_still_on_a_busy_machine(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching, passed_s = make(), list[float]()
    watching.admit(record(), told(CLUSTER))
    clock, names = Clock(monkeypatch, watching), watching.listings.names

    def names_that_are_old_when_they_come(directory: Path) -> list[str]:
        listed = names(directory)
        clock.now_s += 5.0 * (not passed_s)
        return listed

    monkeypatch.setattr(watching.listings, "names", names_that_are_old_when_they_come)
    compare = SimpleNamespace(observe=lambda *given: passed_s.append(given[-1]), say=lambda _directory: None)
    monkeypatch.setattr(watching, "_late_names", compare)
    watching.look()
    watching.look()
    assert passed_s[1] == 5.0, "so many seconds' beats may be new in the second listing"

    def no_names(_directory: Path) -> list[str]:
        clock.now_s += 7.0
        raise FileNotFoundError

    with monkeypatch.context() as outage, pytest.raises(SharedFsError):
        outage.setattr(watching.listings, "names", no_names)
        watching.look()
    watching.look()
    assert passed_s[2] == 7.0, "since the board that it is compared with"


def test_node_in_no_epoch_judges_nobody(make: Make, run_dir: RunDir) -> None:
    watching = make()
    watching.admit(record(), told(CLUSTER))
    assert watching.leave() == record()
    raise_flag(run_dir, Flag(2, 5, 7, 2, "failed"))
    watching.look()
    assert watching.verdict is None


def test_newer_record_is_found_and_judged(make: Make, run_dir: RunDir) -> None:
    watching = make()
    watching.heart.incarnation = 1
    watching.admit(record(2), told(CLUSTER))
    assert claim(run_dir, record(3, "finished"))
    watching.look()
    assert watching.verdict == Verdict(Event.FINISHED)


def test_torn_record_is_no_news(make: Make, run_dir: RunDir) -> None:
    watching = make()
    watching.admit(record(2), told(CLUSTER))
    run_dir.entry(Record(3)).write_text("{")
    watching.look()
    assert watching.verdict is None


def test_known_failure_of_the_trainer_lets_other_news_through(make: Make, run_dir: RunDir) -> None:
    watching = make()
    watching.admit(record(), told(CLUSTER))
    raise_flag(run_dir, Flag(2, 5, 10, 0, "trainer_failed"))
    watching.look()
    assert watching.verdict is not None and watching.verdict.event is Event.TRAINER_FAILED
    watching.know_trainer_failure()
    watching.look()
    assert watching.verdict is None and not watching.stop.is_set()
    raise_flag(run_dir, Flag(2, 5, 10, 0, "gave_up"))
    watching.look()
    assert watching.verdict is not None and watching.verdict.event is Event.GAVE_UP


def test_silent_peer_is_found_by_the_nodes_own_clock(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = make(rank=0)
    clock = Clock(monkeypatch, watching)
    watching.admit(record(), told(CLUSTER))
    for _ in range(15):
        clock.now_s += 2.0
        watching.look()
    assert watching.verdict is None
    clock.now_s += 2.0
    watching.look()
    clock.now_s += 2.0
    watching.look()
    assert watching.verdict == Verdict(Event.SILENT, 1)


@pytest.mark.parametrize("afterwards", ["admit", "leave", "know_trainer_failure"])
def test_signal_stops_actions_for_good(make: Make, afterwards: str) -> None:
    watching = make()
    watching.admit(record(), told(CLUSTER))
    watching.interrupt(15)
    {
        "admit": lambda: watching.admit(record(3), told(CLUSTER)),
        "leave": watching.leave,
        "know_trainer_failure": watching.know_trainer_failure,
    }[afterwards]()
    assert watching.signal == 15 and watching.stop.is_set()


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let every heartbeat fail with an errno, until the monkeypatch is undone."""

    def broken(path: Path, *_: Any, **__: Any) -> None:
        if number == errno.ENOENT:  # the directory below the mount point is there, and empty
            raise FileNotFoundError(number, os.strerror(number), str(path))
        raise SharedFsError("write", path, OSError(number, os.strerror(number)), 0.0)

    monkeypatch.setattr(files, "show", broken)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.ENAMETOOLONG])
def test_error_that_cannot_pass_ends_the_watch(
    make: Make, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    watching = make(cluster=FAST)
    watching.begin(0, 2)
    failing(monkeypatch, number)
    until(watching.stop.is_set)
    assert isinstance(watching.error, SharedFsError)


AWAY = ("EROFS", "EIO", "ENOSPC", "ENOENT")


@pytest.mark.parametrize("number", [getattr(errno, name) for name in AWAY], ids=AWAY)
def test_node_without_its_own_beat_ends_training_and_comes_back_as_another_incarnation(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    watching = make(7, ClusterSettings(num_nodes=8, beat_s=0.01, node_timeout_s=1.5))
    watching.begin(0, 2)
    with monkeypatch.context() as away:
        failing(away, number)
        until(lambda: watching.fence.tripped)
        until(lambda: 7 in ENDED_TRAININGS)
        assert watching.stop.is_set() and watching.error is None
        assert not watching.fence.wait_until_back(0.1)
    assert watching.fence.wait_until_back(60.0)
    assert watching.heart.renew() and watching.incarnation == 2
    watching.fence.reset()
    until(lambda: beats(run_dir, rank=7)[-1].incarnation == 2)
    watching.fence.trip("it waits for another beat")
    assert watching.fence.wait_until_back(60.0), "the new incarnation knows its own"


def test_fence_trips_while_every_call_on_the_directory_hangs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    watching = make(7, ClusterSettings(num_nodes=8, beat_s=0.01, node_timeout_s=0.3))
    watching.begin(0, 2)
    answers = threading.Event()
    real = files.listing

    def hanging(directory: Path) -> list[str]:
        answers.wait(30.0)
        return real(directory)

    monkeypatch.setattr(files, "listing", hanging)
    until(lambda: watching.fence.tripped)
    answers.set()
    assert watching.fence.wait_until_back(60.0)


def test_fence_ends_training_before_it_says_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    ENDED_TRAININGS.clear()
    ended_when_said: list[list[int]] = []
    monkeypatch.setattr(watch.log, "error", lambda *_: ended_when_said.append(list(ENDED_TRAININGS)))
    make(7).fence.trip("its output may lie on the mount that hangs")
    assert ended_when_said == [[7]]


def test_process_that_fails_to_come_back_does_not_beat_as_its_successor(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = make()
    older.begin(0, 2)
    for _ in range(5):
        older.beat()
    newer = make()
    newer.begin(1, 2)
    real, stale = files.listing, [[beats(run_dir)[0].name]]
    monkeypatch.setattr(files, "listing", lambda path: stale.pop() if stale else real(path))
    assert not older.heart.renew()
    older.beat()
    assert parse(real(run_dir.workers)).beats[1].incarnation == 2
    assert parse(real(run_dir.workers)).beats[1].counter < 5, "the living one's"


def test_rank_that_was_taken_over_meanwhile_does_not_come_back(make: Make, run_dir: RunDir) -> None:
    older = make()
    older.begin(0, 2)
    newer = make()
    newer.begin(1, 2)
    assert not older.heart.renew()


def test_guest_that_beats_but_does_not_get_on_counts_as_gone(
    make: Make, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    master, guest = make(0), GUESTS
    place = {"state": "running", "iteration": 1, "phase": "train_rollout", "steps": 5}
    clock = Clock(monkeypatch, master)
    master.admit(record(2, members={0: 1}), told(CLUSTER))
    here: list[set[int]] = []
    for counter in range(400):
        more = {"waiting_for": [0]} if counter > 300 else {}
        write_json(run_dir.entry(Beat(2, guest, 1, counter)), {**place, **more})
        master.look()
        here.append(set(master.guests))
        clock.now_s += CLUSTER.beat_interval_s
    gone = [guest not in each for each in here]
    limit_s = STALL_S + CLUSTER.node_timeout_s
    assert gone.index(True) * CLUSTER.beat_interval_s == pytest.approx(limit_s, rel=0.3)
    assert gone[300] and not gone[-1], "it goes on"


def test_run_directory_that_disappears_is_told_as_such(make: Make, run_dir: RunDir) -> None:
    watching = make()
    run_dir.master.rmdir()
    with pytest.raises(SharedFsError, match=r"cannot list .*master: No such file or directory"):
        watching.look()


@pytest.mark.parametrize(("ranks", "text"), [([2], "rank 2"), ([2, 1], "ranks 1, 2"), ([], "ranks ")])
def test_ranks_are_named(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_epoch_with_other_limits_is_watched_under_these(make: Make, run_dir: RunDir) -> None:
    """A worker lives on while its master is started again with another patience."""
    watching = make(rank=1)
    watching.begin(0, 2)
    watching.admit(record(2), told(CLUSTER))
    watching.silence.silent_s[0] = 40.0
    patient = CLUSTER.model_copy(update={"node_timeout_s": 300.0, "on_node_failure": "abort"})
    hasty = CLUSTER.model_copy(update={"node_timeout_s": 5.0, "on_node_failure": "abort"})
    for cluster, verdict in ((patient, None), (hasty, Event.SILENT)):
        watching.admit(record(2), told(cluster))
        assert watching.fence.limit_s == cluster.node_timeout_s
        watching.silence.silent_s[0] = 40.0
        watching.look()
        assert (watching.verdict and watching.verdict.event) == verdict


def test_node_that_was_taken_for_lost_hears_that_it_comes_back_and_no_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who types the command of the others starts a second process of a healthy node."""
    run_dir = run_dir_at(tmp_path)
    flag = Flag(2, 7, Phase.TRAIN_ROLLOUT, 0, "lost")
    text = "rank 2 (vm) is lost: no heartbeat for 30 s. To bring it back, on that machine: run --worker 2"
    run_dir.entry(flag).write_text(json.dumps({"text": text, "rank": 2, "comes_anew": None}))
    for rank in (1, 2):
        board = parse([run_dir.entry(flag).name])
        Judge(run_dir, rank, RunSettings()).repeat_losses(board, record(), lambda _why: None)
    others, own = caplog.messages
    assert others == f"holding: {text}"
    assert "it comes back by itself" in own and "no heartbeat for 30 s" in own and "run --worker" not in own
