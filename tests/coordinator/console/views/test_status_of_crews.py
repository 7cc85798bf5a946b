"""The status of a run in which one crew generates and another trains, from made-up directories."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.views.run import Run
from coordinator.console.views.status_text import render
from coordinator.console.views.terminal_lines import view
from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.machine.network import pid_space
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement
from coordinator.protocol.records import claim
from coordinator.protocol.watch import ENDED
from coordinator.settings.loading import build
from coordinator.settings.tree import Crew, SettingsError
from tests.coordinator.examples import record, run_dir_at, tree, write_json

PLACE = ("rollout=0-1", "train=2")
GONE = 2**22 + 1
"""More than any pid."""
MACHINES = {"rollout": (0, 1), "train": (2,)}
ROWS = {"rollout": "train_rollout", "train": "training"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three machines, of which the last one trains."""
    run_dir_at(tmp_path)
    write_json(tmp_path / "run.json", {"run_id": "abc", "format": FORMAT, "fixed": {}})
    publish_placement(tmp_path, Placement(3, PLACE))
    for machine in range(3):
        publish_devices(tmp_path, machine, f"node-{machine}", 1)
    return tmp_path


def crew_at(root: Path, crew: Crew) -> RunDir:
    return RunDir(root, crew, MACHINES[crew])


def enter(root: Path, crew: Crew, epoch: int = 2, kind: Any = "full", **master: Any) -> RunDir:
    """All nodes of a crew beat in an epoch; its master says `master`."""
    run_dir = crew_at(root, crew)
    for directory in run_dir.protocol:
        directory.mkdir(parents=True, exist_ok=True)
    ranks = range(len(run_dir.machines))
    settings = build({"cluster.num_nodes": len(ranks), "iterations": 8}).of_crew(crew)
    claim(run_dir, record(epoch, kind, dict.fromkeys(ranks, 1), settings=settings))
    for rank in ranks:
        beat(run_dir, rank, epoch=epoch, **(master if rank == 0 else {}))
    return run_dir


def beat(run_dir: RunDir, rank: int, counter: int = 5, epoch: int = 2, **said: Any) -> None:
    usual = {
        "host": f"node-{run_dir.machine(rank)}", "pid": os.getpid(), "pid_space": "elsewhere",
        "state": "running",
        "iteration": 5, "phase": ROWS[run_dir.crew], "waiting_for": [], "row_s": 12.0,
    }  # fmt: skip
    write_json(run_dir.entry(Beat(epoch, rank, 1, counter)), {**usual, **said})


def status(root: Path) -> dict[str, Any]:
    return json.loads(json.dumps(Run(root).status()))


def shown(root: Path) -> list[str]:
    return render(Run(root).status(), root).splitlines()


def test_each_crew_has_its_own_master_epoch_row_and_nodes(root: Path) -> None:
    enter(root, "rollout", 2, iteration=7)
    enter(root, "train", 4)
    before = tree(root)
    found = status(root)
    assert (found["state"], found["iteration"], found["phase"]) == ("running", 5, "training")
    assert (found["num_nodes"], found["epoch"], found["iterations"]) == (3, 4, 8)
    assert [node["name"] for node in found["nodes"]] == ["rollout rank 0", "rollout rank 1", "train rank 2"]
    crews = [
        [crew[key] for key in ("crew", "epoch", "iteration", "phase", "master")] for crew in found["crews"]
    ]
    assert crews == [
        ["rollout", 2, 7, "train_rollout", "rollout rank 0"],
        ["train", 4, 5, "training", "train rank 2"],
    ]
    assert [node["rank"] for node in found["crews"][1]["nodes"]] == [2]
    assert tree(root) == before, "reading writes nothing"


def test_text_has_a_line_a_crew_and_a_table_of_all_nodes(root: Path) -> None:
    enter(root, "rollout", 2, iteration=7, left_s=31.0)
    enter(root, "train", 4)
    lines = shown(root)
    assert lines[:3] == [
        f"{root}: run abc is running",
        "rollout crew, led by rank 0 (node-0), cluster epoch 2: "
        "iteration 7 of 8, train_rollout for 12 s, about 31 s left",
        "train crew, led by rank 2 (node-2), cluster epoch 4: iteration 5 of 8, training for 12 s",
    ]
    assert [line.split()[:3] for line in lines[4:]] == [
        ["crew", "rank", "host"],
        ["rollout", "0", "node-0"],
        ["rollout", "1", "node-1"],
        ["train", "2", "node-2"],
    ]
    live = [line.plain.rstrip() for line in view(Run(root).status(), [], root, width=100, height=24)]
    assert live[0] == f"{root.name}: running"
    assert live[1] == "rollout crew: iteration 7 of 8, train_rollout for 12 s, about 31 s left"
    assert [line.split()[:2] for line in live[3:7]] == [line.split()[:2] for line in lines[4:]]


def test_crew_that_waits_says_for_what_of_the_other_crew_and_since_when(root: Path) -> None:
    enter(root, "rollout", 2, iteration=5)
    waits = "the groups of iteration 5, by the rollout crew"
    train = enter(root, "train", 4, iteration=4, phase="", waits_for=waits, waiting_s=0.0)
    (train.entry(Flag(4, 4, Phase.ITERATION_END, 0, "ok"))).write_text("{}")
    line = f"iteration 5 of 8, waiting for {waits}, for 12 s"
    assert shown(root)[2].endswith(f"epoch 4: {line}")
    found = status(root)
    assert (found["state"], found["waiting_for"]) == ("running", [])
    assert (found["crews"][1]["waits_for"], found["crews"][1]["waiting_s"]) == (waits, 12.0)
    (train.entry(Flag(4, 5, Phase.ITERATION_START, 0, "ok"))).write_text("{}")
    assert status(root)["crews"][1]["waits_for"] == "", "its flag is newer than its heartbeat"


