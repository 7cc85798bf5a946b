"""Copies of models on this machine, for engines and trainers: what loads a model does not retry a call."""

import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from coordinator.machine import copy_entries, copying
from coordinator.machine.copy_entries import COPY, PART, StoreError
from coordinator.machine.copying import CopyOrder
from coordinator.machine.filesystems import LOCAL, find_mount
from coordinator.machine.host_lock import own_folder
from coordinator.machine.network import boot
from rollout.storage.hashing import CountBytes, FileFacts
from rollout.storage.writer import THREADS

log = logging.getLogger(__name__)

HELD = 3
"""Copies that a node holds: what its engine serves, what it will serve next, and the model that these are
adapters of."""


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
        """Lock of `_held`: one thread copies ahead of another."""

    def hold(
        self,
        source: Path,
        files: Mapping[str, FileFacts],
        count_bytes: CountBytes,
        before: Mapping[str, Path] | None = None,
        threads: int = THREADS,
    ) -> Path:
        """Return a directory of this machine that has these files of `source`, and keep it there.

        It is `source` itself where that is on a local filesystem; a directory of links if weights in another
        layout lie beside, which vLLM would take for the model's own. A copy, or such a directory, stays until
        HELD others were asked for. `count_bytes` gets the size of each piece that is copied, 0 now and then
        while another process or thread copies, and may raise. `before`: by name, the files of this machine
        that the deltas in `source` change into these, or that are these; what does not come to the right
        checksum is copied whole. Raises Incomplete if a file of `source` is not as `files` says, StoreError
        if there is no room, SharedFsError.
        """
        is_here = _is_here(source, files)
        if is_here and not _has_other_weights(source, files):
            return source
        folder, key = own_folder("store", self._below), _key(files, source if is_here else None)
        _warn_if_shared(folder)
        with self._lock:
            descriptor = self._held.pop(key, None)
            if descriptor is not None:
                self._held[key] = descriptor
        if descriptor is None:
            self._let_go(HELD - 1)
            order = CopyOrder(source, files, count_bytes, before or {}, threads, is_here)
            descriptor = copy_entries.acquire(
                folder / key, lambda: copying.fill(folder / key, order), count_bytes
            )
            self._keep(key, descriptor)
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
        if (free := copy_entries.make_room(folder, size)) < size:
            raise StoreError(
                f"{folder} has room for {free / 1e9:.2f} GB, and the policy has {size / 1e9:.2f} GB"
            )
        try:
            self._begun = copy_entries.begin_copy(folder)
            part = self._begun[0] / PART
            part.mkdir()
        except OSError as error:
            raise StoreError(f"{folder} takes no copy: {error.strerror}") from error
        return part

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
        if not copy_entries.use(descriptor, target):
            os.close(descriptor)
            return None
        self._let_go(HELD - 1)
        self._keep(key, descriptor)
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
            copy_entries.remove(copy.parent)

    def close(self) -> None:
        """Let go of what is held, and leave no more than the next start needs."""
        self.abandon()
        if self._held:
            self._let_go(0)
            copy_entries.make_room(own_folder("store", self._below), 0)

    def _keep(self, key: str, descriptor: int) -> None:
        """Hold a copy by this descriptor; an older one is closed."""
        with self._lock:
            if key in self._held:  # another thread was faster
                os.close(self._held.pop(key))
            self._held[key] = descriptor

    def _let_go(self, most: int) -> None:
        """Keep the last `most` copies that were asked for."""
        with self._lock:
            while len(self._held) > most:
                os.close(self._held.pop(next(iter(self._held))))


@cache
def _warn_if_shared(folder: Path) -> None:
    kind = find_mount(folder.resolve()).kind
    if kind not in LOCAL:
        log.warning("%s, for copies of models, is on %s; give this node cluster.local_dir=DIR, "
                    "a directory on its own disk", folder, kind)  # fmt: skip


def _is_here(source: Path, files: Mapping[str, FileFacts]) -> bool:
    """Return whether all files are on a local filesystem: a model may be a folder of links."""
    real = source.resolve()
    if not find_mount(real).is_local:
        return False
    elsewhere = {(real / name).resolve().parent for name in files} - {real}
    return all(find_mount(folder).is_local for folder in elsewhere)


def _has_other_weights(source: Path, files: Mapping[str, FileFacts]) -> bool:
    return any(name.endswith(".safetensors") and name not in files for name in os.listdir(source))


def _key(files: Mapping[str, FileFacts], linked: Path | None = None) -> str:
    """Return the name of the copy of these files, or of a directory of links to them in `linked`."""
    identity = [boot(), files, *([str(linked)] if linked else [])]
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
