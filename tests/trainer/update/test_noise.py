"""What a reward that says nothing does to a policy, in exact expectation over all samples and all rewards.

The policy answers `a`, `bc` or `bd`: two choices, of which the second comes only after `b`. So its answers
differ in length, as plain ones and ones in brackets do.
"""

import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.trajectory import Group, Sample
from trainer.batch.selection import batch_advantages, lessons
from trainer.settings import TrainerSettings
from trainer.update.loss import Totals, TrainedTokens, policy_loss

ANSWERS = ("a", "bc", "bd")
GROUP = 3
START = (0.4, -0.7)
"""The logits of `a` over `b`, and of `c` over `d`."""
FURTHER = (1.3, -1.5)
"""The logits after some updates: ratios lie inside and on both sides of every clip."""
LEARN_FROM_REWARDS = [
    "default",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "cispo",
    "sapo",
    "gmpo",
    "maxrl",
    "rloo",
    "reinforce++",
]


def settings_of(preset: str) -> TrainerSettings:
    """The preset with nothing beside its rewards: a penalty for length, or a KL term, says something."""
    return TrainerSettings(algorithm=preset, kl="off", kl_in="loss", overlong="keep")


def logprobs(theta: Tensor, answer: str) -> Tensor:
    """(T,) of an answer's tokens."""
    signs = {"a": (1,), "bc": (-1, 1), "bd": (-1, -1)}[answer]
    return torch.stack([torch.nn.functional.logsigmoid(sign * theta[k]) for k, sign in enumerate(signs)])


@cache
def groups() -> list[tuple[float, Group]]:
    """Every group that START may sample, with a coin for each sample, and how likely it is."""
    theta = torch.tensor(START, dtype=torch.float64)
    found: list[tuple[float, Group]] = []
    for answers in itertools.product(ANSWERS, repeat=GROUP):
        likely = math.exp(sum(float(logprobs(theta, answer).sum()) for answer in answers))
        for coins in itertools.product((0.0, 1.0), repeat=GROUP):
            samples = [
                Sample(
                    token_ids=np.arange(1 + len(answer), dtype=np.int32),
                    loss_mask=np.array([0, *(1 for _ in answer)], np.uint8),
                    logprobs=np.zeros(1 + len(answer), np.float32),
                    finish_reason="stop",
                    text=answer,
                    reward=coin,
                )
                for answer, coin in zip(answers, coins, strict=True)
            ]
            found.append((likely / 2**GROUP, Group(0, "t", "", samples)))
    return found


def expected_gradient(preset: str, now: tuple[float, float]) -> Tensor:
    """(2,) the mean gradient of a step's loss by the logits `now`, for samples of the policy START."""
    settings = settings_of(preset)
    old = torch.tensor(START, dtype=torch.float64)
    theta = torch.tensor(now, dtype=torch.float64, requires_grad=True)
    mean = torch.zeros((), dtype=torch.float64)
    for likely, group in groups():
        trained = [one for lesson in lessons([group], settings, None) for one in lesson]
        advantages = batch_advantages(trained, settings)
        if not any(advantages):
            continue
        texts = [one.sample.text for one in trained]
        before = torch.cat([logprobs(old, text) for text in texts])
        tokens = TrainedTokens(
            torch.cat([logprobs(theta, text) for text in texts]),
            before,
            before,
            None,
            torch.tensor(np.repeat(advantages, [len(text) for text in texts])),
            torch.tensor(np.repeat(range(len(texts)), [len(text) for text in texts])),
        )
        loss, _ = policy_loss(tokens, Totals(len(before), len(trained), max_tokens=2), settings)
        mean = mean + likely * loss
    (gradient,) = torch.autograd.grad(mean, theta)
    return gradient


@pytest.mark.parametrize("preset", LEARN_FROM_REWARDS)
def test_coins_move_no_policy_in_expectation(preset: str) -> None:
    assert expected_gradient(preset, START).abs().max() < 1e-12


@pytest.mark.parametrize("preset", LEARN_FROM_REWARDS)
def test_later_updates_on_coins_lead_at_most_back_to_the_policy_that_sampled(preset: str) -> None:
    """A clip cuts off what would lead further, and leaves what leads back."""
    away = torch.tensor(FURTHER, dtype=torch.float64) - torch.tensor(START, dtype=torch.float64)
    downhill = -expected_gradient(preset, FURTHER)
    along = float(downhill @ away)
    if preset in {"rloo", "maxrl", "cispo"}:  # nothing is clipped; what is clipped keeps a gradient
        assert abs(along) < 1e-12
    else:
        assert along < -1e-5
