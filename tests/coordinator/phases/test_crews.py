"""What a crew looks at while it waits for the other one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import Crew, RunDir
from coordinator.keeping import resume
from coordinator.phases import crews


@pytest.mark.parametrize(
    ("crew", "listed"),
    [("rollout", ["checkpoints"]), ("train", ["train_trajectories", "train_trajectories/iteration_000003"])],
)
def test_crew_lists_anew_where_the_other_one_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, crew: Crew, listed: list[str]
) -> None:
    """A client that believes old listings would hide it; evaluations have no directory yet."""
    monkeypatch.setattr(resume, "next_iteration", lambda *_: 3)
    for name in ("checkpoints", "train_trajectories/iteration_000003"):
        (tmp_path / name).mkdir(parents=True)
    seen: list[str] = []

    def names(directory: Path) -> list[str]:
        found = [path.name for path in directory.iterdir()]
        seen.append(str(directory.relative_to(tmp_path)))
        return found

    watch = SimpleNamespace(listings=SimpleNamespace(names=names))
    node: Any = SimpleNamespace(run_dir=RunDir(tmp_path, crew), finished=None, settings=None, watch=watch)
    crews._list_anew(node)
    assert seen == listed
