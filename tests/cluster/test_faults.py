"""What ends a run early: how fast, with which exit code and words, and what a second start makes of it."""

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import FAST, Cluster, token_ids
from tests.cluster.faults import AGENT, COLLECTOR, children, durable_parts, lost_groups, repeated_groups

QUICK = (
    "cluster.node_timeout_s=4",
    "rollout.environment=tests.cluster.plugins:slow",
    "rollout.concurrency=4",
)
"""Losses are found in seconds, and a rollout lasts long enough to be hit."""


def parts(cluster: Cluster, rank: int) -> list[Path]:
    return sorted(cluster.run_dir.trajectories("train", 1).glob(f"r{rank:04d}.*.safetensors"))


def start_rollout(
    cluster: Cluster, engine_url: str, nodes: int, policy: str = "abort", **variables: str
) -> tuple[str, ...]:
    """Start a rollout that can be hit, and wait until its last rank has published a part."""
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    arguments = ("--num-nodes", str(nodes), *arguments, "--on-node-failure", policy)
    # A node that is slow to start would claim nothing.
    arguments += ("rollout.tasks_per_iteration=24", "--rank-weights", ",".join("1" * nodes))
    cluster.start(0, *arguments, variables=variables)
    for rank in range(1, nodes):
        cluster.start(rank, variables=variables)
    cluster.until(lambda: parts(cluster, nodes - 1), "the first part")
    return arguments


