"""Flags of a node: raised, waited for, raised again, removed; and what a worker reads of its master's."""

import json
import threading
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory.file_names import Beat, Flag, Record, parse_protocol_name
from coordinator.directory.layout import RunDir
from coordinator.node import flags as flags_module
from coordinator.node.flags import Flags, read_call, read_flag
from coordinator.node.identity import Identity
from coordinator.node.position import Position
from coordinator.protocol.phase import Phase
from coordinator.protocol.watch import Watch
from coordinator.settings.loading import build
from rollout.storage import files
from tests.coordinator.examples import record

SETTINGS = build({"cluster.num_nodes": 3, "cluster.poll_max_s": 0.01})


class Interrupted(Exception):
    """What a node's check raises."""


class World:
    """A node's flags, and all that they need."""

    def __init__(self, run_dir: RunDir, rank: int, left_behind: Collection[Path] = ()) -> None:
        self.run_dir = run_dir
        self.position = Position()
        self.watch = Watch(run_dir, rank, SETTINGS, lambda: {"host": "here"}, end_training=lambda: None)
        self.interrupts = False
        identity = SimpleNamespace(
            run_dir=run_dir, rank=rank, is_master=rank == 0, is_guest=False, host="node-a"
        )
        self.flags = Flags(
            cast(Identity, identity),
            self.position,
            self.watch,
            self.check,
            lambda: "those that are missing",
            self.sweep,
            left_behind,
        )

    def check(self) -> None:
        if self.interrupts:
            raise Interrupted

    def sweep(self, paths: Iterable[Path]) -> None:
        for path in paths:
            files.remove(path)

    def listed(self) -> set[Flag]:
        names = (
            parse_protocol_name(path.name) for place in self.run_dir.protocol for path in place.iterdir()
        )
        return {entry for entry in names if isinstance(entry, Flag)}


@pytest.fixture
def master(run_dir: RunDir) -> Iterator[World]:
    yield from node(run_dir, 0)


@pytest.fixture
def worker(run_dir: RunDir) -> Iterator[World]:
    yield from node(run_dir, 1)


def node(run_dir: RunDir, rank: int) -> Iterator[World]:
    world = World(run_dir, rank)
    world.watch.begin(0, 2)
    world.watch.admit(record(2), SETTINGS)
    yield world
    world.watch.close()


def ok(
    rank: int, iteration: int = 1, phase: int = Phase.TRAIN_ROLLOUT, epoch: int = 2, kind: str = "ok"
) -> Flag:
    return Flag(epoch, iteration, phase, rank, kind)


said = partial(ok, kind="ok.json")


def show(run_dir: RunDir, flag: Flag, payload: dict[str, Any]) -> None:
    (run_dir.entry(flag)).write_text(json.dumps(payload))


def test_master_waits_for_the_flags_of_all_members_and_reads_them(master: World) -> None:
    show(master.run_dir, said(1), {"short": 1})
    late = threading.Timer(0.05, show, (master.run_dir, ok(2), {}))
    late.start()
    up = master.flags.wait_members(1, Phase.TRAIN_ROLLOUT)
    late.join()
    assert master.position.waiting_for == []
    assert up == {1: said(1), 2: ok(2)}
    opened = files.operations["open"]
    assert master.flags.payloads(up, {"short": 0}) == {0: {"short": 0}, 1: {"short": 1}, 2: {}}
    assert files.operations["open"] == opened + 1, "a flag without a document is not read"


def test_wait_names_who_is_missing_and_ends_when_the_node_may_not_go_on(master: World) -> None:
    show(master.run_dir, ok(1), {})
    show(master.run_dir, ok(2, epoch=1), {})  # of an epoch that has ended
    master.interrupts = True
    with pytest.raises(Interrupted):
        master.flags.wait_members(1, Phase.TRAIN_ROLLOUT)
    assert master.position.waiting_for == [2]


def test_worker_waits_for_the_master_alone_and_has_its_document(worker: World) -> None:
    show(worker.run_dir, said(0), {"slots": 3})
    assert worker.flags.wait_master(1, Phase.TRAIN_ROLLOUT) == {"slots": 3}


def test_worker_passes_all_rows_that_one_listing_has_shown_as_over(worker: World) -> None:
    over = (Phase.TRAIN_AGGREGATE, Phase.EVAL_DECISION)
    show(worker.run_dir, ok(0, phase=over[0]), {})
    show(worker.run_dir, said(0, phase=over[1]), {"slots": 3})
    worker.watch.look()
    listed = files.operations["list"]
    assert [worker.flags.wait_master(1, phase) for phase in over] == [{}, {"slots": 3}]
    assert files.operations["list"] == listed


def test_flag_has_a_file_with_content_only_if_it_has_a_document(worker: World) -> None:
    worker.flags.raise_done(1, Phase.TRAINING, {})
    worker.flags.raise_done(1, Phase.ITERATION_END, {"work_s": 1.0})
    empty, full = ok(1, phase=Phase.TRAINING), said(1, phase=Phase.ITERATION_END)
    assert worker.listed() == {empty, full}
    assert worker.run_dir.entry(empty).read_bytes() == b""
    assert read_flag(worker.run_dir, full) == {"work_s": 1.0}


