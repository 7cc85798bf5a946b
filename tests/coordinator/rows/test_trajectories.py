"""Who generates what: shares and spare slots by weight, and how much of them is needed."""

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter
from coordinator.node.iteration import Iteration
from coordinator.node.position import Position
from coordinator.protocol.phases import Phase
from coordinator.rows import trajectories
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.storage import files
from rollout.tasks.task_set import TaskSet
from rollout.trajectory import Group
from tests.coordinator.made_up import ORIGIN, POLICY, group, tombstone


@pytest.fixture
def node(tmp_path: Path) -> Any:
    """As much of a node as planning looks at: three members of the weights 2, 1 and 1."""
    run_dir = RunDir(tmp_path)
    files.make_directory(run_dir.trajectories("train", 1))
    members = {rank: SimpleNamespace(weight=2.0 if rank == 0 else 1.0) for rank in range(3)}
    record = SimpleNamespace(members=members)
    return SimpleNamespace(run_dir=run_dir, record=record)


@pytest.fixture
def iteration() -> Iteration:
    """An iteration that the master has opened."""
    return Iteration(1, documents={Phase.ITERATION_START: {"policy": POLICY}})


def finish(node: Any, *groups: Group) -> None:
    writer = PartWriter(node.run_dir, "train", 1, 0, 2, ORIGIN)
    for each in groups:
        writer.add(each)
    writer.flush()


def test_every_slot_is_needed_where_there_are_no_spare_ones(node: Any, iteration: Iteration) -> None:
    finish(node, group(1), tombstone(2))
    assert trajectories.plan(node, iteration, "train", Quota(8, 8), ORIGIN) == {
        "shares": {"0": [0, 3, 4], "1": [5, 6], "2": [7]},
        "needed": {"0": 3, "1": 2, "2": 1},
        "short": 0,
    }


def test_spare_slots_come_after_the_needed_ones_of_each_node(node: Any, iteration: Iteration) -> None:
    assert trajectories.plan(node, iteration, "train", Quota(4, 8), ORIGIN) == {
        "shares": {"0": [0, 1, 4, 5], "1": [2, 6], "2": [3, 7]},
        "needed": {"0": 2, "1": 1, "2": 1},
        "short": 0,
    }


def test_after_a_restart_flat_groups_are_replaced_by_spare_slots(node: Any, iteration: Iteration) -> None:
    finish(node, group(0), group(1, rewards=(1.0, 1.0)), tombstone(3), group(4))
    plan = trajectories.plan(node, iteration, "train", Quota(4, 8, replace_flat=True), ORIGIN)
    assert sum(plan["needed"].values()) == 2
    assert sorted(slot for share in plan["shares"].values() for slot in share) == [2, 5, 6, 7]


def test_what_no_slot_is_left_for_is_short(node: Any, iteration: Iteration) -> None:
    finish(node, *(group(slot, rewards=(1.0, 1.0)) for slot in range(6)))
    plan = trajectories.plan(node, iteration, "train", Quota(4, 8, replace_flat=True), ORIGIN)
    assert (sum(plan["needed"].values()), plan["short"]) == (2, 2)
    said = {rank: {"short": 0} for rank in range(3)}
    assert trajectories.sum_short(plan, {**said, 1: {"short": 1}}) == {"short": 3}


def test_nothing_is_planned_once_enough_is_finished(node: Any, iteration: Iteration) -> None:
    finish(node, *(group(slot) for slot in range(4)))
    plan = trajectories.plan(node, iteration, "train", Quota(4, 8), ORIGIN)
    assert plan["shares"] == {"0": [], "1": [], "2": []} and not any(plan["needed"].values())


def test_requests_go_on_while_a_part_is_written(
    node: Any, iteration: Iteration, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    class SlowFilesystem:
        def add(self, _group: Group) -> None:
            """Takes it."""

        def flush(self) -> None:
            time.sleep(0.5)
            written.set()

    async def requests(*_: Any, on_group: Any, **__: Any) -> int:
        on_group(group(0))
        steps = 0
        while not written.is_set():
            await asyncio.sleep(0.01)
            steps += 1
        return steps

    monkeypatch.setattr(trajectories, "collect", requests)
    monkeypatch.setattr(trajectories, "_client", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(trajectories, "_generates", lambda *_: False)
    monkeypatch.setattr(trajectories, "_environment", lambda *_: None)
    node.position, node.watch = Position(), SimpleNamespace(stop=None)
    share = SimpleNamespace(
        settings=RolloutSettings(part_interval_s=0.01), tasks=TaskSet((), "none"), slots=[], order=[],
        needed=1, quota=Quota(1, 1), functions=SimpleNamespace(reward=None), origin=ORIGIN, kind="train",
        begun=[], segment=None,
    )  # fmt: skip
    writer: Any = SlowFilesystem()
    steps = asyncio.run(trajectories._collect(node, iteration, cast(Any, share), writer))
    assert steps > 10
