"""The path of a run directory, before anything is written: what cannot become one is refused."""

import itertools
import logging
import os
import re
import shlex
from pathlib import Path

from coordinator.directory.layout import RunDir
from coordinator.machine.filesystems import find_mount
from coordinator.machine.host_lock import link_in_utf8
from coordinator.machine.oddities import need_loopback, need_temporary
from coordinator.machine.run_command import STARTED_BY
from coordinator.protocol.exits import NodeEnded
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.run_json import (
    has_run,
)
from rollout.environment_variables import is_utf8
from rollout.storage import files

log = logging.getLogger(__name__)

KEEPS_NOTHING = {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "securityfs", "debugfs", "tracefs", "mqueue"}
"""Filesystems that show the kernel: no directory can be made there."""
_REMOTE = re.compile(r"[\w.-]+:")
"""How what is elsewhere begins: s3://bucket/run, node-a:/shared/run."""
OWN = ("doctor", "job", "protocol")
"""What a run directory may have before its run: of `run doctor`, of a job of a server, of two crews."""
SHOWN = 3
"""So many files of others are named."""
ASKED = 5
"""How often a filesystem that says no is asked whether this user may write: its errors look the same."""


def check_log_path(root: Path, option: str = "--log-path") -> None:
    """SettingsError unless `root` is, or can become, a directory that we may write.

    Only below the current directory more than the last part of it may be missing (runs/default): elsewhere it
    is a mount that is not there, or a slip of the pen.
    """
    existing = next(path for path in (root, *root.parents) if files.exists(path))
    if remote := next((part for part in root.parts if _REMOTE.fullmatch(part)), None):
        raise SettingsError(f"{option} {root}: '{remote}' is not a directory; give one that is mounted here")
    if not files.is_directory(existing):
        raise SettingsError(f"{option} {root}: {existing} is a file; give a directory")
    if existing == root and "config.json" in files.listing(root) and not has_run(root):
        raise SettingsError(
            f"{option} {root}: is the directory of a model (it has a config.json), and a run would write "
            "into it; give another directory"
        )
    for path in itertools.takewhile(lambda path: path != existing, (root, *root.parents)):
        if os.path.islink(path):
            text = f"{path} is a link to {os.readlink(path)}, which is not there; is it mounted here?"
            raise SettingsError(f"{option} {root}: {text}")
    working = Path.cwd()
    if existing not in (root, root.parent) and working not in (existing, *existing.parents):
        raise SettingsError(
            f"{option} {root}: there is no directory {root.parent}; is it mounted here? If the path is "
            f"right, make it first: mkdir -p {shlex.quote(str(root.parent))}"
        )
    refuse_kernel(root, existing.resolve(), option)
    if not any(os.access(existing, os.W_OK | os.X_OK) for _ in range(ASKED)):
        raise SettingsError(f"{option} {root}: {existing} is not writable for this user")
    if files.exists(RunDir(root.parent).run_json) and not has_run(root):
        raise SettingsError(
            f"{option} {root}: is within the run {root.parent}; give that one, or a directory of its own"
        )


def check_new_run(root: Path, settings: RunSettings) -> None:
    """Raise SettingsError for a run that begins without the samples it would train on. Log a line if its
    directory already holds files of others.
    """
    if settings.rl_phase == "update":
        raise SettingsError(
            f"--rl-phase update: no run is at {root}, whose samples could be trained on; make them with "
            "--rl-phase rollout"
        )
    if not files.is_directory(root) or settings.rollout_split == "eval-only":  # run eval makes it first
        return
    names = [name for name in sorted(files.listing(root)) if name[0] != "." and name not in OWN]
    if names:
        shown = ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")
        log.warning("--log-path %s holds no run, but %s; the run's files go beside them", root, shown)


def warn_of_own_disk(root: Path, num_nodes: int) -> None:
    """Log a line if a run of several nodes, each started by itself, begins where other machines may see
    nothing: a shared directory may not be mounted.
    """
    mount = find_mount(root.resolve())
    if mount.is_local and num_nodes > 1 and STARTED_BY not in os.environ:
        log.warning(
            "--log-path %s is on a disk of this machine (%s at %s); do the other nodes see it?",
            root, mount.kind, mount.point,
        )  # fmt: skip


def refuse_kernel(root: Path, existing: Path, option: str = "--log-path") -> None:
    """Raise SettingsError if nothing can ever be kept at `existing`, a part of `root`."""
    if find_mount(existing).kind in KEEPS_NOTHING:
        raise SettingsError(
            f"{option} {root}: {existing} shows the kernel, and keeps no files; give a directory of a disk"
        )


def ready_machine(root: Path) -> Path:
    """Give this machine what a node needs and containers leave out. Return a name in UTF-8 for the run
    directory, which is made: a link to it on this machine, if its own name is none.
    """
    need_loopback()
    need_temporary(root)
    if is_utf8(root):
        return root
    check_log_path(root)
    files.make_directory(root)
    try:
        link = link_in_utf8(root)
    except NodeEnded as error:
        raise SettingsError(error.text) from None
    print(f"run: {root} is not written in UTF-8; this machine calls it {link}", flush=True)
    return link
