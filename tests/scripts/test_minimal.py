"""`scripts/minimal.py`: what it makes does not depend on where it was killed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.storage import files
from scripts import minimal


class Killed(Exception):
    """What ends a run in a test."""


def digits(_task: Any, completion: str) -> float:
    """Reward a random model's digits: unlike `exact`, it tells its samples apart."""
    return sum(character.isdigit() for character in completion) / 8


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal, "GROUPS", 4)
    monkeypatch.setattr(minimal, "exact", digits)


def weights(root: Path, iteration: int) -> bytes:
    return (root / f"iteration_{iteration:04d}/checkpoint/model.safetensors").read_bytes()


def killed_after(count: int) -> Iterator[None]:
    """Let `count` groups be written, then end the run."""
    yield from [None] * count
    raise Killed


def test_a_run_killed_between_its_groups_and_before_its_checkpoint_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for root in (whole, broken):
        root.mkdir()
    minimal.run(whole, iterations=3, warm_up_steps=0)
    assert weights(whole, 1) != weights(whole, 2) != weights(whole, 3)

    publish, kill = files.publish, killed_after(6)  # in the middle of the second iteration

    def publish_or_end(path: Path, data: bytes) -> None:
        next(kill)
        publish(path, data)

    monkeypatch.setattr(files, "publish", publish_or_end)
    with pytest.raises(Killed):
        minimal.run(broken, iterations=3, warm_up_steps=0)
    monkeypatch.setattr(files, "publish", publish)
    first = broken / "iteration_0002/group_0001.safetensors"
    written = first.stat().st_mtime_ns
    assert not (broken / "iteration_0002/group_0002.safetensors").exists()

    publish_directory = minimal.publish_directory

    def end(source: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(minimal, "publish_directory", end)
    with pytest.raises(Killed):
        minimal.run(broken, iterations=3, warm_up_steps=0)
    monkeypatch.setattr(minimal, "publish_directory", publish_directory)

    minimal.run(broken, iterations=3, warm_up_steps=0)
    assert first.stat().st_mtime_ns == written, "a group that was there was made again"
    assert [weights(broken, number) for number in (1, 2, 3)] == [
        weights(whole, number) for number in (1, 2, 3)
    ]
