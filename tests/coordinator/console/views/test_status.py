"""What anybody reads of a run: from made-up directories, nothing is written."""

import json
import os
import time
from pathlib import Path

import pytest

from coordinator.console.views.run import Run
from coordinator.console.views.status import StatusReader
from coordinator.console.views.status_text import repairs
from coordinator.directory.layout import RunDir
from coordinator.machine.network import pid_space
from coordinator.protocol.records import claim
from coordinator.protocol.watch import ENDED
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings, SettingsError
from tests.coordinator.console.views.beating_run import GONE, SETTINGS, beat, flag, running, states
from tests.coordinator.examples import record

TOP_KEYS = (
    "run_id state epoch iteration phase waiting_for waiting_s left_s num_nodes nodes crews last_metrics"
)
NODE_KEYS = (
    "crew rank name host address state phase weight tasks_assigned tasks_done samples_assigned samples_done "
    "silent_s error row_s waiting_s tokens_per_s left_s gpu_count gpus"
)
"""Keys of a node in `run status --json`, as INTERFACE.md has them."""


def test_status_has_the_documented_keys_and_is_json(run_dir: RunDir) -> None:
    status = json.loads(json.dumps(running(run_dir)))
    assert status.keys() >= {*TOP_KEYS.split()}
    assert all(node.keys() >= {*NODE_KEYS.split()} for node in status["nodes"])


def test_master_that_has_just_started_gathers_and_is_not_stopped(run_dir: RunDir) -> None:
    beat(run_dir, 0, state="gathering", phase="", iteration=0)
    status = Run(run_dir.root).status()
    assert (status["state"], status["phase"]) == ("holding", "gathering")
    beat(run_dir, 0, counter=6, state=ENDED, phase="", iteration=0)
    assert Run(run_dir.root).status()["state"] == "stopped"


def test_running_nodes_are_shown_where_they_are(run_dir: RunDir) -> None:
    status = running(run_dir, waiting_for=[2], silent_s={"1": 0.4, "2": 1.0})
    assert (status["run_id"], status["state"], status["epoch"]) == ("abc", "running", 2)
    assert (status["iteration"], status["phase"], status["waiting_for"]) == (5, "train_rollout", [2])
    assert status["num_nodes"] == 3 and status["iterations"] == 8
    assert status["nodes"][1] == {
        "crew": "main", "rank": 1, "name": "rank 1", "host": "node-1", "address": "10.0.0.1",
        "state": "alive", "iteration": 5, "phase": "train_rollout", "row_s": 0.0, "waiting_s": 0.0,
        "weight": 1.0, "measured_weight": None, "tasks_assigned": 64, "tasks_done": 3,
        "samples_assigned": 0, "samples_done": 0, "tokens_per_s": None, "left_s": None,
        "gpu_count": 0, "gpus": [], "silent_s": 0.4, "error": "",
    }  # fmt: skip


def test_newest_beat_of_the_newest_incarnation_counts(run_dir: RunDir) -> None:
    running(run_dir)
    beat(run_dir, 1, incarnation=2, counter=0, done=60)
    assert Run(run_dir.root).status()["nodes"][1]["tasks_done"] == 60


def test_file_in_place_of_a_run_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(SettingsError, match="notes: is a file; give the directory of a run"):
        Run(tmp_path / "notes").status()


def test_run_without_a_record_has_stopped_before_it_began(run_dir: RunDir) -> None:
    status = Run(run_dir.root).status()
    assert (status["state"], status["epoch"], status["num_nodes"]) == ("stopped", 0, 1)
    assert states(status) == ["never_seen"]
    assert status["last_metrics"] is None


def test_finished_run_is_finished_though_its_nodes_left(run_dir: RunDir) -> None:
    running(run_dir, record(2, "finished", settings=SETTINGS), state=ENDED)
    status = Run(run_dir.root).status()
    assert status["state"] == "finished"
    assert states(status) == ["left", "alive", "alive"]


def test_run_that_has_ended_waits_for_nobody(run_dir: RunDir) -> None:
    running(run_dir, record(3, "finished", settings=SETTINGS), state=ENDED, waiting_for=[1], waiting_s=9.0)
    status = Run(run_dir.root).status()
    assert (status["waiting_for"], status["waiting_s"]) == ([], 0.0)
    claim(run_dir, record(4, settings=SETTINGS))
    flag(run_dir, 0, "stopped", epoch=4)
    status = Run(run_dir.root).status()
    assert (status["state"], status["waiting_for"], status["waiting_s"]) == ("stopped", [], 0.0)


