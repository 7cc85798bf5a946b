"""Every preset against its paper's formulas, written out here in float64: advantages, loss, gradient."""

from collections.abc import Callable
from math import exp, sqrt
from typing import Literal

import numpy as np
import pytest
import torch

from rollout.trajectory import Group, Sample
from trainer.algorithms import PRESETS
from trainer.batch.selection import SelectedSample, batch_advantages, lessons
from trainer.settings import TrainerSettings
from trainer.update.loss import Totals, TrainedTokens, policy_loss

MAX_TOKENS = 5
REWARDS = [[1.0, 0.0, 0.25], [0.0, 2.0], [1.0, 1.0]]
"""Rewards of three groups, the last of which is flat."""
WEIGHTS = {"right": 1.0, "long": 0.5}
"""The weights of two rewards, for a preset of several: those, and how many tokens an answer has."""
# One row a sample: log pi_theta, log pi_old, log mu, log pi_reference of its trained tokens. The ratios lie
# inside and outside of every preset's clip, for both signs of the advantage.
TOKENS: dict[tuple[int, int], list[list[float]]] = {
    (0, 0): [[-1.0, -0.5, -2.0], [-1.05, -1.0, -1.0], [-1.0, -1.1, -0.9], [-1.2, -0.6, -1.5]],
    (0, 1): [[-0.5, -2.0], [-1.0, -1.55], [-1.0, -1.5], [-0.7, -1.0]],
    (0, 2): [
        [-3.0, -0.3, -1.0, -2.0, -1.5],
        [-2.9, -0.7, -2.7, -2.0, -1.4],
        [-2.0, -0.9, -2.6, -3.5, -1.6],
        [-2.5, -0.5, -1.2, -1.9, -1.6],
    ],
    (1, 0): [[-0.7], [-1.1], [-1.2], [-0.9]],
    (1, 1): [[-1.3, -0.2, -0.9], [-0.8, -0.2001, -2.9], [-0.8, -0.4, -2.9], [-1.0, -0.3, -1.1]],
    (2, 0): [[-0.4, -0.8], [-0.6, -0.8], [-0.5, -0.9], [-0.5, -0.6]],
    (2, 1): [[-1.2], [-1.0], [-1.1], [-0.8]],
}
Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]
"""A sequence's log pi_theta, log pi_old, log mu, log pi_reference, and its advantage."""


# ---- the papers


def std(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)) + 1e-6


GROUP_0 = [7 / 12, -5 / 12, -2 / 12]  # minus the mean, 5/12
OVERLONG_0 = [11 / 12, -1 / 12, -10 / 12]  # its third answer fills MAX_TOKENS: 1, 0, -0.75
STANDARDISED = {
    **{(0, j): a / std(REWARDS[0]) for j, a in enumerate(GROUP_0)},
    (1, 0): -1 / std(REWARDS[1]),
    (1, 1): 1 / std(REWARDS[1]),
}
CENTRED = {(0, 0): 7 / 12, (0, 1): -5 / 12, (0, 2): -2 / 12, (1, 0): -1.0, (1, 1): 1.0}
FLAT = {(2, 0): 0.0, (2, 1): 0.0}
"""They count where a preset's formula has a mean over all samples."""
PER_TOKEN = [a for key, a in {**CENTRED, **FLAT}.items() for _ in TOKENS[key][0]]
MEAN = sum(PER_TOKEN) / 17
SPREAD = sqrt(sum((a - MEAN) ** 2 for a in PER_TOKEN) / 17)
BOTH = {  # of each group: the answers' first reward, then their tokens, each less its mean over its deviation
    **{
        (0, j): a / std(REWARDS[0]) + 0.5 * b / std([3, 2, 5])
        for j, (a, b) in enumerate(zip(GROUP_0, [-1 / 3, -4 / 3, 5 / 3], strict=True))
    },
    **{(1, j): sign / std(REWARDS[1]) + 0.5 * sign / std([1, 3]) for j, sign in enumerate([-1, 1])},
    **{(2, j): 0.5 * b / std([2, 1]) for j, b in enumerate([0.5, -0.5])},
}
ADVANTAGES: dict[str, dict[tuple[int, int], float]] = {
    "default": CENTRED,
    "grpo": {**STANDARDISED, **FLAT},
    "dr_grpo": {**CENTRED, **FLAT},
    "dapo": {**STANDARDISED, **{(0, j): a / std([1, 0, -0.75]) for j, a in enumerate(OVERLONG_0)}},
    "gspo": {**STANDARDISED, **FLAT},
    "cispo": STANDARDISED,
    "sapo": {**STANDARDISED, **FLAT},
    "gmpo": {**STANDARDISED, **FLAT},
    "dppo": {**CENTRED, **FLAT},
    "maxrl": {(0, 0): 1.4, (0, 1): -1.0, (0, 2): -0.4, (1, 0): -1.0, (1, 1): 1.0, **FLAT},
    "gdpo": {key: a / std([*BOTH.values()]) for key, a in BOTH.items()},
    "rloo": {(0, 0): 0.875, (0, 1): -0.625, (0, 2): -0.25, (1, 0): -2.0, (1, 1): 2.0, **FLAT},
    "reinforce++": {key: (a - MEAN) / SPREAD for key, a in {**CENTRED, **FLAT}.items()},
    "rft": {(0, 0): 1.0, (1, 1): 1.0, (2, 0): 1.0, (2, 1): 1.0},
    "sft": dict.fromkeys(TOKENS, 1.0),
    "dpo": {(0, 0): 1.0, (0, 1): -1.0, (1, 0): -1.0, (1, 1): 1.0},
    "kto": {**dict.fromkeys(TOKENS, 1.0), (0, 1): -1.0, (1, 0): -1.0},
    "distill": dict.fromkeys(TOKENS, 0.0),
}


