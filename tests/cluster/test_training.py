"""What is trained, and what a restart makes of it, in whole runs of real nodes."""

import http.client
import json
import math
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from filelock import FileLock

from coordinator.machine.network import LOOPBACK
from rollout.engines.admin import EngineAdmin
from rollout.engines.model_dir import policy_digest
from rollout.part_file import decode_part
from rollout.storage.hashing import checksums
from tests.cluster.cluster import FAST, Cluster
from tests.cluster.small_run import SETTINGS
from tests.cluster.weights import farthest, worst_logprob
from tests.coordinator.journal.test_tracker_feed import events
from tests.engines.engines import Reference
from trainer.checkpoint.merge import merge

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

ITERATIONS = 7
SLOW = "rollout.environment=tests.cluster.plugins:slow"
SCHEDULE = "trainer.schedule=cosine"
"""A training that is repeated takes the place in the schedule that it had."""


def two_nodes(cluster: Cluster, engine_urls: list[str], *more: str, slow_s: float = 0.0) -> None:
    """Start a small run of ITERATIONS iterations; `more` is for the master."""
    nodes = ("--num-nodes", "2", "--iterations", str(ITERATIONS))
    settings = (*nodes, *SETTINGS, "eval.interval=0", SLOW, SCHEDULE)
    for rank, url in enumerate(engine_urls):
        arguments = () if rank else (*settings, *more)
        cluster.start(rank, *arguments, "--engine-url", url, variables={"SLOW_S": str(slow_s)})


def result(cluster: Cluster, iteration: int) -> dict[str, Any]:
    return json.loads((cluster.run_dir.checkpoint(iteration) / "result.json").read_text())


def trainers_said(cluster: Cluster) -> str:
    return "".join(path.read_text() for path in sorted(cluster.run_dir.logs(0).glob("trainer.*.log")))


@pytest.fixture(scope="module")
def calm(cache: Path, engine_urls: list[str]) -> Cluster:
    """A run that nothing happens to: every rank holds the whole model, every checkpoint its trainer state.
    Made once for all workers of the test session.
    """
    directory = cache / "calm"
    cluster = Cluster(directory / "run", cache, directory)
    with FileLock(cache / "calm.lock"):
        if len(cluster.metrics()) < ITERATIONS:
            directory.mkdir()
            try:
                two_nodes(cluster, engine_urls, "trainer.layout=replicated")
                assert cluster.wait() == [0, 0], cluster.everything_said()
            finally:
                cluster.close()
    return cluster


def test_nodes_killed_between_trainer_states_repeat_their_steps_and_end_with_the_same_weights(
    cluster: Cluster, engine_urls: list[str], calm: Cluster
) -> None:
    settings = ("trainer.save_interval=2", "checkpoints.keep_last=2", "metrics.sinks=tensorboard")
    states = cluster.run_dir.trainer_states
    for iteration in (2, 3, 6):  # before the first trainer state, in the midst of it, and after others
        two_nodes(cluster, engine_urls, *settings, slow_s=1.0)
        begun = cluster.run_dir.trajectories("train", iteration)
        cluster.until(begun.is_dir, f"the beginning of iteration {iteration}", 120)
        for rank in (0, 1):
            cluster.kill(rank)
            cluster.nodes[rank].wait()
        assert not cluster.run_dir.checkpoint(iteration).exists(), "the nodes were killed too late"
        for document in states.glob("iteration_000002.*/state.json") if iteration == 3 else ():
            document.unlink()  # as if they had been killed before it was written
    assert [*states.glob("iteration_000003.*/state.json")], "it was saved in place of the one before"

    two_nodes(cluster, engine_urls, *settings)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    repeated = re.findall(r"training again on iteration (\d)", trainers_said(cluster))
    assert repeated == ["1", "1", "2", "5"]
    assert farthest(cluster.run_dir.checkpoint(ITERATIONS), calm.run_dir.checkpoint(ITERATIONS)) < 1e-7
    assert result(cluster, ITERATIONS)["optimizer_step"] == result(calm, ITERATIONS)["optimizer_step"]

    lines = cluster.metrics()
    assert [line["iteration"] for line in lines] == list(range(1, ITERATIONS + 1))
    assert [line["lr"] for line in lines] == [line["lr"] for line in calm.metrics()]
    curve = dict(events(cluster.root)["loss"])
    assert set(curve) >= {3, 4, 5, 6, 7}, "from the last line before the kill on"
    assert curve == {n: pytest.approx(lines[n - 1]["loss"], abs=1e-6) for n in curve}
    complete = sorted(path.parent.name[:16] for path in states.glob("*/state.json"))
    assert complete == ["iteration_000004", "iteration_000006"] and len(list(states.iterdir())) == 2
    kept = sorted(path.name for path in cluster.run_dir.checkpoints.glob("iteration_*"))
    assert kept == ["iteration_000006", "iteration_000007"]


