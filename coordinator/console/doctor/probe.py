"""The checks of `run doctor` that one node does by itself: measure, then let `checks` judge.

All files are in a directory that this process made for itself; its partner is a second process.
"""

import contextlib
import grp
import math
import os
import pwd
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil

from coordinator.console.doctor import checks as judge
from coordinator.console.doctor import node_checks as judge_node
from coordinator.console.doctor.checks import Check, Latency
from coordinator.console.doctor.partner import Partner, versioned
from coordinator.journal.events import versions
from coordinator.machine import network
from coordinator.machine.filesystems import Mount
from coordinator.machine.gpus import count_gpus, list_gpus
from coordinator.machine.oddities import LEAST_PROCESSES, oddities, startable
from rollout.environment_variables import cores
from rollout.storage import files, once
from rollout.storage.retry import SharedFsError, retry

REPLACE_S = 1.0
NAMES = 100
"""Names that two processes create at once."""
ROUNDS = 20
"""Names that the other process publishes while this one waits for them."""
FLAGS = 500
BUDGET_S = 3.0
"""A check that repeats itself stops after this long, but works at least once."""
SEEN_S = judge.VISIBLE_S + 5
"""How long to wait for a name; a run does not tolerate more either."""
STALE_S = 10.0
"""How long to wait until outdated state goes away that no run relies on."""
PAUSE_S = 0.001
BIG_BYTES = 64 * 2**20
NEEDED = ("python", "flagpost", "torch", "transformers")


def node_checks(directory: Path, mount: Mount) -> Generator[tuple[str, Callable[[], list[Check]]]]:
    """Yield each check's name and function; `directory`, on `mount`, is only for this process.

    The partner lives until its last check is done.
    """
    with Partner() as partner:
        yield "free space", lambda: check_space(directory)
        yield "atomic rename", lambda: [check_replace(directory, partner)]
        yield "create once", lambda: [check_create(directory, partner)]
        yield "visibility", lambda: check_visibility(directory, partner, mount)
        yield "flags", lambda: check_flags(directory, mount)
        yield "write speed", lambda: check_big_file(directory, partner)
    yield "address", lambda: [check_addresses()]
    yield "machine", lambda: [judge_node.judge_machine(list(oddities()))]
    yield "processes", lambda: judge_node.judge_processes(startable(LEAST_PROCESSES), LEAST_PROCESSES)
    yield "GPUs", lambda: [check_gpus()]
    yield "versions", lambda: [judge_node.judge_versions(versions(), NEEDED)]


def check_addresses() -> Check:
    """Check which addresses others can reach this node by."""
    addresses = [str(address) for address in network.local_addresses()]
    return judge_node.judge_addresses(addresses, network.has_ipv6_alone())


# ---- the directory


def check_directory(root: Path, is_new: bool, directory: Path) -> Check:
    """Check which modes and owner this mount gives to the files of a run."""
    files.publish(directory / "mode", b"", durable=False)
    file_stat = _stat(directory / "mode")
    owner = f"{_name(pwd.getpwuid, file_stat.st_uid)}:{_name(grp.getgrgid, file_stat.st_gid)}"
    return judge.judge_directory(is_new, _stat(root).st_mode & 0o7777, file_stat.st_mode & 0o7777, owner)


def _stat(path: Path) -> os.stat_result:
    return retry("look at", path, lambda: os.stat(path))


