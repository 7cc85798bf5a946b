"""What has lost its name is removed while the run goes on."""

import threading
from pathlib import Path

import pytest

from coordinator import shared_fs
from coordinator.remover import Remover


@pytest.fixture
def slow_filesystem(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is removed until it is set."""
    answers = threading.Event()
    remove_tree = shared_fs.remove_tree

    def slow(directory: Path) -> None:
        assert answers.wait(20)
        remove_tree(directory)

    monkeypatch.setattr(shared_fs, "remove_tree", slow)
    return answers


def directories(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for directory in made:
        (directory / "inside").mkdir(parents=True)
        (directory / "inside" / "file").write_bytes(b"x")
    return made


def test_run_goes_on_meanwhile(tmp_path: Path, slow_filesystem: threading.Event) -> None:
    remover = Remover()
    remover.remove(directories(tmp_path, "a", "b"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    slow_filesystem.set()
    remover.close()
    assert not list(tmp_path.iterdir())


def test_end_of_the_node_waits_for_it_but_not_for_ever(
    tmp_path: Path, slow_filesystem: threading.Event
) -> None:
    remover = Remover()
    remover.remove(directories(tmp_path, "a"))
    remover.close(0.1)
    assert (tmp_path / "a").exists()
    slow_filesystem.set()


def test_next_ones_come_after_those_before(tmp_path: Path) -> None:
    remover = Remover()
    one, two = directories(tmp_path, "a", "b")
    remover.remove([one])
    remover.remove([one, two])  # as a listing may still show it
    remover.remove([])
    remover.close()
    assert not list(tmp_path.iterdir())
