"""Let nobody else write in the run directory, but for its group where that is wanted."""

import logging
import os
import stat
from pathlib import Path

from coordinator.settings.tree import SettingsError
from rollout.storage import files
from rollout.storage.retry import retry

log = logging.getLogger(__name__)

OTHERS = 0o007
"""The part of a umask that keeps out everybody but user and group. The command sets it in any case."""


def share_with_group(root: Path) -> None:
    """Let the group write what this process makes, if the run directory, or what it will lie in, is setgid.

    Such a directory was made for a group. A umask that keeps the group from reading (077) stays as it is, and
    one that lets the group write (002, 007) needs no such directory.
    """
    existing = next(path for path in (root, *root.parents) if files.exists(path))
    umask = os.umask(OTHERS)
    if _look(existing).st_mode & stat.S_ISGID and not umask & stat.S_IRGRP:
        umask &= ~stat.S_IWGRP
    os.umask(umask)


def refuse_strangers(root: Path, allowed: bool) -> None:
    """Raise SettingsError if users whom this one need not trust may write in the run directory, unless it is
    `allowed`: what lies there says which code the nodes run.

    A mount may show owners and modes that are not so (an export that maps root to nobody, a volume of a
    container). It shows them for a new file too, and then it is only a warning.
    """
    if allowed or not files.is_directory(root):
        return
    root_stat, me = _look(root), os.geteuid()
    if root_stat.st_uid not in (0, me):
        fault = f"belongs to user {root_stat.st_uid}, and this process to user {me}"
    elif root_stat.st_mode & stat.S_IWOTH:
        fault = f"can be written by every user (mode {stat.S_IMODE(root_stat.st_mode):04o})"
    else:
        return
    probe = files.write_temporary(root / "owner", b"", durable=False)
    probe_stat = _look(probe)
    files.drop(probe)
    umask = os.umask(OTHERS)
    os.umask(umask)
    if (probe_stat.st_uid, stat.S_IMODE(probe_stat.st_mode)) != (me, files.MODE & ~umask):
        log.warning(
            "%s %s, it seems; but this mount shows a new file as of user %d with mode %04o: "
            "it does not tell who can write there",
            root, fault, probe_stat.st_uid, stat.S_IMODE(probe_stat.st_mode),
        )  # fmt: skip
        return
    raise SettingsError(
        f"--log-path {root} {fault}: who writes there can have this node run any code; give a directory of "
        "your own (chmod o-w), or add --allow-shared-dir on every node"
    )


def _look(path: Path) -> os.stat_result:
    return retry("look at", path, lambda: os.stat(path), path)
