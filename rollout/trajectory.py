"""Trajectories, and the part file that holds them: one safetensors blob that verifies itself.

A blob holds flat arrays over all samples of all groups (`token_ids`, `loss_mask`, `logprobs`), `offsets`
(sample s has [offsets[s], offsets[s + 1])) and `records`, the JSON (as bytes) of all that is not per token.
Its metadata holds `part` (the fields of PartHeader), `data_sha256` (of everything after the safetensors
header) and `header_sha256` (of the safetensors header itself, with this one value written as zeros). So
`header_sha256` vouches for the whole file.
"""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from rollout.origin import Code, Origin, Sampling, described

_DTYPES = {"token_ids": "I32", "loss_mask": "U8", "logprobs": "F32", "offsets": "I64", "records": "U8"}
_NUMPY = {"I32": np.dtype("<i4"), "U8": np.dtype("u1"), "F32": np.dtype("<f4"), "I64": np.dtype("<i8")}
_HEADER_LIMIT_BYTES = 100_000_000
_ZEROS = "0" * 64

UNFINISHED = "unfinished"
"""The finish_reason of a sample that a later iteration goes on with (rollout.segment_tokens)."""


class DamagedPart(ValueError):
    """The bytes are not a whole, unaltered part; the message says what is wrong."""


@dataclass(frozen=True)
class Turn:
    """What one side says in a conversation, for people to read."""

    role: str
    """As in chat messages: `assistant` for the model. `environment`: a text that was appended as it is."""
    text: str
    begin: int | None = None
    end: int | None = None
    """If the model has generated it for this sample: its tokens are token_ids[begin:end]."""
    finish_reason: str | None = None
    """If it is generated: `stop`, or `length` if it was cut."""


@dataclass(frozen=True)
class Span:
    """The tokens [begin:end] of a sample, which one iteration has generated."""

    begin: int
    end: int
    iteration: int
    policy_iteration: int
    """The iteration whose training made the policy that they were sampled by."""


@dataclass
class Sample:
    """One trajectory: the prompt's tokens, then what was generated (and, over several turns, observed)."""

    token_ids: NDArray[np.int32]
    """(T,), prompt included."""
    loss_mask: NDArray[np.uint8]
    """(T,): 1 for tokens that are trained, i.e. generated (the end-of-sequence token too); 0 for prompt and
    observations.
    """
    logprobs: NDArray[np.float32]
    """(T,), natural log, of each token in the distribution that it was sampled from; 0 where not trained.
    NaN: a trained token that nothing has sampled, in demonstrations only.
    """
    finish_reason: str
    """`stop` (it ended by itself), `length` (it was cut), or UNFINISHED."""
    text: str
    """The completion."""
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """What the environment and the reward have measured, by name."""
    turns: list[Turn] = field(default_factory=list)
    """The conversation after the group's prompt; empty if that is `text` alone. A conversation that an
    environment has opened with another prompt begins with that one.
    """
    spans: list[Span] = field(default_factory=list)
    """Which iterations have generated it, in order, if several may have; empty: the one that its part is of.
    """
    index: int = 0
    """Where it has spans: its number among the samples that its group was asked for, which its draws follow
    from.
    """


@dataclass
class Group:
    """The samples of one slot. A tombstone (a slot that is given up for good) has none, and says why."""

    slot: int
    task_id: str
    prompt: str
    """For people."""
    samples: list[Sample]
    given_up: str | None = None
    failed: list[str] = field(default_factory=list)
    """For each sample that is missing, because its reward raised or it was unfit: the reason."""

    @property
    def is_unfinished(self) -> bool:
        """Whether the next iteration goes on with some of its samples. None has a reward then."""
        return any(sample.finish_reason == UNFINISHED for sample in self.samples)


@dataclass(frozen=True)
class PartHeader:
    """Where a part belongs, and (from `policy` on) the fields of the Origin of its samples."""

    kind: Literal["train", "eval"]
    iteration: int
    rank: int
    epoch: int
    part: int
    policy: str
    policy_iteration: int
    sampling: Sampling
    reward: Code
    environment: Code

    @property
    def origin(self) -> Origin:
        """What the samples were made with."""
        return Origin(self.policy, self.policy_iteration, self.sampling, self.reward, self.environment)


