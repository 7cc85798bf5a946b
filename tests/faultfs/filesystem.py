"""The operations: passed on to the backing directory, with the faults of the moment."""

import errno
import functools
import os
import posixpath
import random
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mfusepy import Operations

from tests.faultfs.cache import ClientCache, Listing
from tests.faultfs.faults import Control, Faults

# Not readdir: the C library takes its ENOENT for the end of the listing.
LOOKS_UP = {"getattr", "open", "create", "mkdir", "unlink", "rmdir", "rename", "link"}
NEEDS_SPACE = {"create", "mkdir", "write", "link", "rename"}
CHANGES = NEEDS_SPACE | {"unlink", "rmdir", "truncate", "chmod", "utimens"}
TIMES = ("st_atime", "st_mtime", "st_ctime")
SHOWN = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_blocks")


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def faulty(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Before `operation` of a path: wait, or fail, as the faults say; after it: perhaps lie."""
    name = operation.__name__

    @functools.wraps(operation)
    def call(self: "FaultyFilesystem", path: str, *arguments: Any) -> Any:
        faults = self.admit(name, path)
        result = operation(self, path, *arguments)
        if name in faults.lies and random.random() < faults.lie_rate:
            if name == "create":
                os.close(result)
            raise failure(errno.EIO)
        return result

    return call


class FaultyFilesystem(Operations):
    """Passes operations on to `backing`; file handles are descriptors of the files there."""

    use_ns = True

    def __init__(self, backing: Path, control: Control) -> None:
        self._backing = str(backing.absolute())
        self._control = control
        self._cache = ClientCache()
        self._shown_s: dict[str, float] = {}
        """From when on each file is there, by the clock of the machine."""

    def admit(self, name: str, path: str) -> Faults:
        """Wait and fail as the faults say; those that hold for this operation."""
        while (faults := self._control.faults()).frozen:
            time.sleep(0.02)
        if faults.latency_s:
            time.sleep(faults.latency_s)
        if faults.read_only and name in CHANGES:
            raise failure(errno.EROFS)
        if faults.full and name in NEEDS_SPACE - {"rename"} and path.startswith(faults.full_below):
            raise failure(errno.ENOSPC)
        if random.random() < faults.error_rate and path.startswith(faults.errors_below):
            possible = [each for each in faults.errors if each != "ENOENT" or name in LOOKS_UP]
            if possible:
                raise failure(getattr(errno, random.choice(possible)))
        return faults

    def _at(self, path: str) -> str:
        return self._backing + path

    def _is_late(self, path: str) -> bool:
        """Whether another client's file is not published yet."""
        late_s = self._control.faults().publishes_s
        if not late_s:
            return False
        if path not in self._shown_s:
            found = os.lstat(self._at(path))
            self._shown_s[path] = 0.0 if stat.S_ISDIR(found.st_mode) else found.st_ctime + late_s
        return time.time() < self._shown_s[path]

    def _is_gone_or_late(self, path: str) -> bool:
        try:
            return self._is_late(path)
        except FileNotFoundError:
            return True

    def _changed(self, path: str) -> None:
        self._shown_s[path] = 0.0
        try:
            listed = posixpath.basename(path), stat.S_IFMT(os.lstat(self._at(path)).st_mode)
        except FileNotFoundError:
            listed = None
        self._cache.changed(path, listed, self._control.faults())

    def _find(self, path: str) -> os.stat_result:
        if self._is_late(path):
            raise failure(errno.ENOENT)
        return os.lstat(self._at(path))

    # ---- looking

    @faulty
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        faults = self._control.faults()
        ask = functools.partial(self._find, path)
        found = self._cache.attributes(path, faults, ask) if fh is None else os.fstat(fh)
        offset_ns = int(faults.clock_offset_s * 1e9)
        times = {name: getattr(found, f"{name}_ns") + offset_ns for name in TIMES}
        return {name: getattr(found, name) for name in SHOWN} | times

    @faulty
    def readdir(self, path: str, fh: int) -> Iterable[tuple[str, dict[str, int], int]]:
        def ask() -> Listing:
            with os.scandir(self._at(path)) as entries:
                found = [(entry.name, kind_of(entry)) for entry in entries]
            return [entry for entry in found if not self._is_gone_or_late(posixpath.join(path, entry[0]))]

        names = self._cache.listing(path, self._control.faults(), ask)
        return [(name, {"st_mode": mode}, 0) for name, mode in names]

    @faulty
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        shown = {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}
        return shown | ({"f_bfree": 0, "f_bavail": 0} if self._control.faults().full else {})

    # ---- names

    @faulty
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        self._changed(path)
        return 0

    @faulty
    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        self._changed(path)
        return 0

    @faulty
    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        self._changed(path)
        return 0

    @faulty
    def rename(self, path: str, new: str) -> int:
        halves_s = self._control.faults().halves_s
        if halves_s > 0 and os.path.isdir(self._at(path)):
            move_directory_in_halves(self._at(path), self._at(new), halves_s)
        elif halves_s > 0:
            copy_in_halves(self._at(path), self._at(new), halves_s)
        else:
            os.rename(self._at(path), self._at(new))
        self._changed(path)
        self._changed(new)
        for below in [each for each in self._shown_s if each.startswith(f"{path}/")]:
            self._shown_s[new + below.removeprefix(path)] = self._shown_s.pop(below)
        return 0

    @faulty
    def link(self, path: str, source: str) -> int:
        if refused := self._control.faults().no_links:
            raise failure(getattr(errno, refused))
        os.link(self._at(source), self._at(path))
        self._changed(path)
        return 0

    @faulty
    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        self._cache.opened(path)
        return 0

    @faulty
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times or (time.time_ns(), time.time_ns()))
        self._cache.opened(path)
        return 0

    # ---- contents

    @faulty
    def create(self, path: str, mode: int, flags: int) -> int:
        descriptor = os.open(self._at(path), flags | os.O_CREAT, mode)
        self._changed(path)
        return descriptor

    @faulty
    def open(self, path: str, flags: int) -> int:
        if self._control.faults().read_only and flags & (os.O_WRONLY | os.O_RDWR):
            raise failure(errno.EROFS)
        self._cache.opened(path)
        self._find(path)
        return os.open(self._at(path), flags)

    @faulty
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @faulty
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._cache.opened(path)
        return os.pwrite(fh, data, offset)

    @faulty
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        self._cache.opened(path)
        return 0

    @faulty
    def flush(self, path: str, fh: int) -> int:
        return 0

    @faulty
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    @faulty
    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def kind_of(entry: os.DirEntry[str]) -> int:
    return stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else stat.S_IFREG


def copy_in_halves(source: str, target: str, halves_s: float) -> None:
    """A rename as a copy: readers find the target half written meanwhile."""
    data = Path(source).read_bytes()
    with open(target, "wb", buffering=0) as file:
        file.write(data[: len(data) // 2])
        time.sleep(halves_s)
        file.write(data[len(data) // 2 :])
    os.unlink(source)


def move_directory_in_halves(source: str, target: str, halves_s: float) -> None:
    """The same for a directory: readers find half of its entries meanwhile."""
    os.mkdir(target)
    names = sorted(os.listdir(source))
    for number, name in enumerate(names):
        if number == len(names) // 2:
            time.sleep(halves_s)
        os.rename(os.path.join(source, name), os.path.join(target, name))
    os.rmdir(source)