def test_killed_node_is_silent_since_its_last_heartbeat(run_dir: RunDir) -> None:
    here = {"pid_space": pid_space(), "monotonic_s": time.monotonic() - 4.0}
    running(run_dir, silent_s={"1": 0.0, "2": 0.0})
    beat(run_dir, 2, counter=6, pid=GONE, **here)
    node = Run(run_dir.root).status()["nodes"][2]
    assert node["state"] == "silent" and 4.0 <= node["silent_s"] < 10.0


def test_what_the_master_observed_is_as_old_as_its_heartbeat(run_dir: RunDir) -> None:
    here = {"pid_space": pid_space(), "monotonic_s": time.monotonic() - 2.0}
    status = running(run_dir, silent_s={"1": 0.5, "2": 9.0}, **here)
    assert 2.5 <= status["nodes"][1]["silent_s"] < 4.6
    beat(run_dir, 1, counter=6, pid_space=pid_space(), monotonic_s=time.monotonic())
    status = Run(run_dir.root).status()
    assert status["nodes"][1]["silent_s"] < 1.0, "it has beaten since"
    assert 11.0 <= status["nodes"][2]["silent_s"] < 13.1


def test_reader_that_sees_a_node_beat_needs_no_observation_of_the_master(run_dir: RunDir) -> None:
    running(run_dir, silent_s={"1": 3.0, "2": 3.0})
    run = Run(run_dir.root)
    assert [node["silent_s"] for node in run.status()["nodes"]] == [0.0, 3.0, 3.0]
    beat(run_dir, 1, counter=6)
    silent_s = [node["silent_s"] for node in run.status()["nodes"]]
    assert silent_s[1] == 0.0 and silent_s[2] >= 3.0


def test_run_that_is_in_no_iteration_shows_the_last_finished_one(run_dir: RunDir) -> None:
    run_dir.metrics.write_text('{"iteration": 3, "kind": "both", "reward": 0.5}\n')
    assert running(run_dir, iteration=0, phase="", state="gathering")["iteration"] == 3


@pytest.mark.parametrize(
    ("rank", "kind", "state"),
    [
        *(
            (rank, kind, "stopped")
            for rank, kind in ((0, "stopped"), (0, "gave_up"), (0, "failed"), (2, "failed"))
        ),
        *((2, kind, "running") for kind in ("left", "trainer_failed", "ok", "enter")),
        (0, "left", "holding"),
    ],
)
def test_calls_that_end_a_run_stop_it(run_dir: RunDir, rank: int, kind: str, state: str) -> None:
    running(run_dir)
    flag(run_dir, rank, kind, epoch=1)
    assert Run(run_dir.root).status()["state"] == "running", "of an epoch that is over"
    flag(run_dir, rank, kind)
    assert Run(run_dir.root).status()["state"] == state


def test_master_that_left_stops_a_run_whose_workers_do_not_wait_for_it(run_dir: RunDir) -> None:
    settings = SETTINGS.model_dump(mode="json")
    settings["cluster"]["on_node_failure"] = "abort"
    running(run_dir, record(2, settings=RunSettings.published(settings)))
    flag(run_dir, 0, "left")
    assert Run(run_dir.root).status()["state"] == "stopped"


def test_workers_hold_for_a_master_that_has_taken_over_and_is_gone_before_it_let_them_in(
    run_dir: RunDir,
) -> None:
    running(run_dir)
    claim(run_dir, record(3, "lobby", {}, master_incarnation=2, settings=SETTINGS))
    beat(run_dir, 0, incarnation=2, state="gathering", pid=GONE, pid_space=pid_space())
    beat(run_dir, 2, counter=6, state=ENDED)
    status = Run(run_dir.root).status()
    assert (status["state"], status["waiting_for"]) == ("holding", [0])
    beat(run_dir, 1, counter=6, state=ENDED)
    assert Run(run_dir.root).status()["state"] == "stopped"


def test_worker_that_left_and_came_again_is_alive(run_dir: RunDir) -> None:
    running(run_dir)
    flag(run_dir, 2, "left")
    assert states(Run(run_dir.root).status())[2] == "left"
    beat(run_dir, 2, incarnation=2, counter=0, state="pending")
    assert states(Run(run_dir.root).status())[2] == "alive"


