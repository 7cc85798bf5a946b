"""What has lost its name is removed while the run goes on."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.directory import remover as remover_module
from coordinator.directory.remover import Remover
from rollout.storage import files


class Interrupted(Exception):
    """What a node's check raises."""


def interrupted() -> None:
    raise Interrupted


def never() -> None:
    raise AssertionError("nothing to wait for")


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Of a filesystem that removes nothing until this is set."""
    answers = threading.Event()
    remove_tree = files.remove_tree

    def slow(directory: Path) -> None:
        assert answers.wait(60)
        remove_tree(directory)

    monkeypatch.setattr(files, "remove_tree", slow)
    yield answers
    answers.set()


@pytest.fixture
def remover() -> Iterator[Remover]:
    remover = Remover()
    yield remover
    remover.close()


def directories(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for directory in made:
        (directory / "inside").mkdir(parents=True)
        (directory / "inside" / "file").write_bytes(b"x")
    return made


def test_run_goes_on_meanwhile(tmp_path: Path, remover: Remover, answers: threading.Event) -> None:
    remover.remove(directories(tmp_path, "a", "b"), never)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    answers.set()
    remover.close()
    assert not list(tmp_path.iterdir())


def test_next_ones_wait_for_those_before_as_long_as_the_node_may_go_on(
    tmp_path: Path, remover: Remover, answers: threading.Event
) -> None:
    one, two = directories(tmp_path, "a", "b")
    remover.remove([one], never)
    with pytest.raises(Interrupted):
        remover.remove([two], interrupted)
    answers.set()
    remover.remove([one, two], lambda: None)  # a listing may still show the first
    remover.close()
    assert not list(tmp_path.iterdir())


def test_end_of_the_node_does_not_wait_for_ever(
    tmp_path: Path,
    remover: Remover,
    answers: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    remover.remove(directories(tmp_path, "a"), never)
    with monkeypatch.context() as patch:
        patch.setattr(remover_module, "CLOSE_TIMEOUT_S", 0.1)
        remover.close()
    assert (tmp_path / "a").exists()
    assert f"{tmp_path / 'a'} was not removed within 0.1 s" in caplog.text


def test_removal_that_hangs_does_not_hold_up_the_run_for_ever(
    tmp_path: Path,
    remover: Remover,
    answers: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(remover_module, "WAIT_S", 0.3)
    one, two = directories(tmp_path, "a", "b")
    remover.remove([one], never)
    for _iteration in range(2):
        remover.remove([one, two], lambda: None)
    assert two.exists()
    assert caplog.text.count(f"{one} was not removed within 0.3 s: the run goes on") == 1
    answers.set()
    until = time.monotonic() + 60
    while one.exists() and time.monotonic() < until:
        time.sleep(0.01)
    remover.remove([two], lambda: None)
    remover.close()
    assert not list(tmp_path.iterdir())