def test_sharded_model_is_trained_to_the_same_weights_as_a_replicated_one(
    cluster: Cluster, engine_urls: list[str], calm: Cluster
) -> None:
    two_nodes(cluster, engine_urls, "trainer.layout=sharded")
    assert cluster.wait() == [0, 0], cluster.everything_said()
    last = cluster.run_dir.checkpoint(ITERATIONS)
    states = {path.name for path in (last / "trainer_state").glob("*.safetensors")}
    assert states == {f"state-0000{rank}-of-00002.safetensors" for rank in (1, 2)}, (
        "each rank wrote its share"
    )
    assert farthest(last, calm.run_dir.checkpoint(ITERATIONS)) < 1e-5
    assert farthest(last, cluster.run_dir.base_model) > 1e-3, "and they have come far"


def test_samples_are_of_the_policy_of_so_many_iterations_before(cluster: Cluster, engine_url: str) -> None:
    """Beyond that, training goes on as ever; a restart in the middle takes the same policies."""
    options = (*FAST, "--eval-interval", "1", "--engine-url", engine_url, "--max-async-level", "1")
    options += ("trainer.warmup_steps=0", "trainer.learning_rate=0.01", "checkpoints.keep_last=4")
    cluster.start(0, *options, "--iterations", "4")
    cluster.until(lambda: len(cluster.metrics()) >= 2, "iteration 2", 120)
    cluster.kill(0)
    cluster.nodes[0].wait()
    assert cluster.run(1, *options, "--iterations", "4") == [0], cluster.output(0)

    lines = cluster.metrics()
    assert [line["policy_iteration"] for line in lines] == [0, 0, 1, 2]
    assert [line["age"] for line in lines] == [line["age_max"] for line in lines] == [0, 1, 1, 1]
    assert lines[0]["effective_samples"] > 0.999 > max(line["effective_samples"] for line in lines[1:])
    made = {number: result(cluster, number) for number in (1, 2, 3, 4)}
    for iteration in (3, 4):
        policies = {cluster.manifest(iteration, kind)["policy"] for kind in ("train", "eval")}
        assert policies == {made[iteration - 2]["policy"]}
        assert made[iteration]["base_policy"] == made[iteration - 1]["policy"]


def test_samples_in_segments_are_trained_once_they_have_ended(cluster: Cluster, engine_url: str) -> None:
    """A node that is killed goes on with what it has begun."""
    options = (*FAST, "--eval-interval", "0", "--engine-url", engine_url, "trainer.learning_rate=0.01")
    options += (
        "rollout.max_tokens=3",
        "rollout.segment_tokens=1",
        "trainer.warmup_steps=0",
        "checkpoints.keep_last=4",
    )
    cluster.start(0, *options, "--iterations", "4")
    cluster.until(lambda: len(cluster.metrics()) >= 2, "iteration 2", 120)
    cluster.kill(0)
    cluster.nodes[0].wait()
    assert cluster.run(1, *options, "--iterations", "4") == [0], cluster.output(0)

    lines = cluster.metrics()
    assert [line["samples"] for line in lines] == [0, 0, 32, 32]
    assert [line["unfinished"] for line in lines] == [8, 16, 16, 16]
    assert [line["age_max"] for line in lines[2:]] == [2, 2]
    assert all(0 < line["age"] < 2 for line in lines[2:])
    for iteration in (3, 4):
        for group in cluster.groups(iteration).values():
            for span in (span for sample in group.samples for span in sample.spans):
                assert span.policy_iteration == span.iteration - 1 and span.end - span.begin == 1
    made = {iteration: result(cluster, iteration)["policy"] for iteration in (1, 2, 3)}
    assert made[1] == made[2] == cluster.manifest(1)["policy"] != made[3], "nothing had ended before"


