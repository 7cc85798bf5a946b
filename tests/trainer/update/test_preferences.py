"""Preferences (DPO, KTO): the loss and its gradient are the paper's, however samples are laid into
microbatches.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollout.trajectory import Group, Picture, Sample
from tests.models import make_model
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.batch.packing import Bundle, fill
from trainer.model.learner import Learner, build_learner
from trainer.settings import TrainerSettings
from trainer.update.preferences import with_shifted_answers
from trainer.update.step import train
from trainer.update.step_stats import StepStats

CPU = torch.device("cpu")
PAIRS = 6
BETA = 0.4


def settings(**more: Any) -> TrainerSettings:
    given = {
        "algorithm": "dpo",
        "pair_beta": BETA,
        "learning_rate": 1e-3,
        "warmup_steps": 0,
        "clip_norm": 1e9,
    }
    return TrainerSettings.model_validate({**given, **more})


def sample(rng: np.random.Generator, prompt: list[int], reward: float) -> Sample:
    answer = rng.integers(5, 15, size=rng.integers(1, 9)).tolist()
    mask = np.array([0] * len(prompt) + [1] * len(answer), np.uint8)
    logprobs = np.where(mask == 1, np.nan, 0).astype(np.float32)
    return Sample(np.array(prompt + answer, np.int32), mask, logprobs, "stop", "", reward)


def batch_of(chosen: TrainerSettings, rewards: tuple[float, ...] = (1.0, 0.0)) -> Batch:
    rng = np.random.default_rng(0)
    groups = []
    for slot in range(PAIRS):
        prompt = rng.integers(5, 15, size=3).tolist()
        groups.append(Group(slot, str(slot), "", [sample(rng, prompt, reward) for reward in rewards]))
    about: dict[str, Any] = {"manifest_sha256": "", "policy": "", "temperature": 1.0, "seed": 3}
    return build_batch(groups, settings=chosen, **about)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The policy and the reference."""
    directory = tmp_path_factory.mktemp("models")
    return make_model(directory / "model", seed=0), make_model(directory / "reference", seed=1)


def learner_of(models: tuple[Path, Path], chosen: TrainerSettings) -> Learner:
    learner = build_learner(models[0], CPU, chosen)
    learner.load_reference(models[1], chosen)
    return learner


def taken(learner: Learner, batch: Batch, chosen: TrainerSettings) -> list[StepStats]:
    return train(learner, batch, chosen, max_tokens=24, report=lambda _: None)


def margins(learner: Learner, batch: Batch) -> torch.Tensor:
    """(pairs,) by the paper's formula, each sequence computed alone."""
    total = torch.zeros(int(batch.groups.max()) + 1, dtype=torch.float64)
    for k, tokens in enumerate(batch.input_tokens.tolist()):
        alone = fill(batch, [[Bundle([k], tokens)]])
        log_ratio = learner.logprobs(alone)[0] - learner.reference_logprobs(alone)
        total[batch.groups[k]] = total[batch.groups[k]] + BETA * float(batch.advantages[k]) * log_ratio.sum()
    return total


def test_answers_behind_another_prompt_have_neither_routes_nor_pictures_of_their_own() -> None:
    batch = batch_of(settings(algorithm="kto"))
    tokens, sequences = len(batch.token_ids), len(batch)
    prompts, lengths = batch.prompt_tokens, batch.lengths()
    long = int(np.argmax(lengths - prompts))
    pictures = [[Picture("a", 0, 2)] for _ in range(sequences)]
    pictures[long].append(Picture("b", int(lengths[long]) - 1, int(lengths[long])))
    given = replace(
        batch,
        teacher_logprobs=np.zeros(tokens, np.float32),
        token_advantages=np.ones(tokens, np.float32),
        routes=np.arange(4 * tokens, dtype=np.int16),
        pictures=pictures,
    )
    given.check()
    moved = with_shifted_answers(given, [range(sequences)])
    moved.check()
    assert not len(moved.routes)
    assert all(shown == [Picture("a", 0, 2)] for shown in moved.pictures)
    behind = (long + 1) % sequences
    assert moved.lengths()[behind] <= prompts[behind] + lengths[long] - prompts[long] - 1