def test_crew_that_waits_before_its_first_iteration_is_in_none(root: Path) -> None:
    enter(root, "rollout", 2, iteration=1)
    enter(root, "train", 2, iteration=0, phase="", waits_for="the groups of iteration 1", row_s=3.0)
    assert shown(root)[2].endswith("epoch 2: not begun, waiting for the groups of iteration 1, for 3 s")


def test_crew_without_a_master_is_named_with_the_command_that_starts_it(root: Path) -> None:
    enter(root, "rollout")
    found = status(root)
    assert (found["state"], found["crews"][0]["state"]) == ("holding", "running")
    lines = shown(root)
    assert lines[2:4] == [
        "train crew: no master yet",
        f"to start train rank 2, on its machine: run --worker 2 --log-path {root}",
    ]
    assert (found["crews"][1]["waiting_for"], found["crews"][1]["epoch"]) == ([2], 0)


def test_crew_whose_nodes_are_all_gone_is_held_for(root: Path) -> None:
    enter(root, "train")
    rollout = enter(root, "rollout")
    for rank in (0, 1):
        beat(rollout, rank, 6, pid=GONE, pid_space=pid_space())
    assert status(root)["crews"][0]["state"] == "holding"
    lines = shown(root)
    assert lines[1].startswith("rollout crew, led by rank 0 (node-0), cluster epoch 2: holding, iteration 5")
    assert lines[3:5] == [
        f"to bring rollout rank 0 back, on node-0: run --master --log-path {root}",
        f"to bring rollout rank 1 back, on node-1: run --worker 1 --log-path {root}",
    ]


def test_lost_worker_of_a_crew_is_named_by_its_machine(root: Path) -> None:
    enter(root, "train")
    rollout = enter(root, "rollout", waiting_for=[1], waiting_s=40.0)
    beat(rollout, 1, 6, pid=GONE, pid_space=pid_space())
    (rollout.entry(Flag(2, 5, 2, 0, "lost"))).write_text("{}")
    found = status(root)
    assert (found["state"], found["waiting_for"], found["waiting_s"]) == ("holding", [1], 40.0)
    assert "waiting for rank 1 (node-1) for 40 s" in shown(root)[1]


def test_run_is_finished_when_both_crews_are(root: Path) -> None:
    enter(root, "train")
    enter(root, "rollout", 3, "finished", iteration=8, state=ENDED)
    assert [crew["state"] for crew in status(root)["crews"]] == ["finished", "running"]
    assert status(root)["state"] == "running"
    assert shown(root)[1].endswith(": finished, iteration 8")
    enter(root, "train", 3, "finished", iteration=8, state=ENDED)
    assert status(root)["state"] == "finished"


def test_crew_that_failed_stops_and_is_not_waited_for(root: Path) -> None:
    enter(root, "rollout")
    train = enter(root, "train")
    (train.entry(Flag(2, 5, 10, 0, "failed"))).write_text("{}")
    assert [crew["state"] for crew in status(root)["crews"]] == ["running", "stopped"]
    rollout = crew_at(root, "rollout")
    (rollout.entry(Flag(2, 5, 10, 0, "failed"))).write_text("{}")
    assert status(root)["state"] == "stopped"


def test_machine_whose_devices_are_divided_has_a_node_in_each_crew(root: Path) -> None:
    for name in (
        "placement.json",
        "devices/rank_0000.json",
        "devices/rank_0001.json",
        "devices/rank_0002.json",
    ):
        (root / "protocol" / name).unlink()
    publish_placement(root, Placement(1, ("rollout=0-1", "train=2")))
    publish_devices(root, 0, "node-0", 3)
    names = [(node["name"], node["rank"], node["crew"]) for node in status(root)["nodes"]]
    assert names == [("rollout rank 0", 0, "rollout"), ("train rank 0", 0, "train")]
    assert "waiting for" not in shown(root)[1]


def test_reader_follows_a_run_that_is_placed_anew(root: Path) -> None:
    run = Run(root)
    assert len(run.status()["crews"]) == 2
    publish_placement(root, Placement(3, ()))
    enter_main = RunDir(root)
    claim(enter_main, record(2, settings=build({"cluster.num_nodes": 3})))
    assert [crew["crew"] for crew in run.status()["crews"]] == ["main"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_machines_that_have_not_said_their_devices_are_waited_for(root: Path, has_begun: bool) -> None:
    (root / "protocol" / "devices" / "rank_0001.json").unlink()
    (root / "protocol" / "devices" / "rank_0002.json").unlink()
    if not has_begun:
        (root / "run.json").rename(root / "later.json")
    with pytest.raises(SettingsError) as told:
        Run(root).status()
    said = "waits for ranks 1, 2 to say what devices there are; on the machine of rank 1: run --worker 1"
    assert said in str(told.value)
    if not has_begun:
        (root / "later.json").rename(root / "run.json")
    for machine in (1, 2):
        publish_devices(root, machine, f"node-{machine}", 1)
    assert len(Run(root).status()["crews"]) == 2