@with_config(extra="forbid", strict=True)
class _TurnRecord(TypedDict):
    role: str
    text: str
    begin: int | None
    end: int | None
    finish_reason: str | None


@with_config(extra="forbid", strict=True)
class _SpanRecord(TypedDict):
    begin: int
    end: int
    iteration: int
    policy_iteration: int


@with_config(extra="forbid", strict=True)
class _SampleRecord(TypedDict):
    finish_reason: str
    text: str
    reward: float | None
    metrics: dict[str, float]
    turns: NotRequired[list[_TurnRecord]]
    spans: NotRequired[list[_SpanRecord]]
    index: NotRequired[int]


class _GroupRecord(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    slot: int
    task_id: str
    prompt: str
    given_up: str | None
    failed: list[str]
    samples: list[_SampleRecord]


_RECORDS = TypeAdapter(list[_GroupRecord])
_HEADER = TypeAdapter(PartHeader)


def unfit(sample: Sample, *, demonstrated: bool, unfinished: bool = False) -> str | None:
    """Return why the sample can be neither trained nor stored; None if it can, and then its arrays are arrays
    and its numbers floats. `demonstrated`: the logprobs of trained tokens may be NaN. `unfinished`: another
    iteration may go on with it.
    """
    try:
        ids, mask = np.asarray(sample.token_ids), np.asarray(sample.loss_mask)
        logprobs = np.asarray(sample.logprobs, dtype=np.float32)
        sample.reward = None if sample.reward is None else float(sample.reward)
        sample.metrics = {str(name): float(value) for name, value in sample.metrics.items()}
    except (TypeError, ValueError, AttributeError) as error:
        return f"it does not consist of numbers: {error}"
    sample.token_ids, sample.loss_mask, sample.logprobs = ids, mask, logprobs
    shapes = {ids.shape, mask.shape, logprobs.shape}
    if shapes != {(ids.size,)}:
        return f"its token_ids, loss_mask and logprobs have the shapes {sorted(shapes)}"
    if ids.size and (ids.dtype.kind not in "iu" or int(ids.min()) < 0 or int(ids.max()) >= 2**31):
        return f"its token_ids are no token ids: {ids.dtype} from {ids.min()} to {ids.max()}"
    if not np.isin(mask, (0, 1)).all():
        return "its loss_mask has values other than 0 and 1"
    trained = mask.astype(bool)
    if trained[:1].any():
        return "its first token is trained, but no logit scores that"
    missing = trained & np.isnan(logprobs) & demonstrated
    broken = ~np.isfinite(logprobs) & ~missing
    if broken.any():
        place = int(broken.argmax())
        return f"the logprob of its token {place} is {logprobs[place]}"
    for name, value in {"reward": sample.reward or 0.0, **sample.metrics}.items():
        if not math.isfinite(value):
            return f"its {name} is {value}"
    if not isinstance(sample.text, str):
        return f"its text is {type(sample.text).__name__}"
    if sample.finish_reason not in ("stop", "length", *([UNFINISHED] if unfinished else [])):
        return f"its finish_reason is {sample.finish_reason!r}, neither stop nor length"
    if not isinstance(sample.turns, list) or not all(isinstance(turn, Turn) for turn in sample.turns):
        return "its turns are no list of Turn"
    return None


def generated_tokens(group: Group, iteration: int) -> int:
    """Count the tokens of a group in a part of `iteration` that this iteration has generated."""
    return sum(
        sum(span.end - span.begin for span in sample.spans if span.iteration == iteration)
        if sample.spans
        else int(sample.loss_mask.sum())
        for sample in group.samples
    )


def encode_part(groups: Sequence[Group], header: PartHeader) -> bytes:
    """Return the part as one blob. Equal arguments give equal bytes. Raises ValueError if a sample's arrays
    differ in length, or if a reward or metric is not finite.
    """
    samples = [sample for group in groups for sample in group.samples]
    lengths = [_length(sample) for sample in samples]
    records = [
        {
            **{name: getattr(group, name) for name in ("slot", "task_id", "prompt", "given_up", "failed")},
            "samples": [_record(sample) for sample in group.samples],
        }
        for group in groups
    ]
    columns: dict[str, list[NDArray[Any]]] = {
        "token_ids": [sample.token_ids for sample in samples],
        "loss_mask": [sample.loss_mask for sample in samples],
        "logprobs": [sample.logprobs for sample in samples],
        "offsets": [np.cumsum([0, *lengths], dtype=_NUMPY["I64"])],
        "records": [np.frombuffer(json.dumps(records, allow_nan=False).encode(), dtype=np.uint8)],
    }
    return _blob(columns, described(header))


def decode_part(data: bytes) -> tuple[PartHeader, list[Group]]:
    """Header and groups, every byte verified. The arrays are writable. Raises DamagedPart, nothing else."""
    header, layout, start, data_sha256 = _parse_header(data)
    if hashlib.sha256(memoryview(data)[start:]).hexdigest() != data_sha256:
        raise DamagedPart("the data's checksum does not match: bytes were altered after the part was written")
    arrays = {
        name: np.frombuffer(data, _NUMPY[_DTYPES[name]], count, start + begin).copy()
        for name, (begin, count) in layout.items()
    }
    try:
        # Not validate_json: text may hold half of a surrogate pair, which only Python's parser accepts.
        records = _RECORDS.validate_python(json.loads(arrays["records"].tobytes()))
    except ValueError as error:
        raise DamagedPart(f"the records do not parse: {error}") from error
    offsets = arrays["offsets"].tolist()
    if len(offsets) != 1 + sum(len(record.samples) for record in records):
        raise DamagedPart(f"{len(offsets) - 1} samples in the arrays, not as many in the records")
    spans = iter([slice(begin, end) for begin, end in itertools.pairwise(offsets)])
    return header, [_group(record, arrays, spans) for record in records]


def line_for_people(group: Group, *, rank: int, model_version: str) -> str:
    """Return the group as one line of JSON, without its token arrays."""
    line: dict[str, Any] = {"slot": group.slot, "task_id": group.task_id, "prompt": group.prompt}
    line |= {"samples": [_for_people(sample) for sample in group.samples]}
    line |= {"rank": rank, "model_version": model_version}
    line |= {name: value for name in ("given_up", "failed") if (value := getattr(group, name))}
    return json.dumps(line) + "\n"


def _for_people(sample: Sample) -> dict[str, Any]:
    record: dict[str, Any] = {
        "text": sample.text,
        "reward": sample.reward,
        "tokens": int(np.count_nonzero(sample.loss_mask)),
        "finish_reason": sample.finish_reason,
    }
    if sample.metrics:
        record["metrics"] = sample.metrics
    if sample.turns:
        record["turns"] = [_turn_for_people(turn, sample.loss_mask) for turn in sample.turns]
    return record


def _turn_for_people(turn: Turn, loss_mask: NDArray[np.uint8]) -> dict[str, Any]:
    """Return a turn, with the number of its tokens and of those that are trained if it is generated."""
    said: dict[str, Any] = {"role": turn.role, "text": turn.text}
    if turn.begin is not None and turn.end is not None:
        trained = int(np.count_nonzero(loss_mask[turn.begin : turn.end]))
        said |= {"tokens": turn.end - turn.begin, "trained": trained, "finish_reason": turn.finish_reason}
    return said


def _length(sample: Sample) -> int:
    lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs)}
    if len(lengths) != 1:
        raise ValueError(f"a sample's token_ids, loss_mask and logprobs differ in length: {sorted(lengths)}")
    return lengths.pop()


