"""The shared directory as the simulated nodes reach it: real files, and a turn of the scheduler at each call.

`rollout.storage.files` gets this module's `os` and `open`, so a node can be killed, paused or held up before
every single call on the directory: between writing a temporary and renaming it, between a beat and the
removal of the one before. What changes a name is shown to an observer.
"""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tests.simulation.scheduler import Killed, Process, Scheduler

Change = Callable[[Process, str, Path, Path | None], None]
"""(process, operation, path, and for rename, link: where it goes)."""

ALL = ""
"""In place of a host: every one."""
SLOW_ONE_IN, SLOW_S = 50, 0.3
"""Now and then a call takes longer, so that the order of things varies."""


class Disk:
    """One directory, and what reaches it from which host."""

    def __init__(self, scheduler: Scheduler, root: Path) -> None:
        self.root = root
        self.has_links = True
        """Whether the filesystem has hard links."""
        self.frozen_until_s: dict[str, float] = {}
        """Hosts whose mount hangs."""
        self.is_observing = False
        self.after: Change = _nothing
        self.on_call: Callable[[Process], None] = lambda _process: None
        """Called at each call, before it has any effect; it may kill or pause the caller."""
        self._scheduler = scheduler

    def enter(self) -> Process:
        """A call on the directory begins: the others may go first, and the mount may hang."""
        scheduler = self._scheduler
        process = scheduler.process
        if self.is_observing:
            return process
        scheduler.wait(self._latency_s())
        self.on_call(process)
        if process.killed:
            raise Killed
        while True:
            until_s = max(*map(self._thaw_s, (process.host, ALL)), process.paused_until_s)
            if until_s <= scheduler.now_s:
                return process
            scheduler.wait(until_s - scheduler.now_s)

    def _thaw_s(self, host: str) -> float:
        return self.frozen_until_s.get(host, 0.0)

    def _latency_s(self) -> float:
        draw = self._scheduler.random
        return draw.uniform(0.0, SLOW_S) if draw.randrange(SLOW_ONE_IN) == 0 else draw.uniform(2e-4, 2e-3)

    def change(self, operation: str, path: Any, target: Any, call: Callable[[], Any]) -> Any:
        process = self.enter()
        where, to = Path(path), None if target is None else Path(target)
        result = call()
        self.is_observing = True
        self.after(process, operation, where, to)
        self.is_observing = False
        return result

    # ---- what rollout.storage calls

    def listdir(self, path: Any) -> list[str]:
        self.enter()
        return sorted(os.listdir(path))

    def is_called(self) -> bool:
        """Whether it is a simulated process that calls, rather than the test that looks on."""
        return self._scheduler.current is not None and not self.is_observing

    def scandir(self, path: Any) -> Any:
        self.enter()
        return os.scandir(path)

    def open(self, path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_ACCMODE == os.O_RDONLY:
            return os.open(path, flags, mode)  # to fsync a directory
        return self.change("open", path, None, lambda: os.open(path, flags, mode))

    def open_file(self, path: Any, mode: str, buffering: int = 0) -> Any:
        """In place of the builtin `open`."""
        if mode == "rb":
            self.enter()
            return open(path, mode)
        return Appending(self, Path(path), self.change("append", path, None, lambda: open(path, mode, 0)))

    def pwrite(self, descriptor: int, data: bytes, offset: int) -> int:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        return self.change("write", path, None, lambda: os.pwrite(descriptor, data, offset))

    def lstat(self, path: Any) -> os.stat_result:
        self.enter()
        return os.lstat(path)

    def replace(self, source: Any, target: Any) -> None:
        self.change("replace", source, target, lambda: os.replace(source, target))

    def rename(self, source: Any, target: Any) -> None:
        self.change("rename", source, target, lambda: os.rename(source, target))

    def link(self, source: Any, target: Any) -> None:
        if not self.has_links:
            raise OSError(errno.EPERM, "no hard links here")
        self.change("link", source, target, lambda: os.link(source, target))

    def unlink(self, path: Any) -> None:
        self.change("unlink", path, None, lambda: os.unlink(path))

    def mkdir(self, path: Any, mode: int = 0o777) -> None:
        self.change("mkdir", path, None, lambda: os.mkdir(path, mode))

    def rmdir(self, path: Any) -> None:
        self.change("rmdir", path, None, lambda: os.rmdir(path))

    def rmtree(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self.change("rmtree", path, None, lambda: shutil.rmtree(path, *args, **kwargs))

    def fsync(self, descriptor: int) -> None:
        """Machines of the simulation do not lose what a disk has not yet written."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


class Appending:
    """A file that is appended to: a write is a call of its own."""

    def __init__(self, disk: Disk, path: Path, file: IO[bytes]) -> None:
        self._disk = disk
        self._path = path
        self._file = file

    def __enter__(self) -> "Appending":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def write(self, data: bytes) -> int:
        return self._disk.change("appended", self._path, None, lambda: self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _nothing(_process: Process, _operation: str, _path: Path, _target: Path | None) -> None:
    pass
