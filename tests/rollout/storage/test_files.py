"""Files of the shared directory: whole or not there, whatever the filesystem answers."""

import errno
import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.storage import files, hashing, once, retry
from rollout.storage.files import make_directory, publish
from rollout.storage.lines import append_line
from rollout.storage.once import create_once
from rollout.storage.retry import PASSING, SharedFsError
from rollout.storage.writer import Writer, write
from tests.coordinator.examples import tree

READER = """
import sys
path = sys.argv[1]
reads, versions = 0, set()
while True:
    with open(path, "rb") as file:
        data = file.read()
    assert len(data) == 200_000 and data == data[:8] * 25_000, f"{len(data)} bytes, of a partial file"
    versions.add(data[:8])
    reads += 1
    if reads == 1:
        print("reading", flush=True)
    if data[:8] == b"last****":
        break
print(reads, len(versions))
"""
MAKER = """
import sys
from pathlib import Path
from rollout.storage.files import make_directory
print("ready", flush=True)
sys.stdin.readline()
for number in range(300):
    directory = Path(sys.argv[1], f"{number:03d}", "a", "b")
    make_directory(directory)
    (directory / sys.argv[2]).touch()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.2)


def failing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    times: int = 1_000_000,
    *,
    after: bool = False,
    when: Callable[..., bool] = lambda *_: True,
) -> list[int]:
    """Let `os.name` fail `times` times; `after`: it works all the same. The list grows with each call."""
    real = getattr(os, name)
    calls: list[int] = []

    def call(*arguments: Any, **more: Any) -> Any:
        if not when(*arguments):
            return real(*arguments, **more)
        calls.append(1)
        if len(calls) > times:
            return real(*arguments, **more)
        if after:
            real(*arguments, **more)
        raise OSError(number, os.strerror(number), arguments[0])

    monkeypatch.setattr(os, name, call)
    return calls


# ---- publish


def test_reader_never_sees_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "document"
    publish(path, b"%08d" % 0 * 25_000, durable=False)
    command = [sys.executable, "-c", READER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stderr is not None
        assert reader.stdout.readline() == "reading\n", reader.stderr.read()
        for version in range(300):
            publish(path, b"%08d" % version * 25_000, durable=False)
        publish(path, b"last****" * 25_000)
        said, error = reader.communicate(timeout=30)
    assert reader.returncode == 0, error
    reads, versions = map(int, said.split())
    assert reads >= versions > 2


def test_publishing_replaces_what_was_there_and_leaves_nothing_else(tmp_path: Path) -> None:
    publish(tmp_path / "a", b"one")
    publish(tmp_path / "a", b"two", durable=False)
    assert (tmp_path / "a").read_bytes() == b"two"
    assert tree(tmp_path) == {"a"}


@pytest.mark.parametrize("durable", [True, False])
def test_durable_means_that_file_and_directory_are_synced_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    order: list[str] = []
    replace, fsync = os.replace, os.fsync

    def synced(descriptor: int) -> None:
        order.append("directory" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("rename"), replace(*names)))
    publish(tmp_path / "a", b"one", durable=durable)
    assert order == (["file", "rename", "directory"] if durable else ["rename"])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT, errno.ESTALE])
def test_rename_that_succeeded_in_spite_of_its_error_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    failing(monkeypatch, "replace", number, times=1, after=True)
    publish(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"
    assert tree(tmp_path) == {"a"}


def test_rename_that_failed_is_not_believed_though_an_older_file_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "a", b"one")
    failing(monkeypatch, "replace", errno.EIO)
    with pytest.raises(SharedFsError, match="cannot rename to"):
        publish(tmp_path / "a", b"two")
    assert tree(tmp_path) == {"a"}


def test_rename_that_failed_leaves_no_temporary_though_the_file_is_as_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "a", b"one")
    failing(monkeypatch, "replace", errno.EIO)
    publish(tmp_path / "a", b"one")
    assert tree(tmp_path) == {"a"}


# ---- create once


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


# ---- errors


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


def test_directory_below_others_that_cannot_be_made_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "mkdir", errno.EROFS, when=lambda path, *_: path.name == "a")
    with pytest.raises(SharedFsError) as caught:
        make_directory(tmp_path / "a" / "b")
    assert str(caught.value).count("read-only") == 1


def test_directory_is_made_without_a_look_and_known_where_nobody_may_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = failing(monkeypatch, "stat", errno.EIO, times=0)
    make_directory(tmp_path / "a")
    assert not looked
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for number in (errno.EEXIST, errno.EACCES, errno.EROFS):
        failing(monkeypatch, "mkdir", number)
        make_directory(tmp_path / "link")


def test_mark_is_an_empty_file_and_leaves_one_that_is_there(tmp_path: Path) -> None:
    files.mark(tmp_path / "flag")
    assert (tmp_path / "flag").read_bytes() == b""
    publish(tmp_path / "flag", b"{}")
    files.mark(tmp_path / "flag")
    assert (tmp_path / "flag").read_bytes() == b"{}"


def test_full_disk_is_told_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fsync", errno.ENOSPC)
    with pytest.raises(SharedFsError) as caught:
        publish(tmp_path / "a", b"data")
    assert re.fullmatch(
        rf"cannot write {tmp_path / 'a'}: No space left on device \([\d.]+ of [\d.]+ GB free\); "
        "free some space there",
        str(caught.value),
    )


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "absent")
    with pytest.raises(FileNotFoundError):
        files.listing(tmp_path / "absent")
    files.remove(tmp_path / "absent")


def test_directory_that_appears_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "open", errno.ENOENT, times=3)
    publish(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"


@pytest.mark.parametrize("write", [publish, create_once])
def test_writing_where_no_directory_is_says_how_long_it_was_tried(
    tmp_path: Path, write: Callable[[Path, bytes], object]
) -> None:
    with pytest.raises(
        SharedFsError, match=r"cannot write .*absent/a: No such file.*\(tried for \d+\.\d s\)"
    ):
        write(tmp_path / "absent" / "a", b"data")


def test_filesystem_that_cannot_sync_directories_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(
        monkeypatch, "fsync", errno.EINVAL, when=lambda descriptor: os.path.isdir(f"/dev/fd/{descriptor}")
    )
    publish(tmp_path / "a", b"one")
    assert (tmp_path / "a").read_bytes() == b"one"


# ---- directories


def test_two_processes_make_the_same_directories_at_once(tmp_path: Path) -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("x", "y")
    ]
    for maker in makers:
        assert maker.stdout is not None and maker.stdout.readline() == "ready\n"
    for maker in makers:
        assert maker.stdin is not None
        maker.stdin.write("\n")
        maker.stdin.flush()
    for maker in makers:
        _said, error = maker.communicate(timeout=30)
        assert maker.returncode == 0, error
    assert {path.name for path in (tmp_path / "299" / "a" / "b").iterdir()} == {"x", "y"}


def stale_for(monkeypatch: pytest.MonkeyPatch, path: Path, times: int) -> None:
    """Let a client see `path` as missing for its next `times` looks, as a negative cache does."""
    real, looks = Path.is_dir, iter(range(times))
    monkeypatch.setattr(
        Path,
        "is_dir",
        lambda self, **more: (
            real(self, **more) if self != path or next(looks, None) is None else False
        ),
    )  # fmt: skip


def test_directory_that_another_client_has_just_made_is_taken_once_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "a"
    directory.mkdir()
    stale_for(monkeypatch, directory, 4)
    make_directory(directory / "b")
    assert (directory / "b").is_dir()


def test_file_in_the_place_of_a_directory_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(SharedFsError, match=r"cannot make the directory .*a: a file of this name is there$"):
        make_directory(tmp_path / "a")


def test_directory_is_renamed_whole(tmp_path: Path) -> None:
    (tmp_path / "staging" / "deep").mkdir(parents=True)
    files.rename(tmp_path / "staging", tmp_path / "final")
    assert tree(tmp_path) == {"final", "final/deep"}


def test_published_directory_is_never_replaced_by_a_rename(tmp_path: Path) -> None:
    for name in ("staging", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    with pytest.raises(OSError):
        files.rename(tmp_path / "staging", tmp_path / "final")
    assert (tmp_path / "final" / "final").exists() and (tmp_path / "staging" / "staging").exists()


def test_rename_of_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.rename(tmp_path / "absent", tmp_path / "b")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_rename_of_a_directory_whose_reply_was_lost_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    (tmp_path / "a").mkdir()
    failing(monkeypatch, "rename", number, times=1, after=True)
    files.rename(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path) == {"b"}


# ---- lines


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "metrics.jsonl"


def test_lines_are_appended(lines: Path) -> None:
    for number in range(3):
        append_line(lines, json.dumps({"iteration": number}))
    assert [json.loads(line)["iteration"] for line in lines.read_text().splitlines()] == [0, 1, 2]


def test_torn_last_line_spoils_no_other(lines: Path) -> None:
    lines.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    append_line(lines, '{"a": 3}')
    assert lines.read_bytes() == b'{"a": 1}\n{"a": 2, "b\n{"a": 3}\n'


def test_line_is_whole_after_the_filesystem_failed_once(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fsync", errno.EIO, times=1)
    append_line(lines, '{"a": 1}')
    assert set(lines.read_text().splitlines()) == {'{"a": 1}'}


def test_of_links_only_the_links_are_removed(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    (archive / "inside").mkdir(parents=True)
    (archive / "inside" / "weights").write_bytes(b"x")
    trunk = tmp_path / "tree"
    trunk.mkdir()
    (trunk / "moved").symlink_to(archive)
    for name, target in [("link", archive), ("to_link", tmp_path / "link"), ("nowhere", tmp_path / "gone")]:
        (tmp_path / name).symlink_to(target)
    for name in ("to_link", "link", "nowhere", "tree"):
        files.remove_tree(tmp_path / name)
    assert tree(tmp_path) == {"archive", "archive/inside", "archive/inside/weights"}


def test_metadata_operations_are_counted(tmp_path: Path) -> None:
    files.operations.clear()
    publish(tmp_path / "a", b"one", durable=False)
    files.listing(tmp_path)
    files.read(tmp_path / "a")
    files.remove(tmp_path / "a")
    assert dict(files.operations) == {"open": 2, "rename": 1, "list": 1, "remove": 1}


def test_only_what_can_be_read_is_hashed(tmp_path: Path) -> None:
    """A snapshot of a model may have links to files that were removed, and links to its files elsewhere."""
    (tmp_path / "blob").write_bytes(b"weights")
    model = tmp_path / "model"
    model.mkdir()
    (model / "linked").symlink_to(tmp_path / "blob")
    (model / "gone").symlink_to(tmp_path / "nowhere")
    (model / "below").symlink_to(tmp_path)
    os.mkfifo(model / "pipe")
    assert hashing.checksums(model) == {"linked": hashing.facts_of(b"weights")}


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
    assert len(said) == 1 and said[0].endswith("waiting for free space") and "GB free" in said[0]


def test_wait_for_space_ends_with_its_limit_and_with_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = full_for(monkeypatch, 10**9)
    with retry.waiting_for_space(0.1), pytest.raises(SharedFsError, match="tried for 0"):
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


def test_link_to_what_is_not_there_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    monkeypatch.setattr(retry.time, "sleep", lambda _seconds: pytest.fail("it is waited for"))
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "link")