def _name(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return look_up(number)[0]
    except KeyError:
        return str(number)


def check_space(directory: Path) -> list[Check]:
    """Check how many bytes and inodes this user may still use."""
    space = retry("ask for the space of", directory, lambda: os.statvfs(directory), directory)
    return [
        judge.judge_space(space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize),
        judge.judge_inodes(space.f_favail, space.f_files),
    ]


def check_replace(directory: Path, partner: Partner) -> Check:
    """Read one file again and again while the partner renames new versions over it."""
    path, reads, missing, torn = directory / "replaced", 0, 0, 0
    files.publish(path, versioned(0), durable=False)
    partner.tell("replace", path=str(path), seconds=REPLACE_S)
    while not partner.is_done():
        reads += 1
        try:
            data = files.read(path, fleeting=True)
        except FileNotFoundError:
            missing += 1
        else:
            torn += data != data[:16] * (len(versioned(0)) // 16)
    return judge.judge_replace(partner.answer(), reads, missing, torn)


def check_create(directory: Path, partner: Partner) -> Check:
    """Let two processes create the same names at the same time."""
    winners: list[int] = []
    started_s = time.monotonic()
    while not winners or (len(winners) < NAMES and time.monotonic() < started_s + BUDGET_S):
        path = directory / f"claim_{len(winners):03d}"
        partner.tell("create", path=str(path))
        is_first = once.create_once(path, b"the first process")
        winners.append(is_first + partner.answer())
    doubled, orphaned = winners.count(2), winners.count(0)
    return judge.judge_create(len(winners), doubled, orphaned, has_hard_links(directory))


def has_hard_links(directory: Path) -> bool:
    """Return whether hard links can be made there."""
    source, second = directory / "linked", directory / "second_name"
    files.publish(source, b"", durable=False)
    files.remove(second)
    try:
        retry("link", second, lambda: os.link(source, second), source)
    except FileExistsError:  # it was made, and reported as failed
        return True
    except SharedFsError as error:
        if error.errno not in once.NO_LINKS:
            raise
        return False
    return True


def check_visibility(directory: Path, partner: Partner, mount: Mount) -> list[Check]:
    """Measure when this process sees what the partner publishes and removes."""
    seen_s, gone_s, stale = list[float](), list[float](), list[float]()
    started_s = time.monotonic()
    while not seen_s or (len(seen_s) < ROUNDS and time.monotonic() < started_s + BUDGET_S):
        name = f"seen_{len(seen_s):03d}"
        path = directory / name
        published_s = partner.ask("publish", path=str(path))
        seen_s.append(_until(lambda p=path: _is_readable(p), published_s, SEEN_S))
        removed_s = partner.ask("remove", path=str(path))
        gone_s.append(_until(lambda n=name: n not in files.listing(directory), removed_s, STALE_S))
        early = directory / f"early_{len(seen_s):03d}"
        os.path.exists(early)  # from now on the mount may remember that there is no such file
        published_s = partner.ask("publish", path=str(early))
        stale.append(_until(lambda e=early: os.path.exists(e), published_s, STALE_S))
    gone_for, found_for = "a removed name was shown for", "a name sought too early was hidden for"
    return [
        judge.judge_visible("visibility", Latency(tuple(seen_s)), mount, "another's file"),
        judge.judge_stale("stale listing", Latency(tuple(gone_s)), STALE_S, mount, gone_for),
        judge.judge_stale("stale lookup", Latency(tuple(stale)), STALE_S, mount, found_for),
    ]


def _is_readable(path: Path) -> bool:
    """Return whether the listing shows `path` and its content is whole."""
    if path.name not in files.listing(path.parent):
        return False
    try:
        return files.read(path, fleeting=True) == path.name.encode()
    except FileNotFoundError:
        return False


def _until(holds: Callable[[], bool], since_s: float, limit_s: float) -> float:
    """Wait until `holds()`; return the seconds since `since_s`, or inf after `limit_s`."""
    while not holds():
        if time.monotonic() > since_s + limit_s:
            return math.inf
        time.sleep(PAUSE_S)
    return max(0.0, time.monotonic() - since_s)


def check_flags(directory: Path, mount: Mount) -> list[Check]:
    """Publish small files like flags; then list them until all of them are there."""
    flags = directory / "flags"
    files.make_directory(flags)
    publish_s: list[float] = []
    started_s = time.monotonic()
    while not publish_s or (len(publish_s) < FLAGS and time.monotonic() < started_s + BUDGET_S):
        before_s = time.monotonic()
        files.publish(flags / f"flag_{len(publish_s):06d}.ok", b"{}", durable=False)
        publish_s.append(time.monotonic() - before_s)
    own_s = _until(lambda: len(files.listing(flags)) >= len(publish_s), time.monotonic(), SEEN_S)
    listing: list[float] = []
    for _ in range(20):
        before_s = time.monotonic()
        files.listing(flags)
        listing.append(time.monotonic() - before_s)
    return [
        judge.judge_flags(Latency(tuple(publish_s))),
        judge.judge_listing(len(publish_s), Latency(tuple(listing)), own_s, mount),
    ]


def check_big_file(directory: Path, partner: Partner) -> list[Check]:
    """Write a big file; then look at its size while the partner renames it."""
    started_s = time.monotonic()
    written = retry("write", directory / "big", lambda: _write_big(directory / "big"), directory)
    written_s = time.monotonic() - started_s
    target = directory / "renamed"
    partner.tell("move", source=str(directory / "big"), target=str(target))
    partial: set[int] = set()
    while not partner.is_done():
        partial.add(_listed_size(target))
    seconds = partner.answer()

    def is_whole() -> bool:
        partial.add(_listed_size(target))
        return written in partial

    has_size = math.isfinite(_until(is_whole, time.monotonic(), SEEN_S))
    partial -= {-1, written}
    return [
        judge.judge_write(written, written_s),
        judge.judge_move(written, seconds, len(partial), has_size, written_s),
    ]


def _write_big(path: Path) -> int:
    """Write and sync `BIG_BYTES`, or as much as possible in `BUDGET_S`; return the number of bytes."""
    block, written = os.urandom(2**20), 0
    until_s = time.monotonic() + BUDGET_S
    with open(path, "wb") as file:
        while written < BIG_BYTES and time.monotonic() < until_s:
            written += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return written


def _listed_size(path: Path) -> int:
    """Return the file's size; -1 while no listing shows it."""
    if path.name in files.listing(path.parent):
        with contextlib.suppress(FileNotFoundError):
            return _stat(path).st_size
    return -1


# ---- this node


def check_gpus() -> Check:
    """Check which GPUs the driver lists, and how many CUDA_VISIBLE_DEVICES leaves to this process."""
    machine = f"{cores()} cores, {judge.size(psutil.virtual_memory().total)}"
    gpus, problem = list_gpus()
    return judge_node.judge_gpus(gpus, count_gpus(), problem, machine)
