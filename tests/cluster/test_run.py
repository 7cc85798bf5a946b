"""Whole runs of real node processes."""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory import published
from coordinator.directory.file_names import Record
from coordinator.protocol.records import EpochRecord
from tests.cluster.cluster import FAST, Cluster, token_ids


def test_one_node_trains_and_a_second_start_resumes(cluster: Cluster) -> None:
    assert cluster.run(1, *FAST, "--iterations", "2") == [0]
    lines = cluster.metrics()
    assert [line["iteration"] for line in lines] == [1, 2]
    assert lines[0]["eval_reward"] is not None and lines[1]["eval_reward"] is None
    assert all(line["loss"] is not None and line["samples"] == 32 for line in lines)
    assert "step 1/" in cluster.output(0)
    assert "[rank 0] model     builtin:tiny, 0.341 M parameters\n" in cluster.output(0)
    assert "; iterations 1 to 2\n" in cluster.output(0)
    first = cluster.run_dir.checkpoint(1).joinpath("result.json").read_text()

    assert cluster.run(1, *FAST, "--iterations", "3") == [0]
    assert [line["iteration"] for line in cluster.metrics()] == [1, 2, 3]
    assert "; iteration 3\n" in cluster.output(0)
    assert cluster.run_dir.checkpoint(1).joinpath("result.json").read_text() == first
    assert cluster.run_dir.latest.read_text() == "iteration_000003\n"
    result = json.loads(cluster.run_dir.checkpoint(3).joinpath("result.json").read_text())
    steps = [
        json.loads(cluster.run_dir.checkpoint(i).joinpath("result.json").read_text())["steps"] for i in (1, 2)
    ]
    assert result["optimizer_step"] == sum(steps) + result["steps"]

    assert cluster.run(1, *FAST, "--iterations", "3") == [0], "nothing left to do is success"
    assert len(cluster.metrics()) == 3

    status = json.loads(cluster.command("status", "--json"))
    assert (status["state"], status["iteration"], status["num_nodes"]) == ("finished", 3, 1)
    assert status["last_metrics"]["iteration"] == 3

    model = AutoModelForCausalLM.from_pretrained(cluster.run_dir.checkpoint(3))
    tokens = AutoTokenizer.from_pretrained(cluster.run_dir.checkpoint(3))("12+34=", return_tensors="pt")
    with torch.no_grad():
        assert torch.isfinite(model(tokens["input_ids"]).logits).all()


