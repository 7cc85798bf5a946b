"""What a metrics line and a heartbeat say of speed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.node import verdicts
from coordinator.node.node import Node
from coordinator.node.verdicts import Position
from coordinator.protocol.phases import Phase
from coordinator.rows import metrics
from tests.coordinator.made_up import run_dir_at, write_json


def line_of(tmp_path: Path, epochs: list[int]) -> dict[str, Any]:
    """The metrics of an iteration that ends in epoch 3, with parts of these epochs."""
    run_dir = run_dir_at(tmp_path)
    document = {
        "tokens": 600,
        "samples": 100,
        "given_up": [],
        "parts": [{"epoch": epoch} for epoch in epochs],
    }
    write_json(run_dir.manifest("train", 1), document)
    phase_s = {Phase.TRAIN_ROLLOUT.label: 2.0}
    node = SimpleNamespace(run_dir=run_dir, iteration=1, phase_s=phase_s, record=SimpleNamespace(epoch=3))
    return metrics._metrics(cast(Node, node), "both", {0: {"work_s": 1.0, "wait_s": 1.0}})


def test_line_says_speed_and_length_of_what_was_generated(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[3, 3])
    assert (line["tokens_per_s"], line["length"]) == (300.0, 6.0)


def test_groups_of_an_epoch_before_make_no_speed(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[2, 3])
    assert (line["tokens_per_s"], line["length"]) == (None, 6.0)


def test_speed_and_time_left_count_from_the_first_progress_to_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s)
    monkeypatch.setattr(verdicts, "time", clock)
    position = Position("running", 1, "train_rollout")
    assert position.describe()["tokens_per_s"] is None
    clock.now_s = 160.0  # an engine has started
    position.reach(0, 8, 0)
    clock.now_s = 164.0
    position.reach(2, 8, 400)
    assert (position.describe()["tokens_per_s"], position.describe()["left_s"]) == (100.0, 12.0)
    position.reach(8, 8, 1600)
    clock.now_s = 200.0
    position.waiting_since_s, position.waiting_for = 164.0, [2]
    said = position.describe()
    assert (said["tokens_per_s"], said["left_s"]) == (400.0, 0.0)
    assert (said["waiting_s"], said["row_s"]) == (36.0, 100.0)
