"""User code that changes or harms its process in every way that was met: the run goes on."""

from pathlib import Path

import pytest

from tests.cluster import mischief
from tests.cluster.cluster import FAST, Cluster


@pytest.mark.parametrize("place", ["environment=acts", "reward=scores", "reward=waits"])
def test_run_goes_on_whatever_user_code_does_to_its_process(
    cluster: Cluster, engine_url: str, tmp_path: Path, place: str
) -> None:
    done = tmp_path / "done"
    done.mkdir()
    cluster.environment[mischief.FOLDER] = str(done)
    setting, _, function = place.partition("=")
    settings = (
        "rollout.tasks_per_iteration=16",
        "rollout.concurrency=4",
        "rollout.group_timeout_s=20",
        "rollout.reward_timeout_s=5",
        "rollout.reward_processes=1",
        f"rollout.{setting}=tests.cluster.mischief:{function}",
    )
    rollout = ("--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    cluster.start(0, *FAST, "--num-nodes", "1", *rollout, *settings, role=("local",))
    assert cluster.wait() == [0], cluster.everything_said()
    output = cluster.output(0)
    assert {each.name for each in done.iterdir()} == set(mischief.ACTS), output
    assert "did not answer" not in output and "is damaged" not in output
    assert len(cluster.groups(1)) == 16
    assert "SystemExit" in output
    if function == "acts":  # the samples of a group are scored together, and its first error is said
        assert "KeyboardInterrupt" in output and "Failed" in output