def tis(old: float, engine: float) -> float:
    return min(exp(old - engine), 2.0)


def ppo(rho: float, a: float, low: float, high: float) -> float:
    return min(rho * a, min(max(rho, 1 - low), 1 + high) * a)


def clipped_terms(row: Row, low: float, high: float) -> list[float]:
    new, old, engine, _, a = row
    return [tis(o, e) * ppo(exp(n - o), a, low, high) for n, o, e in zip(new, old, engine, strict=True)]


def grpo(rows: list[Row], at: list[Row]) -> float:
    total = 0.0
    for row in rows:
        new, _, _, reference, _ = row
        k3 = [exp(r - n) - (r - n) - 1 for n, r in zip(new, reference, strict=True)]
        terms = clipped_terms(row, 0.2, 0.2)
        total += sum(t - 0.04 * k for t, k in zip(terms, k3, strict=True)) / len(new)
    return -total / len(rows)


def dr_grpo(rows: list[Row], at: list[Row]) -> float:
    return -sum(sum(clipped_terms(row, 0.2, 0.2)) for row in rows) / (len(rows) * MAX_TOKENS)


def dapo(rows: list[Row], at: list[Row]) -> float:
    return -sum(sum(clipped_terms(row, 0.2, 0.28)) for row in rows) / tokens(rows)


def reinforce_pp(rows: list[Row], at: list[Row]) -> float:
    return -sum(sum(clipped_terms(row, 0.2, 0.2)) for row in rows) / tokens(rows)


def without_kl(rows: list[Row], at: list[Row]) -> float:
    """GRPO's."""
    return -sum(sum(clipped_terms(row, 0.2, 0.2)) / len(row[0]) for row in rows) / len(rows)


def gspo(rows: list[Row], at: list[Row]) -> float:
    """GSPO-token: the value of the ratio is the sequence's, sg(s) pi / sg(pi)."""
    total = 0.0
    for (new, old, engine, _, a), (now, *_) in zip(rows, at, strict=True):
        s = exp(sum(n - o for n, o in zip(now, old, strict=True)) / len(now))
        ratios = [s * exp(n - m) for n, m in zip(new, now, strict=True)]
        terms = [tis(o, e) * ppo(r, a, 3e-4, 4e-4) for r, o, e in zip(ratios, old, engine, strict=True)]
        total += sum(terms) / len(new)
    return -total / len(rows)


def cispo(rows: list[Row], at: list[Row]) -> float:
    total = 0.0
    for (new, old, engine, _, a), (now, *_) in zip(rows, at, strict=True):
        weights = [min(exp(m - o), 5.0) for m, o in zip(now, old, strict=True)]
        total += sum(tis(o, e) * w * a * n for n, o, e, w in zip(new, old, engine, weights, strict=True))
    return -total / tokens(rows)


def sapo(rows: list[Row], at: list[Row]) -> float:
    total = 0.0
    for new, old, engine, _, a in rows:
        tau = 1.0 if a > 0 else 1.05
        gates = [4 / (tau * (1 + exp(-tau * (exp(n - o) - 1)))) for n, o in zip(new, old, strict=True)]
        total += sum(tis(o, e) * g * a for g, o, e in zip(gates, old, engine, strict=True)) / len(new)
    return -total / len(rows)


