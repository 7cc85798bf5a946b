"""A shared directory that does not answer: a node waits, with a deadline, and loses no finished work."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.machine.filesystems import Mount
from coordinator.node import directory_outage
from coordinator.node.directory_outage import DirectoryOutage
from coordinator.protocol.exits import Exit, NodeEnded
from rollout.storage import retry
from rollout.storage.files import SharedFsError

Make = Callable[..., DirectoryOutage]


def failing(number: int) -> SharedFsError:
    return SharedFsError("write", Path("part"), OSError(number, "it fails"), 0.0)


@pytest.fixture
def seen() -> list[str]:
    """What the node has done."""
    return []


@pytest.fixture
def waits() -> list[str]:
    """What the node has said of a full disk."""
    return []


@pytest.fixture
def make(tmp_path: Path, seen: list[str], waits: list[str]) -> Make:
    def made(
        *, is_master: bool = False, back: bool = True, was_seen: bool = True, away: str | None = None
    ) -> DirectoryOutage:
        cluster = SimpleNamespace(rejoin_timeout_s=0.3, beat_interval_s=0.02, poll_max_s=0.01)
        answers = threading.Event()
        if back:
            answers.set()
        fence = SimpleNamespace(
            wait_until_back=answers.wait, limit_s=1.0, reset=lambda: seen.append("is on its way")
        )
        heart = SimpleNamespace(was_seen=was_seen, renew=lambda: not seen.append("a new incarnation"))
        watch: Any = SimpleNamespace(
            fence=fence, heart=heart, refusal=away, leave=lambda: seen.append("has left")
        )
        identity: Any = SimpleNamespace(
            root=tmp_path,
            run_dir=RunDir(tmp_path),
            is_master=is_master,
            rank=2,
            settings=SimpleNamespace(cluster=cluster),
        )
        position: Any = SimpleNamespace(move=seen.append, wait_for_space=waits.append)
        messages: Any = SimpleNamespace(
            doctor_command=lambda: "run doctor", repair=lambda _rank=None: "Start it again"
        )
        phase_endings: Any = SimpleNamespace(check_self=lambda: None)
        return DirectoryOutage(identity, position, watch, messages, phase_endings)

    return made


@pytest.mark.parametrize("is_master", [True, False])
def test_only_a_worker_comes_back_as_a_new_incarnation(make: Make, seen: list[str], is_master: bool) -> None:
    make(is_master=is_master).wait_out()
    of_worker = [] if is_master else ["has left", "a new incarnation"]
    assert seen == ["fenced", *of_worker, "is on its way"]


def test_directory_that_stays_away_ends_the_node_with_what_to_do(make: Make, tmp_path: Path) -> None:
    with pytest.raises(NodeEnded, match=r"took no heartbeat for 0 s\. Start it again") as ended:
        make(back=False).wait_out()
    assert ended.value.code == Exit.LOST and str(tmp_path) in ended.value.text


def test_master_that_sees_no_beat_of_its_own_says_that_no_node_could_see_another(make: Make) -> None:
    with pytest.raises(NodeEnded, match=r"has shown none of them .* run doctor") as ended:
        make(is_master=True, back=False, was_seen=False).wait_out()
    assert ended.value.code == Exit.FAILED


@pytest.mark.parametrize("is_mounted", [True, False])
@pytest.mark.parametrize("away", [None, "cannot write the beat"])
def test_node_is_cut_off_without_its_mount_or_its_beat(
    make: Make, monkeypatch: pytest.MonkeyPatch, is_mounted: bool, away: str | None
) -> None:
    monkeypatch.setattr(directory_outage, "find_mount", lambda _path: Mount("nfs4", "server:/export", "/mnt"))
    node = make(away=away)
    if not is_mounted:
        monkeypatch.setattr(directory_outage, "find_mount", lambda _path: Mount("ext4", "/dev/sda1", "/"))
    assert node.is_cut_off() is not (is_mounted and away is None)


@pytest.mark.parametrize("is_mounted", [True, False])
def test_run_that_its_own_filesystem_does_not_list_was_moved(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_mounted: bool
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(directory_outage.time, "monotonic", lambda: clock[0])
    mount = Mount("nfs4", "server:/export", f"{tmp_path.parent}")
    monkeypatch.setattr(directory_outage, "find_mount", lambda _path: mount)
    node = make()
    if not is_mounted:
        monkeypatch.setattr(directory_outage, "find_mount", lambda _path: Mount("ext4", "/dev/sda1", "/"))
    (tmp_path / "run.json").touch()
    node.look_for_run()
    (tmp_path / "run.json").unlink()
    node.look_for_run()
    clock[0] += directory_outage.RETRY_S + 1
    (tmp_path / "run.json").touch()  # it comes back: what was missed before does not count
    node.look_for_run()
    tmp_path.rename(moved := tmp_path.with_name(f"{tmp_path.name}.moved"))
    assert bool(node.absence()) is is_mounted
    node.look_for_run()
    clock[0] += directory_outage.RETRY_S + 1
    if is_mounted:
        with pytest.raises(NodeEnded, match=f"{tmp_path} was moved or removed.* Start it again") as ended:
            node.look_for_run()
        assert ended.value.code == Exit.FAILED
    else:
        node.look_for_run()
    moved.rename(tmp_path)


def test_finished_work_is_written_again_once_the_directory_is_back(make: Make) -> None:
    errors = [failing(errno.EIO), failing(errno.ESTALE)]

    def write() -> None:
        if errors:
            raise errors.pop()

    make().persist(write)
    assert not errors


@pytest.mark.parametrize(("number", "is_tried_again"), [(errno.EACCES, False), (errno.EIO, True)])
def test_error_that_stays_is_raised(make: Make, number: int, is_tried_again: bool) -> None:
    tried: list[int] = []

    def write() -> None:
        tried.append(number)
        raise failing(number)

    with pytest.raises(SharedFsError):
        make().persist(write)
    assert (len(tried) > 1) is is_tried_again


def test_space_that_is_waited_for_too_long_ends_the_node_also_if_it_was_fenced_meanwhile(
    make: Make, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    monkeypatch.setattr(directory_outage.time, "monotonic", lambda: clock[0])
    node, error = make(), failing(errno.ENOSPC)
    for _ in range(5):
        node.full(error)
        clock[0] += 100.0  # there was some space in between
    node.full(error)
    clock[0] += 0.2
    node.wait_out()
    clock[0] += 0.2
    said = r"cannot write part: it fails.* free some space there\. Start it again"
    with pytest.raises(NodeEnded, match=said) as end:
        node.full(error)
    assert end.value.code == Exit.LOST and end.value.tell is None
    assert "waiting for free space on /" in waits[-1] and "gives up after 0 s" in waits[-1]


def test_work_that_finds_no_space_ends_the_node_with_the_same_code(make: Make) -> None:
    def write() -> None:
        retry.retry("write", Path("part"), refuse)

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(NodeEnded, match="cannot write part: No space left on device") as end:
        make().persist(write)
    assert end.value.code == Exit.LOST
