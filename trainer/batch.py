"""The training batch of one iteration: finished groups in, flat arrays out. Torch-free.

A batch depends on the groups and a seed alone, never on the nodes that made the groups or on the order in
which they are given, so every membership of the run makes the same bytes.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollout.trajectory import Group, Sample
from trainer.advantages import group_advantages

FORMAT = 1

_T = TypeVar("_T")

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
    """What the batch was made from; `groups` and `samples` count the dropped ones too."""

    groups: int
    groups_used: int
    samples: int
    samples_used: int
    reward: float
    """Mean over all samples that exist, 0 without any."""
    truncated: float
    """Fraction of all samples that exist which were cut at max_tokens."""


@dataclass(frozen=True, eq=False)
class Batch:
    """S sequences of T tokens in all; sequence s is `[offsets[s]:offsets[s + 1]]` of the token arrays."""

    token_ids: NDArray[np.int32]
    """(T,), prompts included."""
    loss_mask: NDArray[np.uint8]
    """(T,), 1: a trained token."""
    logprobs: NDArray[np.float32]
    """(T,), the engine's, natural log, of the sampled tokens; 0 elsewhere."""
    offsets: NDArray[np.int64]
    """(S + 1,)"""
    advantages: NDArray[np.float32]
    """(S,)"""
    rewards: NDArray[np.float32]
    """(S,)"""
    slots: NDArray[np.int32]
    """(S,), the slot that the sequence's group belongs to."""
    counts: Counts
    manifest_sha256: str
    policy: str
    """Digest of the policy that generated the samples."""
    temperature: float
    """At which they were sampled; the trainer divides its logits by it."""
    seed: int

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.advantages)

    def lengths(self) -> NDArray[np.int64]:
        """(S,) tokens of each sequence."""
        return np.diff(self.offsets)

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
        """The batch in `data`; raises DamagedBatch when it is cut, altered or of another format."""
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


class _Scored(NamedTuple):
    slot: int
    sample: Sample
    reward: float


def build_batch(
    groups: Iterable[Group], *, manifest_sha256: str, policy: str, temperature: float, seed: int
) -> Batch:
    """Select, score and shuffle the sequences of an iteration.

    Tombstones, samples without a reward and groups without an advantage are dropped. The sequences are
    shuffled by `seed`, so that each optimizer step mixes many groups. Raises ValueError for two groups of
    one slot.
    """
    ordered = sorted(groups, key=lambda group: group.slot)
    for one, other in pairwise(ordered):
        if one.slot == other.slot:
            raise ValueError(
                f"slot {one.slot} has two groups ({one.task_id}, {other.task_id}); a slot is one group"
            )
    existing: list[_Scored] = []
    chosen: list[tuple[_Scored, float]] = []
    groups_used = 0
    for group in ordered:
        if group.given_up is not None:
            continue
        scored = [_Scored(group.slot, s, s.reward) for s in group.samples if s.reward is not None]
        existing += scored
        advantages = group_advantages([one.reward for one in scored])
        if advantages is not None:
            groups_used += 1
            chosen += zip(scored, advantages.tolist(), strict=True)
    chosen = _shuffled(chosen, seed)
    samples = [one.sample for one, _ in chosen]
    batch = Batch(
        token_ids=_flat([sample.token_ids for sample in samples], np.int32),
        loss_mask=_flat([sample.loss_mask for sample in samples], np.uint8),
        logprobs=_flat([sample.logprobs for sample in samples], np.float32),
        offsets=np.cumsum([0, *(len(sample.token_ids) for sample in samples)], dtype=np.int64),
        advantages=np.array([advantage for _, advantage in chosen], np.float32),
        rewards=np.array([one.reward for one, _ in chosen], np.float32),
        slots=np.array([one.slot for one, _ in chosen], np.int32),
        counts=Counts(
            groups=len(ordered),
            groups_used=groups_used,
            samples=len(existing),
            samples_used=len(chosen),
            reward=_mean([one.reward for one in existing]),
            truncated=_mean([one.sample.finish_reason == "length" for one in existing]),
        ),
        manifest_sha256=manifest_sha256,
        policy=policy,
        temperature=temperature,
        seed=seed,
    )
    batch._check()
    return batch


def _flat(arrays: list[NDArray], dtype: type) -> NDArray:
    """The arrays one after another; an empty one when there are none."""
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _shuffled(items: list[_T], seed: int) -> list[_T]:
    """A permutation that depends on the seed and the number of items alone.

    By hashes: the stream of numpy's generators may change between its versions (NEP 19).
    """
    keys = [hashlib.sha256(f"batch/{seed}/{k}".encode()).digest() for k in range(len(items))]
    return [items[k] for k in sorted(range(len(items)), key=keys.__getitem__)]
