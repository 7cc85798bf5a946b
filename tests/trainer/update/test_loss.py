import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.settings import TrainerSettings
from trainer.statistics import STATS
from trainer.update.loss import Totals, TrainedTokens, adapted_bonus, policy_loss

SETTINGS = TrainerSettings(clip_low=0.2, clip_high=0.28, engine_correction_cap=2.0)
#             inside, above+, below+, above-, below-, cap
NEW = [-1.00, -0.50, -2.00, -0.50, -2.00, -1.00]
OLD = [-1.05, -1.00, -1.00, -1.00, -1.00, -1.00]
ENGINE = [-1.00, -1.10, -0.90, -1.00, -1.20, -3.00]
REFERENCE = [-1.10, -0.70, -1.00, -0.40, -1.00, -1.30]
ADVANTAGES = [0.50, 0.70, 0.70, -0.40, -0.40, 0.25]
SEQUENCES = [0, 0, 1, 1, 1, 2]
TOTALS = Totals(tokens=10, sequences=5, max_tokens=8)
COMBINATIONS = list(
    itertools.product(
        ["token", "sequence"],
        ["ppo", "dual", "cispo", "soft", "geometric", "divergence", "none", "likelihood"],
        ["token", "sequence", "constant"],
        ["off", "truncated", "masked"],
        ["off", "k1", "k2", "k3"],
    )
)


def compute(
    settings: TrainerSettings = SETTINGS, *, dtype: Any = torch.float64, **changed: Any
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient and statistics of the tokens above; `changed` takes the place of theirs."""
    lists = {"new": NEW, "old": OLD, "engine": ENGINE, "reference": REFERENCE, "advantages": ADVANTAGES}
    tensors: dict[str, Tensor] = {k: torch.tensor(changed.get(k, v), dtype=dtype) for k, v in lists.items()}
    logprobs = tensors["new"].requires_grad_()
    tokens = TrainedTokens(
        logprobs,
        tensors["old"],
        tensors["engine"],
        tensors["reference"] if settings.kl != "off" else None,
        tensors["advantages"],
        torch.tensor(changed.get("sequences", SEQUENCES), dtype=torch.int64),
    )
    loss, of_tokens = policy_loss(tokens, TOTALS, settings)
    assert not of_tokens.requires_grad and of_tokens.shape == (1 + len(STATS), len(logprobs))
    if settings.aggregation == "token":
        assert of_tokens[0].sum().item() / TOTALS.tokens == pytest.approx(loss.item(), rel=1e-6)
    stats = of_tokens[1:].sum(1) / TOTALS.tokens
    loss.backward()
    assert logprobs.grad is not None
    return loss.item(), logprobs.grad.tolist(), dict(zip(STATS, stats.tolist(), strict=True))


def golden() -> tuple[float, float, float]:
    """Loss, KL and clip fraction, token by token from the formulas, in Python's float64."""
    loss = kl = clipped = 0.0
    for new, old, engine, advantage in zip(NEW, OLD, ENGINE, ADVANTAGES, strict=True):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 1 - 0.2), 1 + 0.28)
        loss -= min(math.exp(old - engine), 2.0) * min(ratio * advantage, bounded * advantage)
        kl += math.exp(old - engine) - 1 - (old - engine)
        clipped += (advantage > 0 and ratio > 1.28) or (advantage < 0 and ratio < 0.8)
    return loss / TOTALS.tokens, kl / TOTALS.tokens, clipped / TOTALS.tokens


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_loss_and_statistics_match_the_formulas(dtype: torch.dtype, tolerance: float) -> None:
    loss, _, stats = compute(dtype=dtype)
    assert (loss, stats["kl_engine"], stats["clip_fraction"]) == pytest.approx(golden(), rel=tolerance)
    assert stats["kl_reference"] == 0


def test_known_loss_of_a_single_token() -> None:
    token = torch.tensor([-1.0]).double()
    one = torch.zeros(1, dtype=torch.int64)
    tokens = TrainedTokens(token, token, token, None, 0.5 * torch.ones(1), one)
    loss, _ = policy_loss(tokens, Totals(1, 1, 1), SETTINGS)
    assert loss.item() == -0.5


