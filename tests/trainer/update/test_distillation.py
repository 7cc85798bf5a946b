"""On-policy distillation: the teacher's logprobs reach the loss, token by token, wherever they are laid."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.trajectory import Group
from tests.trainer.conftest import make_group
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import Bundle, fill
from trainer.model import tiny
from trainer.model.learner import Learner, build_learner
from trainer.settings import TrainerSettings
from trainer.update.step import train
from trainer.update.step_stats import StepStats

CPU = torch.device("cpu")


def settings(**more: Any) -> TrainerSettings:
    given = {"algorithm": "distill", "learning_rate": 1e-2, "warmup_steps": 0, "clip_norm": 1e9}
    return TrainerSettings.model_validate({**given, **more})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy and the teacher."""
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("model", "teacher")):
        tiny.build(seed=seed, steps=0, out=directory / name)
    return directory / "model", directory / "teacher"


def made(rewards: tuple[float, ...] = (1.0, 1.0, 0.0)) -> list[Group]:
    rng = np.random.default_rng(0)
    return [make_group(slot, rewards, rng) for slot in range(5)]


def taught(groups: list[Group], teacher: Learner) -> list[Group]:
    """The groups with the teacher's logprobs, each sequence computed alone."""
    batch = batch_of(groups, settings(kl="off", advantage="one"))
    for group in groups:
        for sample in group.samples:
            ids = sample.token_ids.tolist()
            places = zip(batch.offsets, batch.offsets[1:], strict=False)
            (k,) = [k for k, (a, b) in enumerate(places) if batch.token_ids[a:b].tolist() == ids]
            logprobs = teacher.logprobs(fill(batch, [[Bundle([k], int(batch.input_tokens[k]))]]))[0]
            sample.teacher_logprobs = np.zeros(len(ids), np.float32)
            sample.teacher_logprobs[sample.loss_mask == 1] = logprobs.detach().numpy()
    return groups


def batch_of(groups: list[Group], chosen: TrainerSettings) -> Batch:
    about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 3}
    return Batch.decode(build_batch(groups, settings=chosen, **about).encode())


def taken(learner: Learner, batch: Batch, chosen: TrainerSettings) -> list[StepStats]:
    return train(learner, batch, chosen, max_tokens=24, report=lambda _: None)


@pytest.mark.parametrize("tokens", [24, 4096], ids=["many microbatches", "one microbatch"])
@pytest.mark.parametrize("kl_in", ["loss", "token_reward"])
def test_gradient_is_the_same_as_with_the_teacher_as_base_model(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tokens: int, kl_in: str
) -> None:
    """Whose logprobs the trainer computes itself."""
    more: dict[str, Any] = {} if kl_in == "loss" else {"clip": "none"}
    chosen = settings(max_tokens_per_microbatch=tokens, kl_in=kl_in, **more)
    groups = taught(made(), build_learner(models[1], CPU, chosen))
    found: list[torch.Tensor] = []
    monkeypatch.setattr(Learner, "apply", lambda self, *_: found.append(self.gradients.clone()) or 0.0)
    for kl_to in ("teacher", "base"):
        as_given = chosen.model_copy(update={"kl_to": kl_to})
        learner = build_learner(models[0], CPU, as_given)
        if as_given.needs_reference:
            learner.load_reference(models[1], as_given)
        (step,) = taken(learner, batch_of(groups, as_given), as_given)
        assert step.kl_reference > 0.01 and step.grad_norm > 0.01
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


def test_policy_comes_closer_to_its_teacher_whatever_the_rewards(models: tuple[Path, Path]) -> None:
    chosen = settings()
    teacher = build_learner(models[1], CPU, chosen)
    for rewards in ((1.0, 0.0, 0.0), (1.0, 1.0)):
        batch = batch_of(taught(made(rewards), teacher), chosen)
        learner = build_learner(models[0], CPU, chosen)
        distances = [taken(learner, batch, chosen)[0].kl_reference for _ in range(15)]
        assert distances[-1] < 0.5 * distances[0]


def test_samples_without_a_teacher_are_refused(models: tuple[Path, Path]) -> None:
    groups = taught(made(), build_learner(models[1], CPU, settings()))
    groups[1].samples[0] = replace(groups[1].samples[0], teacher_logprobs=None)
    with pytest.raises(ValueError, match=r"1 of 15 samples have no logprobs of a teacher"):
        batch_of(groups, settings())


def test_teacher_that_is_not_needed_costs_the_batch_nothing(models: tuple[Path, Path]) -> None:
    groups = taught(made(), build_learner(models[1], CPU, settings()))
    assert len(batch_of(groups, TrainerSettings()).teacher_logprobs) == 0
