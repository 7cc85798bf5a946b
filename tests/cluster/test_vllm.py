"""Whole runs whose engines are real vLLM servers, on the CPU. `make test-vllm` runs them."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cluster.cluster import FAST, Cluster
from tests.cluster.faults import children, durable_parts, lost_groups, repeated_groups, unsound_manifests
from tests.cluster.intruder import NOBODY, gets_in, offered_by, spools
from tests.cluster.weights import worst_logprob
from tests.engines.engines import ONE_THREAD, VLLM_ARGS, Reference
from trainer.model import tiny

SETTINGS = (
    *FAST,
    "--engine",
    "vllm",
    *(f"engine.args.{name}={json.dumps(value)}" for name, value in VLLM_ARGS.items()),
    "eval.max_tasks=2",
    "trainer.threads_per_process=1",
)
# vLLM renames its processes, which would overwrite the environment by which a cluster knows its own.
ENVIRONMENT = ["env", "SPT_NOENV=1", *(f"{name}={value}" for name, value in ONE_THREAD.items())]
PROCESSES = {"the API server": "-m vllm.entrypoints.", "the engine core": "VLLM::EngineCore"}
"""What is in the command lines of a server's processes."""
LONGEST_S = 600.0
pytestmark = pytest.mark.timeout(2 * LONGEST_S)


def engine_logs(cluster: Cluster, rank: int) -> int:
    """How many servers a node has started."""
    return len(list(cluster.run_dir.logs(rank).glob("engine.*.log")))


def test_two_nodes_train_and_their_engines_serve_what_was_trained(cluster: Cluster) -> None:
    words = ("--num-nodes", "2", "--rank-weights", "1,1")  # else a node that is slow to start gets no group
    cluster.start(0, *words, "--iterations", "2", *SETTINGS, prefix=ENVIRONMENT)
    cluster.start(1, prefix=ENVIRONMENT)
    assert cluster.wait(LONGEST_S) == [0, 0], cluster.everything_said()
    lines = cluster.metrics()
    assert [line["iteration"] for line in lines] == [1, 2]
    assert all(line["loss"] is not None and line["kl_engine"] < 1e-8 for line in lines)
    for iteration in (1, 2):
        groups = cluster.groups(iteration)
        assert sorted(groups) == list(range(8)) and not cluster.manifest(iteration)["given_up"]
        assert {len(group.samples) for group in groups.values()} == {4}
    assert {entry["rank"] for entry in cluster.manifest(2)["parts"]} == {0, 1}

    trained = json.loads((cluster.run_dir.checkpoint(1) / "result.json").read_text())["policy"]
    assert cluster.manifest(2)["policy"] == trained != cluster.manifest(1)["policy"]
    assert [engine_logs(cluster, rank) for rank in (0, 1)] == [1, 1], "new weights without a restart"
    after, before = Reference(cluster.run_dir.checkpoint(1)), Reference(cluster.run_dir.base_model)
    assert worst_logprob(cluster, 2, after) < 1e-4 < worst_logprob(cluster, 2, before)


