"""What a machine does with its nodes: real processes in place of the nodes."""

import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.commands import machine
from coordinator.commands.interrupts import Interrupts
from coordinator.commands.machine import Typed
from coordinator.directory.layout import RunDir
from coordinator.machine.children import Child, Children
from coordinator.node.awaiting import await_master
from coordinator.placement import Crew
from coordinator.protocol import placed
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.placed import Placement
from coordinator.protocol.records import EpochRecord, Records, claim
from coordinator.protocol.snapshot import whole_board
from rollout.storage import files
from tests.coordinator.made_up import record

REFUSED = f"raise SystemExit({int(Exit.USAGE)})"
COUNTS = """
import signal, time
received = []
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(1.0)
raise SystemExit(100 + len(received))
"""


def test_node_whose_neighbour_may_not_start_is_told_once_and_ends_in_order() -> None:
    with Children() as children:

        def start(crew: Crew) -> Child:
            if crew == "rollout":
                child = children.start(crew, [sys.executable, "-c", COUNTS])
                while "ready" not in child.tail():
                    pass
                return child
            return children.start(crew, [sys.executable, "-c", REFUSED])

        assert machine._follow(start, ["rollout", "train"], Interrupts()) == [101, Exit.USAGE]


def typed(root: Path, *place: str) -> Typed:
    given = {"cluster.num_nodes": 2, "cluster.place": list(place), "tiny.warmup_steps": 0}
    return Typed(root, 0, given, [], False, False)


def newest(run_dir: RunDir) -> EpochRecord | None:
    return Records(run_dir).newest(whole_board(run_dir).records)


@pytest.mark.parametrize(("where", "call"), [(placed, "publish_placement"), (machine, "move_away")])
def test_master_that_is_killed_while_it_places_devices_leaves_no_node_in_its_old_crew(
    where: Any, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = RunDir(tmp_path)
    for directory in old.fixed_directories:
        files.make_directory(directory)
    assert claim(old, record())
    with monkeypatch.context() as patch:
        patch.setattr(where, call, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            machine._place_devices(typed(tmp_path, "rollout=0", "train=1"))
    machine._place_devices(typed(tmp_path, "rollout=0", "train=1"))
    assert placed.read_placement(tmp_path) == Placement(2, ("rollout=0", "train=1"))
    found = newest(old)
    assert found is not None and found.kind == "moved"


@pytest.mark.parametrize(
    ("place", "crew", "is_elsewhere"),
    [
        (["rollout=0", "train=1"], "main", True),
        (["rollout=0", "train=1"], "train", False),
        (["rollout=0-1", "train=0-1"], "train", True),
        (["rollout=0-1", "train=0-1"], "main", False),
    ],
)
def test_worker_that_has_looked_just_before_devices_are_placed_looks_again(
    place: list[str], crew: Crew, is_elsewhere: bool, tmp_path: Path
) -> None:
    placed.publish_placement(tmp_path, Placement(2, tuple(place)))
    with pytest.raises(Ended) as ended:
        await_master(RunDir(tmp_path, crew), 0.1, 30.0)
    assert ended.value.code is (Exit.MOVED if is_elsewhere else Exit.LOST)


def test_waiting_for_machines_ends_with_who_is_missing_and_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = Placement(2, ("rollout=0", "train=1"))
    placed.publish_placement(tmp_path, placement)
    given = {"cluster.rejoin_timeout_s": 0.2}
    assert machine._await_crews(typed(tmp_path), given, placement) == Exit.LOST
    last = caplog.messages[-1]
    assert "waited 0 s for ranks 0, 1" in last and f"run --worker 1 --log-path {tmp_path}" in last


def test_placement_that_changes_while_machines_are_awaited_is_looked_at_again(tmp_path: Path) -> None:
    placed.publish_placement(tmp_path, Placement(3, ("rollout=0", "train=1,2")))
    assert machine._await_crews(typed(tmp_path), {}, Placement(2, ("rollout=0", "train=1"))) == Exit.MOVED
