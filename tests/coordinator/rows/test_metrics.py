"""What a metrics line says of speed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
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
    settings = SimpleNamespace(kind="both")
    node = SimpleNamespace(run_dir=run_dir, settings=settings, record=SimpleNamespace(epoch=3))
    return metrics._metrics(
        cast(Node, node), Iteration(1, phase_s=phase_s), {0: {"work_s": 1.0, "wait_s": 1.0}}
    )


def test_line_says_speed_and_length_of_what_was_generated(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[3, 3])
    assert (line["tokens_per_s"], line["length"]) == (300.0, 6.0)


def test_groups_of_an_epoch_before_make_no_speed(tmp_path: Path) -> None:
    line = line_of(tmp_path, epochs=[2, 3])
    assert (line["tokens_per_s"], line["length"]) == (None, 6.0)