def test_clipped_tokens_have_no_gradient() -> None:
    assert [slope != 0 for slope in compute()[1]] == [True, False, True, True, False, True]


@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_microbatches_add_up_to_the_step(combination: tuple[str, ...]) -> None:
    names = ("ratio", "clip", "aggregation", "engine_correction", "kl")
    settings = TrainerSettings(**dict(zip(names, combination, strict=True)))  # pyright: ignore
    whole = compute(settings)
    everything = {"new": NEW, "old": OLD, "engine": ENGINE, "reference": REFERENCE, "advantages": ADVANTAGES}
    first = {name: values[:2] for name, values in everything.items()}
    second = {name: values[2:] for name, values in everything.items()}
    parts = [
        compute(settings, **first, sequences=[0, 0]),
        compute(settings, **second, sequences=[0, 0, 0, 1]),
    ]
    empty = compute(settings, **{name: [] for name in everything}, sequences=[])
    assert empty == (0.0, [], dict.fromkeys(STATS, 0.0))
    assert whole[0] == pytest.approx(sum(part[0] for part in parts), rel=1e-9)
    assert whole[1] == pytest.approx(parts[0][1] + parts[1][1], rel=1e-6)
    for name in STATS:
        assert whole[2][name] == pytest.approx(sum(part[2][name] for part in parts), rel=1e-9)


def test_first_update_is_the_policy_gradient_though_old_is_the_policy_itself() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, -0.25], dtype=torch.float64)
    mismatch = torch.tensor([0.1, 3.0], dtype=torch.float64)
    engine = logprobs.detach() - mismatch
    sequences = torch.tensor([0, 1])
    tokens = TrainedTokens(logprobs, logprobs, engine, None, advantages, sequences)
    loss, of_tokens = policy_loss(tokens, Totals(2, 2, 9), SETTINGS)
    loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -mismatch.exp().clamp(max=2) * advantages / 2)
    assert not of_tokens[1 + STATS.index("clip_fraction")].any()


@pytest.mark.parametrize("algorithm", ["sapo", "gmpo"])
def test_first_step_is_that_of_grpo_without_kl(algorithm: str) -> None:
    expected = compute(TrainerSettings(algorithm="grpo", kl="off"), old=NEW)[1]
    assert compute(TrainerSettings(algorithm=algorithm), old=NEW)[1] == pytest.approx(expected, rel=1e-12)
    assert compute(TrainerSettings(algorithm=algorithm))[1] != pytest.approx(
        compute(TrainerSettings(algorithm="grpo", kl="off"))[1], rel=1e-2
    )


def test_bounds_of_the_divergence_are_for_the_probability_and_for_leaving_the_engine() -> None:
    probabilities = [(0.1, 0.001), (0.9, 0.7), (0.5, 0.7), (0.7, 0.9), (0.9, 0.7)]  # of policy and engine
    new, engine = ([math.log(pair[k]) for pair in probabilities] for k in (0, 1))
    tokens = {"new": new, "old": new, "engine": engine, "advantages": [1.0, 1.0, 1.0, -1.0, -1.0]}
    settings = TrainerSettings(algorithm="dppo", engine_correction="off", aggregation="token")
    _, slopes, stats = compute(settings, **tokens, sequences=[0] * 5)
    assert slopes == pytest.approx([-0.1, 0, -0.1, 0, 0.1])
    assert stats["clip_fraction"] == pytest.approx(2 / 10)