def test_three_nodes_train_together_and_may_differ_in_processes(cluster: Cluster, tmp_path: Path) -> None:
    tasks = [{"id": f"t{n}", "prompt": f"{n + 10}+{n + 20}=", "answer": "1"} for n in range(16)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    arguments = (*FAST, "--rank-weights", "2,1,1", "--iterations", "2", "trainer.keep_alive=false")
    cluster.start(0, "--num-nodes", "3", *arguments, "--tasks", str(tmp_path / "tasks.jsonl"))
    cluster.start(1, "trainer.processes_per_node=2")
    cluster.start(2)
    assert cluster.wait() == [0, 0, 0], cluster.everything_said()
    record = EpochRecord.model_validate_json(cluster.run_dir.entry(Record(2)).read_bytes())
    assert [member.processes for member in record.members.values()] == [1, 2, 1]
    manifest = cluster.manifest(1)
    shares = {rank: 0 for rank in range(3)}
    for part in manifest["parts"]:
        shares[part["rank"]] += len(part["slots"])
    assert shares == {0: 4, 1: 2, 2: 2}
    assert (manifest["slots"], manifest["groups"], manifest["samples"]) == (8, 8, 32)
    assert manifest["given_up"] == []
    taken = [group.task_id for number in (1, 2) for group in cluster.groups(number).values()]
    assert sorted(taken) == sorted(task["id"] for task in tasks), "each once"
    lines = cluster.metrics()
    assert [line["iteration"] for line in lines] == [1, 2]
    assert set(lines[0]["wait_seconds"]) == {"0", "1", "2"}
    base = json.loads(cluster.run_dir.checkpoint(2).joinpath("result.json").read_text())["base_policy"]
    assert base == json.loads(cluster.run_dir.checkpoint(1).joinpath("result.json").read_text())["policy"]


def test_one_policy_makes_the_same_samples_in_segments_and_at_once(
    tmp_path: Path, cache: Path, engine_url: str
) -> None:
    """Two nodes pass samples of eight tokens on to each other, three tokens an iteration. What is evaluated
    is the same too, from one node and from two.
    """
    found: list[dict[tuple[int, int], list[list[int]]]] = []
    evaluated: list[dict[int, list[list[int]]]] = []
    for nodes, segment in ((1, "null"), (2, "3")):
        logs = tmp_path / segment
        logs.mkdir()
        cluster = Cluster(logs / "run", cache, logs)
        options = (*FAST, "--rl-phase", "rollout", "--engine-url", engine_url)
        options += ("rollout.max_tokens=8", f"rollout.segment_tokens={segment}")
        try:
            codes = cluster.run(nodes, *options, "--iterations", "4")
            assert codes == [0] * nodes, cluster.everything_said()
            evaluated.append(token_ids(cluster.groups(1, "eval")))
            found.append({})
            for iteration in range(1, 5):
                opened = published.read_json(cluster.run_dir.iteration_json(iteration)) or {}
                begun = BegunGroup.all_of(opened)
                for slot, group in cluster.groups(iteration).items():
                    first = (iteration, slot - len(begun))
                    if slot < len(begun):
                        first = (begun[slot].iteration, begun[slot].slot)
                    if not group.is_unfinished:
                        assert first not in found[-1]
                        found[-1] |= {first: [sample.token_ids.tolist() for sample in group.samples]}
        finally:
            cluster.close()
    uncut, cut = found
    assert evaluated[0] == evaluated[1] and len(evaluated[0]) == 4
    assert [uncut[1, slot] for slot in range(8)] != [uncut[2, slot] for slot in range(8)]
    assert len(uncut) == 32 and {first: uncut[first] for first in cut} == cut
    assert {(iteration, slot) for iteration in (1, 2) for slot in range(8)} <= cut.keys()


def test_rollout_and_update_are_halves_of_an_iteration(cluster: Cluster, engine_url: str) -> None:
    rollout = ("--rl-phase", "rollout", "--engine-url", engine_url, *FAST)
    assert cluster.run(2, *rollout, "--rollout-split", "eval-only", "--iterations", "1") == [0, 0]
    assert cluster.manifest(1, "eval")["groups"] == 4
    assert not cluster.run_dir.manifest("train", 1).exists()

    cold = ("--rollout-split", "train-only", "--iterations", "2", "rollout.temperature=0.6")
    assert cluster.run(2, *rollout, *cold) == [0, 0]
    assert cluster.manifest(1)["groups"] == cluster.manifest(2)["groups"] == 8
    assert not cluster.run_dir.manifest("eval", 2).exists()
    assert not list(cluster.run_dir.checkpoints.glob("iteration_*"))

    update = ("--rl-phase", "update", *FAST, "--iterations", "1", "rollout.temperature=1.6")
    assert cluster.run(2, *update) == [0, 0], cluster.everything_said()
    assert cluster.metrics()[-1]["kl_engine"] < 1e-3, "trained at the temperature that it was sampled at"
    assert cluster.run_dir.checkpoint(1).is_dir()
    assert [line["kind"] for line in cluster.metrics()] == ["eval", "rollout", "rollout", "update"]
    assert not list(cluster.run_dir.logs(0).glob("engine.*.log")), "an update needs no engine"


def test_update_without_trajectories_says_what_to_run(cluster: Cluster) -> None:
    update = ("--rl-phase", "update", *FAST)
    assert cluster.run(1, *update, "--iterations", "1") == [2] and not cluster.root.exists()
    assert "--rl-phase rollout" in cluster.output(0).splitlines()[-1]
    assert cluster.run(1, "--rl-phase", "rollout", *FAST, "--iterations", "1") == [0]
    assert cluster.run(1, *update, "--iterations", "2") == [1]
    assert "iteration 2 has no trajectories" in cluster.output(0).splitlines()[-1]
