"""Pictures from the embedded engine to the trainer: both compute the same of the same files."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file

from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server import EmbeddedServer
from rollout.environments.environment import single_turn
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.pictures import pictures_in
from rollout.tasks.pictures import TaskPictures
from rollout.tasks.shape_pictures import shape_tasks
from rollout.trajectory import Group, Picture, Sample, unfit
from tests.paths import REPOSITORY
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import Microbatch, Packing, plan_step
from trainer.model import tiny_seeing
from trainer.model.learner import Learner, build_learner
from trainer.model.pictures import PictureFault, RunPictures
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
SAMPLING = Sampling(n=8, max_tokens=12)
SETTINGS = TrainerSettings(learning_rate=1e-3, global_batch_size=64, max_tokens_per_microbatch=256)
TEXT = {"id": "text", "messages": [{"role": "user", "content": "What colour?"}]}


@dataclass
class Seen:
    """A model that sees, tasks, and the groups that the embedded engine has made of them."""

    model: Path
    images: Path
    tasks: list[dict[str, Any]]
    groups: list[list[Sample]]


def asked(
    model: Path, images: Path, tasks: Sequence[dict[str, Any]], sampling: Sampling = SAMPLING
) -> list[Any]:
    """What the engine makes of each task: its samples, or why it refuses it."""

    async def ask() -> list[Any]:
        engine = EmbeddedEngine(model, dtype=torch.float64, max_batch=64)
        engine.start()
        async with (
            TestServer(EmbeddedServer(engine, str(model), "v").app()) as server,
            EngineClient(str(server.make_url("")).rstrip("/"), images=images) as client,
        ):
            work = [
                single_turn(task, Policy(client, sampling, 7 * k), sampling) for k, task in enumerate(tasks)
            ]
            return await asyncio.gather(*work, return_exceptions=True)

    return asyncio.run(ask())


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    directory = tmp_path_factory.mktemp("seen")
    model, images, pictures = directory / "tiny", directory / "images", TaskPictures()
    tiny_seeing.build(0, 0, model)
    tasks = shape_tasks(0, "eval", 4, pictures.take)
    (first, *_), (second, *_) = (task["messages"][0]["content"] for task in tasks[:2])
    both = [{"type": "text", "text": "Which of "}, first, second, {"type": "text", "text": "?"}]
    tasks += [{"id": "two", "messages": [{"role": "system", "content": "Look. "},
                                         {"role": "user", "content": both}]}, TEXT]  # fmt: skip
    for digest in {digest for task in tasks for digest in pictures_in(task["messages"])}:
        pictures.publish(digest, images)
    return Seen(model, images, tasks, asked(model, images, tasks))


def batch_of(groups: Sequence[Sequence[Sample]]) -> Batch:
    for samples in groups:
        for number, sample in enumerate(samples):
            sample.reward = float(number)
            assert unfit(sample, demonstrated=False) is None
    numbered = [Group(slot, str(slot), "", list(samples)) for slot, samples in enumerate(groups)]
    batch = build_batch(numbered, manifest_sha256="", policy="", temperature=1.0, seed=0)
    return Batch.decode(batch.encode())


def learner_of(seen: Seen, settings: TrainerSettings = SETTINGS) -> Learner:
    learner = build_learner(seen.model, CPU, settings)
    learner.see(RunPictures(seen.model, seen.images), share_prompts=True)
    return learner


def microbatches(batch: Batch, packing: Packing) -> list[Microbatch]:
    return plan_step(batch, range(len(batch)), [1.0], 0, SETTINGS.max_tokens_per_microbatch, packing)


@torch.no_grad()
def mismatch(learner: Learner, microbatch: Microbatch) -> float:
    """The largest difference between the trainer's logprobs and the engine's."""
    return float((learner.logprobs(microbatch)[0] - torch.from_numpy(microbatch.engine_logprobs)).abs().max())


def test_samples_list_their_pictures_and_their_expanded_tokens(seen: Seen) -> None:
    first, second = (pictures_in(seen.tasks[k]["messages"])[0] for k in (0, 1))
    for sample in seen.groups[4]:
        begin = len("Look. Which of ")
        assert sample.pictures == [Picture(first, begin, begin + 17), Picture(second, begin + 17, begin + 34)]
        assert set(sample.token_ids[begin : begin + 34]) == {99} and not sample.loss_mask[: begin + 34].any()
    assert not any(sample.pictures for sample in seen.groups[5])


def test_group_of_a_text_with_placeholder_is_refused_with_the_reason(seen: Seen) -> None:
    sly = json.loads(json.dumps(seen.tasks[0]))
    sly["messages"][0]["content"].append({"type": "text", "text": "<image>"})
    gone = json.loads(json.dumps(seen.tasks[0]))
    gone["messages"][0]["content"][0]["image"] = "0" * 64
    for refusal, reason in zip(
        asked(seen.model, seen.images, [sly, gone]),
        ("gives them 2 places", "this picture is missing"),
        strict=True,
    ):
        assert isinstance(refusal, RequestRefused) and reason in str(refusal)


def test_policy_that_writes_a_placeholder_is_computed_as_it_was(seen: Seen) -> None:
    """The engine has embedded the token that was drawn: no picture belongs there."""
    written = [
        sample
        for samples in seen.groups[:4]
        for sample in samples
        if 99 in sample.token_ids[:-1][sample.loss_mask[:-1] == 1]
    ]
    assert written
    (part,) = microbatches(batch_of([[written[0], replace(written[0])]]), Packing())
    assert mismatch(learner_of(seen), part) < 1e-5


def test_two_prompts_that_differ_in_their_pictures_only_are_not_shared(seen: Seen) -> None:
    sample = seen.groups[0][0]
    (shown,) = sample.pictures
    other = replace(shown, digest=seen.groups[1][0].pictures[0].digest)
    twin = replace(sample, pictures=[other])
    learner = learner_of(seen)
    (part,) = microbatches(
        batch_of([[sample, replace(sample)], [twin, replace(twin)]]), Packing(pairs_per_token=768.0)
    )
    assert part.pictures is not None
    assert sorted(digest for digest, _, _ in part.pictures) == sorted([shown.digest, other.digest])
    assert mismatch(learner, part) > 1e-3  # the twins were not made with that picture


def test_missing_altered_or_otherwise_expanded_picture_is_a_fault_with_a_name(
    seen: Seen, tmp_path: Path
) -> None:
    (part, *_) = microbatches(batch_of(seen.groups[:1]), Packing())
    assert part.pictures is not None
    digest, begin, count = part.pictures[0]
    pictures = RunPictures(seen.model, tmp_path)
    with pytest.raises(PictureFault, match=f"{digest}: this picture of the batch is missing"):
        pictures.placed(part)
    (tmp_path / digest).write_bytes(b"other")
    with pytest.raises(PictureFault, match=f"{digest}: this picture has changed"):
        pictures.placed(part)
    with pytest.raises(PictureFault, match="the processor makes 17 tokens of it"):
        RunPictures(seen.model, seen.images).placed(replace(part, pictures=[(digest, begin, count - 1)]))


@pytest.mark.parametrize("freezes", [True, False])
def test_training_moves_tower_and_projector_only_if_asked(seen: Seen, freezes: bool) -> None:
    settings = SETTINGS.model_copy(update={"freeze_vision": freezes})
    learner = learner_of(seen, settings)
    before = {name: value.detach().clone() for name, value in learner.model.named_parameters()}
    (step,) = train(learner, batch_of(seen.groups), settings, max_tokens=12, report=lambda line: None)
    assert step.mismatch_max < 1e-5
    same = {name for name, value in learner.model.named_parameters() if torch.equal(before[name], value)}
    vision = {name for name in before if name.startswith(("model.vision_tower.", "model.multi_modal_proj"))}
    # The layer's output that LLaVA takes comes before it.
    unused = {f"model.vision_tower.post_layernorm.{name}" for name in ("weight", "bias")}
    assert same == (vision if freezes else unused)
    assert learner.parameters.keys() == before.keys() - (vision if freezes else set())


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("freezes", [True, False])
def test_adapters_are_trained_beside_pictures(seen: Seen, freezes: bool) -> None:
    adapters = {"lora": LoraSettings(rank=4), "freeze_vision": freezes}
    settings, batch = SETTINGS.model_copy(update=adapters), batch_of(seen.groups)
    learner = learner_of(seen, settings)
    (step,) = train(learner, batch, settings, max_tokens=12, report=lambda line: None)
    assert step.mismatch_max < 1e-5  # at first they add nothing
    moved = {name for name, value in learner.parameters.items() if ".lora_B." in name and value.any()}
    assert any(".vision_tower." in name for name in moved) is not freezes
    assert any(".language_model." in name for name in moved)


def test_a_rank_without_pictures_takes_part_where_layers_are_sharded(seen: Seen, tmp_path: Path) -> None:
    """Two ranks, one group each; the text's rank has no picture. Else the other one would wait for it."""
    batch = batch_of([seen.groups[0], seen.groups[5]])
    (tmp_path / "batch").write_bytes(batch.encode())
    (tmp_path / "tiny").symlink_to(seen.model)
    (tmp_path / "images").symlink_to(seen.images)
    plain = SETTINGS.model_dump(mode="json") | {"share_prompts": True}
    cases = [
        {
            "name": name,
            "model": "tiny",
            "ranks": 2,
            "rank_weights": [1, 1],
            "settings": plain | {"layout": name},
        }
        for name in ("replicated", "sharded")
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    job = Path(__file__).with_name("layout_job.py")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, str(job), str(tmp_path)], env=environment, timeout=240)
    assert done.returncode == 0
    learner = learner_of(seen)
    train(learner, batch, SETTINGS, max_tokens=12, report=lambda line: None)
    for case in cases:
        theirs = load_file(tmp_path / f"{case['name']}.safetensors")
        for name, value in learner.parameters.items():
            torch.testing.assert_close(theirs[name], value.detach(), atol=2e-5, rtol=0)
