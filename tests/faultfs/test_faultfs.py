"""The faulty filesystem itself: each fault does what it says, and it always goes away."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faultfs import FaultFs, unavailable


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as mounts:
        yield mounts


def until(ready: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.01)


def thread_waits(thread: threading.Thread) -> bool:
    """Whether a thread of this process waits for an answer of FUSE."""
    return "request_wait" in Path(f"/proc/self/task/{thread.native_id}/wchan").read_text()


def refused(call: Callable[[], object]) -> int | None:
    """The errno that `call` fails with."""
    with pytest.raises(OSError) as caught:
        call()
    return caught.value.errno


def test_without_faults_it_is_one_directory(shared: FaultFs) -> None:
    one, two = (mount.path for mount in shared.mounts)
    (one / "a").mkdir()
    (one / "a" / "b").write_bytes(b"x" * 300_000)
    assert (two / "a" / "b").read_bytes() == b"x" * 300_000
    with open(two / "a" / "b", "ab") as file:
        file.write(b"y")
    assert (one / "a" / "b").stat().st_size == 300_001
    os.link(one / "a" / "b", one / "c")
    os.rename(two / "a", two / "d")
    assert sorted(os.listdir(one)) == ["c", "d"]
    shutil.rmtree(one / "d")
    (two / "c").unlink()
    assert os.listdir(shared.backing) == []


def test_absence_is_remembered_until_the_directory_is_listed(shared: FaultFs) -> None:
    one, two = (mount.path / "a" for mount in shared.mounts)
    shared.set(negative_s=1000)
    assert not two.exists()
    one.touch()
    assert one.exists() and not two.exists()
    os.listdir(two.parent)
    assert two.exists()


def test_stubborn_absence_outlives_listings_until_its_time_is_over(shared: FaultFs) -> None:
    one, two = (mount.path / "a" for mount in shared.mounts)
    shared.set(negative_s=2, stubborn=True)
    assert not two.exists()
    one.touch()
    assert os.listdir(two.parent) == ["a"] and not two.exists()
    until(two.exists, "the end of the cache")


def test_listing_is_remembered_until_the_client_changes_the_directory(shared: FaultFs) -> None:
    one, two = (mount.path for mount in shared.mounts)
    shared.set(listing_s=1000)
    assert os.listdir(two) == []
    (one / "a").touch()
    assert os.listdir(one) == ["a"] and os.listdir(two) == []
    (two / "b").touch()
    assert sorted(os.listdir(two)) == ["a", "b"]


def test_attributes_are_remembered_until_the_file_is_opened(shared: FaultFs) -> None:
    one, two = (mount.path / "a" for mount in shared.mounts)
    one.write_text("12")
    shared.set(attributes_s=1000)
    assert two.stat().st_size == 2
    one.write_text("12345")
    assert two.stat().st_size == 2
    assert two.read_text() == "12345" and two.stat().st_size == 5


def test_errors_come_at_their_rate_and_below_a_path_alone(shared: FaultFs) -> None:
    path = shared[0].path
    (path / "a").mkdir()
    shared[0].set(error_rate=0.5, errors=("EIO",), errors_below="/a")
    failed = 0
    for _ in range(100):
        try:
            os.listdir(path / "a")
        except OSError as error:
            assert error.errno == errno.EIO
            failed += 1
        os.listdir(path)
    assert 30 < failed < 100


@pytest.mark.parametrize("lie", ["rename", "link", "mkdir", "create", "unlink", "write"])
def test_lie_reports_an_error_for_what_it_did(shared: FaultFs, lie: str) -> None:
    path = shared[0].path
    (path / "a").write_text("x")
    shared[0].set(lie_rate=1.0, lies=(lie,))
    calls: dict[str, Callable[[], object]] = {
        "rename": lambda: os.rename(path / "a", path / "b"),
        "link": lambda: os.link(path / "a", path / "b"),
        "mkdir": lambda: os.mkdir(path / "b"),
        "create": lambda: (path / "b").touch(),
        "unlink": lambda: os.unlink(path / "a"),
        "write": lambda: (path / "a").write_text("longer"),
    }
    assert refused(calls[lie]) == errno.EIO
    assert {
        "unlink": not (shared.backing / "a").exists(),
        "write": (shared.backing / "a").exists() and (shared.backing / "a").read_text() == "longer",
    }.get(lie, (shared.backing / "b").exists())


def test_full_disk_keeps_what_is_there(shared: FaultFs) -> None:
    path = shared[0].path
    (path / "a").write_text("x")
    shared.set(full=True)
    assert refused(lambda: (path / "b").write_text("y")) == errno.ENOSPC
    assert refused(lambda: (path / "b").mkdir()) == errno.ENOSPC
    assert shutil.disk_usage(path).free == 0
    assert (path / "a").read_text() == "x"


def test_read_only_mount_reads(shared: FaultFs) -> None:
    path = shared[0].path
    (path / "a").write_text("x")
    shared[0].set(read_only=True)
    assert refused(lambda: (path / "a").write_text("y")) == errno.EROFS
    assert refused(lambda: os.rename(path / "a", path / "b")) == errno.EROFS
    assert (path / "a").read_text() == "x"
    (shared[1].path / "a").write_text("y")


def test_frozen_mount_blocks_until_it_thaws(shared: FaultFs) -> None:
    shared[0].freeze()
    done = threading.Event()
    thread = threading.Thread(target=lambda: (os.listdir(shared[0].path), done.set()))
    thread.start()
    (shared[1].path / "a").touch()
    assert not done.wait(0.5)
    shared[0].thaw()
    assert done.wait(30)
    thread.join()


def test_rename_in_halves_shows_the_first_half(shared: FaultFs) -> None:
    one, two = (mount.path for mount in shared.mounts)
    (one / "a").write_text("12345678")
    shared[0].set(halves_s=1.0)
    thread = threading.Thread(target=lambda: os.rename(one / "a", one / "b"))
    thread.start()
    until((two / "b").exists, "the first half")
    assert (two / "b").read_text() in {"", "1234"} and (two / "a").exists()
    thread.join()
    assert (two / "b").read_text() == "12345678" and not (two / "a").exists()


def test_links_are_refused_and_clocks_are_off(shared: FaultFs) -> None:
    path = shared[0].path
    shared[0].set(no_links="EPERM", clock_offset_s=3600)
    (path / "a").touch()
    assert refused(lambda: os.link(path / "a", path / "b")) == errno.EPERM
    assert 3500 < (path / "a").stat().st_mtime - (shared.backing / "a").stat().st_mtime < 3700


def test_frozen_mounts_go_away_and_who_waits_there_gets_an_error(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    errors: list[int | None] = []
    with FaultFs(tmp_path / "fs", 1) as mounts:
        mounts.freeze()
        thread = threading.Thread(target=lambda: errors.append(refused(lambda: os.listdir(mounts[0].path))))
        thread.start()
        until(lambda: thread_waits(thread), "the call hangs")
    thread.join(30)
    assert not thread.is_alive() and errors[0] in {errno.ECONNABORTED, errno.ENOTCONN}
    assert not os.path.ismount(mounts[0].path)