def test_dual_clip_bounds_what_a_bad_token_costs() -> None:
    far_above = {"new": [-0.5], "old": [-3.0], "engine": [-3.0], "advantages": [-0.4], "sequences": [0]}
    assert math.exp(2.5) > 3
    ppo, slopes, _ = compute(**far_above)
    assert ppo == pytest.approx(math.exp(2.5) * 0.4 / 10) and slopes[0] != 0
    dual, slopes, stats = compute(TrainerSettings(clip="dual", dual_clip=3.0), **far_above)
    assert dual == pytest.approx(3 * 0.4 / 10) and slopes == [0]
    assert stats["clip_fraction"] == pytest.approx(1 / 10)
    assert compute(TrainerSettings(clip="dual", dual_clip=3.0)) == compute(TrainerSettings())


def test_masked_correction_leaves_out_what_the_engine_saw_otherwise() -> None:
    mismatches = [0.5, 0.8, -0.5, -0.8]  # the cap is e^0.69
    engine = [-1.0 - mismatch for mismatch in mismatches]
    tokens = {"new": [-1.0] * 4, "old": [-1.0] * 4, "engine": engine, "advantages": [1.0] * 4}
    _, slopes, _ = compute(TrainerSettings(engine_correction="masked"), **tokens, sequences=[0] * 4)
    assert slopes == pytest.approx([-math.exp(0.5) / 10, 0, -math.exp(-0.5) / 10, 0])


def test_sequence_far_from_the_engine_is_masked_whole_by_its_geometric_mean() -> None:
    mismatches = [0.5, -0.5, 0.3, 0.3, -0.3]  # means 0, 0.3 and -0.3
    tokens = {
        "new": [-1.0] * 5,
        "old": [-1.0] * 5,
        "engine": [-1.0 - mismatch for mismatch in mismatches],
        "advantages": [1.0] * 5,
        "sequences": [0, 0, 1, 1, 2],
    }
    _, slopes, stats = compute(TrainerSettings(engine_sequence_cap=1.3), **tokens)
    weights = [math.exp(0.5), math.exp(-0.5), 0, 0, 0]  # e^0.3 = 1.35
    assert slopes == pytest.approx([-weight / 10 for weight in weights])
    assert stats["correction_fraction"] == pytest.approx(3 / 10)
    _, slopes, _ = compute(TrainerSettings(engine_sequence_cap=1.4), **tokens)
    assert 0 not in slopes
    alone = TrainerSettings(engine_sequence_cap=1.3, engine_correction="off")
    assert compute(alone, **tokens)[1] == pytest.approx([-0.1, -0.1, 0, 0, 0])


@pytest.mark.parametrize(("correction", "corrected"), [("off", 0), ("truncated", 1), ("masked", 2)])
def test_fraction_of_corrected_tokens_counts_the_cut_and_the_masked(correction: str, corrected: int) -> None:
    tokens = {"new": [-1.0] * 3, "old": [-1.0] * 3, "engine": [-1.5, -2.5, -0.1], "advantages": [1.0] * 3}
    settings = TrainerSettings.model_validate({"engine_correction": correction})
    assert compute(settings, **tokens, sequences=[0] * 3)[2]["correction_fraction"] == corrected / 10


def test_kl_in_the_reward_is_no_term_of_the_loss() -> None:
    plain = compute(TrainerSettings())
    rewarded = compute(TrainerSettings(kl="k1", kl_in="token_reward", kl_coefficient=0.5))
    assert rewarded[:2] == plain[:2] and rewarded[2]["kl_reference"] > 0


def test_likelihood_is_the_negative_log_likelihood_however_far_the_policy_has_moved() -> None:
    settings = TrainerSettings(algorithm="sft")
    loss, slopes, stats = compute(settings, advantages=[1.0] * 6, engine=[math.nan] * 6)
    assert loss == pytest.approx(-sum(NEW) / 10)
    assert slopes == pytest.approx([-1 / 10] * 6)
    assert stats == pytest.approx(dict.fromkeys(STATS, 0.0) | {"weight": 0.6, "weight_squared": 0.6})


def test_weights_say_how_many_samples_of_the_policy_the_tokens_are_worth() -> None:
    weights = [2.0, 0.5, 1.0, 1.0, 3.0, 0.1]
    engine = [old - math.log(weight) for old, weight in zip(OLD, weights, strict=True)]
    stats = compute(TrainerSettings(engine_correction_cap=1.5), engine=engine)[2]
    assert stats["weight"] == pytest.approx(sum(weights) / 10)
    assert stats["weight_squared"] == pytest.approx(sum(weight**2 for weight in weights) / 10)


