"""Real shared filesystems for tests: a server, and as many clients' mounts of it as a run has nodes.

    with Mounts("sshfs", tmp_path / "fs", 3) as shared:
        subprocess.run([*shared.inside, "ls", str(shared.path(0))])     # a process that sees the mounts
        os.listdir(shared.seen(1))                                      # what it sees, for everybody else

The server and its clients run in a mount, a network and a pid namespace of their own (`python -m
tests.filesystems`). So several of these may exist side by side, and nothing outside is reached or changed.
The kernel ends them all with the first process there, which ends when its standard input does: with the
`with` block, or with the process that has entered it, however that ends. What is started with `inside` is in
the first of these namespaces only, so nodes meet each other as ever.
"""

import os
import select
import shutil
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from tests.filesystems.servers import FILESYSTEMS

REPOSITORY = Path(__file__).parents[2]
START_S = 90.0
"""How long a server and its clients may take to come up."""
END_S = 10.0
ALONE = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")


class Mounts:
    """`clients` mounts of a filesystem; a context manager. `folder` is on a local disk and not yet there."""

    inside: tuple[str, ...]
    """What stands before a command that is to see the mounts; its pid will be the command's. The command ends
    with the thread that starts it."""

    def __init__(self, kind: str, folder: Path, clients: int) -> None:
        self._kind = kind
        self._folder = folder
        self._paths = [folder / f"client{number}" for number in range(clients)]

    def path(self, client: int) -> Path:
        """Return where a process that is started with `inside` sees the filesystem as this client."""
        return self._paths[client]

    def seen(self, client: int) -> Path:
        """Return where all other processes see that."""
        return Path(f"/proc/{self._first}/root{self._paths[client]}")

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True)
        words = ["-m", "tests.filesystems", self._kind, *map(str, [self._folder, *self._paths])]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [*ALONE, sys.executable, *words],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            self._wait_mounted()
            (first,) = psutil.Process(self._process.pid).children()
        except BaseException:
            self._end()
            raise
        self._first = first.pid
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"]  # a node would wait for its mount to come back
        sees_mounts = ["nsenter", f"--mount=/proc/{self._first}/ns/mnt", f"--wdns={REPOSITORY}"]
        self.inside = (*ends_with_us, *sees_mounts)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait_mounted(self) -> None:
        """Wait for the line that the first process prints when all is mounted."""
        out = self._process.stdout
        assert out is not None
        if not select.select([out], [], [], START_S)[0] or not out.readline():
            raise RuntimeError(f"no {self._kind}: {(self._folder / 'log').read_text().strip()}")

    def _end(self) -> None:
        try:
            self._process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:  # it does not read its input: a mount or a server hangs
            self._process.kill()  # and so, by --kill-child, the first process
            self._process.communicate()


def unavailable(kind: str) -> str | None:
    """Why a filesystem cannot be mounted here, for pytest.skip; None if it can."""
    if not sys.platform.startswith("linux"):
        return "needs FUSE and namespaces as Linux has them"
    if os.geteuid() != 0:
        return "needs root, for namespaces and mounts"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse, readable and writable"
    needs = {name: "util-linux" for name in ("unshare", "nsenter", "setpriv")} | {"ip": "iproute2"}
    for program, package in {**needs, **FILESYSTEMS[kind].needs}.items():
        if shutil.which(program) is None:
            return f"needs {program} (Debian: {package})"
    if subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode:
        return "needs namespaces (unshare), which this machine does not allow"
    return None
