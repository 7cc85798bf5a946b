"""The probe of a checkpoint: what an engine that has loaded it must compute."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout.engines.model_dir import policy_digest
from rollout.storage.hashing import checksums
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.checkpoint import checkpoint
from trainer.checkpoint.probe import MAX_TOKENS, probe_logprobs, probe_tokens
from trainer.checkpoint.state import StateSaver
from trainer.documents import TrainRequest, TrainResult
from trainer.model.learner import Learner
from trainer.update.step import train

CPU = torch.device("cpu")


def run_phase(
    request: TrainRequest, batch: Batch, save_dtype: str = "float32"
) -> tuple[Learner, TrainResult]:
    settings = request.settings.model_copy(update={"save_dtype": save_dtype})
    request = request.model_copy(update={"settings": settings})
    learner = checkpoint.load(Path(request.base_dir), request.base_policy, CPU, settings)
    steps = len(train(learner, batch, request.settings, max_tokens=32, report=lambda line: None))
    staging_dir = Path(request.staging_dir)
    return learner, checkpoint.write(
        learner, staging_dir, request, steps, {"loss": 0.0}, StateSaver(60), probe=probe_tokens(batch)
    )


def logprobs_of(model_dir: Path, token_ids: list[int]) -> list[float]:
    """By transformers, in float32, from the files."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0, :-1], dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16"])
def test_probe_holds_the_logprobs_of_the_weights_as_they_are_saved(
    batch: Batch, make_request: Callable[..., TrainRequest], save_dtype: str
) -> None:
    request = make_request(batch)
    learner, result = run_phase(request, batch, save_dtype)
    staging_dir = Path(request.staging_dir)
    probe = json.loads((staging_dir / "probe.json").read_bytes())
    first = batch.token_ids[: batch.offsets[1]].tolist()
    assert probe["token_ids"] == first[:-1]
    assert probe["logprobs"] == pytest.approx(logprobs_of(staging_dir, probe["token_ids"]), abs=1e-5)
    assert "probe.json" in result.files
    assert probe["logprobs"] == probe_logprobs(learner, probe["token_ids"]), (
        "what it trains is what is served"
    )
    resumed = checkpoint.load(staging_dir, result.policy, CPU, request.settings)
    for name, parameter in learner.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter)
    (staging_dir / "probe.json").unlink()
    assert policy_digest(checksums(staging_dir)) == result.policy, "it does not enter the digest"


def test_probe_goes_with_its_weights_and_with_no_others(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    empty = build_batch([], manifest_sha256="m", policy="p", temperature=1.0, seed=0)
    first = make_request(batch)
    run_phase(first, batch)
    probe = (Path(first.staging_dir) / "probe.json").read_bytes()
    same = make_request(empty, base=Path(first.staging_dir))
    run_phase(same, empty)
    assert (Path(same.staging_dir) / "probe.json").read_bytes() == probe
    other = make_request(batch, base=Path(first.staging_dir))
    learner = checkpoint.load(Path(other.base_dir), other.base_policy, CPU, other.settings)
    checkpoint.write(learner, Path(other.staging_dir), other, 1, {"loss": 0.0}, StateSaver(60))
    assert not (Path(other.staging_dir) / "probe.json").exists()


@pytest.mark.parametrize(
    ("tokens", "probed"),
    [(2, 0), (3, 2), (MAX_TOKENS, MAX_TOKENS - 1), (MAX_TOKENS + 1, MAX_TOKENS), (500, MAX_TOKENS)],
)
def test_probe_leaves_room_for_a_token_where_the_whole_sequence_had_room(
    batch: Batch, tokens: int, probed: int
) -> None:
    token_ids = np.arange(tokens + 3, dtype=np.int32)
    two = replace(
        batch, token_ids=token_ids, offsets=np.array([0, tokens, tokens + 3]), advantages=np.ones(2)
    )
    assert probe_tokens(two) == list(range(probed))


def test_empty_batch_has_no_probe() -> None:
    assert probe_tokens(build_batch([], manifest_sha256="m", policy="p", temperature=1.0, seed=0)) == []
