"""Sources of tasks with an advantage and a weight of their own: in one batch, each as if it were alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rollout.trajectory import Group
from trainer.batch.batch import Batch, DamagedBatch
from trainer.batch.building import ReplayedGroups, build_batch
from trainer.settings import TrainerSettings
from trainer.update.loss import Totals, TrainedTokens, loss_of_sources, policy_loss

ABOUT: dict[str, Any] = {"manifest_sha256": "m", "policy": "p", "temperature": 1.0, "seed": 3}
SOURCES = {0: "math", 1: "code", 2: "math", 3: "code", 4: "other"}
KINDS = [
    {"advantage": "standardised", "weight": 0.5},
    {"advantage": "whitened", "weight": 2.0},
    {"advantage": "one", "reward_threshold": 0.5},
    {"keep_flat_groups": True, "overlong": "penalise"},
    {"overlong": "drop", "weight": 4.0},
]


@pytest.fixture
def groups(group: Callable[..., Group]) -> list[Group]:
    rng = np.random.default_rng(0)
    rewards = [[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.5, None, 0.0], [0.0, 1.0], [1.0, 0.0]]
    return [group(slot, of_group, rng) for slot, of_group in enumerate(rewards)]


def by_sample(batch: Batch, weight: float = 1.0) -> dict[bytes, float]:
    """The advantage of each sequence, by its tokens, times a weight."""
    pieces = np.split(batch.token_ids, batch.offsets[1:-1])
    pairs = zip(pieces, batch.advantages, strict=True)
    return {piece.tobytes(): float(np.float32(weight * float(advantage))) for piece, advantage in pairs}


@pytest.mark.parametrize("math", KINDS)
@pytest.mark.parametrize("code", KINDS)
def test_each_source_is_as_if_it_were_alone_times_its_weight(
    groups: list[Group], math: dict[str, Any], code: dict[str, Any]
) -> None:
    given, about = {"math": math, "code": code}, {**ABOUT, "max_tokens": 8}
    both = build_batch(
        groups, settings=TrainerSettings.model_validate({"sources": given}), task_sources=SOURCES, **about
    )
    wanted, absent = dict[bytes, float](), 0
    for name in ("math", "code", "other"):
        own = [group for group in groups if SOURCES[group.slot] == name]
        alone = {key: value for key, value in given.get(name, {}).items() if key != "weight"}
        batch = build_batch(own, settings=TrainerSettings(**alone), **about)
        wanted |= by_sample(batch, given.get(name, {}).get("weight", 1.0))
        absent += len(batch.absent_at)
    assert by_sample(both) == pytest.approx(wanted, rel=1e-6) and len(both.absent_at) == absent


def test_advantages_of_turns_have_the_weight_too(groups: list[Group]) -> None:
    math = {"advantage": "whitened", "weight": 2.0}
    settings = TrainerSettings.model_validate({"credit": "turn", "sources": {"math": math}})
    both = build_batch(groups, settings=settings, task_sources=SOURCES, **ABOUT)
    of_math = [group for group in groups if SOURCES[group.slot] == "math"]
    alone = build_batch(of_math, settings=TrainerSettings(credit="turn", advantage="whitened"), **ABOUT)
    wanted = dict(zip(*of_tokens(alone), strict=True))
    found = [(ids, values) for ids, values in zip(*of_tokens(both), strict=True) if ids in wanted]
    assert len(found) == len(wanted) == 5
    for ids, values in found:
        np.testing.assert_allclose(values, 2 * wanted[ids], rtol=1e-6)


def of_tokens(batch: Batch) -> tuple[list[bytes], list[np.ndarray]]:
    """The tokens of each sequence, and their advantages."""
    cuts = batch.offsets[1:-1]
    pieces = np.split(batch.token_ids, cuts)
    return [piece.tobytes() for piece in pieces], np.split(batch.token_advantages, cuts)


def test_replayed_groups_have_the_sources_of_their_own_iteration(groups: list[Group]) -> None:
    settings = TrainerSettings.model_validate({"replay_window": 2, "sources": {"math": {"weight": 8.0}}})
    older = ReplayedGroups(groups[:1], 1.0, 8, task_sources={0: "code"})
    alone, seen = build_batch(groups[:1], **ABOUT), set[float]()
    for seed in range(8):
        about = {**ABOUT, "seed": seed, "settings": settings, "task_sources": {0: "math"}, "older": [older]}
        batch = build_batch(groups[:1], **about)
        seen.add(weight := 1.0 if batch.counts.samples_replayed else 8.0)
        assert by_sample(batch) == by_sample(alone, weight)
    assert seen == {1.0, 8.0}


@pytest.mark.parametrize("clip", get_args(TrainerSettings.model_fields["clip"].annotation))
def test_weight_of_an_advantage_is_that_of_the_loss(clip: str) -> None:
    rng = torch.Generator().manual_seed(0)
    new, old, engine = (torch.randn(12, generator=rng, dtype=torch.float64) / 3 - 2 for _ in range(3))
    advantages = torch.randn(12, generator=rng, dtype=torch.float64)
    settings, sequences = TrainerSettings.model_validate({"clip": clip}), torch.arange(12) // 3
    totals = Totals(tokens=12, sequences=4, max_tokens=8)
    once, thrice = (
        policy_loss(TrainedTokens(new, old, engine, None, weight * advantages, sequences), totals, settings)[
            0
        ]
        for weight in (1.0, 3.0)
    )
    assert thrice == pytest.approx(3 * once)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"advantage": "pair", "keep_flat_groups": False}, r"trainer.sources.a with trainer.advantage=pair"),
        ({"kl": "k1", "kl_in": "reward"}, r"trainer.sources.a with trainer.kl_in=reward: that is computed"),
        ({"overlong": "penalise"}, r"trainer.sources.a: trainer.overlong=penalise with .*success"),
        ({"sources": {"a": {"weight": 0}}}, r"greater than 0"),
        ({"sources": {"a": {"advantage": "pair"}}}, r"trainer.sources.a: .*compares the samples of a step"),
        ({"sources": {"a": {"algorithm": "kto"}}}, r"trainer.sources.a: .*give it to all"),
        ({"sources": {"a": {"algorithm": "grop"}}}, r"trainer.sources.a: .*did you mean grpo\?"),
        ({"sources": {"a": {"algorithm": "distill"}, "b": {"kl": "k3"}}}, r"the same trainer.kl_to"),
    ],
)
def test_source_that_would_be_wrong_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        TrainerSettings(**{"sources": {"a": {"advantage": "success"}}, **given})


def test_source_with_a_preset_takes_its_values_and_not_those_of_all() -> None:
    sources = {"a": {"algorithm": "gspo", "clip_low": 0.1}, "b": {"clip": "cispo"}}
    settings = TrainerSettings.model_validate({"algorithm": "grpo", "sources": sources})
    a, b, other = map(settings.of_source, ("a", "b", "c"))
    assert (a.ratio, a.clip_low, a.clip_high, a.kl) == ("sequence", 0.1, 4e-4, "off")
    assert (b.clip, b.kl, b.aggregation, b.advantage) == ("cispo", "k3", "sequence", "standardised")
    in_loss = TrainerSettings.model_validate({"algorithm": "rloo", "sources": {"a": {"kl": "k1"}}})
    assert in_loss.kl_in == "reward" and in_loss.of_source("a").kl_in == "loss"
    assert other == TrainerSettings(algorithm="grpo") and settings.reference == "base"
    assert not TrainerSettings.model_validate({"sources": sources}).needs_reference


LOSSES: list[dict[str, Any]] = [
    {"algorithm": "gspo"},
    {"algorithm": "cispo", "engine_correction": "masked"},
    {"algorithm": "gmpo"},
    {"algorithm": "dr_grpo", "engine_sequence_cap": 1.01},
    {"algorithm": "rft"},
]


@pytest.mark.parametrize("math", LOSSES)
@pytest.mark.parametrize("code", LOSSES)
def test_losses_of_sources_add_up_to_what_each_gives_the_tokens_of_its_own(
    math: dict[str, Any], code: dict[str, Any]
) -> None:
    rng = torch.Generator().manual_seed(0)
    new, old, engine, base, advantages = (
        torch.randn(12, generator=rng, dtype=torch.float64) / 3 - 2 for _ in range(5)
    )
    sequences, totals = torch.arange(12) // 3, Totals(tokens=15, sequences=5, max_tokens=8)
    kinds, new = np.array([0, 1, 1, 0]).repeat(3), new.requires_grad_()
    each = [TrainerSettings(**settings) for settings in (math, code)]
    tokens = TrainedTokens(new, old, engine, None, advantages, sequences)
    loss, terms = loss_of_sources(kinds, each, tokens, totals)
    (gradient,) = torch.autograd.grad(loss, new)
    of_kinds = torch.from_numpy(kinds)
    alone = [  # a token without an advantage adds nothing
        policy_loss(tokens._replace(advantages=advantages * (of_kinds == kind)), totals, settings)
        for kind, settings in enumerate(each)
    ]
    assert loss.item() == pytest.approx(sum(part.item() for part, _ in alone), rel=1e-12)
    wanted = torch.autograd.grad(alone[0][0] + alone[1][0], new)[0]
    torch.testing.assert_close(gradient, wanted)
    for kind, (_, of_tokens) in enumerate(alone):
        torch.testing.assert_close(terms[:, of_kinds == kind], of_tokens[:, of_kinds == kind])
    held = TrainerSettings.model_validate({**math, "kl": "k2", "kl_coefficient": 0.5})
    compared = tokens._replace(reference_logprobs=base)
    with_kl, _ = loss_of_sources(kinds, [held, each[1]], compared, totals)
    of_math = 0.25 * (new - base).square()[of_kinds == 0]  # divided as the aggregation has it
    divisor = {"token": 15, "sequence": 3 * 5, "constant": 5 * 8}[held.aggregation]
    assert (with_kl - loss).item() == pytest.approx(of_math.sum().item() / divisor)


def test_microbatch_may_lack_a_source_or_every_token() -> None:
    each = [TrainerSettings(algorithm="gspo"), TrainerSettings(algorithm="cispo")]
    totals = Totals(tokens=6, sequences=2, max_tokens=8)
    for count in (0, 6):
        new = torch.full((count,), -2.0, requires_grad=True)
        kinds, sequences = np.ones(count, np.int64), torch.arange(count) // 3
        tokens = TrainedTokens(new, new.detach(), new.detach(), None, torch.ones(count), sequences)
        loss, terms = loss_of_sources(kinds, each, tokens, totals)
        loss.backward()
        assert terms.shape[1] == count and new.grad is not None and new.grad.shape == (count,)


def test_batch_tells_sources_apart_if_there_are_several(groups: list[Group]) -> None:
    batch = build_batch(groups, task_sources=SOURCES, **ABOUT)
    assert batch.source_names == ["code", "math", "other"]
    named = [batch.source_names[source] for source in batch.sources]
    assert named == [SOURCES[slot] for slot in batch.slots.tolist()]
    again = Batch.decode(batch.encode())
    assert again.source_names == batch.source_names and again.sources.tolist() == batch.sources.tolist()
    alone = build_batch(groups, task_sources=dict.fromkeys(SOURCES, "math"), **ABOUT)
    assert alone.encode() == build_batch(groups, **ABOUT).encode()
    with pytest.raises(DamagedBatch, match="do not name the source of each sequence"):
        Batch.decode(replace(batch, source_names=["code", "math"]).encode())
