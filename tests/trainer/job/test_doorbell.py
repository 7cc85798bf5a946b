"""The doorbell between a node and its trainers."""

import threading
import time
from pathlib import Path

from trainer.job.doorbell import Doorbell, ring


def test_ring_ends_a_wait_and_rings_before_it_count(tmp_path: Path) -> None:
    bell = Doorbell(tmp_path / "bell")
    for _ in range(3):
        ring(tmp_path / "bell")
    started = time.monotonic()
    bell.wait(60.0)
    timer = threading.Timer(0.05, ring, [tmp_path / "bell"])
    timer.start()
    bell.wait(60.0)
    assert time.monotonic() - started < 50
    timer.join()
    bell.close()


def test_wait_ends_without_a_ring_too(tmp_path: Path) -> None:
    bell = Doorbell(tmp_path / "bell")
    started = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - started >= 0.05
    bell.close()


def test_ring_where_nobody_waits_does_nothing(tmp_path: Path) -> None:
    ring(tmp_path / "bell")
    assert not (tmp_path / "bell").exists()
    bell = Doorbell(tmp_path / "bell")
    bell.close()
    ring(tmp_path / "bell")  # a FIFO without a reader


def test_bell_that_nobody_hears_never_blocks_who_rings(tmp_path: Path) -> None:
    bell = Doorbell(tmp_path / "bell")
    for _ in range(70_000):  # more than a FIFO holds
        ring(tmp_path / "bell")
    bell.close()
