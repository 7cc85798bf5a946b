"""Waits of trainers for space on a full disk, as their node hears of them: files in the spool. Torch-free."""

import contextlib
import os
from pathlib import Path

from rollout.storage.retry import SharedFsError, space_wait


def report(spool: Path, number: int, local_rank: int, limit_s: float, error: SharedFsError) -> None:
    """Write that this rank waits, in request `number`, up to `limit_s` for space; again and again meanwhile:
    the node takes away what it has read. A spool on the same full disk does not end the wait.
    """
    path = spool / f"full_{number:06d}.{local_rank}"
    temporary = path.with_name(f"{path.name}.tmp")
    with contextlib.suppress(OSError):
        temporary.write_text(space_wait(error.path, limit_s))
        temporary.replace(path)


def take(spool: Path, number: int) -> str:
    """Return what a rank of this node has reported since the last call; an empty text: nothing."""
    text = ""
    for name in os.listdir(spool):
        if name.startswith(f"full_{number:06d}.") and not name.endswith(".tmp"):
            text = (spool / name).read_text()
            (spool / name).unlink()
    return text
