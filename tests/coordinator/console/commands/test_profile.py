"""`run profile` where no run works: what it says, and that it leaves no request."""

from pathlib import Path

import pytest

from coordinator.console.commands.profile import profile_next_step
from coordinator.settings.tree import SettingsError
from tests.coordinator.example_run import make_run


@pytest.mark.parametrize(
    ("state", "rank", "text"),
    [
        ("finished", None, "nothing trains: the run is finished"),
        ("died", 1, "nothing trains: the run is stopped"),
        ("died", 3, "--rank 3: it does not train; give one of 0, 1, 2"),
    ],
)
def test_run_that_does_not_train_is_not_asked(
    tmp_path: Path, state: str, rank: int | None, text: str
) -> None:
    run_dir = make_run(tmp_path / "run", iterations=2, state=state)  # pyright: ignore
    before = sorted(run_dir.master.iterdir())
    with pytest.raises(SettingsError, match=text):
        profile_next_step(run_dir.root, rank)
    assert sorted(run_dir.master.iterdir()) == before


def test_directory_without_a_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no run there"):
        profile_next_step(tmp_path, None)
