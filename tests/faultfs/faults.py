"""What can go wrong on a mount, as the test sets it and the mount's process reads it."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Faults:
    """The faults of one mount; all off by default. Rates are between 0 and 1, for each operation."""

    attributes_s: float = 0.0
    """Sizes, times and existence of what was found are believed for so long."""
    negative_s: float = 0.0
    """"No such file" is believed for so long."""
    listing_s: float = 0.0
    """A listing is believed for so long. 0: opening a directory asks the server, as NFS does."""
    keeps_listing: bool = False
    """Whether a client puts what it makes and removes itself into the listing that it remembers, as rclone
    does, instead of asking for a new one.
    """
    stubborn: bool = False
    """Whether "no such file" outlives a listing that shows the file."""
    error_rate: float = 0.0
    """Operations that do nothing and report one of `errors`."""
    errors: tuple[str, ...] = ("ESTALE", "EIO", "EINTR", "ENOENT")
    """ENOENT only where a name is looked up."""
    errors_below: str = "/"
    """Only paths that begin so (as seen from the mount) get `errors`."""
    lie_rate: float = 0.0
    """Operations of `lies` that succeed and report EIO."""
    lies: tuple[str, ...] = ("rename", "link", "create", "mkdir", "unlink", "rmdir", "write", "fsync")
    latency_s: float = 0.0
    """Every operation takes so much longer."""
    full: bool = False
    """ENOSPC for what needs space; statfs says that none is free."""
    full_below: str = "/"
    """Only paths that begin so are on the full disk, as with a quota."""
    read_only: bool = False
    """EROFS for what changes something."""
    frozen: bool = False
    """Every operation blocks."""
    halves_s: float = 0.0
    """A rename copies: for so long only the first half is at the target, and the source is still there."""
    no_links: str = ""
    """The errno (as EPERM) with which hard links are refused; empty: they work."""
    publishes_s: float = 0.0
    """A new file of another client is not there until it is so old, as with a write-back cache."""
    clock_offset_s: float = 0.0
    """Added to all times that a stat shows."""

    def to_json(self) -> str:
        """For the control file."""
        return json.dumps(dataclasses.asdict(self))


class Control:
    """The faults in a control file, read again whenever it was replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mark = (0, 0)
        self._faults = Faults()

    def faults(self) -> Faults:
        """As they are now."""
        found = os.stat(self._path)
        mark = (found.st_ino, found.st_mtime_ns)
        if mark != self._mark:
            self._faults = Faults(**json.loads(self._path.read_text()))
            self._mark = mark
        return self._faults
