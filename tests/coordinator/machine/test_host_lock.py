"""Locks of a host lie where no other user can reach them, and no process is killed that is not the holder."""

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from coordinator.machine import host_lock as module
from coordinator.machine.host_lock import (
    acquire,
    hold_for_process,
    host_lock,
    if_stale,
    link_in_utf8,
    name_of_run,
    own_folder,
)
from coordinator.machine.oddities import oddities
from coordinator.phases import base_model
from coordinator.protocol.exits import Exit, NodeEnded
from rollout.storage import once
from tests.faultfs import FaultFs, unavailable

HOLDER = """
import sys, time
from coordinator.machine.host_lock import hold_for_process
lock = hold_for_process("rank", "rank 0", lambda: None)
print("held", flush=True)
time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The machine's directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(module, "HOLDER_PATIENCE_S", 0.5)
    return tmp_path


@contextlib.contextmanager
def running(*argv: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def somebody_elses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    folder.rename(folder.with_name(folder.name.replace(str(uid), str(uid + 1))))


def a_link(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def a_dangling_link(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    folder.symlink_to(folder.parent / "nowhere")


def a_file(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    folder.touch(mode=0o700)


def an_open_one(folder: Path, _monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o710)


PLANTED = [
    (somebody_elses, "belongs to user"),
    (a_link, "is not a directory"),
    (a_dangling_link, "is not a directory"),
    (a_file, "is not a directory"),
    (an_open_one, "is open to other users"),
]


@pytest.mark.parametrize(("plant", "said"), PLANTED)
def test_folder_that_another_user_may_have_made_is_refused_and_nothing_is_written(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[..., None], said: str
) -> None:
    plant(temporary / f"flagpost-locks-{os.getuid()}", monkeypatch)
    before = sorted(temporary.rglob("*"))
    with pytest.raises(NodeEnded, match=f"{said}.*: remove it, or set TMPDIR") as end:
        host_lock("rank")
    assert end.value.code is Exit.FAILED and "\n" not in end.value.text
    assert sorted(temporary.rglob("*")) == before


def test_folder_is_this_users_alone_whatever_the_umask_is(temporary: Path) -> None:
    old = os.umask(0)
    try:
        assert own_folder("locks") == own_folder("locks") == temporary / f"flagpost-locks-{os.getuid()}"
    finally:
        os.umask(old)
    assert own_folder("locks").stat().st_mode & 0o777 == 0o700


def test_built_in_model_of_a_user_without_a_home_is_kept_in_such_a_folder(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(temporary / "file" / "cache"))
    an_open_one(temporary / f"flagpost-models-{os.getuid()}", monkeypatch)
    tiny, rollout = SimpleNamespace(warmup_steps=0), SimpleNamespace(seed=0)
    node: Any = SimpleNamespace(settings=SimpleNamespace(tiny=tiny, rollout=rollout, tasks="mine"))
    with pytest.raises(NodeEnded, match="is open to other users"):
        base_model._from_cache(node)


def test_older_process_that_does_not_end_is_killed() -> None:
    with running(sys.executable, "-c", HOLDER) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        hold_for_process("rank", "rank 0", lambda: None).release()
        assert holder.wait(60) == -9


@pytest.mark.parametrize("wrong", [{"command": ["run"]}, {"created_s": 1.0}, {"user": 12345}, {"user": None}])
def test_process_that_is_not_the_holder_is_spared(wrong: dict[str, Any]) -> None:
    lock = host_lock("rank")
    with running("sleep", "1000") as stranger, lock:
        process = psutil.Process(stranger.pid)
        said = module._facts(process) | wrong
        Path(lock.lock_file).with_suffix(".pid").write_text(json.dumps(said))
        with pytest.raises(NodeEnded, match="does not end"):
            hold_for_process("rank", "rank 0", lambda: None)
        assert stranger.poll() is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_process_of_another_user_is_spared() -> None:
    lock = host_lock("rank")
    with running("sleep", "1000", user=65534, extra_groups=[]) as stranger, lock:
        said = module._facts(psutil.Process(stranger.pid))
        Path(lock.lock_file).with_suffix(".pid").write_text(json.dumps(said))
        with pytest.raises(NodeEnded, match="does not end"):
            hold_for_process("rank", "rank 0", lambda: None)
        assert stranger.poll() is None


@pytest.mark.parametrize(
    "content", ["", "4711", "[]", "{}", '{"pid": "x"}', '{"pid": 1, "user": 0}', "1 2.0"]
)
def test_holder_that_cannot_be_read_is_told(content: str, caplog: pytest.LogCaptureFixture) -> None:
    lock = host_lock("rank")
    with lock:
        Path(lock.lock_file).with_suffix(".pid").write_text(content)
        with pytest.raises(NodeEnded, match="its pid is in"):
            hold_for_process("rank", "rank 0", lambda: None)


def test_copy_of_a_run_has_locks_of_its_own(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    once.create_once(run / "run.json", b'{"run_id": "abc"}')
    name = name_of_run(run / "run.json", "abc")
    subprocess.run(["cp", "-a", run, tmp_path / "copy"], check=True)
    assert name_of_run(tmp_path / "copy" / "run.json", "abc") != name
    run.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert name_of_run(tmp_path / "link" / "run.json", "abc") == name


def test_two_mounts_of_one_run_have_the_same_locks(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as shared:
        once.create_once(shared[0].path / "run.json", b'{"run_id": "abc"}')
        names = {name_of_run(shared[mount].path / "run.json", "abc") for mount in (0, 1, 0)}
        names.add(name_of_run(shared.backing / "run.json", "abc"))
    assert len(names) == 1


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_filesystem_that_refuses_locks_keeps_two_processes_apart_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(_descriptor: int, _kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("fcntl.flock", refuse)
    first, second = host_lock("x"), host_lock("x")
    assert acquire(first, lambda: None, 60.0)
    assert not acquire(second, lambda: None, 0.5)
    assert if_stale(second) == f"; if nothing runs, remove {second.lock_file}"
    first.release()
    assert acquire(second, lambda: None, 60.0)
    second.release()
    monkeypatch.setattr(module, "EMPTY_S", 0.1)
    Path(second.lock_file).touch()  # its holder was killed before it had written its pid
    assert acquire(host_lock("x"), lambda: None, 60.0)
    assert any("locks are refused" in line for line in oddities())


def test_links_to_directories_that_were_removed_go_and_those_of_a_mount_that_is_away_stay(
    tmp_path: Path,
) -> None:
    names = ("removed", "young", "there", "mount/away", "now")
    directories = {name: tmp_path / os.fsdecode(b"caf\xe9") / name for name in names}
    for directory in directories.values():
        directory.mkdir(parents=True)
    links = {name: link_in_utf8(directory) for name, directory in directories.items()}
    for name in ("removed", "there", "mount/away"):
        os.utime(links[name], (1.0, 1.0), follow_symlinks=False)
    directories["removed"].rmdir()
    directories["young"].rmdir()
    shutil.rmtree(directories["mount/away"].parent)
    assert link_in_utf8(directories["now"]) == links["now"]
    assert {name for name, link in links.items() if link.is_symlink()} == {*names} - {"removed"}
