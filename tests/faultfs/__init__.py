"""A filesystem that misbehaves as shared ones do: several mounts of one directory, each with its faults.

    with FaultFs(tmp_path / "fs", 2) as shared:
        shared.set(attributes_s=3, negative_s=3, listing_s=3)      # on all mounts
        shared[1].set(error_rate=0.02)                             # on one, while it is in use
        shared[1].freeze()

Each mount is a process of its own (`python -m tests.faultfs`), as each node of a run has its own client.
What the faults are is in `faults.py`, what the caches promise in `filesystem.py`.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.faultfs.faults import Faults

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 30.0


class Mount:
    """One client's view of the backing directory, at `path`."""

    def __init__(self, backing: Path, path: Path) -> None:
        self.path = path
        self.faults = Faults()
        self._control = path.with_suffix(".faults.json")
        self._log = path.with_suffix(".log")
        self.set()
        path.mkdir()
        command = [sys.executable, "-m", "tests.faultfs", str(backing), str(path)]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, "--control", str(self._control)], cwd=REPOSITORY, stdout=log, stderr=log
            )

    def wait_mounted(self) -> None:
        """Until it answers; RuntimeError with what the process said if it does not come."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not os.path.ismount(self.path):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.path} could not be mounted: {self._log.read_text().strip()}")
            time.sleep(0.01)

    def set(self, **faults: Any) -> None:
        """Change these faults (the fields of Faults) from the next operation on."""
        self.faults = replace(self.faults, **faults)
        temp = self._control.with_suffix(".tmp")
        temp.write_text(self.faults.to_json())
        os.replace(temp, self._control)

    def freeze(self) -> None:
        """From now on every operation blocks, until `thaw`."""
        self.set(frozen=True)

    def thaw(self) -> None:
        """Let the blocked operations go on."""
        self.set(frozen=False)

    def close(self) -> None:
        """Unmount, whoever still uses it and however it hangs: who does gets errors from now on."""
        subprocess.run(["fusermount3", "-u", "-z", str(self.path)], check=False, capture_output=True)
        self._process.kill()  # closes its connection, which fails what is still under way
        self._process.wait()


class FaultFs:
    """`mounts` mounts of one directory, `backing`, all made on entry and always gone on exit."""

    def __init__(self, folder: Path, mounts: int) -> None:
        self.backing = folder / "backing"
        self.mounts: list[Mount] = []
        self._folder = folder
        self._number = mounts

    def __enter__(self) -> Self:
        self.backing.mkdir(parents=True)
        try:
            for number in range(self._number):
                self.mounts.append(Mount(self.backing, self._folder / f"mount{number}"))
            for mount in self.mounts:
                mount.wait_mounted()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getitem__(self, number: int) -> Mount:
        return self.mounts[number]

    def set(self, **faults: Any) -> None:
        """As Mount.set, on all of them."""
        for mount in self.mounts:
            mount.set(**faults)

    def freeze(self) -> None:
        """The server hangs: every mount does."""
        self.set(frozen=True)

    def thaw(self) -> None:
        """The server answers again."""
        self.set(frozen=False)

    def close(self) -> None:
        """Unmount all."""
        for mount in self.mounts:
            mount.close()


@functools.lru_cache
def unavailable() -> str:
    """Why no such filesystem can be mounted here; empty if one can. Tries it once."""
    if not sys.platform.startswith("linux"):
        return "needs FUSE as Linux has it"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "needs /dev/fuse, readable and writable"
    if shutil.which("fusermount3") is None:
        return "needs fusermount3 (package fuse3)"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with FaultFs(Path(folder, "trial"), 1):
                return ""
        except RuntimeError as error:
            return f"FUSE does not work here: {error}"
