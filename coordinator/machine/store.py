"""Copies of models on this machine, for engines and trainers: what loads a model does not retry a call."""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from coordinator.directory.published import Incomplete
from coordinator.machine.filesystems import LOCAL, find_mount
from coordinator.machine.host_lock import own_folder
from coordinator.machine.network import boot
from rollout.storage import delta, files
from rollout.storage.files import FileFacts, Moved, SharedFsError
from rollout.storage.writer import THREADS, Sink, copy_of

log = logging.getLogger(__name__)

HELD = 3
"""Copies that a node holds: what its engine serves, what it will serve next, and the model that these are
adapters of."""
UNUSED = 2
"""Copies that stay although no process uses them: the next start of a run needs them."""
LOOK_S = 0.1
"""How often a node looks whether another one has finished a copy."""
COPY, PART, NEW = "copy", "part", "new-"


class StoreError(RuntimeError):
    """A model does not fit on this machine. The message names the folder and the setting."""


class Store:
    """The models that the processes of this user use on this machine, in one folder for all of them:

    <folder>/<key>/         one copy. A process that makes or removes it has an exclusive lock on this
                            directory, one that uses it a shared lock: the kernel ends both with the process
    <folder>/<key>/part/    the files while they are being copied; nobody believes them
    <folder>/<key>/copy/    the files, once all are there and have the checksums that were asked for
    <folder>/new-*/part/    files that a trainer of this machine writes; they get a key once they are hashed

    The key is a digest of the names and checksums, and of the machine's start: nothing is synced, so what is
    left from before a crash of the machine may have holes.
    """

    def __init__(self, below: str | None = None) -> None:
        """`below`: the directory for the folder; default: the machine's directory for temporary files."""
        self._below = below
        self._held: dict[str, int] = {}
        """Key -> descriptor that has the lock; the one that was asked for last comes last."""
        self._begun: tuple[Path, int] | None = None
        """What a trainer writes: the entry, and the descriptor that has its lock."""
        self._lock = threading.Lock()
        """For `_held`: one thread copies ahead of another."""

    def hold(
        self,
        source: Path,
        files: Mapping[str, FileFacts],
        moved: Moved,
        before: Mapping[str, Path] | None = None,
        threads: int = THREADS,
    ) -> Path:
        """Return a directory of this machine that has these files of `source`, and keep it there.

        It is `source` itself where that is on a local filesystem. Otherwise it stays until HELD others were
        asked for. `moved` gets the size of each piece that is copied, 0 now and then while another process
        or thread copies, and may raise. `before`: by name, the files of this machine that the deltas in
        `source` change into these; what does not come to the right checksum is copied whole. Raises
        Incomplete if a file of `source` is not as `files` says, StoreError if there is no room,
        SharedFsError.
        """
        if _is_here(source, files):
            return source
        folder, key = own_folder("store", self._below), _key(files)
        _warn_if_shared(folder)
        with self._lock:
            descriptor = self._held.pop(key, None)
            if descriptor is not None:
                self._held[key] = descriptor
        if descriptor is None:
            self._let_go(HELD - 1)
            copying = _Copying(source, files, moved, before or {}, threads)
            descriptor = _acquire(folder / key, partial(_fill, folder / key, copying), moved)
            with self._lock:
                if key in self._held:  # another thread was faster
                    os.close(self._held.pop(key))
                self._held[key] = descriptor
            self._let_go(HELD)
        os.utime(folder / key)  # the least recently used go first
        return folder / key / COPY

    def find(self, files: Mapping[str, FileFacts]) -> Path | None:
        """Return the copy of these files if there is one now. It may be removed unless it is held."""
        copy = own_folder("store", self._below) / _key(files) / COPY
        return copy if copy.is_dir() else None

    def begin(self, size: int) -> Path:
        """Return an empty directory for about `size` bytes that a trainer of this node writes: `adopt` makes
        a copy of them. There is one at a time. Raises StoreError if there is no room.
        """
        self.abandon()
        folder = own_folder("store", self._below)
        if (free := _make_room(folder, size)) < size:
            raise StoreError(
                f"{folder} has room for {free / 1e9:.2f} GB, and the policy has {size / 1e9:.2f} GB"
            )
        try:
            while self._begun is None:
                self._begin(Path(tempfile.mkdtemp(prefix=NEW, dir=folder)))
            part = self._begun[0] / PART
            part.mkdir()
        except OSError as error:
            raise StoreError(f"{folder} takes no copy: {error.strerror}") from error
        return part

    def _begin(self, entry: Path) -> None:
        """Lock an entry, unless another process has taken it for one that nobody uses."""
        try:
            descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        if _lock(descriptor, fcntl.LOCK_EX) and _is_same(descriptor, entry):
            self._begun = entry, descriptor
        else:
            os.close(descriptor)

    def is_on_this_machine(self) -> bool:
        """Return whether the copies are on a filesystem of this machine alone."""
        return find_mount(own_folder("store", self._below).resolve()).is_local

    def adopt(self, files: Mapping[str, FileFacts]) -> Path | None:
        """Make what a trainer has written since `begin`, these files, a copy that is held; returns its
        directory. None: it is gone.
        """
        assert self._begun is not None
        (entry, descriptor), self._begun = self._begun, None
        key = _key(files)
        target = entry.parent / key
        try:
            (entry / PART).rename(entry / COPY)
            entry.rename(target)
        except OSError:  # another node of this machine has the same copy, or soon
            os.close(descriptor)
            shutil.rmtree(entry, ignore_errors=True)
            try:
                descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                return None
        # To take one lock for the other lets go of it in between.
        if not (
            _lock(descriptor, fcntl.LOCK_SH) and _is_same(descriptor, target) and (target / COPY).is_dir()
        ):
            os.close(descriptor)
            return None
        self._let_go(HELD - 1)
        with self._lock:
            if key in self._held:
                os.close(self._held.pop(key))
            self._held[key] = descriptor
        return target / COPY

    def abandon(self) -> None:
        """Remove what a trainer has written since `begin`, if `adopt` has not made it a copy."""
        if self._begun is not None:
            (entry, descriptor), self._begun = self._begun, None
            shutil.rmtree(entry, ignore_errors=True)
            os.close(descriptor)

    def remove(self, copy: Path) -> None:
        """Let go of a copy that `adopt` has made, and remove it unless others use it."""
        with self._lock:
            descriptor = self._held.pop(copy.parent.name, None)
        if descriptor is not None:
            os.close(descriptor)
            _if_unused(copy.parent, lambda: shutil.rmtree(copy.parent, ignore_errors=True))

    def close(self) -> None:
        """Let go of what is held, and leave no more than the next start needs."""
        self.abandon()
        if self._held:
            self._let_go(0)
            _make_room(own_folder("store", self._below), 0)

    def _let_go(self, left: int) -> None:
        """Keep the last `left` copies that were asked for."""
        with self._lock:
            while len(self._held) > left:
                os.close(self._held.pop(next(iter(self._held))))


