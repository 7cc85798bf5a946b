"""Which filesystem a path is on, and which ones count as this machine's own."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from coordinator.machine.filesystems import Mount, find_mount

TABLE = [
    ("overlay", "overlay", "/"),
    ("proc", "proc", "/proc"),
    ("systemd-1", "autofs", "/shared"),
    ("server:/export", "nfs4", "/shared"),
    ("/dev/nvme0n1", "xfs", "/shared/scratch"),
    ("bucket", "fuse.s3fs", "/data"),
]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [SimpleNamespace(device=device, fstype=kind, mountpoint=point) for device, kind, point in TABLE]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: parts)


def test_mount_is_the_innermost_one() -> None:
    assert find_mount(Path("/proc/self")).point == "/proc"
    assert find_mount(Path("/")).point == "/"


def test_mount_at_a_path_with_any_sign_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/mounts has `#` as \\043, which the C library leaves so: MooseFS names itself mfs#HOST:PORT."""
    parts = [("/dev/sda", "/", "ext4"), ("mfs\\043master:9421", "/mnt/a\\043b", "fuse")]
    listed = [SimpleNamespace(device=device, mountpoint=at, fstype=kind) for device, at, kind in parts]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: listed)
    assert find_mount(Path("/mnt/a#b/run")) == Mount("fuse", "mfs#master:9421", "/mnt/a#b")


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("path", "kind", "is_local"),
    [
        ("/home/me/run", "overlay", True),
        ("/shared/run", "nfs4", False),  # the mount, not the automounter below it
        ("/shared/scratch/run", "xfs", True),
        ("/sharedness", "overlay", True),
        ("/data/model", "fuse.s3fs", False),
    ],
)
def test_filesystem_is_local_if_this_machine_alone_writes_there(path: str, kind: str, is_local: bool) -> None:
    found = find_mount(Path(path))
    assert (found.kind, found.is_local) == (kind, is_local)


@pytest.mark.parametrize("kind", ["unknown", "fuse", "fuseblk", "nfs", "9p", "virtiofs", "lustre", "ext5"])
def test_what_is_not_known_to_be_local_counts_as_shared(kind: str) -> None:
    assert not Mount(kind, "?", "/").is_local
