"""What a heartbeat says of a node's place, its progress and its speed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.node import position as position_module
from coordinator.node.position import Position
from coordinator.protocol.liveness import Standstill, stall_limit_s
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from rollout.engines.token_counts import Generated
from rollout.storage import hashing


def test_speed_and_time_left_count_from_the_first_progress_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(position_module, "time", clock)
    position = Position()
    position.move("running", 1, "train_rollout")
    assert position.describe()["tokens_per_s"] is None
    clock.now_s = 160.0  # an engine has started
    position.reach(0, 8, 0)
    clock.now_s = 164.0
    position.reach(2, 8, 400)
    assert (position.describe()["tokens_per_s"], position.describe()["left_s"]) == (100.0, 12.0)
    position.reach(8, 8, 1600)
    position.begin_to_wait()
    position.wait_for([2])
    clock.now_s = 200.0
    said = position.describe()
    assert (said["tokens_per_s"], said["left_s"]) == (400.0, 0.0)
    assert (said["waiting_s"], said["row_s"]) == (36.0, 100.0)


def test_tasks_of_which_none_is_done_show_samples_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(position_module, "time", clock)
    position = Position()
    position.move("running", 1, "train_rollout")
    position.expect(samples_per_task=8, max_tokens=24)
    position.reach(0, 16, 0)
    clock.now_s = 104.0
    position.generate(Generated(600, 0))
    said = position.describe()
    assert (said["samples"], said["samples_total"], said["tokens_per_s"]) == (0, 128, 150.0)
    assert said["left_s"] == pytest.approx(4 * (128 * 24 / 600 - 1), abs=0.1), (
        "as if each were as long as may be"
    )
    clock.now_s = 110.0
    position.generate(Generated(900, 64))
    assert position.doing()[1] == (
        "0 of 16 tasks (64 of 128 samples), 150 tokens/s, 10 s so far, about 10 s left"
    )
    position.reach(9, 16, 1000)
    assert position.describe()["samples"] == 72, "of a group that was begun before this phase too"
    clock.now_s = 120.0
    position.reach(16, 16, 2000)
    assert (position.describe()["samples"], position.describe()["left_s"]) == (128, 0.0)
    position.move("running", 1, "train_files_ready")
    position.generate(Generated(5, 5))
    assert (position.describe()["samples_total"], position.describe()["tokens_per_s"]) == (0, None)


def test_engine_that_generates_is_no_standstill() -> None:
    position, standstill = Position(), Standstill(interval_s=10.0)
    position.move("running", 1, "train_rollout")
    position.reach(0, 4)
    for now_s in range(0, 200, 10):
        position.generate(Generated(1, 0))
        standstill.observe({1: position.describe()}, float(now_s))
    assert standstill.still_s[1] == 0.0
    for now_s in range(200, 400, 10):
        position.generate(Generated(0, 0))
        standstill.observe({1: position.describe()}, float(now_s))
    assert standstill.still_s[1] > 0.0


def test_place_is_said_in_log_lines_and_in_sentences() -> None:
    position = Position()
    assert (position.prefix(), position.where(), position.phase) == ("", " while starting", None)
    position.move("running", 7, Phase.TRAINING.label)
    assert (position.prefix(), position.where()) == (" it 7 training", " in training, iteration 7")
    assert position.phase is Phase.TRAINING


def test_node_that_is_between_two_epochs_says_which_iteration_it_was_in() -> None:
    position = Position()
    assert position.describe()["iteration"] == 0
    position.move("running", 7, Phase.TRAINING.label)
    position.move("gathering")
    assert (position.iteration, position.describe()["iteration"]) == (0, 7)


def test_move_begins_progress_and_waiting_anew() -> None:
    position = Position()
    position.move("running", 1, Phase.TRAIN_ROLLOUT.label)
    position.reach(3, 8, 90)
    position.wait_for([2])
    position.move("running", 1, Phase.TRAIN_FILES_READY.label)
    said = position.describe()
    assert (said["done"], said["total"], said["waiting_for"], said["waiting_s"]) == (0, 0, [], 0.0)


@pytest.mark.parametrize("is_counted", [True, False])
def test_file_that_is_read_slowly_is_no_standstill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_counted: bool
) -> None:
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 2_000_000)
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(16_000_000))
    position, standstill, now_s = Position(), Standstill(600.0), 0.0
    position.move("running", 1, Phase.ITERATION_START.label)
    count = position.count_bytes() if is_counted else hashing.unheard
    stalled: set[int] = set()

    def slow(size: int) -> None:
        nonlocal now_s
        now_s += 600.0
        count(size)
        standstill.observe({1: position.describe()}, now_s)
        stalled.update(standstill.beyond(lambda _phase: 1800.0, 30.0))

    hashing.file_facts(path, slow)
    assert stalled == (set() if is_counted else {1}), "it took 4800 s"


def test_rollout_may_stand_still_for_as_long_as_a_group_may_take() -> None:
    given = {"rollout.group_timeout_s": 100.0, "engine.start_timeout_s": 10.0}
    assert stall_limit_s(build(given), "train_rollout") == 100.0 + 2 * 10.0
    assert stall_limit_s(build({**given, "rollout.stall_timeout_s": 7.0}), "eval_rollout") == 27.0


def test_group_that_is_given_up_is_progress_too() -> None:
    position, standstill = Position(), Standstill(interval_s=10.0)
    position.move("running", 1, "train_rollout")
    for now_s in range(0, 200, 10):
        position.step()
        standstill.observe({1: position.describe()}, float(now_s))
    assert standstill.still_s[1] == 0.0


def test_what_goes_on_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(position_module, "time", clock)
    starts = [True]
    position = Position(engine_starts=lambda: starts[0])
    position.move("running", 1, "train_rollout")
    clock.now_s = 112.0
    starting = position.doing()
    assert position.describe()["work"] == "starting the engine"
    clock.now_s = 130.0
    assert "run logs shows what it says), 30 s so far" in position.doing()[1]
    starts[0], clock.now_s = False, 112.0
    assert starting[1] == "starting the engine, 12 s so far"
    assert position.doing()[1] == "train_rollout, no samples finished yet, 12 s so far"
    position.reach(0, 128, 0)
    clock.now_s = 120.0
    position.reach(32, 128, 900)
    generating = position.doing()
    assert generating[1] == "32 of 128 tasks, 112 tokens/s, 20 s so far, about 24 s left"
    clock.now_s = 130.0
    assert "about 14 s left" in position.doing()[1]
    clock.now_s = 190.0
    assert "left" not in position.doing()[1], "nothing has gone on for longer than it was to take"
    clock.now_s = 120.0
    position.reach(33, 128, 950)
    assert generating[0] == position.doing()[0] != starting[0]
    position.reach(128, 128, 4000)
    position.begin_to_wait()
    position.wait_for([1, 2])
    clock.now_s = 150.0
    assert position.doing()[1] == "waiting for ranks 1, 2, 30 s so far"
    position.move("gathering")
    assert position.doing()[1] == "gathering the nodes, 0 s so far"
    position.move("running", 1, "training")
    assert position.doing()[1] == "starting the trainer, 0 s so far"
    position.reach(1, 4)
    clock.now_s = 160.0
    assert position.doing()[1] == "1 of 4 parts, 10 s so far"
    position.move("running", 1, "checkpoint")
    position.count_bytes()(5_000_000)
    assert position.doing()[1] == "5 MB read, 0 s so far"
    position.move("running")
    assert position.doing()[1] == "entering the epoch, 0 s so far"


def test_full_disk_is_the_work_while_it_is_said_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(position_module, "time", clock)
    position = Position()
    position.move("running", 2, "training")
    position.reach(8, 9)
    for _ in range(10):
        clock.now_s += 2.0
        position.wait_for_space("waiting for free space on /shared (0 of 12 MB free)")
    assert position.describe()["work_s"] == 18.0
    assert position.doing()[1] == "waiting for free space on /shared (0 of 12 MB free), 18 s so far"
    clock.now_s += 20.0
    assert position.describe()["work"] == "" and "8 of 9 parts" in position.doing()[1]
