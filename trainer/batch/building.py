"""Build the training batch of one iteration: finished groups in, flat arrays out. Torch-free.

A batch depends only on the groups, the settings and a seed, never on the nodes that made the groups or on
their order, so every membership of the run makes the same bytes.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollout.trajectory import Group, Sample
from trainer.batch.batch import Batch, Counts
from trainer.batch.selection import (
    Lesson,
    draw_lessons,
    lessons,
    over_whole_batch,
    policy_iterations,
    shuffled,
)
from trainer.settings import TrainerSettings

_DEFAULTS = TrainerSettings()


class ReplayedGroups(NamedTuple):
    """The groups of an older iteration in the replay window, and how they were sampled."""

    groups: Sequence[Group]
    temperature: float = 1.0
    max_tokens: int | None = None
    """The longest completion that could be sampled; a penalty for length needs it."""
    policy_iteration: int = 0
    """The iteration whose training made the policy that sampled them; spans say it themselves."""
    reward_weights: Mapping[str, float] | None = None
    """The weight of each reward with trainer.advantage=decoupled; see `selection.lessons`."""
    task_sources: Mapping[int, str] = MappingProxyType({})
    """By slot: the source of its task."""


def build_batch(
    groups: Sequence[Group],
    *,
    manifest_sha256: str,
    policy: str,
    temperature: float,
    seed: int,
    settings: TrainerSettings = _DEFAULTS,
    max_tokens: int | None = None,
    iteration: int = 1,
    policy_iteration: int = 0,
    older: Sequence[ReplayedGroups] = (),
    reward_weights: Mapping[str, float] | None = None,
    task_sources: Mapping[int, str] = MappingProxyType({}),
) -> Batch:
    """Select, score and shuffle the sequences of an iteration's `groups`.

    `settings` decide which are dropped and what their advantages are (trainer.batch.selection). Tombstones
    and samples without a reward are always dropped. The groups were sampled at `temperature`; `max_tokens`
    limited a completion, and a penalty for length needs it; `reward_weights` and `task_sources` are as in
    selection.lessons. The batch is trained in `iteration`, its samples are made by the policy of
    `policy_iteration` where they do not say another one. `older` are the replay window's other iterations,
    oldest first. If there are any, the batch is drawn from all of them, as many lessons as the iteration
    itself has. The sequences (with advantage=pair the pairs) are shuffled by `seed`, so that each optimizer
    step mixes many groups.

    Raises ValueError as selection.lessons, and if samples without logprobs (demonstrations) are to be trained
    by another loss than their likelihood.
    """
    newest = ReplayedGroups(groups, temperature, max_tokens, policy_iteration, reward_weights, task_sources)
    sampled = [*older, newest]
    limit = settings.max_off_policy_steps
    oldest = None if limit is None else iteration - 1 - limit
    window = [
        lessons(each.groups, settings, each.max_tokens, oldest, each.reward_weights, each.task_sources)
        if oldest is None or each.policy_iteration >= oldest
        else []
        for each in sampled
    ]
    if older:
        window = draw_lessons(window, len(window[-1]), settings.replay_power, seed)
    drawn = [
        (lesson, each) for each, of_iteration in zip(sampled, window, strict=True) for lesson in of_iteration
    ]
    trained, advantages = over_whole_batch([item for lesson, _ in drawn for item in lesson], settings)
    origins = [(number, each) for number, (lesson, each) in enumerate(drawn) for _ in lesson]
    scored = list(zip(trained, advantages, origins, strict=True))
    if settings.advantage == "pair":
        places = {number: place for place, number in enumerate(shuffled(range(len(drawn)), seed))}
        order = sorted(scored, key=lambda entry: places[entry[2][0]])
    else:
        order = shuffled(scored, seed)
    chosen = [entry for entry in order if entry[0].computed]
    absent = [(place, item.tokens) for place, (item, _, _) in enumerate(order) if not item.computed]
    samples = [item.sample for item, _, _ in chosen]
    named = [each.task_sources.get(item.slot, "") for item, _, (_, each) in chosen]
    names = sorted({*named, *(name for each in sampled for name in each.task_sources.values())})
    if len(names) < 2 and not settings.sources:
        named = names = []
    batch = Batch(
        token_ids=_flat([sample.token_ids for sample in samples], np.int32),
        loss_mask=_flat([sample.loss_mask for sample in samples], np.uint8),
        logprobs=_flat([sample.logprobs for sample in samples], np.float32),
        offsets=np.cumsum([0, *(len(sample.token_ids) for sample in samples)], dtype=np.int64),
        advantages=np.array([advantage for _, advantage, _ in chosen], np.float32),
        rewards=np.array([item.reward for item, _, _ in chosen], np.float32),
        slots=np.array([item.slot for item, _, _ in chosen], np.int32),
        groups=np.array([number for _, _, (number, _) in chosen], np.int32),
        absent_at=np.array([place for place, _ in absent], np.int64),
        absent_tokens=np.array([tokens for _, tokens in absent], np.int32),
        temperatures=np.array([each.temperature for _, _, (_, each) in chosen], np.float32),
        ages=_flat([_ages(item.sample, each, iteration) for item, _, (_, each) in chosen], np.int32),
        teacher_logprobs=_flat(_taught(samples, settings), np.float32),
        token_advantages=_flat(
            [item.of_tokens for item, _, _ in chosen if item.of_tokens is not None], np.float32
        ),
        sources=np.array([names.index(name) for name in named], np.int32),
        routes=_flat(_routes(samples, settings), np.int16),
        source_names=names,
        counts=_counts(groups, window),
        pictures=[sample.pictures for sample in samples] if any(s.pictures for s in samples) else (),
        manifest_sha256=manifest_sha256,
        policy=policy,
        seed=seed,
    )
    batch.check()
    check_engine_logprobs(batch, settings)
    return batch


def _taught(samples: Sequence[Sample], settings: TrainerSettings) -> list[NDArray[np.float32]]:
    """Return the teacher's logprobs of all samples, if the loss needs them; ValueError if it lacks some."""
    if settings.reference != "teacher":
        return []
    taught = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    if len(taught) < len(samples):
        raise ValueError(
            f"{len(samples) - len(taught)} of {len(samples)} samples have no logprobs of a teacher, which "
            "trainer.kl_to=teacher needs; they were made without rollout.teacher: train on them with the "
            "settings of before, or remove them (run cleanup --iteration N; older ones: "
            "trainer.replay_window=1)"
        )
    return taught