def test_updates_of_a_model_in_bfloat16_are_not_lost_in_its_engine(cluster: Cluster, tmp_path: Path) -> None:
    tiny.build(0, 0, tmp_path / "exact")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exact", dtype=torch.bfloat16)
    shutil.copytree(tmp_path / "exact", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    given = [word for word in SETTINGS if word not in ('engine.args.dtype="float32"', FAST[0])]
    steps = ("trainer.learning_rate=3e-4", "trainer.warmup_steps=0", "--eval-interval", "0")
    words = ("--model", str(tmp_path / "model"), "--tasks", "builtin:arithmetic", "--iterations", "2", *steps)
    cluster.start(0, *words, *given, prefix=ENVIRONMENT)
    assert cluster.wait(LONGEST_S) == [0], cluster.everything_said()
    assert [line["iteration"] for line in cluster.metrics() if line["kl_engine"] < 1e-8] == [1, 2]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_tasks_that_show_pictures_are_answered_by_what_was_trained_on_them(cluster: Cluster) -> None:
    words = ("--tasks", "builtin:shapes", "--iterations", "2", "trainer.learning_rate=1e-3")
    words = (*words, "trainer.freeze_vision=false", "--eval-interval", "0")
    cluster.start(0, *words, *SETTINGS, prefix=ENVIRONMENT)
    assert cluster.wait(LONGEST_S) == [0], cluster.everything_said()
    assert engine_logs(cluster, 0) == 1 and "changes tensors" not in cluster.output(0)
    for iteration in (1, 2):
        assert not cluster.manifest(iteration)["given_up"]
        metrics = json.loads((cluster.run_dir.checkpoint(iteration) / "result.json").read_text())["metrics"]
        assert metrics["mismatch_max"] < 1e-4 and metrics["grad_norm"] > 0
        samples = [sample for group in cluster.groups(iteration).values() for sample in group.samples]
        assert len(samples) == 32 and {len(sample.pictures) for sample in samples} == {1}
    assert cluster.manifest(2)["policy"] != cluster.manifest(1)["policy"]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_are_served_beside_the_base_model_that_stays_in_the_engine(cluster: Cluster) -> None:
    adapters = ("trainer.lora.rank=4", "trainer.learning_rate=0.01", "trainer.warmup_steps=0")
    cluster.start(0, "--iterations", "2", *SETTINGS, *adapters, "--eval-interval", "0", prefix=ENVIRONMENT)
    assert cluster.wait(LONGEST_S) == [0], cluster.everything_said()
    assert all(line["kl_engine"] < 1e-8 for line in cluster.metrics())
    assert engine_logs(cluster, 0) == 1, "new adapters without a restart"
    trained = cluster.run_dir.checkpoint(1)
    assert cluster.manifest(2)["policy"] == json.loads((trained / "result.json").read_text())["policy"]
    assert [path.name for path in trained.glob("*.safetensors")] == ["adapter_model.safetensors"]
    after, before = Reference(trained), Reference(cluster.run_dir.base_model)
    assert worst_logprob(cluster, 2, after) < 1e-4 < 1e-2 < worst_logprob(cluster, 2, before)


def test_server_of_which_a_process_is_killed_is_started_again_and_nothing_is_lost(cluster: Cluster) -> None:
    slow = ["rollout.environment=tests.cluster.plugins:slow", "rollout.concurrency=4"]
    cluster.start(0, "--iterations", "2", *SETTINGS, *slow, prefix=[*ENVIRONMENT, "SLOW_S=1.5"])
    for iteration, victim in enumerate(PROCESSES, 1):
        directory = cluster.run_dir.trajectories("train", iteration)
        cluster.until(lambda d=directory: list(d.glob("*.safetensors")), "the first part", LONGEST_S)
        kept = durable_parts(cluster.run_dir)
        (process,) = children(cluster.nodes[0].pid, PROCESSES[victim])
        process.kill()
        cluster.until(lambda n=iteration: len(cluster.metrics()) == n, f"iteration {iteration}", LONGEST_S)
        assert engine_logs(cluster, 0) == iteration + 1
        assert lost_groups(cluster.run_dir, kept) == []
    assert cluster.wait(60.0) == [0], cluster.everything_said()
    assert repeated_groups(cluster.run_dir) == unsound_manifests(cluster.run_dir) == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_of_the_machine_gets_into_no_socket_and_no_file(cluster: Cluster) -> None:
    slow = ["rollout.environment=tests.cluster.plugins:slow", "rollout.concurrency=4", "--iterations", "9"]
    cluster.start(0, *SETTINGS, *slow, prefix=[*ENVIRONMENT, "SLOW_S=1.5"])
    directory = cluster.run_dir.trajectories("train", 1)
    cluster.until(lambda: list(directory.glob("*.safetensors")), "the first part", LONGEST_S)
    pid = cluster.nodes[0].pid
    files, sockets, ports = offered_by([pid], spools(pid))
    assert any("engine-1.sock" in path for path in sockets) and {ip for ip, _port in ports} <= {"127.0.0.1"}
    assert all("/flagpost-" in path for path in sockets), "the sockets between its processes too"
    assert gets_in(NOBODY, (files, sockets, ports)) == []
    assert any("engine-1.sock" in str(path) for path in gets_in(0, ([], sockets, []))), "the try itself works"
    cluster.kill(0, signal.SIGINT)
    assert cluster.wait(LONGEST_S) == [130], cluster.everything_said()
