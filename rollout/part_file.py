"""The part file, which holds groups of trajectories: one safetensors blob that verifies itself.

A blob holds flat arrays over all samples of all groups (`token_ids`, `loss_mask`, `logprobs`, and where there
is a teacher `teacher_logprobs`), `offsets`
(sample s has [offsets[s], offsets[s + 1])) and `records`, the JSON (as bytes) of all that is not per token.
Its metadata holds `part` (the fields of PartHeader), `data_sha256` (of everything after the safetensors
header) and `header_sha256` (of the safetensors header itself, with this one value written as zeros). So
`header_sha256` vouches for the whole file.
"""

import hashlib
import itertools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from json import dumps, loads  # code of the user's may set others in the module
from typing import Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter, with_config
from typing_extensions import TypedDict

from rollout.origin import Code, Origin, Sampling, origin_document
from rollout.trajectory import Group, Picture, Sample, Span, Turn

_DTYPES = {"token_ids": "I32", "loss_mask": "U8", "logprobs": "F32", "offsets": "I64", "records": "U8"}
_TEACHER = {"teacher_logprobs": "F32"}
"""Only there if a teacher was asked."""
_ROUTES = {"routes": "I16"}
"""Only there if some were recorded: so many for each token as there are."""
_ALL = {**_DTYPES, **_TEACHER, **_ROUTES}
_NUMPY = {
    "I32": np.dtype("<i4"),
    "U8": np.dtype("u1"),
    "I16": np.dtype("<i2"),
    "F32": np.dtype("<f4"),
    "I64": np.dtype("<i8"),
}
_HEADER_LIMIT_BYTES = 100_000_000
_ZEROS = "0" * 64


class DamagedPart(ValueError):
    """The bytes are not a whole, unaltered part; the message says what is wrong."""


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
    reward: NotRequired[float]
    state: NotRequired[str]


@with_config(extra="forbid", strict=True)
class _SpanRecord(TypedDict):
    begin: int
    end: int
    iteration: int
    policy_iteration: int


@with_config(extra="forbid", strict=True)
class _PictureRecord(TypedDict):
    digest: str
    begin: int
    end: int


@with_config(extra="forbid", strict=True)
class _SampleRecord(TypedDict):
    finish_reason: str
    text: str
    reward: float | None
    metrics: dict[str, float]
    turns: NotRequired[list[_TurnRecord]]
    spans: NotRequired[list[_SpanRecord]]
    index: NotRequired[int]
    pictures: NotRequired[list[_PictureRecord]]


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
        "records": [np.frombuffer(dumps(records, allow_nan=False).encode(), dtype=np.uint8)],
    }
    taught = [sample.teacher_logprobs for sample in samples if sample.teacher_logprobs is not None]
    if taught:
        if len(taught) != len(samples) or list(map(len, taught)) != lengths:
            raise ValueError("a sample's teacher_logprobs are missing, or are not as many as its token_ids")
        columns["teacher_logprobs"] = taught
    if widths := {sample.routes.shape[1] for sample in samples if sample.routes is not None}:
        columns["routes"] = [_routes(sample, *widths).ravel() for sample in samples]
    return _blob(columns, origin_document(header))


def check_part(data: bytes) -> PartHeader:
    """Return the header, after both checksums were verified. Raises DamagedPart, nothing else."""
    return _checked(data)[0]


def decode_part(data: bytes) -> tuple[PartHeader, list[Group]]:
    """Header and groups, every byte verified. The arrays are writable. Raises DamagedPart, nothing else."""
    header, layout, start = _checked(data)
    arrays = {
        name: np.frombuffer(data, _NUMPY[_ALL[name]], count, start + begin).copy()
        for name, (begin, count) in layout.items()
    }
    try:
        # Not validate_json: text may hold half of a surrogate pair, which only Python's parser accepts.
        records = _RECORDS.validate_python(loads(arrays["records"].tobytes()))
    except ValueError as error:
        raise DamagedPart(f"the records do not parse: {error}") from error
    offsets = arrays["offsets"].tolist()
    if len(offsets) != 1 + sum(len(record.samples) for record in records):
        raise DamagedPart(f"{len(offsets) - 1} samples in the arrays, not as many in the records")
    if len({record.slot for record in records}) != len(records):
        raise DamagedPart("it has a slot twice")
    spans = iter([slice(begin, end) for begin, end in itertools.pairwise(offsets)])
    return header, [_group(record, arrays, spans) for record in records]


