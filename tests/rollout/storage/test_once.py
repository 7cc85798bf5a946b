"""A file is created once, and each that tries learns whether it was the one."""

import errno
import os
from pathlib import Path

import pytest

from rollout.storage import files, once
from rollout.storage.once import create_once
from rollout.storage.retry import SharedFsError
from tests.coordinator.examples import tree
from tests.rollout.storage.failing_calls import failing

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(params=["links", "no links"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no links":
        failing(monkeypatch, "link", errno.EPERM)


@pytest.mark.usefixtures("links")
def test_file_is_created_once_and_says_who_created_it(tmp_path: Path) -> None:
    assert create_once(tmp_path / "a", b"one") is True
    assert create_once(tmp_path / "a", b"two") is False
    assert create_once(tmp_path / "a", b"one") is True
    assert (tmp_path / "a").read_bytes() == b"one"
    assert {name for name in tree(tmp_path) if not files.is_temporary(name)} == {"a"}


@pytest.mark.usefixtures("links")
def test_created_file_is_no_link_to_a_temporary(tmp_path: Path) -> None:
    create_once(tmp_path / "a", b"one")
    assert (tmp_path / "a").stat().st_nlink == 1


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EMLINK])
def test_filesystem_without_hard_links_creates_exclusively(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    refused = failing(monkeypatch, "link", number)
    assert create_once(tmp_path / "a", b"one")
    assert len(refused) == 1
    assert (tmp_path / "a").read_bytes() == b"one"


@pytest.mark.parametrize("times", [1, 3])
def test_temporary_that_a_newer_process_has_removed_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """As of a process that was suspended before it linked; somebody who always removes it is an error."""
    real, removed = os.link, list[str]()

    def link(source: Path, target: Path) -> None:
        if len(removed) < times:
            removed.append(str(source))
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    if times == 3:
        with pytest.raises(FileNotFoundError):
            create_once(tmp_path / "a", b"{}")
    else:
        assert create_once(tmp_path / "a", b"{}")
        assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("number", [errno.EIO, errno.EEXIST])
def test_link_whose_reply_was_lost_is_found_by_reading_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing(monkeypatch, "link", number, times=1, after=True)
    assert create_once(tmp_path / "a", b"one") is True
    assert tree(tmp_path) == {"a"}


def test_exclusive_creation_that_fails_leaves_no_file_and_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EPERM)
    monkeypatch.setattr(once, "TORN_S", 0.1)
    with monkeypatch.context() as full:
        failing(full, "pwrite", errno.ENOSPC)
        with pytest.raises(SharedFsError, match="No space left"):
            create_once(tmp_path / "a", b"one")
    assert "a" not in tree(tmp_path)
    assert create_once(tmp_path / "a", b"two") is True
    assert (tmp_path / "a").read_bytes() == b"two"


def test_exclusive_creation_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "link", errno.EPERM)
    path = tmp_path / "a"
    failing(
        monkeypatch,
        "open",
        errno.ESTALE,
        times=2,
        when=lambda name, *_: name == path.with_name(".a.claim0.tmp"),
    )
    assert create_once(path, b"one") is True
