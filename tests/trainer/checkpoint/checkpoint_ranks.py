"""The ranks of test_checkpoint_ranks.py: jobs of several sizes and layouts, one after the other.

Argument: a directory, which holds one request for each of the first three iterations, which follow each
other; the first process group has 3 ranks. The ranks are forked, which saves importing torch in each.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rollout.engines.model_dir import policy_digest
from rollout.storage.hashing import FileFacts, checksums
from trainer.batch.batch import Batch
from trainer.checkpoint import checkpoint, hub_files, state
from trainer.checkpoint.probe import probe_tokens
from trainer.checkpoint.retrain import CheckpointError
from trainer.checkpoint.state import StateSaver
from trainer.documents import Resume, SavedState, TrainedBatch, TrainRequest, TrainResult
from trainer.model.learner import Learner
from trainer.resume import plan_resume, saves_in_background
from trainer.update.step import train

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
NODES = [0, 0, 1]
"""The node of each rank of the uninterrupted run."""


def forked(ranks: int) -> int:
    """Return the number of a rank in each process of one; this one ends when they have."""
    started: list[int] = []
    for number in range(ranks):
        if (pid := os.fork()) == 0:
            return number
        started.append(pid)
    sys.exit(any([os.waitpid(pid, 0)[1] for pid in started]))


rank, root = forked(len(NODES)), Path(sys.argv[1])
requests = [TrainRequest.from_json((root / f"request_{k}.json").read_bytes()) for k in (1, 2, 3)]
batches = {
    request.iteration: TrainedBatch(
        iteration=request.iteration,
        policy="",
        batch_file=request.batch_file,
        batch_sha256=request.batch_sha256,
        settings=request.settings.model_copy(update={"save_interval": 3}),
        max_tokens=32,
    )
    for request in requests
}
expected: dict[int, dict[str, torch.Tensor]] = {}
"""Iteration -> the weights of the run that is never interrupted, and its first moments."""


def in_job(name: str, ranks: int, story: Callable[[], None]) -> None:
    """Let the first `ranks` processes live through `story` together, in a process group of their own."""
    if rank < ranks:
        if ranks > 1:
            dist.init_process_group("gloo", f"file://{root}/store_{name}", rank=rank, world_size=ranks)
        story()
        if ranks > 1:
            dist.destroy_process_group()


def with_layout(
    request: TrainRequest, layout: str, base: Path, staging: str, **changes: object
) -> TrainRequest:
    """The request of another job, which starts from `base`."""
    staging_dir = root / staging
    if rank == 0:
        staging_dir.mkdir()
    settings = request.settings.model_copy(update={"layout": layout, **changes})
    is_due = saves_in_background(request.iteration, settings.state_interval)
    facts = {
        "settings": settings,
        "base_dir": str(base),
        "base_policy": policy_digest(checksums(base)),
        "staging_dir": str(staging_dir),
        "state_dir": str(root / f"state_{request.iteration}") if is_due else None,
    }
    return request.model_copy(update=facts)


def load(request: TrainRequest, resume: Resume = checkpoint.AT_HAND) -> Learner:
    def repeat(learner: Learner, batch: TrainedBatch) -> None:
        train_on(learner, request, Path(batch.batch_file))

    base_dir = Path(request.base_dir)
    model_dir = Path(requests[0].base_dir)
    return checkpoint.load(
        base_dir, request.base_policy, CPU, request.settings, resume, repeat, model_dir=model_dir
    )


def train_on(learner: Learner, request: TrainRequest, batch_file: Path) -> Batch:
    batch = Batch.decode(batch_file.read_bytes())
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    train(
        learner,
        batch,
        request.settings,
        max_tokens=32,
        rank_weights=(1.0,) * ranks,
        report=lambda line: None,
    )
    return batch


def run(learner: Learner, request: TrainRequest, saver: StateSaver) -> TrainResult:
    """Train and write."""
    batch = train_on(learner, request, Path(request.batch_file))
    staging_dir = Path(request.staging_dir)
    metrics = {"loss": 0.0}

    def copied(found: Mapping[str, FileFacts] | None) -> None:
        is_early = "result.json" not in os.listdir(staging_dir)
        said = {"files": found, "is_early": is_early}
        (root / f"copied_{request.iteration}.{rank}.json").write_text(json.dumps(said))

    return checkpoint.write(
        learner, staging_dir, request, 3, metrics, saver, probe=probe_tokens(batch), copied=copied
    )


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    def whole(value: torch.Tensor) -> torch.Tensor:
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()

    moments = {
        f"exp_avg.{name}": whole(learner.optimizer.state[value]["exp_avg"])
        for name, value in learner.parameters.items()
    }
    return {name: whole(value) for name, value in learner.parameters.items()} | moments


def compare(learner: Learner, iteration: int, claim: str) -> None:
    """Write down how far the weights are from those of the uninterrupted run."""
    now = weights(learner)
    far = max(float((now[name] - value).abs().max()) for name, value in expected[iteration].items())
    if rank == 0:
        (root / "claims").mkdir(exist_ok=True)
        (root / "claims" / f"{claim}.json").write_text(json.dumps(far))


def uninterrupted() -> None:
    """Three sharded ranks; iteration 1 writes its state with the checkpoint, 2 in the background, 3 none."""
    saver = StateSaver(TIMEOUT_S)
    learner = None
    base = Path(requests[0].base_dir)
    for request, interval in zip(requests, (1, 2, 2), strict=True):
        asked = with_layout(request, "sharded", base, f"main_{request.iteration}", save_interval=interval)
        asked = asked.model_copy(update={"delta": True})
        if request.iteration > 1:  # two ranks on the first node, one on the second, which wants a copy later
            node, os.environ["LOCAL_RANK"] = NODES[rank], str(rank - NODES.index(NODES[rank]))
            os.environ["LOCAL_WORLD_SIZE"] = str(NODES.count(node))
            copy_dir = root / f"copy_{request.iteration}.{node}"
            copy_dir.mkdir(exist_ok=True)
            wanted = node == 0 or request.iteration == 2
            asked = asked.model_copy(update={"ahead": True, "copy_dir": str(copy_dir) if wanted else None})
        if rank == 0 and interval > 1:
            (root / f"state_{request.iteration}").mkdir()
        learner = load(asked) if learner is None else learner
        saver.finish()
        result = run(learner, asked, saver)
        base = Path(asked.staging_dir)
        in_file = TrainResult.from_json((base / "result.json").read_bytes())
        for document in (result, in_file):  # each rank measures its own
            assert document.metrics.pop("checkpoint_seconds") > 0
        assert result == in_file, "whole on every rank"
        expected[request.iteration] = weights(learner)
    saver.finish()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def go_on(layout: str, staging: str, base: str, iteration: int = 2) -> Callable[[], None]:
    """An iteration from a checkpoint of the one before, in another layout."""

    def story() -> None:
        asked = with_layout(requests[iteration - 1], layout, root / base, staging)
        learner = load(asked)
        run(learner, asked, StateSaver(TIMEOUT_S))
        compare(learner, iteration, staging)

    return story


def back_again() -> None:
    """Iteration 3, on three sharded ranks again, from what one replicated rank has written."""
    asked = with_layout(requests[2], "sharded", root / "alone_2", "back_3")
    learner = load(asked)
    run(learner, asked, StateSaver(TIMEOUT_S))
    compare(learner, 3, "back_3")


def repeats_what_has_no_state() -> None:
    """The weights of iteration 3 have no state: two ranks continue that of iteration 2."""
    asked = with_layout(requests[2], "sharded", root / "main_3", "repeated_3", save_interval=2)
    directory = root / "state_2"
    saved = SavedState.from_json((directory / "state.json").read_bytes())
    known = {k: batch.model_copy(update={"policy": saved.policy}) for k, batch in batches.items()}
    states = {str(directory): saved}
    resume = plan_resume(3, asked.base_policy, states, known, known.get)
    assert [batch.iteration for batch in resume.repeat] == [3]
    compare(load(asked, resume), 3, "repeated_3")
    start = plan_resume(3, asked.base_policy, {}, known, known.get)
    assert start.from_start and [batch.iteration for batch in start.repeat] == [1, 2, 3]
    compare(load(asked, start), 3, "from_start")
    wrong = resume.model_copy(update={"repeat": (batches[1], batches[1], batches[1])})
    try:
        load(asked, wrong)
    except CheckpointError as error:
        if rank == 0:
            (root / "claims" / "refusal.txt").write_text(str(error))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    hub_files.WHOLE_BYTES = state.WHOLE_BYTES = 0  # also a tiny model is written by all
    hub_files.WORTH = 2.0  # in few steps at a high learning rate, hardly a number stays
    in_job("three", 3, uninterrupted)
    in_job("two", 2, go_on("sharded", "two_2", "main_1"))
    in_job("copies", 2, go_on("replicated", "copies_2", "main_1"))
    in_job("alone", 1, go_on("replicated", "alone_2", "main_1"))
    in_job("hybrid", 2, go_on("hybrid", "hybrid_2", "main_1"))
    in_job("after_hybrid", 1, go_on("replicated", "after_hybrid_3", "hybrid_2", 3))
    in_job("back", 3, back_again)
    in_job("repeat", 2, repeats_what_has_no_state)
