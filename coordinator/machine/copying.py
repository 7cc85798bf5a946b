"""Copy a model's files into an entry of the store, whole or by their deltas, and check them on the way."""

import logging
import os
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coordinator.directory.published import Incomplete
from coordinator.machine.copy_entries import COPY, PART, StoreError, make_room
from rollout.storage import delta, files, hashing
from rollout.storage.files import SharedFsError
from rollout.storage.hashing import CountBytes, FileFacts
from rollout.storage.writer import FileSink, copy_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CopyOrder:
    """What Store.hold was asked for; see there."""

    source: Path
    files: Mapping[str, FileFacts]
    count_bytes: CountBytes
    before: Mapping[str, Path]
    threads: int
    links: bool = False
    """The files are on this machine, and links to them are enough."""


def fill(entry: Path, order: CopyOrder) -> None:
    """Copy the files, in threads; `entry` goes if that fails. Raises as Store.hold."""
    source = order.source
    began_s = time.monotonic()
    size = 0 if order.links else sum(facts["bytes"] for facts in order.files.values())
    part = entry / PART
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        if (free := make_room(entry.parent, size)) < size:
            raise StoreError(_no_room(source, entry.parent, size, free))
        part.mkdir()
        with ExitStack() as stack:
            map_all = map
            if order.threads > 1:  # a process does not end before the threads of a pool do
                map_all = stack.enter_context(ThreadPoolExecutor(order.threads)).map
            rebuilt = sum(map_all(partial(_copy, order, part), order.files))
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
    if order.links:
        log.info("%s holds weights in another layout too: %s has links to its own", source, entry / COPY)
        return
    delta_text = f" ({rebuilt / 1e9:.2f} GB by a delta)" if rebuilt else ""
    log.info("%s was copied to this machine: %.2f GB in %.1f s%s", source, size / 1e9, seconds, delta_text)


def _copy(order: CopyOrder, target: Path, name: str) -> int:
    """Make one file, by its delta if that can be had. Returns its size if it was; Incomplete if the file in
    `source` is another one.
    """
    path, expected = order.source / name, order.files[name]
    if name in order.before and _rebuild(order, target, name):
        return expected["bytes"]
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    if order.links:
        (target / name).symlink_to(path.resolve())
        return 0
    with open(target / name, "wb") as file:
        sink = FileSink(file, order.count_bytes)
        copy_of(path)(sink)
    if (actual := sink.facts) != expected:
        raise Incomplete(
            f"{path} was read as {actual['bytes']} bytes with sha256 {actual['sha256']}, "
            f"but it should have {expected['bytes']} bytes with sha256 {expected['sha256']}"
        )
    return 0


def _rebuild(order: CopyOrder, target: Path, name: str) -> bool:
    """Make one file of its delta and the file before, or of that alone where there is no delta; return
    whether it has come to the right checksum.
    """
    change, before = order.source / delta.delta_name(name), order.before[name]
    try:
        if not files.exists(change) and hashing.file_facts(before, order.count_bytes) == order.files[name]:
            os.link(before, target / name)
            return True
        with open(before, "rb") as old, open(target / name, "wb") as file:
            sink = FileSink(file, order.count_bytes)
            delta.apply(old, hashing.pieces(change), sink.write)
        problem = "that comes to another checksum" if sink.facts != order.files[name] else ""
    except (OSError, delta.DamagedDelta) as error:
        problem = str(error)
    if problem:
        log.warning("%s is of no use with %s: %s; the whole file is read", change, before, problem)
    return not problem


def _no_room(source: Path, folder: Path, size: int, free: int) -> str:
    return (
        f"{source} cannot be copied to this machine: it has {size / 1e9:.2f} GB, and {folder} has room for "
        f"{free / 1e9:.2f} GB; free some space there, or give this node another directory for copies: "
        "cluster.local_dir=DIR"
    )