@cache
def _warn_if_shared(folder: Path) -> None:
    kind = find_mount(folder.resolve()).kind
    if kind not in LOCAL:
        log.warning("%s, for copies of models, is on %s; give this node cluster.local_dir=DIR, "
                    "a directory on its own disk", folder, kind)  # fmt: skip


def _acquire(entry: Path, fill: Callable[[], None], moved: Moved) -> int:
    """Return a descriptor of `entry` with a shared lock, once its copy is there; `fill` makes it."""

    def is_copied() -> bool:
        return (entry / COPY).is_dir()

    while True:
        descriptor = _open(entry)
        try:
            if _lock(descriptor, fcntl.LOCK_EX) and _is_same(descriptor, entry) and not is_copied():
                fill()
            # To take one lock for the other lets go of it in between.
            if _lock(descriptor, fcntl.LOCK_SH) and _is_same(descriptor, entry) and is_copied():
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        moved(0)
        time.sleep(LOOK_S)


@dataclass(frozen=True)
class _Copying:
    """What Store.hold was asked for."""

    source: Path
    files: Mapping[str, FileFacts]
    moved: Moved
    before: Mapping[str, Path]
    threads: int


def _fill(entry: Path, asked: _Copying) -> None:
    """Copy the files, in threads; `entry` goes if that fails. Raises as Store.hold."""
    source = asked.source
    began_s, size = time.monotonic(), sum(facts["bytes"] for facts in asked.files.values())
    part = entry / PART
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        if (free := _make_room(entry.parent, size)) < size:
            raise StoreError(_no_room(source, entry.parent, size, free))
        part.mkdir()
        with ExitStack() as stack:
            each = map
            if asked.threads > 1:  # a process does not end before the threads of a pool do
                each = stack.enter_context(ThreadPoolExecutor(asked.threads)).map
            rebuilt = sum(each(partial(_copy, asked, part), asked.files))
        part.rename(entry / COPY)
    except BaseException as error:
        shutil.rmtree(entry, ignore_errors=True)
        if isinstance(error, FileNotFoundError):
            raise Incomplete(f"{error.filename} is gone, and was to be copied to this machine") from None
        if isinstance(error, OSError) and not isinstance(error, SharedFsError):
            free = shutil.disk_usage(entry.parent).free
            raise StoreError(f"{error.strerror}: {_no_room(source, entry.parent, size, free)}") from error
        raise
    seconds = time.monotonic() - began_s
    how = f" ({rebuilt / 1e9:.2f} GB by a delta)" if rebuilt else ""
    log.info("%s was copied to this machine: %.2f GB in %.1f s%s", source, size / 1e9, seconds, how)