def _routes(samples: Sequence[Sample], settings: TrainerSettings) -> list[NDArray[np.int16]]:
    """Return the routes of all samples, if they are replayed; ValueError if some have none."""
    if not settings.routing_replay:
        return []
    routed = [s.routes.ravel() for s in samples if s.routes is not None and (s.routes >= 0).any()]
    if len(routed) < len(samples):
        raise ValueError(
            f"{len(samples) - len(routed)} of {len(samples)} samples have no routes, which "
            "trainer.routing_replay needs; they were made without it: train on them with "
            "trainer.routing_replay=false, or remove them (run cleanup --iteration N)"
        )
    return routed


def check_engine_logprobs(batch: Batch, settings: TrainerSettings) -> None:
    """Raise ValueError if the loss needs logprobs of an engine, and trained tokens have none (NaN)."""
    missing = np.flatnonzero(np.isnan(batch.logprobs) & (batch.loss_mask == 1))
    free = {"clip": "likelihood", "engine_correction": "off", "engine_sequence_cap": None}
    pairs = [(name, getattr(each, name)) for name in free for each in settings.of_all_sources]
    needs = list(dict.fromkeys(f"trainer.{name}={value}" for name, value in pairs if value != free[name]))
    if len(missing) and needs:
        sequences = len(np.unique(np.searchsorted(batch.offsets, missing, side="right")))
        raise ValueError(
            f"{sequences} of {len(batch)} sequences are demonstrations, which no engine has sampled; "
            f"{' with '.join(needs)} needs logprobs: train on demonstrations with trainer.algorithm=sft"
        )


def _counts(groups: Sequence[Group], used: Sequence[Sequence[Lesson]]) -> Counts:
    """Count what a batch was made from; `used` are its lessons, the iteration's own last."""
    existing = [(s, s.reward) for group in groups for s in group.samples if s.reward is not None]
    computed = [[sum(item.computed for item in lesson) for lesson in of_iteration] for of_iteration in used]
    samples = [sum(of_iteration) for of_iteration in computed]
    return Counts(
        groups=len(groups),
        groups_used=sum(count > 0 for of_iteration in computed for count in of_iteration),
        samples=len(existing),
        samples_used=sum(samples),
        samples_replayed=sum(samples[:-1]),
        reward=_mean([reward for _, reward in existing]),
        truncated=_mean([sample.finish_reason == "length" for sample, _ in existing]),
    )


def _ages(sample: Sample, sampled: ReplayedGroups, iteration: int) -> NDArray[np.int32]:
    """(T,), as Batch.ages."""
    return (iteration - 1 - policy_iterations(sample, sampled.policy_iteration)) * sample.loss_mask


def _flat(arrays: list[NDArray], dtype: type) -> NDArray:
    """Return the arrays one after another; an empty one when there are none."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