@pytest.mark.parametrize("tokens", [16, 4096], ids=["a sequence a microbatch", "one microbatch"])
def test_gradient_is_that_of_dpos_loss(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    chosen = settings(max_tokens_per_microbatch=tokens)
    batch, learner = batch_of(chosen), learner_of(models, chosen)
    loss = -torch.nn.functional.logsigmoid(margins(learner, batch)).mean()
    parameters = list(learner.parameters.values())
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    found: list[torch.Tensor] = []
    monkeypatch.setattr(Learner, "apply", lambda self, *_: found.append(self.gradients.clone()) or 0.0)
    (step,) = taken(learner, batch, chosen)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3
    own = margins(learner, batch).detach()
    assert step.loss == pytest.approx(loss.item(), rel=1e-5)
    assert (step.margin, step.preferred) == pytest.approx(
        (float(own.mean()), float((own > 0).double().mean()))
    )


def test_each_step_weighs_its_pairs_by_the_policy_as_it_then_is(models: tuple[Path, Path]) -> None:
    """With an odd batch size, which pairs are not cut at."""
    chosen = settings(global_batch_size=5)
    batch, learner = batch_of(chosen), learner_of(models, chosen)
    other = learner_of(models, chosen)
    steps = taken(learner, batch, chosen)
    assert len(steps) == PAIRS // 2
    for k, step in enumerate(steps):
        sequences = slice(4 * k, 4 * k + 4)
        assert sorted(np.bincount(batch.groups[sequences]).tolist())[-2:] == [2, 2], "pairs stay together"
        own = margins(other, batch)[np.unique(batch.groups[sequences])].detach()
        assert step.margin == pytest.approx(float(own.mean()), rel=1e-4)
        taken(other, _only(batch, sequences), chosen)
    for one, two in zip(learner.parameters.values(), other.parameters.values(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def _only(batch: Batch, sequences: slice) -> Batch:
    """The batch of some of its sequences."""
    tokens = slice(int(batch.offsets[sequences.start]), int(batch.offsets[sequences.stop]))
    of_tokens = {
        name: getattr(batch, name)[tokens] for name in ("token_ids", "loss_mask", "logprobs", "ages")
    }
    names = ("advantages", "rewards", "slots", "groups", "temperatures")
    of_sequences = {name: getattr(batch, name)[sequences] for name in names}
    offsets = batch.offsets[sequences.start : sequences.stop + 1] - tokens.start
    about: dict[str, Any] = {
        name: getattr(batch, name) for name in ("counts", "manifest_sha256", "policy", "seed")
    }
    return Batch(offsets=offsets, **of_tokens, **of_sequences, **about)


def test_training_prefers_the_better_samples(models: tuple[Path, Path]) -> None:
    chosen = settings()
    batch, learner = batch_of(chosen), learner_of((models[0], models[0]), chosen)
    first = taken(learner, batch, chosen)[0]
    assert (first.loss, first.margin, first.preferred) == pytest.approx((np.log(2), 0.0, 0.0), abs=1e-5)
    for _ in range(20):
        last = taken(learner, batch, chosen)[0]
    assert last.preferred == 1 and last.loss < 0.5


def test_best_and_worst_of_a_sampled_group_are_its_pair() -> None:
    batch = batch_of(settings(), rewards=(0.5, 2.0, -1.0, 2.0))
    assert len(batch) == 2 * PAIRS
    assert batch.rewards.tolist() == [2.0 if a > 0 else -1.0 for a in batch.advantages]
    assert np.bincount(batch.groups).tolist() == [2] * PAIRS


def test_group_of_equal_rewards_has_no_pair() -> None:
    assert len(batch_of(settings(), rewards=(1.0, 1.0))) == 0


def test_pair_of_which_one_is_not_trained_is_left_out() -> None:
    assert len(batch_of(settings(reward_threshold=0.5))) == 0


def test_flat_groups_cannot_count() -> None:
    with pytest.raises(ValueError, match=r"keep_flat_groups=true with trainer\.advantage=pair"):
        settings(keep_flat_groups=True)
    with pytest.raises(ValueError, match=r"entropy_bonus=0\.1 with trainer\.advantage=pair"):
        TrainerSettings(algorithm="dpo", entropy_bonus=0.1)


def answers_behind(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """The prompt and the answer of each sequence."""
    parts = zip(np.split(batch.token_ids, batch.offsets[1:-1]), batch.prompt_tokens, strict=True)
    return [(tokens[:prompt].tolist(), tokens[prompt:].tolist()) for tokens, prompt in parts]


def test_each_answer_stands_behind_the_next_prompt_of_its_step() -> None:
    batch = batch_of(settings(algorithm="kto"))
    own, other = (
        answers_behind(batch),
        answers_behind(with_shifted_answers(batch, [range(0, 5), range(5, 12)])),
    )
    longest = max(len(prompt) + len(answer) for prompt, answer in own)
    for k, (prompt, answer) in enumerate(other):
        before = {0: 4, 5: 11}.get(k, k - 1)
        assert (prompt, answer) == (own[k][0], own[before][1][: longest - len(prompt)])


@pytest.mark.parametrize("tokens", [16, 4096], ids=["a sequence a microbatch", "one microbatch"])
def test_gradient_is_that_of_ktos_loss(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    chosen = settings(algorithm="kto", max_tokens_per_microbatch=tokens, undesirable_weight=1.5)
    batch, learner = batch_of(chosen), learner_of(models, chosen)

    def log_ratios(batch: Batch) -> torch.Tensor:
        """(S,) each sequence computed alone."""
        alone = [fill(batch, [[Bundle([k], n)]]) for k, n in enumerate(batch.input_tokens.tolist())]
        return torch.stack([(learner.logprobs(m)[0] - learner.reference_logprobs(m)).sum() for m in alone])

    distance = log_ratios(with_shifted_answers(batch, [range(2 * PAIRS)])).mean().detach().clamp(min=0)
    signs = torch.from_numpy(batch.advantages)
    margins = BETA * signs * (log_ratios(batch) - distance)
    loss = (torch.where(signs > 0, 1.0, 1.5) * (1 - margins.sigmoid())).mean()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*learner.parameters.values()])])
    found: list[torch.Tensor] = []
    monkeypatch.setattr(Learner, "apply", lambda self, *_: found.append(self.gradients.clone()) or 0.0)
    (step,) = taken(learner, batch, chosen)
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-6)
    assert expected.abs().max() > 1e-3
    assert (step.loss, step.margin) == pytest.approx((loss.item(), margins.mean().item()), rel=1e-4)


def test_training_learns_labels(models: tuple[Path, Path]) -> None:
    chosen = settings(algorithm="kto", learning_rate=0.01)
    batch, learner = batch_of(chosen), learner_of((models[0], models[0]), chosen)
    first = taken(learner, batch, chosen)[0]
    assert (first.loss, first.margin) == pytest.approx((0.5, 0.0), abs=1e-5)
    for _ in range(20):
        last = taken(learner, batch, chosen)[0]
    assert last.preferred == 1 and last.loss < 0.4


def test_a_step_of_one_answer_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"global_batch_size=1 with trainer\.advantage=label: a step compares"
    ):
        settings(algorithm="kto", global_batch_size=1)