def gmpo(rows: list[Row], at: list[Row]) -> float:
    """Corrected for the engine by token, so in the form of GSPO-token."""

    def clipped(log_ratio: float, a: float) -> float:
        return min(log_ratio, 0.4) if a > 0 else max(log_ratio, -0.4)

    total = 0.0
    for (new, old, engine, _, a), (now, *_) in zip(rows, at, strict=True):
        moved, still = ([clipped(n - o, a) for n, o in zip(at, old, strict=True)] for at in (new, now))
        mean = sum(still) / len(still)
        terms = [tis(o, e) * exp(mean + m - s) for m, s, o, e in zip(moved, still, old, engine, strict=True)]
        total += a * sum(terms) / len(new)
    return -total / len(rows)


def dppo(rows: list[Row], at: list[Row]) -> float:
    """Binary total variation: |pi - mu| of the sampled token, in the direction of the advantage."""
    total = 0.0
    for (new, old, engine, _, a), (now, *_) in zip(rows, at, strict=True):
        for n, m, o, e in zip(new, now, old, engine, strict=True):
            moved = exp(m) - exp(e)
            is_left_out = abs(moved) > 0.15 and (moved > 0) == (a > 0)
            total += 0.0 if is_left_out else tis(o, e) * exp(n - o) * a
    return -total / (len(rows) * MAX_TOKENS)


def rloo(rows: list[Row], at: list[Row]) -> float:
    total = 0.0
    for new, old, engine, _, a in rows:
        total += sum(tis(o, e) * exp(n - o) * a for n, o, e in zip(new, old, engine, strict=True))
    return -total / (len(rows) * MAX_TOKENS)


def likelihood(rows: list[Row], at: list[Row]) -> float:
    return -sum(sum(new) for new, *_ in rows) / tokens(rows)


def pairs(rows: list[Row], at: list[Row]) -> float:
    """Whose advantages have DPO's or KTO's weights already: test_pairs."""
    return -sum(sum(a * n for n in new) for new, *_, a in rows) / len(rows)


def reverse_kl(rows: list[Row], at: list[Row]) -> float:
    """The value is log pi - log pi_teacher, the gradient that times the gradient of log pi."""
    total = 0.0
    for (new, _, _, teacher, _), (now, *_) in zip(rows, at, strict=True):
        apart = now - teacher
        total += float((apart + apart * (new - now) + (new - now) ** 2 / 2).sum())
    return total / tokens(rows)


def tokens(rows: list[Row]) -> int:
    return sum(len(new) for new, *_ in rows)


LOSSES: dict[str, Callable[[list[Row], list[Row]], float]] = {
    "default": dapo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "gmpo": gmpo,
    "dppo": dppo,
    "maxrl": rloo,
    "gdpo": without_kl,
    "rloo": rloo,
    "reinforce++": reinforce_pp,
    "rft": likelihood,
    "sft": likelihood,
    "dpo": pairs,
    "kto": pairs,
    "distill": reverse_kl,
}
"""By preset, the loss of the first argument's policy, what stands behind a stop-gradient by the second's."""


def gradient(loss: Callable[[list[Row], list[Row]], float], rows: list[Row]) -> list[float]:
    """Of every token's log pi_theta, by central differences."""
    slopes = []
    for k, row in enumerate(rows):
        for t in range(len(row[0])):
            values = []
            for step in (1e-6, -1e-6):
                moved = row[0].copy()
                moved[t] += step
                values.append(loss([*rows[:k], (moved, *row[1:]), *rows[k + 1 :]], rows))
            slopes.append((values[0] - values[1]) / 2e-6)
    return slopes


# ---- ours


def groups() -> list[Group]:
    return [
        Group(slot, f"task-{slot}", "", [sample(slot, j, reward) for j, reward in enumerate(rewards)])
        for slot, rewards in enumerate(REWARDS)
    ]


def sample(slot: int, j: int, reward: float) -> Sample:
    """Two prompt tokens, then those of TOKENS."""
    engine = TOKENS[slot, j][2]
    return Sample(
        token_ids=np.array([slot, j, *range(len(engine))], np.int32),
        loss_mask=np.array([0, 0, *[1] * len(engine)], np.uint8),
        logprobs=np.array([0, 0, *engine], np.float32),
        finish_reason="stop",
        text="",
        reward=reward,
        metrics={"right": reward, "long": float(len(engine))},
    )


def selected(settings: TrainerSettings) -> list[SelectedSample]:
    return [one for lesson in lessons(groups(), settings, MAX_TOKENS, weights=WEIGHTS) for one in lesson]


def key_of(one: SelectedSample) -> tuple[int, int]:
    return one.slot, int(one.sample.token_ids[1])


