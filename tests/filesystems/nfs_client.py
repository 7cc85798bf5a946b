"""Mount an NFS export through FUSE, with libnfs as the client: for kernels that have no client of their own.

    python -m tests.filesystems.nfs_client nfs://SERVER/EXPORT/ MOUNTPOINT

Every call goes to the server: nothing is remembered, as the kernel's client would. So it shows what the
protocol and the server do, and nothing of stale attributes, absences or listings.
"""

import ctypes
import errno
import os
import stat
import sys
import time
from collections.abc import Iterable
from ctypes import byref, c_char_p, c_int, c_uint64, c_void_p
from typing import Any

from mfusepy import FUSE, Operations

STAT = ("dev", "ino", "mode", "nlink", "uid", "gid", "rdev", "size", "blksize", "blocks")
TIMES = ("atime", "mtime", "ctime")
NANOSECONDS = tuple(f"{name}_nsec" for name in TIMES)
SPACE = (
    *("bsize", "frsize", "blocks", "bfree", "bavail", "files"),
    *("ffree", "favail", "fsid", "flag", "namemax"),
)


class Stat(ctypes.Structure):
    """struct nfs_stat_64 of libnfs."""

    _fields_ = [(name, c_uint64) for name in (*STAT, *TIMES, *NANOSECONDS, "used")]


class Entry(ctypes.Structure):
    """The beginning of struct nfsdirent of libnfs."""

    _fields_ = [("next", c_void_p), ("name", c_char_p)]


class Statvfs(ctypes.Structure):
    """struct nfs_statvfs_64 of libnfs."""

    _fields_ = [(f"f_{name}", c_uint64) for name in SPACE]


class Url(ctypes.Structure):
    """struct nfs_url of libnfs."""

    _fields_ = [("server", c_char_p), ("path", c_char_p), ("file", c_char_p)]


class NfsClient(Operations):
    """Passes operations on to the export at `url`, one at a time, as a context of libnfs wants it."""

    use_ns = True

    def __init__(self, url: str) -> None:
        self._nfs = ctypes.CDLL("libnfs.so.13")
        for name in ("nfs_init_context", "nfs_parse_url_dir", "nfs_readdir", "nfs_get_error"):
            getattr(self._nfs, name).restype = c_void_p
        self._nfs.nfs_parse_url_dir.restype = ctypes.POINTER(Url)
        self._nfs.nfs_readdir.restype = ctypes.POINTER(Entry)
        self._nfs.nfs_get_error.restype = c_char_p
        self._context = c_void_p(self._nfs.nfs_init_context())
        parsed = self._nfs.nfs_parse_url_dir(self._context, url.encode())
        if not parsed:
            raise ValueError(f"{url}: {self._nfs.nfs_get_error(self._context).decode()}")
        self._nfs.nfs_set_dircache(self._context, 0)
        self._call("mount", parsed.contents.server, parsed.contents.path)

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function of libnfs; OSError if it says so."""
        code = getattr(self._nfs, f"nfs_{name}")(self._context, *arguments)
        if code < 0:
            text = f"{name}: {self._nfs.nfs_get_error(self._context).decode()}"
            if -code not in {errno.ENOENT, errno.EEXIST}:
                print(time.strftime("%X"), text, file=sys.stderr, flush=True)
            raise OSError(-code, text)
        return code

    # ---- looking

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = Stat()
        if fh is None:
            self._call("lstat64", path.encode(), byref(found))
        else:
            self._call("fstat64", c_void_p(fh), byref(found))
        shown = {f"st_{name}": getattr(found, name) for name in STAT}
        return shown | {
            f"st_{name}": getattr(found, name) * 10**9 + getattr(found, f"{name}_nsec") for name in TIMES
        }

    def readdir(self, path: str, fh: int) -> Iterable[str]:
        directory = c_void_p()
        self._call("opendir", path.encode(), byref(directory))
        names: list[str] = []
        while entry := self._nfs.nfs_readdir(self._context, directory):
            names.append(os.fsdecode(entry.contents.name))
        self._nfs.nfs_closedir(self._context, directory)
        return names

    def readlink(self, path: str) -> str:
        text = ctypes.create_string_buffer(4096)
        self._call("readlink", path.encode(), text, c_int(4096))
        return os.fsdecode(text.value)

    def statfs(self, path: str) -> dict[str, int]:
        found = Statvfs()
        self._call("statvfs64", path.encode(), byref(found))
        return {f"f_{name}": getattr(found, f"f_{name}") for name in SPACE}

    # ---- names

    def mkdir(self, path: str, mode: int) -> int:
        return self._call("mkdir2", path.encode(), c_int(mode))

    def unlink(self, path: str) -> int:
        return self._call("unlink", path.encode())

    def rmdir(self, path: str) -> int:
        return self._call("rmdir", path.encode())

    def rename(self, old: str, new: str) -> int:
        return self._call("rename", old.encode(), new.encode())

    def link(self, target: str, source: str) -> int:
        return self._call("link", source.encode(), target.encode())

    def symlink(self, target: str, source: str) -> int:
        return self._call("symlink", source.encode(), target.encode())

    def chmod(self, path: str, mode: int) -> int:
        return self._call("chmod", path.encode(), c_int(stat.S_IMODE(mode)))

    def chown(self, path: str, uid: int, gid: int) -> int:
        return self._call("lchown", path.encode(), c_int(uid), c_int(gid))

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        pair = (ctypes.c_long * 4)(
            *(value for ns in times or (time.time_ns(),) * 2 for value in (ns // 10**9, ns % 10**9 // 1000))
        )
        return self._call("utimes", path.encode(), pair)

    # ---- contents

    def create(self, path: str, mode: int, flags: int) -> int:
        handle = c_void_p()
        self._call(
            "create", path.encode(), c_int(flags | os.O_CREAT), c_int(stat.S_IMODE(mode)), byref(handle)
        )
        assert handle.value
        return handle.value

    def open(self, path: str, flags: int) -> int:
        handle = c_void_p()
        self._call("open", path.encode(), c_int(flags & ~os.O_NOFOLLOW), byref(handle))
        assert handle.value
        return handle.value

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        room = ctypes.create_string_buffer(size)
        done = 0
        while done < size:
            place = ctypes.byref(room, done)
            count = self._call("pread", c_void_p(fh), c_uint64(offset + done), c_uint64(size - done), place)
            if count == 0:
                break
            done += count
        return room.raw[:done]

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return self._call("pwrite", c_void_p(fh), c_uint64(offset), c_uint64(len(data)), data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        return self._call("truncate", path.encode(), c_uint64(length))

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        return self._call("fsync", c_void_p(fh))

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0  # a server answers a change of names when it is durable

    def flush(self, path: str, fh: int) -> int:
        return 0

    def release(self, path: str, fh: int) -> int:
        return self._call("close", c_void_p(fh))


def main() -> None:
    url, mountpoint = sys.argv[1:]
    FUSE(
        NfsClient(url),
        mountpoint,
        foreground=True,
        nothreads=True,
        fsname=url.partition("?")[0],
        subtype="libnfs",
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
    )


if __name__ == "__main__":
    main()
