"""What a heartbeat says of a node's place, its progress and its speed."""

from types import SimpleNamespace

import pytest

from coordinator.node import position as position_module
from coordinator.node.position import Position
from coordinator.protocol.phases import Phase


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


def test_place_is_said_in_log_lines_and_in_sentences() -> None:
    position = Position()
    assert (position.prefix(), position.where(), position.phase) == ("", " while starting", None)
    position.move("running", 7, Phase.TRAINING.label)
    assert (position.prefix(), position.where()) == (" it 7 training", " in training, iteration 7")
    assert position.phase is Phase.TRAINING


def test_move_begins_progress_and_waiting_anew() -> None:
    position = Position()
    position.move("running", 1, Phase.TRAIN_ROLLOUT.label)
    position.reach(3, 8, 90)
    position.wait_for([2])
    position.move("running", 1, Phase.TRAIN_FILES_READY.label)
    said = position.describe()
    assert (said["done"], said["total"], said["waiting_for"], said["waiting_s"]) == (0, 0, [], 0.0)