def _record(sample: Sample) -> dict[str, Any]:
    record = {name: getattr(sample, name) for name in ("finish_reason", "text", "reward", "metrics")}
    if sample.turns:
        record["turns"] = [asdict(turn) for turn in sample.turns]
    if sample.spans:
        record |= {"spans": [asdict(span) for span in sample.spans], "index": sample.index}
    return record


def _group(record: _GroupRecord, arrays: Mapping[str, NDArray[Any]], spans: Any) -> Group:
    samples = []
    for sample in record.samples:
        span = next(spans)
        samples.append(
            Sample(
                token_ids=arrays["token_ids"][span],
                loss_mask=arrays["loss_mask"][span],
                logprobs=arrays["logprobs"][span],
                finish_reason=sample["finish_reason"],
                text=sample["text"],
                reward=sample["reward"],
                metrics=sample["metrics"],
                turns=[Turn(**turn) for turn in sample.get("turns", ())],
                spans=[Span(**span) for span in sample.get("spans", ())],
                index=sample.get("index", 0),
            )
        )
    return Group(record.slot, record.task_id, record.prompt, samples, record.given_up, record.failed)


def _blob(columns: dict[str, list[NDArray[Any]]], header: dict[str, Any]) -> bytes:
    # The safetensors library would order the metadata at random, and copy the data twice.
    # The widest type comes first, as in the library, so that every array is aligned.
    entries: dict[str, Any] = {}
    chunks: list[memoryview] = []
    digest = hashlib.sha256()
    end = 0
    for name in sorted(columns, key=lambda name: -_NUMPY[_DTYPES[name]].itemsize):
        dtype = _NUMPY[_DTYPES[name]]
        begin = end
        chunk = np.concatenate([np.empty(0, dtype), *columns[name]], dtype=dtype, casting="unsafe").data
        chunks.append(chunk)
        digest.update(chunk)
        end += chunk.nbytes
        shape = [(end - begin) // dtype.itemsize]
        entries[name] = {"dtype": _DTYPES[name], "shape": shape, "data_offsets": [begin, end]}
    metadata = {"part": json.dumps(header), "data_sha256": digest.hexdigest(), "header_sha256": _ZEROS}
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    sealed = _sealed(text, _ZEROS, hashlib.sha256(text.encode()).hexdigest())
    return b"".join([struct.pack("<Q", len(sealed)), sealed.encode(), *chunks])


def _sealed(text: str, old: str, new: str) -> str:
    """Return the header with another value of header_sha256. Quotes inside of `part` are escaped, so this
    text occurs only once.
    """
    return text.replace(f'"header_sha256":"{old}"', f'"header_sha256":"{new}"')


def _parse_header(data: bytes) -> tuple[PartHeader, dict[str, tuple[int, int]], int, str]:
    """Return the header; name -> (begin in bytes, number of items); where the data starts; the data's
    checksum.
    """
    if len(data) < 8:
        raise DamagedPart(f"{len(data)} bytes are too few for a part")
    start = 8 + struct.unpack("<Q", data[:8])[0]
    if start > min(len(data), _HEADER_LIMIT_BYTES):
        raise DamagedPart(f"its header should end at byte {start}, the part has {len(data)}")
    try:
        text = bytes(data[8:start]).decode("ascii")
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        sealed_by, data_sha256 = metadata["header_sha256"], metadata["data_sha256"]
        if (
            len(sealed_by) != 64
            or hashlib.sha256(_sealed(text, sealed_by, _ZEROS).encode()).hexdigest() != sealed_by
        ):
            raise DamagedPart("the header's checksum does not match")
        header = _HEADER.validate_json(metadata["part"])
        layout, end = _layout(entries)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, DamagedPart):
            raise
        raise DamagedPart(f"the header does not parse: {type(error).__name__}: {error}") from error
    if start + end != len(data):
        raise DamagedPart(f"the part has {len(data)} bytes, its header says {start + end}")
    return header, layout, start, data_sha256


def _layout(entries: dict[str, Any]) -> tuple[dict[str, tuple[int, int]], int]:
    if set(entries) != set(_DTYPES):
        raise DamagedPart(f"it holds the arrays {sorted(entries)}, not {sorted(_DTYPES)}")
    layout, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (count,), (begin, stop) = entry["shape"], entry["data_offsets"]
        if (
            entry["dtype"] != _DTYPES[name]
            or begin != end
            or stop - begin != count * _NUMPY[entry["dtype"]].itemsize
        ):
            raise DamagedPart(f"array {name!r} is described inconsistently: {entry}")
        layout[name], end = (begin, count), stop
    return layout, end