@pytest.fixture(scope="module")
def calm(cache: Path, engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The token ids of such a rollout that nothing happens to, by slot."""
    logs = tmp_path_factory.mktemp("calm")
    cluster = Cluster(logs / "run", cache, logs)
    options = ("--rl-phase", "rollout", "--iterations", "1", "--eval-interval", "0")
    try:
        codes = cluster.run(1, *FAST, *options, "--engine-url", engine_url, "rollout.tasks_per_iteration=24")
        assert codes == [0], cluster.everything_said()
        return token_ids(cluster.groups(1))
    finally:
        cluster.close()


def test_killed_worker_ends_all_and_a_restart_generates_only_the_rest(
    cluster: Cluster, engine_url: str, calm: dict[int, Any]
) -> None:
    arguments = start_rollout(cluster, engine_url, 3)
    cluster.kill(2)
    assert cluster.wait() == [3, 3, -signal.SIGKILL]
    for rank in (0, 1):
        last = cluster.output(rank).splitlines()[-1]
        assert re.search(
            r"rank 2 \(.+; last seen in train_rollout, iteration 1, \d+/\d+\) is lost: its process died", last
        ), last
        assert "To resume: run --master --log-path" in last and "and run --worker RANK --log-path" in last
    kept = {
        path.name: path.read_bytes()
        for path in cluster.run_dir.trajectories("train", 1).glob("*.safetensors")
    }
    assert kept

    cluster.start(0, *arguments)
    for rank in (1, 2):
        cluster.start(rank)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    entries = cluster.manifest(1)["parts"]
    assert {entry["file"] for entry in entries} >= set(kept), "finished groups count"
    assert sorted(slot for entry in entries for slot in entry["slots"]) == list(range(24))
    for name, data in kept.items():
        assert (cluster.run_dir.trajectories("train", 1) / name).read_bytes() == data
    assert token_ids(cluster.groups(1)) == calm


def test_terminated_worker_is_lost_at_once(cluster: Cluster, engine_url: str) -> None:
    start_rollout(cluster, engine_url, 2)
    cluster.kill(1, signal.SIGTERM)
    assert cluster.wait(120) == [3, 130]
    assert "interrupted by SIGTERM" in cluster.output(0).splitlines()[-1], "it is not its silence that tells"


def test_killed_agent_of_a_trainer_is_another_attempt(cluster: Cluster) -> None:
    arguments = (*FAST, "--num-nodes", "2", "--iterations", "12", "--eval-interval", "0")
    cluster.start(0, *arguments, "trainer.max_attempts=2")
    cluster.start(1)
    cluster.until(lambda: len(cluster.metrics()) >= 1, "the first iteration", 120)
    (agent,) = children(cluster.nodes[1].pid, AGENT)
    agent.kill()
    assert cluster.wait(120) == [0, 0], cluster.everything_said()
    failures = [line for line in cluster.output(0).splitlines() if "rank 1" in line]
    # A job that is between two iterations has taken no attempt of one yet.
    where = ("attempt 2 of 2", "the training job ended between iterations")
    assert any("failed in training" in line and any(map(line.__contains__, where)) for line in failures), (
        failures
    )
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, 13))


def test_run_holds_for_a_killed_worker_and_goes_on_with_it(cluster: Cluster, engine_url: str) -> None:
    start_rollout(cluster, engine_url, 3, "wait")
    cluster.kill(2)
    cluster.nodes[2].wait()
    for rank in (0, 1):
        cluster.until(lambda rank=rank: "is lost" in cluster.output(rank), f"rank {rank} says who is lost")
    assert "run --worker 2 --log-path" in cluster.output(1)

    def holds() -> bool:
        status = json.loads(cluster.command("status", "--json"))
        told = (status["state"], status["iteration"], status["waiting_for"], status["nodes"][2]["state"])
        return told == ("holding", 1, [2], "left")

    cluster.until(holds, "status says where it holds, and who is waited for")
    finished = durable_parts(cluster.run_dir)
    assert not cluster.run_dir.manifest("train", 1).exists(), "the rollout was still going on"
    cluster.start(2)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    assert lost_groups(cluster.run_dir, finished) == repeated_groups(cluster.run_dir) == []
    assert sorted(cluster.groups(1)) == list(range(24))
    line = cluster.metrics()[0]
    assert line["seconds"] >= sum(line["phase_seconds"].values()) + 1, "it holds the interruption"


def test_run_goes_on_without_the_killed_and_the_stopped_and_takes_both_in_again(cluster: Cluster) -> None:
    arguments = (*FAST, *QUICK, "--num-nodes", "3", "--iterations", "10", "--eval-interval", "0")
    cluster.start(0, *arguments, "--on-node-failure", "shrink")
    for rank in (1, 2):
        cluster.start(rank)
    cluster.until(cluster.metrics, "the first iteration", 120)
    cluster.kill(1, signal.SIGSTOP)
    cluster.kill(2)
    cluster.nodes[2].wait()
    cluster.until(lambda: [*cluster.metrics()[-1]["wait_seconds"]] == ["0"], "an iteration without both")
    cluster.kill(1, signal.SIGCONT)
    cluster.start(2)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    assert set(cluster.metrics()[-1]["wait_seconds"]) == {"0", "1", "2"}
    assert [line["iteration"] for line in cluster.metrics()] == list(range(1, 11))
    for iteration in range(1, 11):
        assert sorted(cluster.groups(iteration)) == list(range(8))


def test_hold_ends_after_rejoin_timeout(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--engine-url", engine_url, "--num-nodes", "2")
    cluster.start(0, *arguments, "--iterations", "4000", "--rejoin-timeout", "5", "--rank-weights", "1,1")
    cluster.start(1)
    cluster.until(lambda: parts(cluster, 1), "the first part")
    cluster.kill(0)
    assert cluster.wait(120) == [-signal.SIGKILL, 3], cluster.everything_said()
    assert "rank 0" in cluster.output(1).splitlines()[-1]


def test_newest_process_of_a_rank_wins(cluster: Cluster, engine_url: str) -> None:
    # Each group takes the old processes so long that none has done its share when a newer one has started.
    arguments = start_rollout(cluster, engine_url, 2, SLOW_S="3")
    old = dict(cluster.nodes)
    cluster.start(1)
    assert old[1].wait(120) == 4
    assert "was taken over by incarnation 2" in cluster.output(1)
    cluster.start(0, *arguments)
    assert old[0].wait(120) == 4
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert sorted(cluster.groups(1)) == list(range(24))


def test_killed_parent_takes_its_nodes_and_their_engines_along(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--engine-url", engine_url, "--num-nodes", "2")
    parent = cluster.start(0, *arguments, "rollout.tasks_per_iteration=500", role=["local"])
    cluster.until(lambda: parts(cluster, 1), "the first part")
    parent.kill()
    parent.wait()
    cluster.until(lambda: not cluster.left_behind(), "the end of all processes", 60)


def test_damaged_part_is_made_again_even_under_a_manifest(cluster: Cluster, engine_url: str) -> None:
    rollout = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "1")
    assert cluster.run(1, *rollout) == [0]
    whole = token_ids(cluster.groups(1))
    part = parts(cluster, 0)[0]
    data = bytearray(part.read_bytes())
    data[-5] ^= 1
    part.write_bytes(data)
    assert cluster.run(1, "--rl-phase", "both") == [0], cluster.everything_said()
    assert part.with_suffix(".damaged").exists()
    assert token_ids(cluster.groups(1)) == whole


def test_iteration_whose_checkpoint_is_damaged_is_trained_again(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, "--eval-interval", "0", "--engine-url", engine_url)
    assert cluster.run(1, *arguments, "--iterations", "2") == [0]
    before = json.loads((cluster.run_dir.checkpoint(2) / "result.json").read_text())["policy"]
    weights = cluster.run_dir.checkpoint(2) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert cluster.run(1, *arguments, "--iterations", "3") == [0], cluster.everything_said()
    assert "DAMAGED CHECKPOINT" in cluster.output(0)
    assert "iteration 2 is trained again" in cluster.output(0)
    base = json.loads((cluster.run_dir.checkpoint(3) / "result.json").read_text())["base_policy"]
    assert base == before, "no update was left out"
    assert [line["iteration"] for line in cluster.metrics()] == [1, 2, 3]


THIRDS = ("trainer.processes_per_node=3", "trainer.tensor_parallel_size=3")
"""A layout that the built-in model cannot have: it has four heads."""


def test_training_that_would_fail_in_the_same_way_is_not_tried_again(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*FAST, "--iterations", "1", "--eval-interval", "0", "--engine-url", engine_url)
    assert cluster.run(1, *arguments, *THIRDS) == [1], cluster.everything_said()
    assert "trainer.model.parallel.LayoutError: " in cluster.output(0).splitlines()[-1]
    assert "attempt 2" not in cluster.output(0)
    assert len(list(cluster.run_dir.logs(0).glob("trainer.*.log"))) == 1


def test_second_signal_ends_a_node_whose_user_code_hangs(cluster: Cluster, engine_url: str) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url)
    cluster.start(0, *arguments, "rollout.reward=tests.cluster.plugins:blocking", variables={"BLOCKS": "1"})
    cluster.until(lambda: "blocking now" in cluster.output(0), "the reward is called")
    # Again and again: two at once may be one to a process that does not run just then.
    cluster.until(lambda: cluster.kill(0, signal.SIGINT) or cluster.nodes[0].poll() is not None, "its end")
    assert cluster.wait() == [-signal.SIGINT]


def test_interrupt_of_the_master_ends_all_although_user_code_blocks_a_collector(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url, "--num-nodes", "2")
    arguments += ("rollout.reward=tests.cluster.plugins:blocking", "--iterations", "1")
    for rank in (0, 1):
        variables = {} if rank else {"BLOCKS": "all"}
        cluster.start(rank, *arguments if rank == 0 else (), variables=variables)
    cluster.until(lambda: "blocking now" in cluster.output(0), "the reward is called")
    cluster.kill(0, signal.SIGINT)
    assert cluster.wait(120) == [130, 130], cluster.everything_said()
    assert "the collector of this node did not stop for" in cluster.output(0)
    assert "interrupted by SIGINT" in cluster.output(1).splitlines()[-1]
    cluster.start(0, *arguments)
    cluster.start(1)
    assert cluster.wait() == [0, 0], cluster.everything_said()


def test_killed_collector_costs_what_it_had_in_flight(
    cluster: Cluster, engine_url: str, calm: dict[int, Any]
) -> None:
    arguments = (*FAST, *QUICK, "--rl-phase", "rollout", "--iterations", "1", "--engine-url", engine_url)
    arguments += ("--eval-interval", "0", "rollout.tasks_per_iteration=24")
    cluster.start(0, *arguments)
    cluster.until(lambda: parts(cluster, 0), "the first part")
    (collector,) = children(cluster.nodes[0].pid, COLLECTOR)
    collector.kill()
    assert cluster.wait() == [0], cluster.everything_said()
    assert "the collector of this node ended with exit status -9" in cluster.output(0)
    assert token_ids(cluster.groups(1)) == calm


def test_group_whose_environment_ends_its_process_is_given_up_alone(
    cluster: Cluster, engine_url: str, tmp_path: Path
) -> None:
    lines = [{"prompt": f"{k}+1=", "answer": f"{k + 1}", "ends": k == 5} for k in range(8)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, lines)))
    arguments = (*FAST, "--rl-phase", "rollout", "--iterations", "1", "--engine-url", engine_url)
    arguments += ("--tasks", str(tmp_path / "tasks.jsonl"), "--eval-interval", "0")
    environment = "rollout.environment=tests.cluster.plugins:ending"
    assert cluster.run(1, *arguments, environment) == [0], cluster.everything_said()
    given_up = {slot: group.given_up for slot, group in cluster.groups(1).items() if group.given_up}
    assert len(given_up) == 1 and "ended with exit status 3" in str(*given_up.values())
    assert "code of an environment or a reward has ended its process" in cluster.everything_said()
    assert len(cluster.groups(1)) == 8


def test_error_on_one_node_ends_all_with_its_words_and_can_be_mended(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--iterations", "1", "--engine-url", engine_url)
    assert cluster.run(2, *arguments, "rollout.reward=tests.cluster.plugins:broken") == [1, 1]
    for rank in (0, 1):
        last = cluster.output(rank).splitlines()[-1]
        words = r"rank [01] \(.+\) failed in train_rollout, iteration 1: .*this reward is broken"
        assert re.search(words, last), last
    assert cluster.run(2, *arguments) == [0, 0], cluster.everything_said()
    assert cluster.manifest(1)["groups"] == 8


def test_failing_run_says_why_whatever_user_code_does_to_its_process(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--iterations", "1", "--engine-url", engine_url)
    reward = "rollout.reward=tests.cluster.plugins:muting"
    assert cluster.run(1, *arguments, reward) == [1], cluster.everything_said()
    assert "all 8 groups were given up" in cluster.output(0).splitlines()[-1]


def test_worker_that_beats_but_makes_no_progress_is_lost_and_replaced(
    cluster: Cluster, engine_url: str
) -> None:
    arguments = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url, "--iterations", "2")
    arguments += ("rollout.reward=tests.cluster.plugins:blocking", "rollout.stall_timeout_s=3")
    arguments += ("engine.start_timeout_s=5",)  # which is added to the limit
    cluster.start(0, *arguments, "--num-nodes", "2", "cluster.node_timeout_s=4")
    stuck = cluster.start(1, variables={"BLOCKS": "1"})
    cluster.until(lambda: "has made no progress for" in cluster.output(0), "the master finds it stuck", 60)
    assert "run --worker 1 --log-path" in cluster.output(0)
    cluster.start(1)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert stuck.wait(30) == 4
    for iteration in (1, 2):
        assert sorted(cluster.groups(iteration)) == list(range(8))
