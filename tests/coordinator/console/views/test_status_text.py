"""The state of a run in words: `run status`."""

import json
import time
from typing import Any

import pytest

from coordinator.console.commands.status import show_status
from coordinator.console.views.run import Run
from coordinator.console.views.status_text import duration, render, repairs, where
from coordinator.console.views.terminal_lines import view
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from coordinator.journal.control_characters import one_line, plain
from coordinator.protocol.records import claim
from coordinator.protocol.watch import ENDED
from coordinator.settings.tree import SettingsError
from tests.coordinator.console.views.beating_run import SETTINGS, beat, flag, running, states
from tests.coordinator.examples import record, write_json


def test_lobby_is_holding_and_shows_who_has_not_come(run_dir: RunDir) -> None:
    claim(run_dir, record(2, "lobby", {}, settings=SETTINGS))
    beat(run_dir, 0, state="gathering", phase="", iteration=0, waiting_for=[1, 2], done=0, total=0, row_s=9.0)
    beat(run_dir, 2, state="pending", phase="", iteration=0)
    status = Run(run_dir.root).status()
    assert (status["state"], status["phase"], status["waiting_for"]) == ("holding", "gathering", [1, 2])
    assert states(status) == ["alive", "never_seen", "alive"]
    assert [node["weight"] for node in status["nodes"]] == [2, 1, 1]
    text = render(status, run_dir.root)
    assert "run abc is holding (cluster epoch 2)" in text
    assert "waiting for ranks 1, 2 (node-2)" in text and "gathering for" not in text
    assert f"to start rank 1, on its machine: run --worker 1 --log-path {run_dir.root}" in text


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


def test_full_disk_is_said_with_what_is_free_and_for_how_long(run_dir: RunDir) -> None:
    running(run_dir, phase="training", row_s=240.0)
    full = "waiting for free space on /shared (0 of 12 MB free: free some there; it gives up after 300 s)"
    beat(run_dir, 1, counter=6, phase="training", work=full, work_s=180.0)
    beat(run_dir, 2, counter=6, phase="training", work=full, work_s=170.0)
    status = Run(run_dir.root).status()
    place = f"iteration 5 of 8, training for 4 min, {full} for 3 min\n"
    assert place in render(status, run_dir.root)
    lines = view(status, [], run_dir.root, width=80, height=24)
    assert f"{full} for 3 min" in [line.plain for line in lines], "it is not cut off"


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
    with pytest.raises(SettingsError, match=r"no run there \(no run\.json\); give the directory of a run$"):
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
        f"{run_dir.root}: run abc is running (cluster epoch 2)",
        "iteration 5 of 8, train_rollout, waiting for rank 2 (node-2)",
    ]
    rows = [line.split() for line in lines[4:7]]
    assert rows[2] == ["2", "node-2", "10.0.0.1", "alive", "train_rollout", "6/64", "1", "0.0", "s"]
    assert lines[-1] == "last finished: iteration 4, reward 0.612"


def test_rendered_status_of_a_stopped_run_says_where_it_was_why_it_ended_and_how_it_goes_on(
    run_dir: RunDir,
) -> None:
    running(run_dir, waiting_for=[2])
    flag(run_dir, 2, "failed")
    lines = render(Run(run_dir.root).status(), run_dir.root).splitlines()
    assert lines[1:4] == [
        "it was last in iteration 5 of 8, train_rollout",
        "said why",
        f"to go on, on node-0: run --master --log-path {run_dir.root}",
    ]
    call = {"text": "rank 0 was interrupted. To resume: run local --log-path /x"}
    write_json(run_dir.entry(Flag(2, 5, 2, 0, "stopped")), call)
    lines = render(Run(run_dir.root).status(), run_dir.root).splitlines()
    assert lines[2:4] == ["rank 0 was interrupted", "to resume: run local --log-path /x"], "of the master"


@pytest.mark.parametrize(
    "line",
    [{"iteration": 1, "reward": None, "eval_reward": None}, {"iteration": 1}, {"iteration": 1, "reward": 1}],
)
def test_last_line_without_a_reward_is_rendered(run_dir: RunDir, line: dict[str, Any]) -> None:
    running(run_dir)
    run_dir.metrics.write_text(json.dumps(line | {"kind": "both"}) + "\n")
    last = render(Run(run_dir.root).status(), run_dir.root).splitlines()[-1]
    assert last.startswith("last finished: iteration 1") and not last.endswith((",", " "))
