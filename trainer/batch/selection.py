"""Choose the samples to train on, and compute their advantages. Torch-free.

A *lesson* is a group's trained samples with their advantages. Group statistics are over the samples that
exist, whether they are trained on or not. A group without a trained sample is no lesson.

With `trainer.keep_flat_groups` every sample that exists counts in the divisor of the loss, as the formulas of
most papers have it. A sample that has no gradient only counts: nothing of it is computed.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rollout.trajectory import Group, Sample
from trainer.batch.advantages import (
    decoupled,
    group_advantages,
    standardised_batch,
    state_advantages,
    turn_advantages,
    whiten,
)
from trainer.settings import TrainerSettings

PAIR = 2
"""Sequences of a group with trainer.advantage=pair; they are trained in one optimizer step."""

_T = TypeVar("_T")


class SelectedSample(NamedTuple):
    """One sample of a batch."""

    slot: int
    sample: Sample
    reward: float
    advantage: float
    tokens: int
    """Its trained tokens; 0 for a sample that is not trained on, but counts as a sequence."""
    computed: bool = True
    """False: it has no gradient, and is in the batch to be counted."""
    of_tokens: NDArray[np.float64] | None = None
    """With credit=turn or state: (T,) the advantage of each token."""
    source: str = ""
    """The source of its task, if trainer.sources has it."""


Lesson = list[SelectedSample]


def policy_iterations(sample: Sample, policy_iteration: int) -> NDArray[np.int32]:
    """(T,) the iteration whose policy has sampled each token: that of its span, else `policy_iteration`."""
    made_by = np.full(len(sample.token_ids), policy_iteration, np.int32)
    for span in sample.spans:
        made_by[span.begin : span.end] = span.policy_iteration
    return made_by


def lessons(
    groups: Iterable[Group],
    settings: TrainerSettings,
    max_tokens: int | None,
    oldest: int | None = None,
    weights: Mapping[str, float] | None = None,
    task_sources: Mapping[int, str] = MappingProxyType({}),
) -> list[Lesson]:
    """Return the lessons of one iteration's groups, in the order of their slots; `task_sources` are the
    sources of the slots' tasks.

    `oldest`: the spans of policies of an earlier iteration are not trained; None: all are. `weights`: of each
    reward that a sample's was added up from, by its name among the metrics; None: it is a single one.
    Raises ValueError for two groups of one slot, for a penalty for length without `max_tokens`, and for a
    sample without one of the rewards that advantage=decoupled needs.
    """
    ordered = sorted(groups, key=lambda group: group.slot)
    for group, other in pairwise(ordered):
        if group.slot == other.slot:
            raise ValueError(
                f"slot {group.slot} has two groups ({group.task_id}, {other.task_id}); a slot is one group"
            )
    of_source = {name: settings.of_source(name) for name in ("", *settings.sources)}
    chosen: list[Lesson] = []
    for group in ordered:
        if group.given_up is None:
            source = task_sources.get(group.slot, "")
            source = source if source in settings.sources else ""
            lesson = _lesson(group, of_source[source], max_tokens, oldest, weights)
            chosen.append([item._replace(source=source) for item in lesson] if source else lesson)
    return [lesson for lesson in chosen if lesson]


def _lesson(
    group: Group,
    settings: TrainerSettings,
    max_tokens: int | None,
    oldest: int | None,
    weights: Mapping[str, float] | None,
) -> Lesson:
    scored = [(sample, sample.reward) for sample in group.samples if sample.reward is not None]
    shaped = [reward - _overlong_penalty(sample, settings, max_tokens) for sample, reward in scored]
    if settings.advantage == "decoupled" and scored:
        values = [_values(group, sample, weights) if weights else [reward] for sample, reward in scored]
        shaped = decoupled(values, [*weights.values()] if weights else [1.0]).tolist()
    by_turn = settings.credit != "sample"
    advantages = group_advantages(shaped, settings.advantage, keep_flat=settings.keep_flat_groups or by_turn)
    if advantages is None:
        return []
    samples = [sample for sample, _ in scored]
    of_tokens = _of_tokens(samples, shaped, advantages, settings) if by_turn else None
    is_flat = not any(map(np.any, of_tokens or [advantages]))
    if by_turn and is_flat and not settings.keep_flat_groups:
        return []
    # What is whitened has an advantage, and a KL term or an entropy bonus teaches without one.
    has_gradient = not is_flat or settings.advantage == "whitened" or settings.teaches_flat_groups
    lesson: list[SelectedSample] = []
    for number, ((entire, reward), advantage) in enumerate(zip(scored, advantages.tolist(), strict=True)):
        sample = entire if oldest is None else _since(entire, oldest)
        trained = _is_trained(sample, reward, settings)
        if trained or settings.keep_flat_groups:
            tokens = int(sample.loss_mask.sum()) if trained else 0
            of_its = of_tokens[number] if of_tokens else None
            lesson.append(
                SelectedSample(
                    group.slot, sample, reward, advantage, tokens, trained and has_gradient, of_its
                )
            )
    if settings.advantage == "pair":
        pair = [item for item in lesson if item.advantage]
        return pair if len(pair) == PAIR else []
    return lesson


def _of_tokens(
    samples: Sequence[Sample], rewards: Sequence[float], advantages: ArrayLike, settings: TrainerSettings
) -> list[NDArray[np.float64]]:
    """[(T,), ...] the advantage of each token of a group's samples: that of its turn. What a sample's reward
    is beyond those of its turns came at its end. A sample that names no turns is a single one. `advantages`
    (n,): those of the samples.
    """
    earned = [[turn.reward or 0.0 for turn in sample.generated_turns] or [0.0] for sample in samples]
    for of_sample, reward in zip(earned, rewards, strict=True):
        of_sample[-1] += reward - sum(of_sample)
    kind, discount = settings.advantage, settings.turn_discount
    if settings.credit == "state":
        states = [[turn.state for turn in sample.generated_turns] or [None] for sample in samples]
        weight = settings.state_weight
        of_turns = state_advantages(advantages, earned, states, kind, discount=discount, weight=weight)
    else:
        of_turns = turn_advantages(earned, kind, discount=discount)
    of_tokens: list[NDArray[np.float64]] = []
    for sample, of_its in zip(samples, of_turns, strict=True):
        begins = [turn.begin or 0 for turn in sample.generated_turns] or [0]
        turns = np.searchsorted(begins, np.arange(len(sample.token_ids)), side="right") - 1
        of_tokens.append(of_its[np.maximum(0, turns)] * sample.loss_mask)
    return of_tokens


def _values(group: Group, sample: Sample, weights: Mapping[str, float]) -> list[float]:
    """Return the values of the sample's rewards, in the order of `weights`."""
    missing = weights.keys() - sample.metrics.keys()
    if missing:
        raise ValueError(
            f"a sample of task {group.task_id} has no {min(missing)} among its metrics, which "
            "trainer.advantage=decoupled needs: its environment gives the reward itself; take another one"
        )
    return [sample.metrics[name] for name in weights]