def test_adapters_are_served_resumed_sharded_and_exported(cluster: Cluster, tmp_path: Path) -> None:
    adapters = (*FAST, SLOW, "--eval-interval", "0", "trainer.warmup_steps=0", "trainer.learning_rate=0.01")
    rank = "trainer.lora.rank=4"
    cluster.start(0, *adapters, rank, "--iterations", "3")
    cluster.until(cluster.metrics, "iteration 1", 120)
    cluster.kill(0)
    cluster.nodes[0].wait()
    assert not cluster.run_dir.checkpoint(3).exists()
    sharded = ("trainer.layout=sharded", "trainer.processes_per_node=2")
    assert cluster.run(1, *adapters, rank, "--iterations", "3", *sharded) == [0], cluster.output(0)

    lines, base = cluster.metrics(), cluster.run_dir.base_model
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert all(line["kl_engine"] < 1e-8 for line in lines)
    steps = [result(cluster, iteration)["steps"] for iteration in (1, 2, 3)]
    assert min(steps) > 0 and result(cluster, 3)["optimizer_step"] == sum(steps)
    assert "fresh optimizer" not in trainers_said(cluster)
    assert cluster.manifest(1)["policy"] == policy_digest(checksums(base)), "the base is what it was"
    before = Reference(base)
    for iteration in (1, 2, 3):
        checkpoint = cluster.run_dir.checkpoint(iteration)
        assert [path.name for path in checkpoint.glob("*.safetensors")] == ["adapter_model.safetensors"]
        if iteration < 3:
            assert cluster.manifest(iteration + 1)["policy"] == result(cluster, iteration)["policy"]
            after = Reference(checkpoint)
            assert worst_logprob(cluster, iteration + 1, after) < 1e-4
            assert worst_logprob(cluster, iteration + 1, before) > 1e-2

    exported = tmp_path / "exported"
    cluster.command("export", "--iteration", "3", "-o", str(exported))
    probe = json.loads((cluster.run_dir.checkpoint(3) / "probe.json").read_text())
    assert Reference(exported).logprobs(probe["token_ids"]) == pytest.approx(probe["logprobs"], abs=1e-4)
    merge(cluster.run_dir.checkpoint(3), tmp_path / "merged")
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    merged = Reference(tmp_path / "merged")
    assert merged.logprobs(probe["token_ids"]) == pytest.approx(probe["logprobs"], abs=1e-4)
    scored = cluster.command("eval", "--checkpoint", "3", "eval.max_tasks=4", "--json")
    assert json.loads(scored)["sets"]["eval"]["tasks"] == 4

    said = len(cluster.output(0).splitlines())
    assert cluster.run(1, *adapters, "trainer.lora.rank=8", "--iterations", "4") == [2]
    [line] = cluster.output(0).splitlines()[said:]
    assert "trainer.lora is rank=8" in line and "was started with rank=4" in line


