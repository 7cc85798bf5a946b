"""A worker whose heartbeats its own mount shows, but not the master's, says so while it waits."""

from pathlib import Path

import pytest

from coordinator.directory.file_names import Beat, parse_protocol_name
from rollout.storage import files
from tests.simulation.faults import Injector
from tests.simulation.world import NodeProcess, World

UNSEEN = "has seen no heartbeat of rank 1"


@pytest.mark.parametrize(("hidden_s", "times"), [(300.0, 1), (0.0, 0)])
def test_worker_that_the_master_does_not_see_says_so_once(
    tmp_path: Path, hidden_s: float, times: int
) -> None:
    world = World(tmp_path, 2, 0, {"iterations": 1})
    hidden_until_s = world.scheduler.now_s + hidden_s

    def hide(patch: pytest.MonkeyPatch) -> None:
        real = files.listing

        def listing(directory: Path) -> list[str]:
            names = real(directory)
            process = world.scheduler.process.acts_for or world.scheduler.process
            assert isinstance(process, NodeProcess)
            if world.scheduler.now_s >= hidden_until_s or process.rank:
                return names
            entries = {name: parse_protocol_name(name) for name in names}
            return [name for name, entry in entries.items() if not isinstance(entry, Beat) or not entry.rank]

        patch.setattr(files, "listing", listing)

    world.patches.append(hide)
    world.run(Injector(world, []).are_over)
    story = "\n".join(world.said)
    assert not world.scheduler.violation, f"{story}\n{world.scheduler.violation}"
    lines = [line for line in world.said if UNSEEN in line]
    assert len(lines) == times, story
    assert all("rank 1 (" in line and line.endswith(f"doctor --log-path {tmp_path}/run") for line in lines)
