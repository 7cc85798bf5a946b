"""The code and the name of a reward change while an iteration is open: real nodes, and files of a user."""

import time
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.cluster import FAST, Cluster

SLOWLY = (
    *FAST,
    "rollout.concurrency=4",  # a group at a time
    "rollout.tasks_per_iteration=8",
    "cluster.node_timeout_s=4",
    "--environment",
    "tests.cluster.plugins:slow",
    "--rl-phase",
    "rollout",
    "--eval-interval",
    "0",
)


def write_rewards(directory: Path, value: str) -> Sequence[str]:
    """A module of rewards, and what a node is started with to find it."""
    directory.mkdir(exist_ok=True)
    text = f"async def score(task, completion):\n    return {value}\n\n\nasync def other(task, completion):\n"
    (directory / "my_rewards.py").write_text(f"{text}    return 10 + {value}\n")
    # Without bytecode: an edit within a second, of the same size, would not be seen.
    return ("env", f"PYTHONPATH={directory}", "PYTHONDONTWRITEBYTECODE=1")


def until_some_are_finished(cluster: Cluster) -> None:
    cluster.until(lambda: list(cluster.run_dir.trajectories("train", 1).glob("*.safetensors")), "a part")


def scores(cluster: Cluster, iteration: int) -> set[float | None]:
    return {sample.reward for group in cluster.groups(iteration).values() for sample in group.samples}


def test_open_iteration_whose_code_has_changed_waits_for_a_decision(
    cluster: Cluster, engine_url: str, tmp_path: Path
) -> None:
    given = (*SLOWLY, "--engine-url", engine_url, "rollout.reward=my_rewards:score", "--iterations", "1")

    # Nothing was finished with a reward that always raises: it is repaired, and the same command goes on.
    prefix = write_rewards(tmp_path / "code", "1 / 0")
    cluster.start(0, *given, prefix=prefix)
    assert cluster.wait() == [1]
    write_rewards(tmp_path / "code", "1.0")
    cluster.start(0, *given, prefix=prefix)
    until_some_are_finished(cluster)
    cluster.kill(0)
    cluster.wait()
    cluster.until(lambda: not cluster.left_behind(), "its reaper's word")

    write_rewards(tmp_path / "code", "2.5")
    before = sorted(path.name for path in cluster.root.rglob("*"))
    cluster.start(0, *given, prefix=prefix)
    assert cluster.wait() == [2]
    said = cluster.output(0).splitlines()[-1]
    assert "the code of --reward my_rewards:score has changed (digest " in said, said
    assert (
        "add --accept-code-change" in said and f"run cleanup --iteration 1 --log-path {cluster.root}" in said
    )
    assert sorted(path.name for path in cluster.root.rglob("*")) == before

    cluster.start(0, *given, "--accept-code-change", prefix=prefix)
    assert cluster.wait() == [0], cluster.everything_said()
    assert scores(cluster, 1) == {1.0, 2.5}, "finished groups keep their scores"
    manifest = cluster.manifest(1)
    digests = [part["reward_digest"] for part in manifest["parts"]]
    assert len(set(digests)) == 2 and manifest["origin"]["reward"]["digest"] == digests[0]
    rescored = sum(group.samples[0].reward == 2.5 for group in cluster.groups(1).values())
    assert cluster.metrics()[0]["mixed_code"] == manifest["mixed_code"] == rescored > 0

    # A finished iteration binds nobody.
    write_rewards(tmp_path / "code", "3.75")
    cluster.start(0, *given, "--iterations", "2", prefix=prefix)
    assert cluster.wait() == [0], cluster.everything_said()
    assert scores(cluster, 2) == {3.75} and cluster.metrics()[1]["mixed_code"] == 0


def test_all_nodes_score_with_the_reward_of_the_master(
    cluster: Cluster, engine_url: str, tmp_path: Path
) -> None:
    prefix, engine = write_rewards(tmp_path / "code", "1.0"), ("--engine-url", engine_url)
    given = ("--num-nodes", "2", "--rank-weights", "1,1", "--iterations", "2", *SLOWLY, *engine)
    cluster.start(0, *given, "rollout.reward=my_rewards:score", prefix=prefix)

    # A worker with another file of the same name ends before it takes part; the master goes on waiting.
    other = write_rewards(tmp_path / "older", "2.5")
    assert cluster.start(1, *engine, prefix=other).wait(120) == 2
    said = cluster.output(1).splitlines()[-1]
    assert "--reward my_rewards:score is not the same on " in said and said.count("(digest ") == 2, said
    assert "the master's host" in said

    cluster.start(1, *engine, prefix=prefix)
    until_some_are_finished(cluster)
    cluster.kill(0)
    cluster.nodes[0].wait()
    cluster.until(lambda: "; to bring it back, on that machine" in cluster.output(1), "the worker to hold")
    time.sleep(0.5)
    cluster.start(0, *given, "rollout.reward=my_rewards:other", prefix=prefix)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert (scores(cluster, 1), scores(cluster, 2)) == ({1.0}, {11.0})
    assert {part["rank"] for part in cluster.manifest(2)["parts"]} == {0, 1}
    assert "iteration 1 is finished as it was begun: --reward=my_rewards:score" in cluster.output(0)