def _since(sample: Sample, oldest: int) -> Sample:
    """Return the sample with only those spans trained that are of a policy of iteration `oldest` or later."""
    is_old = policy_iterations(sample, oldest) < oldest
    return replace(
        sample,
        loss_mask=np.where(is_old, 0, sample.loss_mask),
        logprobs=np.where(is_old, 0, sample.logprobs),
    )


def _is_trained(sample: Sample, reward: float, settings: TrainerSettings) -> bool:
    if settings.overlong == "drop" and sample.finish_reason == "length":
        return False
    is_good = settings.reward_threshold is None or reward >= settings.reward_threshold
    return is_good and bool(sample.loss_mask.any())


def _overlong_penalty(sample: Sample, settings: TrainerSettings, max_tokens: int | None) -> float:
    """Return how far, from 0 to 1, the sample reaches into the last `overlong_buffer` tokens before
    `max_tokens` (soft overlong punishment: DAPO, arXiv 2503.14476, equation 13).
    """
    if settings.overlong != "penalise":
        return 0.0
    if max_tokens is None:
        raise ValueError("trainer.overlong=penalise: the longest completion (rollout.max_tokens) is needed")
    buffer = settings.overlong_buffer * max_tokens
    generated = int(sample.loss_mask.sum())
    return min(1.0, max(0.0, (generated - (max_tokens - buffer)) / buffer))


