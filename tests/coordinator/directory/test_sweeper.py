"""What nobody reads any more is removed while the phases go on."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.directory import sweeper as sweeper_module
from coordinator.directory.sweeper import Sweeper
from rollout.storage import files


@pytest.fixture
def sweeper() -> Iterator[Sweeper]:
    sweeper = Sweeper()
    yield sweeper
    sweeper.close()


def made(directory: Path, *names: str) -> list[Path]:
    for name in names:
        (directory / name).touch()
    return [directory / name for name in names]


def test_nobody_waits_for_a_slow_filesystem_and_a_node_that_ends_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sweeper: Sweeper
) -> None:
    answers, remove = threading.Event(), files.remove

    def slow(path: Path) -> None:
        assert answers.wait(60)
        remove(path)

    monkeypatch.setattr(files, "remove", slow)
    sweeper.sweep(made(tmp_path, "a", "b"))
    sweeper.sweep(made(tmp_path, "c"))
    assert len(list(tmp_path.iterdir())) == 3
    threading.Timer(0.1, answers.set).start()
    sweeper.close()
    assert not list(tmp_path.iterdir())


def test_end_does_not_wait_for_a_filesystem_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, sweeper = threading.Event(), Sweeper()
    monkeypatch.setattr(files, "remove", lambda _path: answers.wait(60))
    monkeypatch.setattr(sweeper_module, "CLOSE_TIMEOUT_S", 0.1)
    sweeper.sweep(made(tmp_path, "a"))
    sweeper.close()
    assert not answers.is_set()
    answers.set()


def test_what_cannot_be_removed_is_said_once_and_the_rest_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sweeper: Sweeper
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()  # unlink refuses it, whoever calls
    paths = [tmp_path / "a", *made(tmp_path, "flag"), tmp_path / "b", tmp_path / "gone"]
    with caplog.at_level(logging.WARNING):
        sweeper.sweep(paths)
        sweeper.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    assert len(caplog.records) == 1 and f"{tmp_path / 'a'} stays" in caplog.text


def test_what_creators_agreed_by_goes_too(tmp_path: Path, sweeper: Sweeper) -> None:
    verdict = tmp_path / ".e0002.epoch.json.verdict0.tmp"
    verdict.mkdir()
    sweeper.sweep([verdict, *made(tmp_path, ".e0002.epoch.json.claim0.tmp")])
    sweeper.close()
    assert not list(tmp_path.iterdir())
