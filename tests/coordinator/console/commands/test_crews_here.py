"""What a machine does with its nodes: real processes in place of the nodes."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.commands import crews_here
from coordinator.console.commands.interrupts import Interrupts
from coordinator.directory.layout import RunDir
from coordinator.journal.logs import Prefix
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.main import run_node
from coordinator.protocol import placement_records, records
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.placement_records import Placement
from coordinator.protocol.records import EpochRecord, Records, claim
from coordinator.protocol.snapshot import whole_board
from coordinator.settings.placement import Crew
from coordinator.settings.tree import SettingsError
from coordinator.start.request import StartRequest
from coordinator.start.wait_for_master import await_master
from rollout.storage import files
from rollout.storage.files import SharedFsError
from tests.coordinator.examples import record

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


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    noted = Interrupts()
    yield noted
    noted.close()


def test_node_whose_neighbour_may_not_start_is_told_once_and_ends_in_order(interrupts: Interrupts) -> None:
    with Children() as children:

        def start(crew: Crew) -> Child:
            if crew == "rollout":
                child = children.start(crew, [sys.executable, "-c", COUNTS])
                while "ready" not in child.tail():
                    pass
                return child
            return children.start(crew, [sys.executable, "-c", REFUSED])

        assert crews_here._follow(start, ["rollout", "train"], interrupts) == [101, Exit.USAGE]


def request(root: Path, *place: str) -> StartRequest:
    given = {"cluster.num_nodes": 2, "cluster.place": list(place), "tiny.warmup_steps": 0}
    return StartRequest(root, overrides=given)


def newest(run_dir: RunDir) -> EpochRecord | None:
    return Records(run_dir).newest(whole_board(run_dir).records)


@pytest.mark.parametrize(
    ("where", "call"), [(placement_records, "publish_placement"), (crews_here, "move_away")]
)
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
            crews_here._place_devices(request(tmp_path, "rollout=0", "train=1"))
    crews_here._place_devices(request(tmp_path, "rollout=0", "train=1"))
    assert placement_records.read_placement(tmp_path) == Placement(2, ("rollout=0", "train=1"))
    found = newest(old)
    assert found is not None and found.kind == "moved"


def test_crew_whose_next_number_stays_taken_by_nobody_who_shows_ends_the_start_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run_dir = RunDir(tmp_path)
    for directory in run_dir.fixed_directories:
        files.make_directory(directory)
    assert claim(run_dir, record())
    monkeypatch.setattr(records, "claim", lambda *_: False)
    monkeypatch.setattr(records, "CACHED_S", 0.2)
    monkeypatch.setattr(records, "LOOK_S", 0.05)
    with pytest.raises(SharedFsError, match=r"e\d+.epoch.json: this number is taken, .* run doctor"):
        records.move_away(run_dir)
    assert "is taken: looking again" in caplog.text


APART = Placement(3, ("train=0", "rollout=1-2"))


@pytest.mark.parametrize(
    ("before", "crew"),
    [
        (placement_records.ONE_CREW, "main"),
        (Placement(3, ()), "main"),
        (Placement(3, ("rollout=0", "train=1-2")), "train"),
        (Placement(3, ("rollout=0-1", "train=2")), "rollout"),
        (Placement(2, APART.place), "rollout"),
    ],
)
def test_worker_that_has_looked_just_before_devices_are_placed_looks_again(
    before: Placement, crew: Crew, tmp_path: Path
) -> None:
    placement_records.publish_placement(tmp_path, APART)
    for placement, code in ((before, Exit.MOVED), (APART, Exit.LOST)):
        with pytest.raises(NodeEnded) as ended:
            await_master(RunDir(tmp_path, crew), placement, 0.1, 30.0)
        assert ended.value.code is code


def place_apart(root: Path) -> None:
    placement_records.publish_placement(root, APART)
    for number in range(3):
        placement_records.publish_devices(root, number, f"node-{number}", 1)


@pytest.mark.parametrize(
    ("before", "machine", "crew"),
    [
        (Placement(3, ("rollout=0-1", "train=2")), 2, "train"),  # of no crew that it was in
        (Placement(3, ("rollout=0-1", "train=2")), 1, "rollout"),  # its crew has another leader: itself
        (placement_records.ONE_CREW, 1, "main"),
        (placement_records.ONE_CREW, 0, "main"),  # a master that another one has replaced
    ],
)
def test_node_that_was_started_for_another_placement_has_moved_and_writes_nothing(
    before: Placement, machine: int, crew: Crew, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    place_apart(tmp_path)
    there = sorted(tmp_path.rglob("*"))
    code = run_node(
        StartRequest(tmp_path, machine, crew=crew, placed_as=before.to_json()), Prefix(machine, crew)
    )
    assert code == Exit.MOVED
    assert sorted(tmp_path.rglob("*")) == there
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "the master has placed the devices of the run")
    ]


@pytest.mark.parametrize(
    ("machine", "crew", "said"),
    [
        (1, "main", "--crew main: .* has no such crew now; leave it out"),
        (1, "train", "--crew train: rank 1 of .* is not in that crew now; leave it out"),
    ],
)
def test_crew_that_is_typed_and_is_not_there_is_one_line(
    machine: int, crew: Crew, said: str, tmp_path: Path
) -> None:
    place_apart(tmp_path)
    with pytest.raises(SettingsError, match=said):
        run_node(StartRequest(tmp_path, machine, crew=crew), Prefix(machine, crew))


@pytest.mark.parametrize(
    ("codes", "is_interrupted", "outcome"),
    [
        ([0, 0], False, Exit.DONE),
        ([0, -9], False, Exit.LOST),
        ([-9, 1], False, Exit.FAILED),
        ([Exit.MOVED], False, Exit.MOVED),
        ([Exit.FAILED, Exit.MOVED], False, Exit.MOVED),
        ([Exit.INTERRUPTED, Exit.MOVED], False, Exit.MOVED),  # it was told to end, by this machine
        ([Exit.MOVED, Exit.SUPERSEDED], False, Exit.SUPERSEDED),
        ([Exit.MOVED, Exit.MOVED], True, Exit.INTERRUPTED),
        ([Exit.MOVED, Exit.FAILED], True, Exit.FAILED),
    ],
)
def test_machine_looks_again_if_a_node_has_moved_unless_it_is_to_end(
    codes: list[int], is_interrupted: bool, outcome: Exit
) -> None:
    assert crews_here._outcome(codes, is_interrupted) == outcome


def test_node_that_does_not_see_that_its_neighbour_has_moved_is_told_to_end(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crews_here, "MOVE_S", 0.5)
    with Children() as children:

        def start(crew: Crew) -> Child:
            script = COUNTS if crew == "rollout" else f"raise SystemExit({int(Exit.MOVED)})"
            child = children.start(crew, [sys.executable, "-c", script])
            while crew == "rollout" and "ready" not in child.tail():
                pass
            return child

        assert crews_here._follow(start, ["rollout", "train"], interrupts) == [101, Exit.MOVED]


def test_waiting_for_machines_ends_with_who_is_missing_and_the_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    placement = Placement(2, ("rollout=0", "train=1"))
    placement_records.publish_placement(tmp_path, placement)
    given = {"cluster.rejoin_timeout_s": 0.2}
    assert crews_here._await_crews(request(tmp_path), given, placement) == Exit.LOST
    last = caplog.messages[-1]
    assert "waited 0 s for ranks 0, 1" in last and f"run --worker 1 --log-path {tmp_path}" in last


def test_placement_that_changes_while_machines_are_awaited_is_looked_at_again(tmp_path: Path) -> None:
    placement_records.publish_placement(tmp_path, Placement(3, ("rollout=0", "train=1,2")))
    assert (
        crews_here._await_crews(request(tmp_path), {}, Placement(2, ("rollout=0", "train=1"))) == Exit.MOVED
    )
