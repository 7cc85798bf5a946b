"""Errors that pass, errors that do not, and a full disk that is waited for."""

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout.storage import files, retry
from rollout.storage.files import make_directory, publish
from rollout.storage.lines import append_line
from rollout.storage.once import create_once
from rollout.storage.retry import PASSING, SharedFsError
from rollout.storage.writer import Writer, write
from tests.coordinator.examples import tree
from tests.rollout.storage.failing_calls import failing

pytestmark = pytest.mark.usefixtures("impatient")

OPERATIONS: list[tuple[str, str, Callable[[Path], object]]] = [
    ("replace", "rename to", lambda path: publish(path, b"data")),
    ("open", "write", lambda path: publish(path, b"data")),
    ("fsync", "write", lambda path: publish(path, b"data")),
    ("link", "link", lambda path: create_once(path, b"data")),
    ("open", "write", lambda path: create_once(path, b"data")),
    ("mkdir", "make the directory", make_directory),
    ("open", "create", files.mark),
    ("listdir", "list", lambda path: files.listing(path.parent)),
    ("unlink", "remove", files.remove),
    ("rename", "rename to", lambda path: files.rename(path, path.with_name("b"))),
    ("rename", "rename to", lambda path: write(path, b"data")),
    ("fsync", "write", lambda path: write(path, lambda sink: sink.write(b"data"))),
    ("rename", "rename to", lambda path: write(path, lambda sink: sink.write(b"data"))),
    ("fsync", "append to", lambda path: append_line(path, "line")),
    ("fsync", "fsync", lambda path: files.fsync_directory(path.parent)),
]
IDS = [f"{what} by {name}" for name, what, _ in OPERATIONS]


@pytest.mark.parametrize(("name", "what", "call"), OPERATIONS, ids=IDS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_error_that_does_not_pass_raises_at_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    what: str,
    call: Callable[[Path], object],
    number: int,
) -> None:
    calls = failing(monkeypatch, name, number)
    with pytest.raises(SharedFsError) as caught:
        call(tmp_path / "a")
    assert len(calls) == 1
    text = str(caught.value)
    assert text.startswith(f"cannot {what} {tmp_path}")
    assert os.strerror(number) in text and "; " in text and "tried for" not in text
    assert caught.value.errno == number
    assert not any(files.is_temporary(left) for left in tree(tmp_path))


@pytest.mark.parametrize(("name", "what", "call"), OPERATIONS, ids=IDS)
def test_error_that_passes_is_retried_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, what: str, call: Callable[[Path], object]
) -> None:
    calls = failing(monkeypatch, name, errno.ESTALE)
    started_s = time.monotonic()
    with pytest.raises(SharedFsError, match=rf"cannot {what} .*Stale.*\(tried for \d+\.\d s\)"):
        call(tmp_path / "a")
    assert len(calls) > 3 and time.monotonic() - started_s < 30
    assert not any(files.is_temporary(left) for left in tree(tmp_path))


@pytest.mark.parametrize("number", sorted(PASSING))
def test_error_that_passes_is_gone_at_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    for name in ("replace", "link", "listdir", "mkdir", "fsync"):
        failing(monkeypatch, name, number, times=2)
    publish(tmp_path / "a", b"one")
    assert create_once(tmp_path / "b", b"two")
    make_directory(tmp_path / "c")
    assert sorted(files.listing(tmp_path)) == ["a", "b", "c"]


def test_full_disk_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fsync", errno.ENOSPC)
    with pytest.raises(SharedFsError) as caught:
        publish(tmp_path / "a", b"data")
    assert re.fullmatch(
        rf"cannot write {tmp_path / 'a'}: No space left on device \([\d.]+ of [\d.]+ GB free\); "
        "free some space there",
        str(caught.value),
    )


def full_for(monkeypatch: pytest.MonkeyPatch, calls: int) -> list[int]:
    """Report a full disk at the first `calls` fsyncs; the list counts them."""
    count, fsync = [0], os.fsync

    def call(descriptor: int) -> None:
        count[0] += 1
        if count[0] <= calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", call)
    return count


def write_in_threads(path: Path) -> None:
    with Writer(path.parent) as writer:
        writer.add(path.name, b"{}")
        writer.finish()


@pytest.mark.parametrize(
    "put", [lambda path: publish(path, b"{}"), write_in_threads], ids=["publish", "Writer"]
)
def test_full_disk_is_waited_for_where_it_is_asked_for(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    put: Callable[[Path], None],
) -> None:
    caplog.set_level(logging.INFO, "rollout.storage.retry")  # a test that starts a node lowers it for good
    path = tmp_path / "document"
    full_for(monkeypatch, 6)
    with pytest.raises(SharedFsError):
        put(path)
    assert tree(tmp_path) == set()
    with retry.waiting_for_space(60.0):
        put(path)
    assert tree(tmp_path) == {"document"}
    said = [line for line in caplog.messages if "No space left on device" in line]
    assert len(said) == 1 and said[0].endswith("waiting for free space, 60 s at most") and "B free" in said[0]


def test_small_disk_is_measured_in_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry.shutil, "disk_usage", lambda _path: SimpleNamespace(free=0, total=12 * 10**6))
    monkeypatch.setattr(retry.os.path, "ismount", lambda path: path == str(tmp_path))
    text = retry.space_wait(tmp_path / "checkpoints" / "staging" / "state", 300.0)
    free = "0 of 12 MB free: free some there; it gives up after 300 s"
    assert text == f"waiting for free space on {tmp_path} ({free})"


def test_wait_for_space_ends_with_its_limit_and_with_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = full_for(monkeypatch, 10**9)
    with retry.waiting_for_space(0.1), pytest.raises(SharedFsError, match=r"tried for \d+\.\d s"):
        publish(tmp_path / "document", b"{}")
    assert count[0] > 2

    def check(error: SharedFsError) -> None:
        raise LookupError(f"the row is over: {error}")

    over = r"the row is over: cannot .*/document: No space left on device"
    with retry.waiting_for_space(60.0, check), pytest.raises(LookupError, match=over):
        publish(tmp_path / "document", b"{}")
    assert tree(tmp_path) == set()


def test_call_that_is_tried_for_long_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retry, "SAID_AFTER_S", 0.0)
    errors = [OSError(errno.EIO, "Input/output error")] * 3

    def call() -> int:
        if errors:
            raise errors.pop()
        return 7

    assert retry.retry("read", tmp_path / "x", call) == 7
    (text,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "x: Input/output error; it is tried again, for up to" in text
