"""Build the training batch of one iteration: finished groups in, flat arrays out. Torch-free.

A batch depends only on the groups, the settings and a seed, never on the nodes that made the groups or on
their order, so every membership of the run makes the same bytes.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollout.trajectory import Group
from trainer.batch.selection import Lesson, batch_advantages, draw, lessons, shuffled
from trainer.settings import TrainerSettings

FORMAT = 2

_DEFAULTS = TrainerSettings()

_DTYPES = {
    "token_ids": np.int32,
    "loss_mask": np.uint8,
    "logprobs": np.float32,
    "offsets": np.int64,
    "advantages": np.float32,
    "rewards": np.float32,
    "slots": np.int32,
}


class DamagedBatch(ValueError):
    """The bytes are not a whole batch of this format."""


@dataclass(frozen=True)
class Counts:
    """What the batch was made from. Unless a field says otherwise, it counts the batch's own iteration, with
    dropped groups and samples.
    """

    groups: int
    groups_used: int
    """Groups in the batch, of any iteration."""
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
    """(T,), by the engine that sampled, natural log; 0 for tokens that are not trained."""
    offsets: NDArray[np.int64]
    """(S + 1,)"""
    advantages: NDArray[np.float32]
    """(S,)"""
    rewards: NDArray[np.float32]
    """(S,), as given, without a penalty for length."""
    slots: NDArray[np.int32]
    """(S,), the slot that the sequence's group has in its iteration."""
    counts: Counts
    manifest_sha256: str
    policy: str
    """Digest of the policy that generated the iteration's samples; replayed ones are of older policies."""
    temperature: float
    """The temperature of the sampling; the trainer divides its logits by it."""
    seed: int

    def __len__(self) -> int:
        """Number of sequences."""
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
        of = np.searchsorted(self.offsets, trained, side="right") - 1
        bounds[0, of[::-1]] = (trained - self.offsets[of])[::-1]  # of several values the last is kept
        bounds[1, of] = trained - self.offsets[of]
        return bounds

    def encode(self) -> bytes:
        """One safetensors file. Equal batches have equal bytes."""
        # One metadata key: safetensors writes several in the order of a randomised hash map.
        about = {
            "format": FORMAT,
            "manifest_sha256": self.manifest_sha256,
            "policy": self.policy,
            "temperature": self.temperature,
            "seed": self.seed,
            "counts": asdict(self.counts),
        }
        arrays = {name: getattr(self, name) for name in _DTYPES}
        return safetensors.numpy.save(arrays, metadata={"batch": json.dumps(about, sort_keys=True)})

    @staticmethod
    def decode(data: bytes) -> "Batch":
        """The batch in `data`; raises DamagedBatch if it is cut, altered or of another format."""
        try:
            arrays = safetensors.numpy.load(data)
            (header_bytes,) = struct.unpack_from("<Q", data)
            about = json.loads(json.loads(data[8 : 8 + header_bytes])["__metadata__"]["batch"])
            if about["format"] != FORMAT:
                raise DamagedBatch(f"the batch has format {about['format']}, this version reads {FORMAT}")
            batch = Batch(
                **{name: arrays[name] for name in _DTYPES},
                counts=Counts(**about["counts"]),
                **{name: about[name] for name in ("manifest_sha256", "policy", "temperature", "seed")},
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
        if not (len(self.loss_mask) == len(self.logprobs) == tokens):
            raise DamagedBatch("token_ids, loss_mask and logprobs differ in length")
        if not (len(self.rewards) == len(self.slots) == sequences == len(self.offsets) - 1):
            raise DamagedBatch("advantages, rewards, slots and offsets do not describe the same sequences")
        if self.offsets[0] != 0 or self.offsets[-1] != tokens or (np.diff(self.offsets) < 1).any():
            raise DamagedBatch(f"the offsets do not cut {tokens} tokens into {sequences} sequences")
        if self.loss_mask[self.offsets[:-1]].any():
            raise DamagedBatch("the first token of a sequence is marked as trained, but no logit scores it")


def build_batch(
    groups: Sequence[Group],
    *,
    manifest_sha256: str,
    policy: str,
    temperature: float,
    seed: int,
    settings: TrainerSettings = _DEFAULTS,
    max_tokens: int | None = None,
    older: Sequence[Sequence[Group]] = (),
) -> Batch:
    """Select, score and shuffle the sequences of an iteration's `groups`.

    `settings` decide which are dropped and what their advantages are (trainer.batch.selection). Tombstones
    and samples without a reward are always dropped. `max_tokens` limits a completion; a penalty for length
    needs it. `older` are the groups of the replay window's other iterations, oldest first. If there are any,
    the batch is drawn from all of them, as many lessons as the iteration itself has. The sequences are
    shuffled by `seed`, so that each optimizer step mixes many groups.

    Raises ValueError for two groups of one slot, or for a penalty without `max_tokens`.
    """
    window = [lessons(of_iteration, settings, max_tokens) for of_iteration in [*older, groups]]
    if older:
        window = draw(window, len(window[-1]), settings.replay_power, seed)
    trained = [one for of_iteration in window for lesson in of_iteration for one in lesson]
    chosen = shuffled(list(zip(trained, batch_advantages(trained, settings), strict=True)), seed)
    samples = [one.sample for one, _ in chosen]
    batch = Batch(
        token_ids=_flat([sample.token_ids for sample in samples], np.int32),
        loss_mask=_flat([sample.loss_mask for sample in samples], np.uint8),
        logprobs=_flat([sample.logprobs for sample in samples], np.float32),
        offsets=np.cumsum([0, *(len(sample.token_ids) for sample in samples)], dtype=np.int64),
        advantages=np.array([advantage for _, advantage in chosen], np.float32),
        rewards=np.array([one.reward for one, _ in chosen], np.float32),
        slots=np.array([one.slot for one, _ in chosen], np.int32),
        counts=_counts(groups, window),
        manifest_sha256=manifest_sha256,
        policy=policy,
        temperature=temperature,
        seed=seed,
    )
    batch._check()
    return batch


def _counts(groups: Sequence[Group], used: Sequence[Sequence[Lesson]]) -> Counts:
    """Count what a batch was made from; `used` are its lessons, the iteration's own last."""
    existing = [(s, s.reward) for group in groups for s in group.samples if s.reward is not None]
    samples = [sum(map(len, of_iteration)) for of_iteration in used]
    return Counts(
        groups=len(groups),
        groups_used=sum(map(len, used)),
        samples=len(existing),
        samples_used=sum(samples),
        samples_replayed=sum(samples[:-1]),
        reward=_mean([reward for _, reward in existing]),
        truncated=_mean([sample.finish_reason == "length" for sample, _ in existing]),
    )


def _flat(arrays: list[NDArray], dtype: type) -> NDArray:
    """The arrays one after another; an empty one when there are none."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