@contextmanager
def recorded(engine_url: str) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """An address that hands on to an engine, and what has been posted there: paths and bodies."""
    posted: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._hand_on(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            posted.append((self.path, json.loads(body or b"{}")))
            self._hand_on(body)

        def _hand_on(self, body: bytes) -> None:
            engine = http.client.HTTPConnection(urlsplit(engine_url).netloc, timeout=60)
            engine.request(self.command, self.path, body, {"Content-Type": "application/json"})
            answer = engine.getresponse()
            data = answer.read()
            engine.close()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # a connection that does not fit is tried again only after a second

    with Server((LOOPBACK, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{LOOPBACK}:{server.server_port}", posted
        finally:
            server.shutdown()


def test_fine_tuning_learns_the_answers_of_a_task_file_and_generates_nothing_but_evaluations(
    cluster: Cluster, tmp_path: Path, engine_urls: list[str]
) -> None:
    sums = [(12, 34), (56, 78), (90, 12), (37, 45), (61, 22), (84, 59), (29, 73), (48, 16)]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        "".join(json.dumps({"prompt": f"{a}+{b}=", "answer": f"{a + b}"}) + "\n" for a, b in sums)
    )
    with recorded(engine_urls[0]) as (url, posted):
        codes = cluster.run(
            1, *FAST, "--tasks", str(tasks), "--eval-tasks", str(tasks), "--engine-url", url,
            "trainer.algorithm=sft", "rollout.samples_per_task=1", "rollout.reward=exact",
            "rollout.tasks_per_iteration=64", "trainer.global_batch_size=8", "trainer.learning_rate=0.002",
            "--iterations", "5", "eval.interval=4", "eval.max_tasks=8",
        )  # fmt: skip
    assert codes == [0], cluster.everything_said()
    lines = cluster.metrics()
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"], [line["loss"] for line in lines]
    assert [line["iteration"] for line in lines if line["eval_reward"] is not None] == [1, 5]
    assert lines[0]["eval_reward"] < 0.2 and lines[-1]["eval_reward"] > 0.8, "it knows them by heart now"
    paths = [path for path, _ in posted]
    generated = [
        body for path, body in posted if path.endswith("/completions") and "prompt_logprobs" not in body
    ]
    assert sorted(body["prompt"] for body in generated) == sorted([f"{a}+{b}=" for a, b in sums] * 2)
    assert "/tokenize" not in paths, "text becomes tokens without the engine"


def test_preferences_are_learnt_by_two_nodes_that_start_no_engine(cluster: Cluster, tmp_path: Path) -> None:
    """The built-in model puts its answers in brackets; it learns to leave them out, from written answers."""
    sums = [(a, b) for a in range(10, 100, 7) for b in range(11, 100, 5)]
    tasks = tmp_path / "tasks.jsonl"
    with tasks.open("w") as file:
        for a, b in sums:
            answer = str(a + b)[::-1]
            file.write(
                json.dumps({"prompt": f"{a}+{b}=", "chosen": answer, "rejected": f"({answer})"}) + "\n"
            )
    codes = cluster.run(
        2, *FAST, "--tasks", str(tasks), "trainer.algorithm=dpo", "rollout.tasks_per_iteration=64",
        "trainer.global_batch_size=31", "trainer.learning_rate=0.003", "--iterations", "3",
        "engine.start_timeout_s=0.1",
    )  # fmt: skip
    assert codes == [0, 0], cluster.everything_said()
    lines = cluster.metrics()
    assert [(line["samples"], line["reward"]) for line in lines] == [(128, 0.5)] * 3
    assert lines[0]["loss"] < math.log(2), "it falls within the first iteration"
    assert lines[-1]["preferred"] > 0.95 and lines[-1]["margin"] > lines[0]["margin"] > 0
    for rank in (0, 1):
        logs = [path.name for path in cluster.run_dir.logs(rank).iterdir()]
        assert logs and not [name for name in logs if name.startswith("engine")], logs


def test_two_nodes_train_on_what_a_teacher_says_of_their_samples(
    cluster: Cluster, engine_urls: list[str]
) -> None:
    """The teacher is another random model than the policy begins as."""
    codes = cluster.run(
        2, *FAST, "trainer.algorithm=distill", f"rollout.teacher={engine_urls[0]}/v1", "rollout.seed=5",
        "--iterations", "2", "--rank-weights", "1,1",  # else a node that is busy may claim nothing
    )  # fmt: skip
    assert codes == [0, 0], cluster.everything_said()
    assert all(line["kl_reference"] > 0.01 and line["grad_norm"] > 0 for line in cluster.metrics())
    paths = sorted(cluster.run_dir.trajectories("train", 2).glob("*.safetensors"))
    groups = [group for path in paths for group in decode_part(path.read_bytes())[1]]
    assert len({path.name[:5] for path in paths}) == 2 and len(groups) == 8
    teacher = EngineAdmin(engine_urls[0])
    for sample in groups[0].samples:
        expected = np.array([0.0, *teacher.prompt_logprobs(sample.token_ids.tolist())])
        assert sample.teacher_logprobs == pytest.approx(expected * sample.loss_mask, abs=1e-5)
