"""Build the training batch of one iteration: finished groups in, flat arrays out. Torch-free.

A batch depends only on the groups, the settings and a seed, never on the nodes that made the groups or on
their order, so every membership of the run makes the same bytes.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollout.trajectory import Group, Picture, Sample
from trainer.batch.selection import (
    Lesson,
    draw,
    lessons,
    over_batch,
    policy_iterations,
    shuffled,
)
from trainer.settings import TrainerSettings

FORMAT = 5

_DEFAULTS = TrainerSettings()

_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "offsets": np.int64,
    "advantages": np.float32,
    "rewards": np.float32,
    "slots": np.int32,
    "groups": np.int32,
    "absent_at": np.int64,
    "absent_tokens": np.int32,
    "temperatures": np.float32,
    "ages": np.int32,
    "teacher_logprobs": np.float32,
    "token_advantages": np.float32,
    "sources": np.int32,
    "routes": np.int16,
}
_OPTIONAL = {"token_advantages", "sources", "routes"}
"""What a batch of before may lack, as one does that has none of it."""


class DamagedBatch(ValueError):
    """The bytes are not a whole batch of this format."""


@dataclass(frozen=True)
class Counts:
    """What the batch was made from. Unless a field says otherwise, it counts the batch's own iteration, with
    dropped groups and samples.
    """

    groups: int
    groups_used: int
    """Groups in the batch, of any iteration; absent ones are not counted, here and below."""
    samples: int
    samples_used: int
    """Samples in the batch, of any iteration."""
    samples_replayed: int
    """Samples in the batch of older iterations."""
    reward: float
    """Mean over all samples that exist; 0 if there are none."""
    truncated: float
    """Fraction of all existing samples that were cut at max_tokens."""


@dataclass(frozen=True, eq=False)
class Batch:
    """S sequences of T tokens in all; sequence s is `[offsets[s]:offsets[s + 1]]` of the token arrays."""

    token_ids: NDArray[np.int32]
    """(T,), prompts included."""
    loss_mask: NDArray[np.uint8]
    """(T,), 1: a trained token."""
    logprobs: NDArray[np.float32]
    """(T,), by the engine that sampled, natural log; NaN for trained tokens that no engine has sampled
    (demonstrations), 0 for tokens that are not trained."""
    offsets: NDArray[np.int64]
    """(S + 1,)"""
    advantages: NDArray[np.float32]
    """(S,), of the samples."""
    rewards: NDArray[np.float32]
    """(S,), as given, without a penalty for length."""
    slots: NDArray[np.int32]
    """(S,), the slot that the sequence's group has in its iteration."""
    temperatures: NDArray[np.float32]
    """(S,), above 0: at which the sequence was sampled; the trainer divides its logits by it."""
    ages: NDArray[np.int32]
    """(T,), how many iterations of training lie between the policy that sampled a token and the policy that
    the batch's iteration starts from; 0: it is the same policy, or the token is not trained."""
    counts: Counts
    manifest_sha256: str
    policy: str
    """Digest of the policy that generated the iteration's samples; replayed ones are of older policies."""
    seed: int
    groups: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """(S,), a number for each sequence's group, which replayed groups of the same slot do not share."""
    absent_at: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """(D,), rising: the places, in the order of all S + D sequences, of those that have no gradient. They are
    in no other array, but count in the divisor of their optimizer step."""
    absent_tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """(D,) trained tokens of each."""
    teacher_logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """(T,), by the teacher, natural log, 0 for tokens that are not trained; or (0,) without a teacher."""
    token_advantages: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """(T,), those of their turns; or (0,): each token has that of its sample."""
    pictures: Sequence[Sequence[Picture]] = ()
    """(S,) those of each sequence, in order; empty if no sequence has any."""
    sources: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """(S,) the index in `source_names` of the source of each sequence's task; or (0,)."""
    routes: NDArray[np.int16] = field(default_factory=lambda: np.zeros(0, np.int16))
    """(T x layers with experts x experts of a token,) as Sample has them; or (0,)."""
    source_names: Sequence[str] = ()
    """In order; empty if the tasks have a single source."""

    def __len__(self) -> int:
        """Number of sequences, without the absent ones."""
        return len(self.advantages)

    def lengths(self) -> NDArray[np.int64]:
        """(S,) tokens of each sequence."""
        return np.diff(self.offsets)

    @cached_property
    def prompt_tokens(self) -> NDArray[np.int64]:
        """(S,) tokens of each sequence before its first trained one; 0 if none is trained."""
        return self._trained_bounds[0]

    @cached_property
    def input_tokens(self) -> NDArray[np.int64]:
        """(S,) tokens of each sequence before its last trained one, from which something is predicted; 1 if
        none is trained.
        """
        return np.maximum(1, self._trained_bounds[1])

    @cached_property
    def _trained_bounds(self) -> NDArray[np.int64]:
        """(2, S) index in each sequence of its first and its last trained token; 0 if none is trained."""
        bounds = np.zeros((2, len(self)), np.int64)
        trained = np.flatnonzero(self.loss_mask)
        sequences = np.searchsorted(self.offsets, trained, side="right") - 1
        bounds[0, sequences[::-1]] = (trained - self.offsets[sequences])[
            ::-1
        ]  # of several values the last is kept
        bounds[1, sequences] = trained - self.offsets[sequences]
        return bounds

    def teaches(self, sequences: range) -> bool:
        """Return whether any of these sequences has an advantage."""
        if len(self.token_advantages):
            tokens = slice(self.offsets[sequences.start], self.offsets[sequences.stop])
            return bool((self.token_advantages * self.loss_mask)[tokens].any())
        return bool(self.advantages[sequences.start : sequences.stop].any())

    def age(self) -> dict[str, float]:
        """Return mean (`age`) and largest (`age_max`) of `ages` over the trained tokens, 0 without any."""
        ages = self.ages[self.loss_mask == 1]
        return {"age": _mean(ages), "age_max": float(ages.max(initial=0))}

    def encode(self) -> bytes:
        """One safetensors file. Equal batches have equal bytes."""
        # One metadata key: safetensors writes several in the order of a randomised hash map.
        header = {
            "format": FORMAT,
            "manifest_sha256": self.manifest_sha256,
            "policy": self.policy,
            "seed": self.seed,
            "counts": asdict(self.counts),
        }
        if self.pictures:
            header["pictures"] = [[astuple(picture) for picture in shown] for shown in self.pictures]
        if self.source_names:
            header["source_names"] = list(self.source_names)
        arrays = {name: getattr(self, name) for name in _DTYPES}
        arrays = {name: array for name, array in arrays.items() if name not in _OPTIONAL or len(array)}
        return safetensors.numpy.save(arrays, metadata={"batch": json.dumps(header, sort_keys=True)})

    @staticmethod
    def decode(data: bytes) -> "Batch":
        """Return the batch in `data`; raises DamagedBatch if it is cut, altered or of another format."""
        try:
            arrays = safetensors.numpy.load(data)
            (header_bytes,) = struct.unpack_from("<Q", data)
            header = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["batch"])
            if header["format"] != FORMAT:
                raise DamagedBatch(f"the batch has format {header['format']}, this version reads {FORMAT}")
            batch = Batch(
                **{name: arrays[name] for name in _DTYPES if name in arrays or name not in _OPTIONAL},
                counts=Counts(**header["counts"]),
                source_names=header.get("source_names", ()),
                pictures=[[Picture(*fields) for fields in shown] for shown in header.get("pictures", ())],
                **{name: header[name] for name in ("manifest_sha256", "policy", "seed")},
            )
        except (SafetensorError, KeyError, TypeError, ValueError, struct.error) as error:
            if isinstance(error, DamagedBatch):
                raise
            raise DamagedBatch(f"not a training batch: {error!r}; make it anew from the manifest") from error
        batch._check()
        return batch

    def _check(self) -> None:
        """Raise DamagedBatch when the arrays contradict each other."""
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != dtype:
                raise DamagedBatch(
                    f"{name} is {array.dtype} of shape {array.shape}, not one-dimensional {dtype}"
                )
        tokens = len(self.token_ids)
        sequences = len(self.advantages)
        if not (len(self.loss_mask) == len(self.logprobs) == len(self.ages) == tokens):
            raise DamagedBatch("token_ids, loss_mask, logprobs and ages differ in length")
        for name in ("teacher_logprobs", "token_advantages"):
            if len(getattr(self, name)) not in (0, tokens):
                raise DamagedBatch(f"token_ids and {name} differ in length")
        if len(self.routes) % tokens if tokens else len(self.routes):
            raise DamagedBatch(f"{len(self.routes)} routes are not the same number for {tokens} tokens")
        of_sequences = (self.rewards, self.slots, self.groups, self.temperatures, self.offsets[1:])
        if any(len(array) != sequences for array in of_sequences):
            raise DamagedBatch(
                "advantages, rewards, slots, groups, temperatures and offsets do not describe the same "
                "sequences"
            )
        if not (np.isfinite(self.temperatures).all() and (self.temperatures > 0).all()):
            raise DamagedBatch("a temperature is not a number above 0")
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or (np.diff(self.offsets) < 1).any():
            raise DamagedBatch(f"the offsets do not cut {tokens} tokens into {sequences} sequences")
        if self.loss_mask[self.offsets[:-1]].any():
            raise DamagedBatch("the first token of a sequence is marked as trained, but no logit scores it")
        if np.isinf(self.logprobs).any():
            raise DamagedBatch("a logprob is infinite, but no engine samples a token of probability 0")
        if self.pictures and len(self.pictures) != sequences:
            raise DamagedBatch(f"it has pictures of {len(self.pictures)} sequences, not of {sequences}")
        if (
            len(self.sources) != (sequences if self.source_names else 0)
            or not np.isin(self.sources, range(len(self.source_names))).all()
        ):
            raise DamagedBatch("sources and source_names do not name the source of each sequence")
        places = np.concatenate([[-1], self.absent_at, [sequences + len(self.absent_at)]])
        if len(self.absent_tokens) != len(self.absent_at) or (np.diff(places) < 1).any():
            raise DamagedBatch("absent_at and absent_tokens do not name places among all sequences")


