from pathlib import Path

import pytest

from coordinator.protocol import placement_records
from coordinator.protocol.placement_records import Placement
from coordinator.settings.tree import SettingsError


def test_nothing_is_placed_before_somebody_does(tmp_path: Path) -> None:
    root = tmp_path / "run"
    assert placement_records.read_placement(root) == placement_records.ONE_CREW
    assert placement_records.device_counts(root) == {}
    (run_dir,) = placement_records.run_dirs(root)
    assert (run_dir.crew, run_dir.name(1)) == ("main", "rank 1")
    placement_records.publish_placement(root, Placement(2, ()))
    assert not root.exists()  # one crew: there is nothing to say


def test_crews_are_known_once_every_machine_has_said_what_it_has(tmp_path: Path) -> None:
    placement_records.publish_placement(tmp_path, Placement(2, ("rollout=1-2", "train=0")))
    placement_records.publish_devices(tmp_path, 0, "node-a", 2)
    assert placement_records.placed_crews(tmp_path, placement_records.read_placement(tmp_path)) is None
    placement_records.publish_devices(tmp_path, 1, "node-b", 1)
    train, rollout = placement_records.run_dirs(tmp_path)  # the crew with the first device of rank 0 leads
    assert (train.crew, train.machines, train.name(0)) == ("train", (0,), "train rank 0")
    assert (rollout.crew, rollout.machines, rollout.name(1)) == ("rollout", (0, 1), "rollout rank 1")
    assert rollout.logs(1) == tmp_path / "logs" / "rollout_0001"


def test_placement_can_be_taken_back(tmp_path: Path) -> None:
    placement_records.publish_placement(tmp_path, Placement(1, ("rollout=0", "train=1")))
    placement_records.publish_placement(tmp_path, Placement(2, ()))
    assert placement_records.read_placement(tmp_path) == Placement(2, ())


def test_numbers_of_devices_stay_what_they_were_first(tmp_path: Path) -> None:
    placement_records.publish_devices(tmp_path, 0, "node-a", 4)
    placement_records.publish_devices(
        tmp_path, 0, "node-c", 8
    )  # another machine in its place, of which 4 are used
    assert placement_records.device_counts(tmp_path) == {0: 4}
    with pytest.raises(SettingsError, match=r"rank 0 \(node-c\) has 2 devices, but had 4 when the run began"):
        placement_records.publish_devices(tmp_path, 0, "node-c", 2)