def test_token_that_no_engine_has_sampled_is_not_corrected() -> None:
    assert compute(engine=[math.nan] * 6) == compute(engine=OLD)


def test_engine_that_was_certain_is_corrected_like_any_other() -> None:
    tokens = {"new": [-1.0], "old": [-1.0], "engine": [0.0], "advantages": [1.0], "sequences": [0]}
    _, slopes, stats = compute(**tokens)
    assert slopes == pytest.approx([-math.exp(-1) / 10])
    assert stats["kl_engine"] == pytest.approx(math.exp(-1) / 10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_has_the_value_of_its_estimator_and_a_gradient_towards_the_reference(estimator: str) -> None:
    settings = TrainerSettings.model_validate({"kl": estimator, "kl_coefficient": 0.5})
    loss, slopes, stats = compute(settings, advantages=[0.0] * 6)
    log_ratios = [new - reference for new, reference in zip(NEW, REFERENCE, strict=True)]
    k3 = [math.exp(-x) - 1 + x for x in log_ratios]
    values = {"k1": log_ratios, "k2": [x * x / 2 for x in log_ratios], "k3": k3}[estimator]
    towards = [1 - math.exp(-x) for x in log_ratios] if estimator == "k3" else log_ratios
    assert loss == pytest.approx(0.5 * sum(values) / 10)
    assert slopes == pytest.approx([0.5 * slope / 10 for slope in towards])
    assert stats["kl_reference"] == pytest.approx(sum(k3) / 10)


def test_entropy_bonus_is_a_mean_over_tokens_whatever_the_aggregation() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], dtype=torch.float64)
    for aggregation in ("token", "constant"):
        settings = TrainerSettings.model_validate({"aggregation": aggregation, "entropy_bonus": 0.25})
        plain = settings.model_copy(update={"entropy_bonus": 0.0})
        entropies = torch.tensor([0.5, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
        tokens = TrainedTokens(logprobs, logprobs, logprobs, None, -logprobs, torch.tensor([0, 0, 1]))
        totals = Totals(4, 3, 8)
        loss, _ = policy_loss(tokens._replace(entropies=entropies), totals, settings)
        without, _ = policy_loss(tokens, totals, plain)
        assert loss.item() == pytest.approx(without.item() - 0.25 * 4.0 / 4)
        loss.backward()
        assert entropies.grad is not None and entropies.grad.tolist() == [-0.25 / 4] * 3
        with pytest.raises(ValueError, match=r"entropy_bonus=0.25 needs the policy's entropies"):
            policy_loss(tokens, totals, settings)


@pytest.mark.parametrize(
    ("bonus", "entropy", "expected"), [(0.5, 1.0, 0.6), (0.5, 1.1, 0.4), (0.05, 1.1, 0.0), (0.95, 0.0, 1.0)]
)
def test_entropy_bonus_rises_below_its_target_and_falls_above(
    bonus: float, entropy: float, expected: float
) -> None:
    assert adapted_bonus(bonus, entropy, target=1.0, by=0.1) == pytest.approx(expected)


def test_kl_without_a_reference_is_an_error() -> None:
    token = torch.tensor([-1.0])
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="kl=k3 needs the logprobs of a reference"):
        tokens = TrainedTokens(token, token, token, None, token, one)
        policy_loss(tokens, Totals(1, 1, 1), TrainerSettings(kl="k3"))


def test_absurd_token_leaves_the_statistics_finite() -> None:
    tokens = {"new": [-1.0], "old": [-1.0], "engine": [-2000.0], "advantages": [1.0], "sequences": [0]}
    loss, _, stats = compute(**tokens, dtype=torch.float32)
    assert loss == pytest.approx(-2 / 10)
    assert math.isfinite(stats["kl_engine"])
