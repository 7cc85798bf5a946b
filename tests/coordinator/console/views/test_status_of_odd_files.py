"""What is read of a run whatever lies in its directory."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.views.run import Run
from coordinator.console.views.status import StatusReader
from coordinator.console.views.status_text import render
from coordinator.console.views.terminal_lines import view
from coordinator.directory.file_names import Beat, Record
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.machine.network import pid_space
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.views.beating_run import GONE, beat, running, states
from tests.coordinator.examples import record, write_json


def test_torn_documents_are_read_as_absent(run_dir: RunDir) -> None:
    running(run_dir)
    run_dir.entry(Record(3)).write_text("{")
    (run_dir.entry(Beat(2, 0, 1, 6))).write_text('{"host"')
    run_dir.metrics.write_text('{"iteration": 4, "kind": "both", "reward": 0.5}\n{"iteration": 5, "rew')
    status = Run(run_dir.root).status()
    assert (status["epoch"], status["last_metrics"]["iteration"]) == (2, 4)
    assert render(status, run_dir.root)


@pytest.mark.parametrize("there", ["nothing", "a directory", "a file", "a torn run.json"])
def test_directory_without_a_run_is_refused(tmp_path: Path, there: str) -> None:
    root = tmp_path / "run"
    if there == "a file":
        root.touch()
    elif there != "nothing":
        root.mkdir()
    if there == "a torn run.json":
        (root / "run.json").write_text('{"run_id": ')
    reason = "is a file; give the directory of a run" if there == "a file" else "no run there"
    with pytest.raises(SettingsError, match=f"--log-path {root}: {reason}"):
        Run(root).status()


def test_run_of_another_format_is_refused(run_dir: RunDir) -> None:
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT + 1})
    with pytest.raises(SettingsError, match=rf"a run of format {FORMAT + 1}; this version reads {FORMAT}"):
        Run(run_dir.root).status()


def test_settings_of_another_version_are_one_line(run_dir: RunDir) -> None:
    foreign = record(2).model_copy(update={"settings": {"cluster": {"gossip": True}}})
    with pytest.raises(SettingsError, match=r"another version of flagpost \(cluster.gossip: .* same version"):
        running(run_dir, foreign)


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