def _routes(sample: Sample, width: int) -> NDArray[np.int16]:
    missing = np.full((len(sample.token_ids), width), -1, np.int16)
    routes = missing if sample.routes is None else sample.routes
    if routes.shape != missing.shape:
        raise ValueError(f"a sample's routes are {routes.shape}, not {missing.shape} as its tokens")
    return routes


def _length(sample: Sample) -> int:
    lengths = {len(sample.token_ids), len(sample.loss_mask), len(sample.logprobs)}
    if len(lengths) != 1:
        raise ValueError(f"a sample's token_ids, loss_mask and logprobs differ in length: {sorted(lengths)}")
    return lengths.pop()


def _record(sample: Sample) -> dict[str, Any]:
    record = {name: getattr(sample, name) for name in ("finish_reason", "text", "reward", "metrics")}
    if sample.turns:
        record["turns"] = [_turn_record(turn) for turn in sample.turns]
    if sample.spans:
        record |= {"spans": [asdict(span) for span in sample.spans], "index": sample.index}
    if sample.pictures:
        record["pictures"] = [asdict(picture) for picture in sample.pictures]
    return record


def _turn_record(turn: Turn) -> dict[str, Any]:
    later = ("reward", "state")  # parts of before have none
    return {name: value for name, value in asdict(turn).items() if value is not None or name not in later}


def _group(record: _GroupRecord, arrays: Mapping[str, NDArray[Any]], spans: Any) -> Group:
    samples, taught = list[Sample](), arrays.get("teacher_logprobs")
    routes = arrays.get("routes")
    routes = None if routes is None else routes.reshape(len(arrays["token_ids"]), -1)
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
                pictures=[Picture(**picture) for picture in sample.get("pictures", ())],
                teacher_logprobs=None if taught is None else taught[span],
                routes=None if routes is None else routes[span],
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
    for name in sorted(columns, key=lambda name: -_NUMPY[_ALL[name]].itemsize):
        dtype = _NUMPY[_ALL[name]]
        begin = end
        chunk = np.concatenate([np.empty(0, dtype), *columns[name]], dtype=dtype, casting="unsafe").data
        chunks.append(chunk)
        digest.update(chunk)
        end += chunk.nbytes
        shape = [(end - begin) // dtype.itemsize]
        entries[name] = {"dtype": _ALL[name], "shape": shape, "data_offsets": [begin, end]}
    metadata = {"part": dumps(header), "data_sha256": digest.hexdigest(), "header_sha256": _ZEROS}
    text = dumps({"__metadata__": metadata, **entries}, separators=(",", ":"))
    text += " " * (-len(text) % 8)
    sealed = _sealed(text, _ZEROS, hashlib.sha256(text.encode()).hexdigest())
    return b"".join([struct.pack("<Q", len(sealed)), sealed.encode(), *chunks])


def _sealed(text: str, old: str, new: str) -> str:
    """Return the header with another value of header_sha256. Quotes inside of `part` are escaped, so this
    text occurs only once.
    """
    return text.replace(f'"header_sha256":"{old}"', f'"header_sha256":"{new}"')


def _checked(data: bytes) -> tuple[PartHeader, dict[str, tuple[int, int]], int]:
    """Return the header, and as _parse_header the arrays, of data that its checksums vouch for."""
    header, layout, start, data_sha256 = _parse_header(data)
    if hashlib.sha256(memoryview(data)[start:]).hexdigest() != data_sha256:
        raise DamagedPart("the data's checksum does not match: bytes were altered after the part was written")
    return header, layout, start


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
        entries = loads(text)
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
    if not set(_DTYPES) <= set(entries) <= set(_ALL):
        raise DamagedPart(f"it holds the arrays {sorted(entries)}, not {sorted(_DTYPES)}")
    layout, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (count,), (begin, stop) = entry["shape"], entry["data_offsets"]
        if (
            entry["dtype"] != _ALL[name]
            or begin != end
            or stop - begin != count * _NUMPY[entry["dtype"]].itemsize
        ):
            raise DamagedPart(f"array {name!r} is described inconsistently: {entry}")
        layout[name], end = (begin, count), stop
    return layout, end