def _copy(asked: _Copying, target: Path, name: str) -> int:
    """Make one file, by its delta if that can be had. Returns its size if it was; Incomplete if the file in
    `source` is another one.
    """
    path, wanted = asked.source / name, asked.files[name]
    if name in asked.before and _rebuild(asked, target, name):
        return wanted["bytes"]
    with open(target / name, "wb") as file:
        sink = Sink(file, asked.moved)
        copy_of(path)(sink)
    if (found := sink.facts) != wanted:
        raise Incomplete(
            f"{path} was read as {found['bytes']} bytes with sha256 {found['sha256']}, "
            f"but it should have {wanted['bytes']} bytes with sha256 {wanted['sha256']}"
        )
    return 0


def _rebuild(asked: _Copying, target: Path, name: str) -> bool:
    """Make one file of its delta and the file before; return whether it has come to the right checksum."""
    change, before = asked.source / delta.delta_name(name), asked.before[name]
    try:
        with open(before, "rb") as old, open(target / name, "wb") as file:
            sink = Sink(file, asked.moved)
            delta.apply(old, files.pieces(change), sink.write)
        problem = "that comes to another checksum" if sink.facts != asked.files[name] else ""
    except (OSError, delta.DamagedDelta) as error:
        problem = str(error)
    if problem:
        log.warning("%s is of no use with %s: %s; the whole file is read", change, before, problem)
    return not problem


def _is_here(source: Path, files: Mapping[str, FileFacts]) -> bool:
    """Return whether all files are on a local filesystem: a model may be a folder of links."""
    real = source.resolve()
    if not find_mount(real).is_local:
        return False
    elsewhere = {(real / name).resolve().parent for name in files} - {real}
    return all(find_mount(folder).is_local for folder in elsewhere)


def _key(files: Mapping[str, FileFacts]) -> str:
    return hashlib.sha256(json.dumps([boot(), files], sort_keys=True).encode()).hexdigest()[:32]


def _make_room(folder: Path, size: int) -> int:
    """Remove copies that no process uses, the least recently used first, until at most UNUSED are left and
    `size` bytes are free, or none is left. Returns how many bytes are free.
    """
    for entry in folder.glob(f"{NEW}*"):  # of a node that was killed
        _if_unused(entry, lambda entry=entry: shutil.rmtree(entry, ignore_errors=True))
    unused = [entry for entry in sorted(folder.iterdir(), key=_used_ns) if _if_unused(entry, lambda: None)]
    while unused and (len(unused) > UNUSED or shutil.disk_usage(folder).free < size):
        entry = unused.pop(0)
        _if_unused(entry, lambda entry=entry: shutil.rmtree(entry, ignore_errors=True))
    return shutil.disk_usage(folder).free


def _used_ns(entry: Path) -> int:
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _if_unused(entry: Path, act: Callable[[], None]) -> bool:
    """Call `act` while no process uses `entry` or begins to; return whether it was called."""
    try:
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # another process has removed it
        return False
    try:
        if free := _lock(descriptor, fcntl.LOCK_EX):
            act()
        return free
    finally:
        os.close(descriptor)


def _open(entry: Path) -> int:
    while True:
        entry.mkdir(exist_ok=True)
        try:
            return os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:  # another process has just removed it
            continue


def _lock(descriptor: int, kind: int) -> bool:
    """Take a lock without waiting for it; return whether it could be had."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(descriptor: int, entry: Path) -> bool:
    """Return whether `entry` is still the directory that was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), entry.stat())
    except FileNotFoundError:
        return False


def _no_room(source: Path, folder: Path, size: int, free: int) -> str:
    return (
        f"{source} cannot be copied to this machine: it has {size / 1e9:.2f} GB, and {folder} has room for "
        f"{free / 1e9:.2f} GB; free some space there, or give this node another directory for copies: "
        "cluster.local_dir=DIR"
    )