def test_every_preset_is_tested() -> None:
    assert set(LOSSES) == set(ADVANTAGES) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_selects_and_scores_as_its_paper_does(name: str) -> None:
    settings = TrainerSettings(algorithm=name)
    trained = selected(settings)
    advantages = batch_advantages(trained, settings)
    ours = {key_of(one): advantage for one, advantage in zip(trained, advantages, strict=True)}
    assert ours == pytest.approx(ADVANTAGES[name], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_loss_and_gradient_of_a_preset_are_its_papers(name: str) -> None:
    rows: list[Row] = []
    for key, advantage in ADVANTAGES[name].items():
        new, old, engine, reference = (np.array(values) for values in TOKENS[key])
        rows.append((new, old, engine, reference, advantage))
    flat = [torch.from_numpy(np.concatenate([row[k] for row in rows])) for k in range(4)]
    lengths = torch.tensor([len(row[0]) for row in rows])
    settings = TrainerSettings(algorithm=name)
    logprobs = flat[0].requires_grad_()
    given = TrainedTokens(
        logprobs,
        flat[1],
        flat[2],
        flat[3] if settings.kl != "off" else None,
        torch.tensor([row[4] for row in rows], dtype=torch.float64).repeat_interleave(lengths),
        torch.arange(len(rows)).repeat_interleave(lengths),
    )
    loss, _ = policy_loss(given, Totals(tokens(rows), len(rows), MAX_TOKENS), settings)
    loss.backward()
    assert loss.item() == pytest.approx(LOSSES[name](rows, rows), rel=1e-9)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient(LOSSES[name], rows), abs=1e-8)


def test_settings_that_are_given_win_over_the_presets() -> None:
    settings = TrainerSettings(algorithm="dapo", clip="cispo", overlong="keep")
    assert (settings.clip, settings.overlong, settings.advantage) == ("cispo", "keep", "standardised")


@pytest.mark.parametrize("name", PRESETS)
def test_bound_that_cuts_nothing_off_is_refused_with_the_fraction_to_type(name: str) -> None:
    clip = TrainerSettings(algorithm=name).clip
    assert TrainerSettings(algorithm=name, clip_low=1).clip_low == 1
    if clip in ("ppo", "dual", "cispo", "divergence"):
        advice = "give 1 for no bound" if clip == "cispo" else "give 0.2 for 20 %, or 1 for no bound"
        with pytest.raises(ValueError, match=rf"trainer\.clip_low=20 .*; {advice}"):
            TrainerSettings(algorithm=name, clip_low=20).refuse_clip_bounds()
    else:
        assert TrainerSettings(algorithm=name, clip_low=20).clip_low == 20
    if clip == "divergence":
        with pytest.raises(ValueError, match=r"clip_high=15 .* no probability rises by more than 1"):
            TrainerSettings(algorithm=name, clip_high=15).refuse_clip_bounds()


@pytest.mark.parametrize(
    ("correction", "cap", "refused"),
    [("truncated", 0.5, True), ("truncated", 1, False), ("masked", 1, True), ("masked", 1.1, False)],
)
def test_cap_of_the_engine_correction_that_cuts_every_token_is_refused(
    correction: Literal["truncated", "masked"], cap: float, refused: bool
) -> None:
    settings = TrainerSettings(engine_correction=correction, engine_correction_cap=cap)
    if not refused:
        return settings.refuse_clip_bounds()
    with pytest.raises(ValueError, match=r"of nearly every token .*; give more than 1, e\.g\. 2"):
        settings.refuse_clip_bounds()


def test_algorithm_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"algorithm=ppo: take grpo.*no value model is trained; there is default, grpo, .*sft",
    ):
        TrainerSettings(algorithm="ppo")
    with pytest.raises(ValueError, match=r"algorithm=gae: take grpo, which .*; there is"):
        TrainerSettings(algorithm="gae")
    with pytest.raises(ValueError, match=r": take reinforce\+\+; there is"):
        TrainerSettings(algorithm="reinforce_plus_plus")
    with pytest.raises(ValueError, match=r"algorithm=GRPO: did you mean grpo\? There is"):
        TrainerSettings(algorithm="GRPO")
    with pytest.raises(ValueError, match=r"algorithm=bnpo: take trainer.algorithm=grpo trainer.aggreg"):
        TrainerSettings(algorithm="bnpo")


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "distill", "rft", "maxrl", "gdpo"])
def test_credit_by_turn_is_refused_where_advantages_are_of_whole_samples(algorithm: str) -> None:
    refusal = r"credit=turn with trainer.advantage=\w+: that is of whole samples; use centred, standardised, "
    with pytest.raises(ValueError, match=refusal):
        TrainerSettings(algorithm=algorithm, credit="turn")
    assert TrainerSettings(credit="turn", advantage="whitened").turn_discount == 1