class Older(NamedTuple):
    """The groups of an older iteration in the replay window, and how they were sampled."""

    groups: Sequence[Group]
    temperature: float = 1.0
    max_tokens: int | None = None
    """The longest completion that could be sampled; a penalty for length needs it."""
    policy_iteration: int = 0
    """The iteration whose training made the policy that sampled them; spans say it themselves."""
    reward_weights: Mapping[str, float] | None = None
    """See selection.lessons."""
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
    older: Sequence[Older] = (),
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
    newest = Older(groups, temperature, max_tokens, policy_iteration, reward_weights, task_sources)
    sources = [*older, newest]
    limit = settings.max_off_policy_steps
    oldest = None if limit is None else iteration - 1 - limit
    window = [
        lessons(
            source.groups, settings, source.max_tokens, oldest, source.reward_weights, source.task_sources
        )
        if oldest is None or source.policy_iteration >= oldest
        else []
        for source in sources
    ]
    if older:
        window = draw(window, len(window[-1]), settings.replay_power, seed)
    drawn = [
        (lesson, source)
        for source, of_iteration in zip(sources, window, strict=True)
        for lesson in of_iteration
    ]
    trained, advantages = over_batch([item for lesson, _ in drawn for item in lesson], settings)
    origins = [(number, source) for number, (lesson, source) in enumerate(drawn) for _ in lesson]
    scored = list(zip(trained, advantages, origins, strict=True))
    if settings.advantage == "pair":
        places = {number: place for place, number in enumerate(shuffled(range(len(drawn)), seed))}
        order = sorted(scored, key=lambda entry: places[entry[2][0]])
    else:
        order = shuffled(scored, seed)
    chosen = [entry for entry in order if entry[0].computed]
    absent = [(place, item.tokens) for place, (item, _, _) in enumerate(order) if not item.computed]
    samples = [item.sample for item, _, _ in chosen]
    named = [source.task_sources.get(item.slot, "") for item, _, (_, source) in chosen]
    names = sorted({*named, *(name for source in sources for name in source.task_sources.values())})
    if len(names) < 2:
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
        temperatures=np.array([source.temperature for _, _, (_, source) in chosen], np.float32),
        ages=_flat([_ages(item.sample, source, iteration) for item, _, (_, source) in chosen], np.int32),
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
    batch._check()
    check_engine_logprobs(batch, settings)
    return batch


def _taught(samples: Sequence[Sample], settings: TrainerSettings) -> list[NDArray[np.float32]]:
    """Return the teacher's logprobs of all samples, if the loss needs them; ValueError if it lacks some."""
    if settings.kl == "off" or settings.kl_to != "teacher":
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
    needs = [f"trainer.{name}={v}" for name, none in free.items() if (v := getattr(settings, name)) != none]
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


def _ages(sample: Sample, source: Older, iteration: int) -> NDArray[np.int32]:
    """(T,), as Batch.ages."""
    return (iteration - 1 - policy_iterations(sample, source.policy_iteration)) * sample.loss_mask


def _flat(arrays: list[NDArray], dtype: type) -> NDArray:
    """Return the arrays one after another; an empty one when there are none."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _mean(values: Sequence[float] | NDArray[np.int32]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