def test_flag_that_is_lost_while_its_node_waits_is_raised_again(
    worker: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flags_module, "RAISE_AGAIN_S", 0.02)
    worker.flags.raise_flag(ok(1), {"short": 0})
    (worker.run_dir.entry(ok(1))).unlink()

    def is_back(_board: object) -> bool | None:
        return ok(1) in worker.listed() or None

    assert worker.flags.wait_until(is_back)
    worker.flags.forget()
    (worker.run_dir.entry(ok(1))).unlink()
    show(worker.run_dir, ok(0), {})
    worker.flags.wait_master(1, Phase.TRAIN_ROLLOUT)
    assert ok(1) not in worker.listed(), "a new epoch raises no flag of the one before"


def test_iteration_is_the_next_one_that_the_master_has_opened_in_this_epoch(worker: World) -> None:
    for flag in (ok(0, 5, 0), ok(0, 7, 0), ok(0, 6, 1), ok(2, 6, 0), ok(0, 6, 0, epoch=1)):
        show(worker.run_dir, flag, {})
    assert worker.flags.wait_opened(5) == 7


def test_flag_of_the_master_stays_until_all_have_passed_its_row(master: World) -> None:
    """A slow worker may still wait for it, or read it, until it has done a later phase."""
    phases = (Phase.ITERATION_START, Phase.TRAIN_PLAN, Phase.TRAIN_ROLLOUT)
    for phase in phases[:2]:
        master.flags.raise_done(1, phase, {"phase": phase})
    show(master.run_dir, ok(1, phase=phases[2]), {})
    late = threading.Timer(0.05, show, (master.run_dir, ok(2, phase=phases[2]), {}))
    mine = {said(0, phase=phase) for phase in phases[:2]}
    assert master.listed() >= mine
    late.start()
    master.flags.wait_members(1, phases[2])
    late.join()
    master.flags.raise_done(1, phases[2], {})
    assert {flag for flag in master.listed() if flag.rank == 0} == {ok(0, phase=phases[2])}
    master.flags.raise_done(2, phases[0], {})
    for rank in (1, 2):
        show(master.run_dir, ok(rank, 1, Phase.TRAINING), {})
    master.flags.wait_members(1, Phase.TRAINING)
    assert {flag for flag in master.listed() if flag.rank == 0} == {ok(0, 2, phases[0])}


def test_flag_of_a_worker_goes_once_the_master_has_counted_it(worker: World) -> None:
    worker.flags.raise_flag(ok(1), {"short": 0})
    show(worker.run_dir, ok(0), {})
    worker.flags.wait_master(1, Phase.TRAIN_ROLLOUT)
    assert worker.listed() == {ok(0)}


def test_what_ended_epochs_and_earlier_processes_have_left_goes_once_an_iteration_is_open(
    run_dir: RunDir,
) -> None:
    left = [run_dir.entry(Beat(1, 1, 1, 9)), run_dir.entry(ok(1, epoch=1))]
    left.append(files.temporary_name(left[1]))
    for path in left:
        path.write_text("{}")
    worker = World(run_dir, 1, left)
    worker.watch.begin(1, 2)
    worker.watch.admit(record(2), SETTINGS)
    worker.flags.raise_flag(enter := Flag(2, 0, 0, 1, "enter"), {})
    worker.flags.tell("trainer_failed", "no memory")
    worker.watch.admit(record(3), SETTINGS)
    worker.flags.forget()
    worker.flags.raise_flag(enter._replace(epoch=3), {})
    worker.flags.clear()
    worker.watch.close()
    assert not worker.listed() and not any(path.exists() for path in left)


def test_master_removes_old_records_and_the_flags_of_nodes_that_have_gone(master: World) -> None:
    run_dir = master.run_dir
    for epoch in (1, 2, 3, 4, 5):
        run_dir.entry(Record(epoch)).write_text(record(epoch).model_dump_json())
    show(run_dir, ok(7, epoch=4), {})
    show(run_dir, ok(1, epoch=5), {})
    master.watch.admit(record(5), SETTINGS)
    master.watch.look(own_too=True)
    master.flags.clear()
    assert master.watch.look(own_too=True).records == (5, 4, 3)
    assert master.listed() == {ok(1, epoch=5)}


def test_call_is_raised_where_the_node_is(worker: World) -> None:
    worker.position.move("running", 4, Phase.TRAINING.label)
    worker.flags.tell("trainer_failed", "out of memory", stalled=None)
    (flag,) = worker.listed()
    assert flag == Flag(2, 4, Phase.TRAINING, 1, "trainer_failed")
    assert read_flag(worker.run_dir, flag) == {"text": "out of memory", "host": "node-a", "stalled": None}
    assert read_call(worker.run_dir, flag) == "out of memory"


def test_worker_outside_of_an_epoch_calls_nobody(worker: World) -> None:
    worker.watch.leave()
    worker.flags.tell("left", "gone")
    assert worker.listed() == set()


def test_call_that_cannot_be_read_is_still_known(worker: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags_module, "PATIENCE_S", 0.0)
    flag = Flag(2, 1, 1, 2, "failed")
    (worker.run_dir.entry(flag)).write_text("{")
    assert read_call(worker.run_dir, flag) == "rank 2 said failed"
