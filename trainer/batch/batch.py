"""The training batch of one iteration: sequences as flat arrays, and the file that holds them. Torch-free."""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from functools import cached_property

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray
from safetensors import SafetensorError

from rollout.trajectory import Picture

FORMAT = 5
"""Version of the batch's file (not of the run directory, which is directory.layout's). Raise it when bytes of
before would be read wrongly; a further array that may be missing (`_OPTIONAL`) is no new version."""

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
        return {"age": float(ages.mean()) if len(ages) else 0.0, "age_max": float(ages.max(initial=0))}

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
            raise DamagedBatch(f"not a training batch: {error!r}; make it again from the manifest") from error
        batch.check()
        return batch

    def check(self) -> None:
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
