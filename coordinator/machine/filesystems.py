"""The filesystems of this machine, as the kernel lists them."""

from dataclasses import dataclass
from pathlib import Path

import psutil

LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "tmpfs", "ramfs", "overlay"}
    | {"squashfs", "erofs", "apfs", "hfs", "ufs"}
)
"""Filesystems that only this machine writes, whose calls do not fail and work the next moment. Any other one
counts as shared."""


@dataclass(frozen=True)
class Mount:
    """The filesystem of a directory."""

    kind: str
    """The kernel's name, e.g. nfs4, fuse.glusterfs, ext4."""
    source: str
    point: str

    @property
    def is_local(self) -> bool:
        """Whether this machine alone writes there."""
        return self.kind in LOCAL


def find_mount(path: Path) -> Mount:
    """Find the filesystem of `path` in the kernel's table, without a call on the mount itself. The path holds
    no symbolic links.
    """
    mount = Mount("unknown", "?", "/")
    for part in psutil.disk_partitions(all=True):  # of mounts on one point, the last covers the others
        # The C library decodes what Linux writes in octal, but not this sign.
        source, point = (text.replace("\\043", "#") for text in (part.device, part.mountpoint))
        if path.is_relative_to(point) and len(point) >= len(mount.point):
            mount = Mount(part.fstype, source, point)
    return mount
