import math

import pytest
import torch

from trainer.loss import policy_loss
from trainer.settings import TrainerSettings

SETTINGS = TrainerSettings(clip_low=0.2, clip_high=0.28, engine_correction_cap=2.0)
#             inside, above+, below+, above-, below-, cap, masked
NEW = [-1.00, -0.50, -2.00, -0.50, -2.00, -1.00, -3.00]
OLD = [-1.05, -1.00, -1.00, -1.00, -1.00, -1.00, -1.00]
ENGINE = [-1.00, -1.10, -0.90, -1.00, -1.20, -3.00, -9.00]
ADVANTAGES = [0.50, 0.70, 0.70, -0.40, -0.40, 0.25, 9.00]
MASK = [1, 1, 1, 1, 1, 1, 0]
NORMALISER = 10.0


def golden() -> tuple[float, float, float]:
    """Loss, KL and clip fraction, token by token from the formulas, in Python's float64."""
    loss = kl = clipped = 0.0
    for new, old, engine, advantage, mask in zip(NEW, OLD, ENGINE, ADVANTAGES, MASK, strict=True):
        if not mask:
            continue
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - 0.2), 1 + 0.28)
        weight = min(math.exp(old - engine), 2.0)
        loss -= weight * min(ratio * advantage, bounded * advantage)
        kl += math.exp(old - engine) - 1 - (old - engine)
        clipped += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    return loss / NORMALISER, kl / NORMALISER, clipped / NORMALISER


def compute(dtype: torch.dtype, new: list[float] = NEW) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    logprobs = torch.tensor(new, dtype=dtype, requires_grad=True)
    old, engine, advantages = (torch.tensor(v, dtype=dtype) for v in (OLD, ENGINE, ADVANTAGES))
    loss, stats = policy_loss(logprobs, old, engine, advantages, torch.tensor(MASK), NORMALISER, SETTINGS)
    loss.backward()
    assert logprobs.grad is not None
    return loss.detach(), logprobs.grad, [stats.kl_engine.item(), stats.clip_fraction.item()]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_statistics_match_the_formulas(dtype: torch.dtype, tolerance: float) -> None:
    loss, _, (kl, clip_fraction) = compute(dtype)
    assert (loss.item(), kl, clip_fraction) == pytest.approx(golden(), rel=tolerance)


def test_known_loss_of_a_single_token() -> None:
    token = torch.tensor([-1.0]).double()
    ones = torch.ones(1).double()
    loss, _ = policy_loss(token, token, token, 0.5 * ones, ones, 1.0, SETTINGS)
    assert loss.item() == -0.5


def test_gradient_matches_finite_differences() -> None:
    _, gradient, _ = compute(torch.float64)
    for k in range(len(NEW)):
        step = 1e-6
        up = compute(torch.float64, [*NEW[:k], NEW[k] + step, *NEW[k + 1 :]])[0]
        down = compute(torch.float64, [*NEW[:k], NEW[k] - step, *NEW[k + 1 :]])[0]
        assert gradient[k].item() == pytest.approx(((up - down) / (2 * step)).item(), abs=1e-8)


def test_clipped_and_masked_tokens_have_no_gradient() -> None:
    _, gradient, _ = compute(torch.float64)
    assert (gradient != 0).tolist() == [True, False, True, True, False, True, False]


def test_first_update_is_the_policy_gradient_though_old_is_the_policy_itself() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -0.25], dtype=torch.float64)
    mismatch = torch.tensor([0.1, 3.0], dtype=torch.float64)
    engine_logprobs = logprobs.detach() - mismatch
    loss, stats = policy_loss(logprobs, logprobs, engine_logprobs, advantages, torch.ones(2), 2.0, SETTINGS)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -mismatch.exp().clamp(max=2) * advantages / 2)
    assert stats.clip_fraction.item() == 0