def test_workers_hold_for_a_master_whose_process_is_gone_from_this_host(run_dir: RunDir) -> None:
    status = running(run_dir, pid=GONE, pid_space=pid_space())
    assert (status["state"], status["waiting_for"]) == ("holding", [0])
    assert states(status) == ["silent", "alive", "alive"]
    assert running(run_dir, pid=os.getpid(), pid_space=pid_space())["state"] == "running"
    assert running(run_dir, pid=GONE)["state"] == "running"


def test_run_whose_processes_are_all_gone_is_stopped(run_dir: RunDir) -> None:
    running(run_dir, pid=GONE, pid_space=pid_space())
    for rank in (1, 2):
        beat(run_dir, rank, counter=6, pid=GONE, pid_space=pid_space())
    status = Run(run_dir.root).status()
    assert status["state"] == "stopped"
    assert states(status) == ["silent"] * 3


def test_node_states_are_those_that_the_master_last_observed(run_dir: RunDir) -> None:
    status = running(run_dir, silent_s={"1": 30.0, "2": 29.9})
    assert states(status) == ["alive", "silent", "alive"]
    flag(run_dir, 2, "left")
    beat(run_dir, 1, counter=6, state=ENDED)
    assert states(Run(run_dir.root).status()) == ["alive", "left", "left"]


def test_time_left_is_the_slowest_nodes_in_the_masters_row(run_dir: RunDir) -> None:
    running(run_dir, left_s=3.0)
    beat(run_dir, 1, counter=6, left_s=40.0)
    beat(run_dir, 2, counter=6, left_s=90.0, phase="train_plan")
    assert Run(run_dir.root).status()["left_s"] == 40.0
    beat(run_dir, 2, counter=7, left_s=90.0, state=ENDED)
    assert Run(run_dir.root).status()["left_s"] == 40.0, "of a node that has ended nothing is left"
    beat(run_dir, 0, counter=6, left_s=3.0, phase="training")
    assert Run(run_dir.root).status()["left_s"] == 3.0
    beat(run_dir, 0, counter=7, left_s=3.0, phase="train_files_ready")
    assert Run(run_dir.root).status()["left_s"] is None


def test_master_of_another_machine_that_beats_no_more_is_silent_to_who_watches(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("coordinator.console.views.crew_reader.time.monotonic", lambda: now_s)
    running(run_dir, silent_s={"1": 1.0})
    reader = StatusReader(run_dir.root)
    for counter in range(6, 19):
        beat(run_dir, 1, counter=counter)
        beat(run_dir, 2, counter=counter)
        status = reader.read()
        now_s += 3.0
    assert (status["state"], status["waiting_for"], status["waiting_s"]) == ("holding", [0], 36.0)
    assert states(status) == ["silent", "alive", "alive"]
    assert repairs(status, run_dir.root) == [
        f"to bring rank 0 back, on node-0: run --master --log-path {run_dir.root}"
    ]


def test_reader_that_was_frozen_takes_nobody_for_silent(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr("coordinator.console.views.crew_reader.time.monotonic", lambda: now_s)
    running(run_dir)
    reader = StatusReader(run_dir.root)
    reader.read()
    now_s = 1000.0
    assert states(reader.read()) == ["alive"] * 3


def test_reader_sees_each_new_line_of_the_metrics(run_dir: RunDir) -> None:
    running(run_dir, phase="iteration_end")
    reader = StatusReader(run_dir.root)
    for iteration, phase in ((5, "iteration_end"), (6, "train_plan"), (7, "train_plan")):
        with run_dir.metrics.open("a") as file:
            file.write(json.dumps({"iteration": iteration, "kind": "both"}) + "\n")
        beat(run_dir, 0, counter=5 + iteration, iteration=iteration + (phase == "train_plan"), phase=phase)
        assert reader.read()["last_metrics"] == {"iteration": iteration, "kind": "both"}


def test_settings_of_the_newest_record_hold(run_dir: RunDir) -> None:
    running(run_dir)
    other: RunSettings = build({"cluster.num_nodes": 2})
    claim(run_dir, record(3, members={0: 1, 1: 1}, settings=other))
    status = Run(run_dir.root).status()
    assert (status["num_nodes"], len(status["nodes"])) == (2, 2)


# ---- whatever lies there
