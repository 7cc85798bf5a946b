"""What the master keeps of guests."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import GUESTS
from coordinator.node.guests_present import Guests
from tests.coordinator.examples import board, run_dir_at


def test_killed_guest_leaves_its_last_heartbeat_alone(tmp_path: Path) -> None:
    run_dir, killed, living = run_dir_at(tmp_path), GUESTS, GUESTS + 1
    old = [Beat(1, killed, 1, 7), Beat(2, killed, 2, 3), Beat(2, killed, 2, 4)]
    others = [Beat(2, living, 1, 8), Beat(2, living, 1, 9), Beat(2, 1, 1, 4), Beat(2, 1, 1, 5)]
    last = Beat(2, killed, 2, 5)
    watch: Any = SimpleNamespace(guests={living: 1}, board=board(*old, last, *others))
    assert sorted(Guests(run_dir, watch).left_behind()) == sorted(map(run_dir.entry, old))
