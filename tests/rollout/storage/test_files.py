"""Files of the shared directory: whole or not there, whatever the filesystem answers."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollout.storage import files, hashing, retry
from rollout.storage.files import make_directory, publish
from rollout.storage.once import create_once
from rollout.storage.retry import SharedFsError
from tests.coordinator.examples import tree
from tests.rollout.storage.failing_calls import failing

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

pytestmark = pytest.mark.usefixtures("impatient")


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


# ---- errors


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


def test_link_to_what_is_not_there_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "absent")
    monkeypatch.setattr(retry.time, "sleep", lambda _seconds: pytest.fail("it is waited for"))
    with pytest.raises(FileNotFoundError):
        files.read(tmp_path / "link")
