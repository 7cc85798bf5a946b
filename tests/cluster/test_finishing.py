"""How a rollout of several nodes ends early, asks for more than it needs, and what the next one takes up."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.admin import EngineAdmin
from rollout.part_file import decode_part
from rollout.tasks.task_set import load_tasks
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.conftest import serving
from tests.cluster.plugins import first_number
from tests.commands import run_forked

TASKS = load_tasks("builtin:arithmetic", seed=0, split="train").tasks


def roll_out(cluster: Cluster, engine_url: str, *settings: str) -> None:
    """Two iterations of rollouts on two nodes."""
    phase = ("--rl-phase", "rollout", "--iterations", "2", "--eval-interval", "0")
    codes = cluster.run(2, *FAST, *phase, "--engine-url", engine_url, *settings)
    assert codes == [0, 0], cluster.everything_said()


def opened(cluster: Cluster, iteration: int) -> dict[str, Any]:
    return json.loads(cluster.run_dir.iteration_json(iteration).read_text())


def unused(cluster: Cluster, iteration: int) -> list[int]:
    """Tasks of the slots that the manifest does not name."""
    used = {slot for part in cluster.manifest(iteration)["parts"] for slot in part["slots"]}
    return [task for slot, task in enumerate(opened(cluster, iteration)["tasks"]) if slot not in used]


def test_groups_that_never_end_are_cancelled_after_the_grace_period_and_reported(
    cluster: Cluster, engine_url: str
) -> None:
    finishing = ("rollout.completion_threshold=0.5", "rollout.grace_period_s=2")
    roll_out(cluster, engine_url, "--environment", "tests.cluster.plugins:stuck", *finishing)
    tasks, manifest = opened(cluster, 1)["tasks"], cluster.manifest(1)
    never = {slot for slot, task in enumerate(tasks) if first_number(TASKS[task]) % 4 == 0}
    assert never, "the seed gives no such task: choose another"
    given_up = {entry["slot"]: entry["reason"] for entry in manifest["given_up"]}
    assert set(given_up) == never and all(reason.startswith("cancelled") for reason in given_up.values())
    assert manifest["groups"] == manifest["slots"] - len(never)
    assert "are cancelled: not finished 2 s after" in cluster.everything_said()
    assert cluster.metrics()[0]["given_up"] == len(never)


@pytest.mark.parametrize("rank", [0, 1])
def test_node_none_of_whose_groups_ends_gives_them_up_when_the_others_have_made_theirs(
    cluster: Cluster, engine_url: str, rank: int
) -> None:
    phase = ("--rl-phase", "rollout", "--iterations", "1", "--eval-interval", "0", "--num-nodes", "2")
    phase = (*phase, "--rank-weights", "1,1")  # a node that claims may come too late to get any group
    finishing = ("rollout.completion_threshold=0.25", "rollout.grace_period_s=0.2")
    arguments = (*FAST, *phase, *finishing, "--engine-url", engine_url)
    stuck = ("--environment", "tests.cluster.plugins:stuck_here")
    cluster.start(0, *arguments, *stuck, variables={"STUCK": "1"} if rank == 0 else {})
    cluster.start(1, variables={"STUCK": "1"} if rank == 1 else {})
    assert cluster.wait() == [0, 0], cluster.everything_said()
    given_up = cluster.manifest(1)["given_up"]
    assert given_up and all("of 8 groups were" in entry["reason"] for entry in given_up)


def test_over_sampling_trains_on_the_first_groups_and_begins_the_next_iteration_with_the_others(
    cluster: Cluster, engine_url: str
) -> None:
    # In the second iteration a node may have claimed few slots, most of them of tasks that never end.
    settings = ("rollout.over_sample=2", "rollout.group_timeout_s=20")
    roll_out(cluster, engine_url, "--environment", "tests.cluster.plugins:stuck", *settings)
    manifest, tasks = cluster.manifest(1), opened(cluster, 1)["tasks"]
    assert len(tasks) == 16
    assert (manifest["slots"], manifest["groups"], manifest["given_up"]) == (8, 8, [])
    left = unused(cluster, 1)
    assert len(left) == 8 and opened(cluster, 2)["tasks"][:8] == left
    assert not set(opened(cluster, 2)["tasks"][8:]) & set(tasks), "drawn without replacement"


def test_groups_without_variance_are_replaced_by_further_tasks(cluster: Cluster, engine_url: str) -> None:
    roll_out(
        cluster, engine_url, "--environment", "tests.cluster.plugins:flat", "rollout.dynamic_sampling=true"
    )
    found = cluster.groups(1)
    odd = [slot for slot in found if first_number(TASKS[opened(cluster, 1)["tasks"][slot]]) % 2]
    assert len(odd) == 8
    assert {len({sample.reward for sample in found[slot].samples}) for slot in odd} == {4}
    assert len(found) > 8, "those that were replaced are kept beside them"
    assert opened(cluster, 2)["tasks"][: len(unused(cluster, 1))] == unused(cluster, 1)


def test_sample_whose_reward_raises_costs_no_other(cluster: Cluster, engine_url: str) -> None:
    roll_out(cluster, engine_url, "rollout.reward=tests.cluster.plugins:picky")
    failed = cluster.manifest(1)["failed_samples"]
    whole = sum(len(group.samples) for group in cluster.groups(1).values())
    assert failed > 0 and whole + failed == 8 * 4
    assert cluster.metrics()[0]["failed_samples"] == failed
    assert "ValueError: not that one" in cluster.everything_said()


def test_run_that_has_used_up_its_spare_tasks_resumes_and_says_what_is_short(
    cluster: Cluster, engine_url: str
) -> None:
    phase = ("--rl-phase", "rollout", "--iterations", "1", "--eval-interval", "0")
    reward = ("rollout.reward=tests.cluster.plugins:constant", "--environment", "tests.cluster.plugins:slow")
    spare = ("rollout.dynamic_sampling=true", "rollout.dynamic_limit=2", "rollout.concurrency=4")
    arguments = (*FAST, *phase, *reward, *spare, "--engine-url", engine_url)
    cluster.start(0, *arguments)
    parts = cluster.run_dir.trajectories("train", 1)

    def durable() -> int:
        return sum(len(decode_part(path.read_bytes())[1]) for path in parts.glob("*.safetensors"))

    cluster.until(lambda: durable() > 10, "more groups are durable than can be replaced")
    cluster.kill(0)
    cluster.nodes[0].wait()
    cluster.start(0, *arguments)
    assert cluster.wait() == [0], cluster.everything_said()
    manifest = cluster.manifest(1)
    assert (manifest["slots"], manifest["groups"], manifest["short"]) == (8, 16, 8)
    assert cluster.metrics()[0]["short"] == 8


def test_server_that_another_run_has_given_other_weights_ends_the_rollout(
    cluster: Cluster, random_model: Path, tmp_path: Path
) -> None:
    with serving(random_model, tmp_path / "engine.log") as url:
        phase = ("--rl-phase", "rollout", "--iterations", "1", "--eval-interval", "0")
        slow = ("--environment", "tests.cluster.plugins:slow", "rollout.concurrency=4")
        cluster.start(0, *FAST, *phase, *slow, "rollout.tasks_per_iteration=40", "--engine-url", url)
        parts = cluster.run_dir.trajectories("train", 1)
        cluster.until(lambda: list(parts.glob("*.safetensors")), "a part")
        EngineAdmin(url).reload(random_model, "another run's")
        assert cluster.wait() == [1]
        assert "serves another run's now" in cluster.output(0)
        assert not cluster.run_dir.manifest("train", 1).exists()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (("rollout.dynamic_sampling=true", "rollout.samples_per_task=1"), "rollout.samples_per_task=1"),
        (("rollout.over_sample=0.5",), "rollout.over_sample=0.5: give 1 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_one_line(
    tmp_path: Path, settings: tuple[str, ...], says: str
) -> None:
    ended = run_forked(("--log-path", "run", "--rl-phase", "rollout", *settings), tmp_path, os.environ)
    assert ended.returncode == 2 and says in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
