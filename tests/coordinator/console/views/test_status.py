"""What anybody reads of a run: from made-up directories, nothing is written."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.commands.status import show_status
from coordinator.console.views.run import Run
from coordinator.console.views.status import StatusReader
from coordinator.console.views.status_text import duration, render, repairs, where
from coordinator.console.views.terminal_lines import view
from coordinator.directory.file_names import Beat, Flag, Record
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.journal.control_characters import one_line, plain
from coordinator.machine.network import pid_space
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import EpochRecord, claim
from coordinator.protocol.watch import ENDED
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings, SettingsError
from tests.coordinator.examples import record, run_dir_at, tree, write_json

SETTINGS = build({"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "iterations": 8})
TOP_KEYS = (
    "run_id state epoch iteration phase waiting_for waiting_s left_s num_nodes nodes crews last_metrics"
)
NODE_KEYS = (
    "crew rank name host address state phase weight tasks_assigned tasks_done samples_assigned samples_done "
    "silent_s error row_s waiting_s tokens_per_s left_s gpu_count gpus"
)
"""Keys of a node in `run status --json`, as INTERFACE.md has them."""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path)
    write_json(made.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    return made


def beat(run_dir: RunDir, rank: int, incarnation: int = 1, counter: int = 5, **said: Any) -> None:
    content = {
        "host": f"node-{rank}", "pid": os.getpid(), "pid_space": "elsewhere", "address": f"10.0.0.{rank}",
        "processes": 1, "state": "running", "iteration": 5, "phase": "train_rollout",
        "done": 3 * rank, "total": 64, "waiting_for": [], **said,
    }  # fmt: skip
    write_json(run_dir.entry(Beat(2, rank, incarnation, counter)), content)


def running(run_dir: RunDir, newest: EpochRecord | None = None, **master: Any) -> dict[str, Any]:
    """Three nodes that beat in epoch 2, of which the master says `master`; their status."""
    claim(run_dir, newest or record(2, settings=SETTINGS))
    beat(run_dir, 0, **master)
    beat(run_dir, 1)
    beat(run_dir, 2)
    return Run(run_dir.root).status()


def flag(run_dir: RunDir, rank: int, kind: str, epoch: int = 2) -> None:
    (run_dir.entry(Flag(epoch, 5, 2, rank, kind))).write_text('{"text": "said why"}')


def states(status: dict[str, Any]) -> list[str]:
    return [node["state"] for node in status["nodes"]]


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


def test_reading_writes_nothing(run_dir: RunDir) -> None:
    running(run_dir)
    before = tree(run_dir.root)
    Run(run_dir.root).status()
    assert tree(run_dir.root) == before


def test_newest_beat_of_the_newest_incarnation_counts(run_dir: RunDir) -> None:
    running(run_dir)
    beat(run_dir, 1, incarnation=2, counter=0, done=60)
    assert Run(run_dir.root).status()["nodes"][1]["tasks_done"] == 60


def test_run_without_a_record_has_stopped_before_it_began(run_dir: RunDir) -> None:
    status = Run(run_dir.root).status()
    assert (status["state"], status["epoch"], status["num_nodes"]) == ("stopped", 0, 1)
    assert states(status) == ["never_seen"]
    assert status["last_metrics"] is None


def test_lobby_is_holding_and_shows_who_has_not_come(run_dir: RunDir) -> None:
    claim(run_dir, record(2, "lobby", {}, settings=SETTINGS))
    beat(run_dir, 0, state="gathering", phase="", iteration=0, waiting_for=[1, 2], done=0, total=0, row_s=9.0)
    beat(run_dir, 2, state="pending", phase="", iteration=0)
    status = Run(run_dir.root).status()
    assert (status["state"], status["phase"], status["waiting_for"]) == ("holding", "gathering", [1, 2])
    assert states(status) == ["alive", "never_seen", "alive"]
    assert [node["weight"] for node in status["nodes"]] == [2, 1, 1]
    text = render(status, run_dir.root)
    assert "run abc is holding (epoch 2)" in text
    assert "waiting for ranks 1, 2 (node-2)" in text and "gathering for" not in text
    assert f"to start rank 1, on its machine: run --worker 1 --log-path {run_dir.root}" in text


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


def test_finished_run_shows_no_rows(run_dir: RunDir) -> None:
    running(run_dir, record(3, "finished", settings=SETTINGS), state=ENDED, iteration=8)
    text = render(Run(run_dir.root).status(), run_dir.root)
    assert "it ended with iteration 8 of 8\n" in text
    crew = Run(run_dir.root).status()["crews"][0]
    assert where({**crew, "iterations": 5}) == "iteration 8", "a last start may ask for fewer iterations"
    assert "train_rollout" not in text and "/64" not in text
    assert [line.split()[-1] for line in text.splitlines() if " left " in line] == ["1"], (
        "a weight, no silence"
    )


def up(run_dir: RunDir, rank: int, row: Phase, iteration: int = 5, epoch: int = 2) -> None:
    (run_dir.entry(Flag(epoch, iteration, row, rank, "ok"))).write_text("{}")


def places(status: dict[str, Any]) -> list[tuple[int, str]]:
    return [(node["iteration"], node["phase"]) for node in status["nodes"]]


def test_flags_show_rows_that_heartbeats_do_not_tell_of_yet(run_dir: RunDir) -> None:
    running(run_dir, waiting_for=[2], total=64, done=9)
    up(run_dir, 0, Phase.TRAIN_AGGREGATE)
    status = Run(run_dir.root).status()
    assert places(status) == [(5, "eval_decision")] * 3
    assert (status["phase"], status["waiting_for"]) == ("eval_decision", [])
    assert [node["tasks_assigned"] for node in status["nodes"]] == [0, 0, 0]
    up(run_dir, 0, Phase.ITERATION_END)
    status = Run(run_dir.root).status()
    assert (status["iteration"], places(status)) == (6, [(6, "iteration_start")] * 3)
    up(run_dir, 0, Phase.ITERATION_END, iteration=8)
    assert places(Run(run_dir.root).status()) == [(8, "iteration_end")] * 3


def test_heartbeats_that_are_further_than_flags_count(run_dir: RunDir) -> None:
    running(run_dir)
    up(run_dir, 0, Phase.TRAIN_PLAN)
    status = Run(run_dir.root).status()
    assert places(status) == [(5, "train_rollout")] * 3
    assert status["nodes"][1]["tasks_done"] == 3


def test_rows_that_a_run_does_not_have_are_not_shown(run_dir: RunDir) -> None:
    rollouts = build({"cluster.num_nodes": 3, "rl_phase": "rollout"})
    running(run_dir, record(2, settings=rollouts))
    up(run_dir, 0, Phase.EVAL_ROLLOUT)
    assert places(Run(run_dir.root).status())[0] == (5, "iteration_end")


def test_lost_node_stays_where_it_was_seen_last(run_dir: RunDir) -> None:
    running(run_dir)
    beat(run_dir, 2, counter=6, phase="train_plan", pid=GONE, pid_space=pid_space())
    up(run_dir, 0, Phase.TRAIN_ROLLOUT)
    up(run_dir, 2, Phase.TRAIN_ROLLOUT)
    assert places(Run(run_dir.root).status())[1:] == [(5, "train_files_ready"), (5, "train_rollout")]


def test_flags_of_an_ended_epoch_move_no_node_that_gathers(run_dir: RunDir) -> None:
    running(run_dir, state="gathering", phase="", iteration=5)
    up(run_dir, 0, Phase.TRAINING)
    assert Run(run_dir.root).status()["phase"] == "gathering"
    claim(run_dir, record(3, settings=SETTINGS))
    assert Run(run_dir.root).status()["phase"] == "gathering"
    up(run_dir, 0, Phase.ITERATION_START, epoch=3)
    assert Run(run_dir.root).status()["phase"] == "train_plan"


def test_new_master_that_holds_is_in_the_iteration_that_was_begun(run_dir: RunDir) -> None:
    run_dir.metrics.write_text('{"iteration": 3, "kind": "both", "reward": 0.5}\n')
    claim(run_dir, record(2, settings=SETTINGS))
    claim(run_dir, record(3, "lobby", {}, settings=SETTINGS))
    up(run_dir, 0, Phase.ITERATION_START, iteration=4)
    beat(run_dir, 0, state="gathering", phase="", iteration=0, waiting_for=[1, 2])
    status = Run(run_dir.root).status()
    assert (status["state"], status["iteration"], status["phase"]) == ("holding", 4, "gathering")


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


GONE = 2**22 + 1
"""More than any pid."""


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


def test_torn_documents_are_read_as_absent(run_dir: RunDir) -> None:
    running(run_dir)
    run_dir.entry(Record(3)).write_text("{")
    (run_dir.entry(Beat(2, 0, 1, 6))).write_text('{"host"')
    run_dir.metrics.write_text('{"iteration": 4, "kind": "both", "reward": 0.5}\n{"iteration": 5, "rew')
    status = Run(run_dir.root).status()
    assert (status["epoch"], status["last_metrics"]["iteration"]) == (2, 4)
    assert render(status, run_dir.root)


GPU = {"name": "H100", "used_bytes": 61 * 2**30, "total_bytes": 80 * 2**30, "busy": 0.97}


def test_what_a_node_says_of_its_speed_and_its_gpus_is_shown(run_dir: RunDir) -> None:
    speed: dict[str, Any] = {"row_s": 12.0, "waiting_s": 3.5, "tokens_per_s": 1234.5, "left_s": 31.0}
    status = running(run_dir, **speed, gpu_count=2, gpus=[GPU, GPU], waiting_for=[2])
    assert status["nodes"][0].items() >= {**speed, "gpu_count": 2, "gpus": [GPU, GPU]}.items()
    assert (status["waiting_s"], status["left_s"]) == (3.5, 31.0)
    text = render(status, run_dir.root)
    assert "train_rollout for 12 s, about 31 s left, waiting for rank 2 (node-2) for 4 s" in text
    assert "1,234" in text and "2 x 61/80 GiB 97 %" in text


def test_nodes_that_start_an_engine_say_so(run_dir: RunDir) -> None:
    running(run_dir, row_s=12.0)
    beat(run_dir, 1, counter=6, work="starting the engine")
    beat(run_dir, 2, counter=6, work="starting the engine")
    text = render(Run(run_dir.root).status(), run_dir.root)
    assert "iteration 5 of 8, train_rollout for 12 s, starting the engine\n" in text


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


def test_held_run_says_the_command_that_brings_the_missing_node_back(run_dir: RunDir) -> None:
    running(run_dir, waiting_for=[1, 2], silent_s={"2": 31.0})
    flag(run_dir, 0, "lost")
    status = Run(run_dir.root).status()
    command = f"to bring rank 2 back, on node-2: run --worker 2 --log-path {run_dir.root}"
    assert repairs(status, run_dir.root) == [command]
    assert command in render(status, run_dir.root).splitlines()


def test_control_characters_are_spelled() -> None:
    assert plain("a\x1b[31mb\x00\x7f\x9b\r\n\tc\rd é") == "a^[[31mb^@^?\\x9b\n\tc^Md é"
    assert one_line("a\tb\nc\x1b") == "a^Ib^Jc^["


def test_rendered_status_cannot_move_the_cursor(run_dir: RunDir) -> None:
    running(run_dir, host="a\x1b[2J", phase="\x1bc\n")
    text = render(Run(run_dir.root).status(), run_dir.root)
    assert "\x1b" not in text and "a^[[2J" in text and "iteration 5 of 8, ^[c^J" in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (34.4, "34 s"), (100, "2 min"), (5400, "90 min"), (11520, "3.2 h")]
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_status_is_printed_as_text_or_as_json(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    running(run_dir)
    show_status(run_dir.root, as_json=False, watch=False)
    assert "iteration 5 of 8, train_rollout\n" in capsys.readouterr().out
    show_status(run_dir.root, as_json=True, watch=False)
    assert json.loads(capsys.readouterr().out)["run_id"] == "abc"


def test_watch_that_is_typed_before_the_run_begins_waits_for_it(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.run_json.rename(run_dir.root / "later")
    with pytest.raises(SettingsError, match=r"no run there \(no run has begun there\)$"):
        show_status(run_dir.root, as_json=False, watch=False)

    def sleep(_seconds: float) -> None:
        if (run_dir.root / "later").exists():
            (run_dir.root / "later").rename(run_dir.run_json)
        else:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        show_status(run_dir.root, as_json=False, watch=True)
    out, err = capsys.readouterr()
    assert err == f"waiting for a run at {run_dir.root} (no run has begun there); Ctrl+C to stop\n"
    assert "run abc" in out


def test_rendered_status_has_a_line_a_node_and_the_last_rewards(run_dir: RunDir) -> None:
    running(run_dir, waiting_for=[2])
    line = {"iteration": 4, "kind": "both", "reward": 0.6123, "eval_reward": None}
    run_dir.metrics.write_text(json.dumps(line) + "\n")
    lines = render(Run(run_dir.root).status(), run_dir.root).splitlines()
    assert lines[:2] == [
        f"{run_dir.root}: run abc is running (epoch 2)",
        "iteration 5 of 8, train_rollout, waiting for rank 2 (node-2)",
    ]
    rows = [line.split() for line in lines[4:7]]
    assert rows[2] == ["2", "node-2", "10.0.0.1", "alive", "train_rollout", "6/64", "1", "0.0", "s"]
    assert lines[-1] == "last finished: iteration 4, reward 0.612"


def test_rendered_status_of_a_stopped_run_says_where_it_was(run_dir: RunDir) -> None:
    running(run_dir, waiting_for=[2])
    flag(run_dir, 0, "stopped")
    text = render(Run(run_dir.root).status(), run_dir.root)
    assert "it was last in iteration 5 of 8, train_rollout\n" in text


@pytest.mark.parametrize(
    "line",
    [{"iteration": 1, "reward": None, "eval_reward": None}, {"iteration": 1}, {"iteration": 1, "reward": 1}],
)
def test_last_line_without_a_reward_is_rendered(run_dir: RunDir, line: dict[str, Any]) -> None:
    running(run_dir)
    run_dir.metrics.write_text(json.dumps(line | {"kind": "both"}) + "\n")
    last = render(Run(run_dir.root).status(), run_dir.root).splitlines()[-1]
    assert last.startswith("last finished: iteration 1") and not last.endswith((",", " "))


@pytest.mark.parametrize("there", ["nothing", "a directory", "a file", "a torn run.json"])
def test_directory_without_a_run_is_refused(tmp_path: Path, there: str) -> None:
    root = tmp_path / "run"
    if there == "a file":
        root.touch()
    elif there != "nothing":
        root.mkdir()
    if there == "a torn run.json":
        (root / "run.json").write_text('{"run_id": ')
    with pytest.raises(SettingsError, match=f"--log-path {root}: no run there"):
        Run(root).status()


def test_run_of_another_format_is_refused(run_dir: RunDir) -> None:
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT + 1})
    with pytest.raises(SettingsError, match=rf"a run of format {FORMAT + 1}; this version reads {FORMAT}"):
        Run(run_dir.root).status()


def test_settings_of_the_newest_record_hold(run_dir: RunDir) -> None:
    running(run_dir)
    other: RunSettings = build({"cluster.num_nodes": 2})
    claim(run_dir, record(3, members={0: 1, 1: 1}, settings=other))
    status = Run(run_dir.root).status()
    assert (status["num_nodes"], len(status["nodes"])) == (2, 2)


def test_settings_of_another_version_are_one_line(run_dir: RunDir) -> None:
    foreign = record(2).model_copy(update={"settings": {"cluster": {"gossip": True}}})
    with pytest.raises(SettingsError, match=r"another version of flagpost \(cluster.gossip: .* same version"):
        running(run_dir, foreign)


# ---- whatever lies there


def test_process_of_another_container_on_this_machine_is_not_called_gone(run_dir: RunDir) -> None:
    elsewhere = f"{pid_space().partition('/')[0]}/1"  # the same machine, another namespace of pids
    assert running(run_dir, pid=GONE, pid_space=elsewhere)["state"] == "running"


def test_pipe_in_the_place_of_a_file_is_not_opened(run_dir: RunDir) -> None:
    before = running(run_dir)
    os.mkfifo(run_dir.entry(Beat(2, 0, 1, 6)))
    os.mkfifo(run_dir.entry(Record(3)))
    (run_dir.entry(Beat(2, 1, 1, 6))).mkdir()
    os.mkfifo(run_dir.metrics)
    assert Run(run_dir.root).status() == before
    run_dir.run_json.unlink()
    os.mkfifo(run_dir.run_json)
    with pytest.raises(SettingsError, match="no run there"):
        Run(run_dir.root).status()


ODD = [None, [], [1], 7, "x", "", {}, {"a": 1}, -1, 10**30, 1e308, float("nan"), float("inf"), True]


@pytest.mark.parametrize("content", ["", "[]", "7", "null", '"x"', "[" * 100_000, "\xff", "{"])
def test_heartbeat_that_is_no_object_says_nothing(run_dir: RunDir, content: str) -> None:
    running(run_dir)
    for rank in (0, 1):
        (run_dir.entry(Beat(2, rank, 1, 6))).write_text(content, encoding="latin-1")
    status = Run(run_dir.root).status()
    assert status["state"] == "running" and states(status) == ["alive"] * 3
    assert render(status, run_dir.root)


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_odd_values_in_a_heartbeat_do_not_fail_the_status(run_dir: RunDir, odd: Any) -> None:
    names = ["host", "pid", "pid_space", "state", "iteration", "phase", "done", "total", "waiting_for"]
    names += ["work", "row_s", "waiting_s", "tokens_per_s", "left_s", "gpu_count", "gpus", "silent_s"]
    running(run_dir)
    run_dir.metrics.write_text(
        json.dumps({"iteration": 4, "kind": "both", "reward": odd, "eval_reward": odd})
    )
    for number, name in enumerate(names):
        for rank in range(3):
            beat(run_dir, rank, counter=6 + number, **{name: odd})
        status = Run(run_dir.root).status()
        assert render(status, run_dir.root)
        for width in (40, 120):
            assert view(status, StatusReader(run_dir.root).lines, run_dir.root, width=width, height=20)