def over_whole_batch(
    trained: Sequence[SelectedSample], settings: TrainerSettings
) -> tuple[list[SelectedSample], list[float]]:
    """Return a whole batch and its advantages, after the steps that need more than one group: of each source
    by itself, times its weight.
    """
    if not settings.sources:
        finished = with_whitened_tokens(trained, settings)
        return finished, batch_advantages(finished, settings)
    finished, advantages = [*trained], [0.0] * len(trained)
    for source in {item.source for item in trained}:
        places = [place for place, item in enumerate(trained) if item.source == source]
        weight = settings.sources[source].weight if source else 1.0
        alone = over_whole_batch([trained[place] for place in places], settings.of_source(source))
        for place, item, advantage in zip(places, *alone, strict=True):
            of_tokens = None if item.of_tokens is None else weight * item.of_tokens
            finished[place], advantages[place] = item._replace(of_tokens=of_tokens), weight * advantage
    return finished, advantages


def batch_advantages(trained: Sequence[SelectedSample], settings: TrainerSettings) -> list[float]:
    """Return the advantages of a whole batch, after the step that needs more than one group."""
    advantages = [item.advantage for item in trained]
    if settings.advantage == "decoupled":
        return standardised_batch(advantages).tolist()
    if not _whitens(settings):
        return advantages
    return whiten(advantages, [item.tokens for item in trained]).tolist()


def with_whitened_tokens(
    trained: Sequence[SelectedSample], settings: TrainerSettings
) -> list[SelectedSample]:
    """Return a whole batch with the advantages of tokens (credit=turn) whitened, where they are to be."""
    of_tokens = [item.of_tokens for item in trained if item.of_tokens is not None]
    if not of_tokens or not _whitens(settings):
        return [*trained]
    counts = np.concatenate([item.sample.loss_mask * (item.tokens > 0) for item in trained])
    ends = np.cumsum([len(values) for values in of_tokens])
    whitened = np.split(whiten(np.concatenate(of_tokens), counts), ends[:-1])
    return [item._replace(of_tokens=values) for item, values in zip(trained, whitened, strict=True)]


def _whitens(settings: TrainerSettings) -> bool:
    """Return whether the batch is whitened: KL in the reward is known in the training, which whitens then."""
    return settings.advantage == "whitened" and (settings.kl == "off" or settings.kl_in == "loss")


def draw_lessons(
    window: Sequence[Sequence[Lesson]], count: int, power: float, seed: int
) -> list[list[Lesson]]:
    """Draw `count` lessons from a window of iterations, oldest first, without replacement.

    A lesson has the weight (p + 1)^power, where p is the position of its iteration. The result has the shape
    of `window`. It has the lessons with the smallest -ln(u) / weight, u uniform (Efraimidis and Spirakis
    2006). u is hashed from the seed, the iteration's distance from the last one, and the slot.
    """
    keyed: list[tuple[float, int, int]] = []
    for p, of_iteration in enumerate(window):
        for k, lesson in enumerate(of_iteration):
            u = _uniform(f"replay/{seed}/{len(window) - 1 - p}/{lesson[0].slot}")
            # The logarithm of -ln(u) / (p + 1)^power, which cannot overflow.
            keyed.append((math.log(-math.log(u)) - power * math.log(p + 1), p, k))
    chosen = sorted((p, k) for _, p, k in sorted(keyed)[:count])
    return [[window[p][k] for q, k in chosen if q == p] for p in range(len(window))]


def shuffled(items: Sequence[_T], seed: int) -> list[_T]:
    """Return a permutation that depends only on the seed and the number of items.

    It is made from hashes: the stream of numpy's generators may change between its versions (NEP 19).
    """
    keys = [_hash(f"batch/{seed}/{k}") for k in range(len(items))]
    return [items[k] for k in sorted(range(len(items)), key=keys.__getitem__)]


def _hash(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _uniform(text: str) -> float:
    """Return a number in (0, 1), without both ends."""
    return ((int.from_bytes(_hash(text)[:8], "little") >> 11) + 0.5) * 2.0**-53
