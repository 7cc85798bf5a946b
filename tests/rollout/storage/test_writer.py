"""Files that a function writes: whole, with an ordinary mode, hashed, and again when a call fails."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from safetensors import SafetensorError

from rollout.storage import files, hashing, retry, writer
from rollout.storage.retry import SharedFsError, library_errors, retry_library
from rollout.storage.writer import FileSink, Writer, copy_of, write

RUST = 'Error while serializing: I/O error: {} (os error {}) at path "/x/.tmpaqAGwO"'


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.2)


def rust_error(number: int) -> SafetensorError:
    return SafetensorError(RUST.format(os.strerror(number), number))


def test_error_of_a_real_library_is_the_oserror_that_it_names(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, library_errors():
        safetensors.numpy.save_file({"a": np.zeros(3)}, tmp_path / "missing" / "a")
    assert caught.value.errno == errno.ENOENT
    assert isinstance(caught.value.__cause__, SafetensorError)
    with pytest.raises(OSError, match="No such device") as caught, library_errors():
        safetensors.numpy.load_file(tmp_path)
    assert caught.value.errno == errno.ENODEV


@pytest.mark.parametrize("error", [SafetensorError("header too large"), ValueError("5"), OSError(5, "x")])
def test_error_without_an_errno_in_its_text_stays_what_it_is(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, library_errors():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("error", [OSError(errno.EIO, "error"), OSError(errno.ESTALE, "stale")])
def test_file_is_written_again_from_the_start_until_a_passing_error_has_passed(
    tmp_path: Path, error: Exception
) -> None:
    tried: list[FileSink] = []

    def produce(sink: FileSink) -> None:
        tried.append(sink)
        sink.write(b"half" if len(tried) < 3 else b"whole file")
        if len(tried) < 3:
            raise error

    facts = write(tmp_path / "a", produce)
    assert facts == hashing.file_facts(tmp_path / "a") == hashing.facts_of(b"whole file")
    assert len(set(tried)) == 3 and os.listdir(tmp_path) == ["a"]


def test_failed_fsync_has_the_file_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[FileSink] = []
    real_fsync = os.fsync

    def fsync(descriptor: int) -> None:
        if len(written) == 1:
            raise OSError(errno.EIO, "Input/output error")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "a", lambda sink: (written.append(sink), sink.write(b"data")))
    assert len(written) == 2 and (tmp_path / "a").read_bytes() == b"data"


@pytest.mark.parametrize(
    ("error", "least"),
    [(OSError(errno.EIO, "error"), 3), (OSError(errno.ENOSPC, "full"), 1)],
    ids=["EIO", "ENOSPC"],
)
def test_error_that_stays_ends_it_and_leaves_nothing(tmp_path: Path, error: Exception, least: int) -> None:
    tried: list[FileSink] = []

    def produce(sink: FileSink) -> None:
        tried.append(sink)
        raise error

    with pytest.raises(SharedFsError, match=rf"cannot write {tmp_path}/a: "):
        write(tmp_path / "a", produce)
    assert len(tried) == 1 if least == 1 else len(tried) >= least
    assert os.listdir(tmp_path) == []


def test_slow_call_is_tried_a_few_times_whatever_it_takes(tmp_path: Path) -> None:
    tried: list[FileSink] = []

    def produce(sink: FileSink) -> None:
        tried.append(sink)
        threading.Event().wait(0.3)
        if len(tried) < retry.PATIENT_ATTEMPTS:
            raise OSError(errno.EIO, "Input/output error")

    write(tmp_path / "a", produce)
    assert len(tried) == retry.PATIENT_ATTEMPTS


def test_every_file_has_the_same_mode(tmp_path: Path) -> None:
    write(tmp_path / "a", lambda sink: sink.write(b"bytes"))
    write(tmp_path / "b", b"bytes")
    files.publish(tmp_path / "c", b"bytes")
    assert len({(tmp_path / name).stat().st_mode for name in "abc"}) == 1


def test_file_is_hashed_while_it_is_written_and_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    real_open = os.open

    def note(path: Path, flags: int, mode: int = 0o777) -> int:
        opened.append(flags & os.O_ACCMODE)
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(files, "open", lambda *_: pytest.fail("it is read again"), raising=False)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 4)
    moved: list[int] = []
    facts = write(tmp_path / "a", lambda sink: (sink.write(b"whole "), sink.write(b"file")), moved.append)
    assert facts == hashing.facts_of(b"whole file") and (tmp_path / "a").read_bytes() == b"whole file"
    assert opened == [os.O_WRONLY] and moved == [4, 2, 4]


@pytest.mark.parametrize("durable", [True, False])
def test_system_begins_to_write_a_large_file_before_its_end_if_it_will_be_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    begun: list[tuple[int, int, int]] = []

    def note(descriptor: int, begin: Any, size: Any, _how: int) -> int:
        begun.append((os.fstat(descriptor).st_size, begin.value, size.value))
        return -1  # an error: that of fsync decides

    monkeypatch.setattr(writer, "_sync_file_range", note)
    monkeypatch.setattr(writer, "CHUNK_BYTES", 4)
    monkeypatch.setattr(writer, "WRITEBACK_BYTES", 8)
    facts = write(tmp_path / "a", b"0123456789" * 2, durable=durable)
    assert facts == hashing.facts_of(b"0123456789" * 2)
    assert begun == ([(8, 0, 8), (16, 8, 8)] if durable else [])


def test_copy_is_the_same_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345" * 1000)
    assert write(tmp_path / "b", copy_of(tmp_path / "a")) == hashing.file_facts(tmp_path / "a")


def test_writer_says_what_it_has_written_by_name(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    with Writer(tmp_path) as written:
        written.add("a", b"one")
        written.add("below/b", lambda sink: sink.write(b"two"))
        facts = written.finish()
    assert facts == {"a": hashing.facts_of(b"one"), "below/b": hashing.facts_of(b"two")}
    assert hashing.checksums(tmp_path / "below")["b"] == facts["below/b"]


def test_writer_raises_what_a_file_has_raised_and_ends_the_others_whole(tmp_path: Path) -> None:
    def fail(sink: FileSink) -> None:
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(SharedFsError, match=r"cannot write .*/a: "), Writer(tmp_path) as written:
        written.add("b", b"bytes")
        written.add("a", fail)
        written.finish()
    assert os.listdir(tmp_path) == ["b"]


def test_reading_by_a_library_is_retried(tmp_path: Path) -> None:
    tried: list[int] = []

    def load() -> str:
        tried.append(1)
        if len(tried) < 3:
            raise rust_error(errno.ESTALE)
        return "loaded"

    assert retry_library("read", tmp_path, load) == "loaded"
