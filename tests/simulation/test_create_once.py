"""Clients that create one file at the same time, killed, suspended and lied to before any call of theirs."""

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.storage import files, once, retry
from tests.simulation.disk import Change, Disk
from tests.simulation.scheduler import Process, Scheduler

CREATORS = 3
SEEDS = int(os.environ.get("FLAGPOST_EXAMPLES", "1500"))
PAUSE_S = 3 * once.TORN_S


class FaultyDisk(Disk):
    """A directory where each call may fail, succeed with an error, come late, or be the caller's last."""

    def __init__(self, scheduler: Scheduler, root: Path, has_links: bool, rate: float) -> None:
        super().__init__(scheduler, root)
        self._random = scheduler.random
        self.has_links = has_links
        self._rate = rate
        self.on_call = self._disturb

    def _disturb(self, process: Process) -> None:
        draw = self._random.random() / (self._rate or 1e-9)
        if draw < 0.1:
            process.killed = True
        elif draw < 0.5:
            process.paused_until_s = self._scheduler.now_s + self._random.uniform(0, PAUSE_S)
        elif draw < 0.7:
            raise OSError(errno.EIO, "nothing was done")

    def change(self, operation: str, path: Any, target: Any, call: Any) -> Any:
        result = super().change(operation, path, target, call)
        if self._random.random() < 0.3 * self._rate:
            raise OSError(errno.EIO, "the reply was lost")
        return result


@pytest.fixture
def directory() -> Iterator[Path]:
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="flagpost-", dir=memory if memory.is_dir() else None))
    yield root
    shutil.rmtree(root)


def put_under(patch: pytest.MonkeyPatch, disk: Disk, scheduler: Scheduler) -> None:
    """The storage functions, on this disk."""
    clock = SimpleNamespace(monotonic=lambda: scheduler.now_s, time=time.time, sleep=scheduler.wait)
    for module in (files, once, retry):
        patch.setattr(module, "os", disk)
        patch.setattr(module, "time", clock, raising=False)
    patch.setattr(files, "open", disk.open_file, raising=False)
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if disk.is_called():
            disk.enter()
        return read(path)

    patch.setattr(Path, "read_bytes", read_bytes)


def race(root: Path, seed: int, has_links: bool, rate: float) -> None:
    """CREATORS create one file; what each was told must agree with each other and with the file."""
    scheduler = Scheduler(seed)
    disk = FaultyDisk(scheduler, root, has_links, rate)
    path = root / "a.json"
    told: dict[int, bool] = {}
    shown: list[bytes] = []
    processes = [Process(f"creator {k}", f"host {k}") for k in range(CREATORS)]

    def create(k: int) -> None:
        while k not in told:
            try:
                told[k] = once.create_once(path, json.dumps({"by": k, "more": "x" * 50}).encode())
            except OSError:  # all its attempts have failed: it is started again
                scheduler.wait(1)

    def look(*_change: Any) -> None:
        content = path.read_bytes() if path.exists() else b""
        if content.endswith(b"}") and content not in shown[-1:]:
            shown.append(content)

    after: Change = look
    disk.after = after
    with pytest.MonkeyPatch.context() as patch:
        put_under(patch, disk, scheduler)
        for k, process in enumerate(processes):
            scheduler.spawn(process, lambda k=k: create(k))
        scheduler.run()
        scheduler.close(processes)
    look()
    story = f"seed {seed}: {told}, {shown}, {[p.killed for p in processes]}"
    assert scheduler.violation is None, f"{story}\n{scheduler.violation}"
    assert len(shown) <= 1, f"the file has changed; {story}"
    by = json.loads(shown[0])["by"] if shown else None
    assert all(won == (k == by) for k, won in told.items()), story
    assert not told or shown, f"nobody created it; {story}"


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.3], ids=["calm", "few faults", "many faults"])
@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_one_creator_wins_and_each_knows_it(directory: Path, has_links: bool, rate: float) -> None:
    for seed in range(SEEDS // 6):
        (root := directory / str(seed)).mkdir()
        race(root, seed, has_links, rate)
        shutil.rmtree(root)
