"""Inspect a directory of weights without torch: whether it is whole, its tensors, its policy digest.

It is a Hugging Face model directory, or the directory of an adapter (low-rank additions to a model in another
directory, as peft writes them). An adapter has an adapter_config.json and no config.json. Weights in other
layouts and formats may lie beside it, as in many repositories: nothing here reads them.
"""

import errno
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout.storage import files, hashing
from rollout.storage.hashing import FileFacts
from rollout.storage.retry import retry

_ITEM_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
PathLike = str | os.PathLike[str]
_HEADER_LIMIT_BYTES = 100_000_000  # the limit of the safetensors library
_POINTER_BYTES = 1024
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FROZEN = "model-frozen.safetensors"
"""In a checkpoint: weights that no step changes. It is a hard link to that of the checkpoint before."""
PROBE = "probe.json"
"""Beside a checkpoint's weights: {"token_ids": [...], "logprobs": [...]}, the right `prompt_logprobs`."""
CONTENT = "content.json"
"""Beside a model's weights: {"dtype": ..., "tensors": {name: sum}}, see rollout.engines.content."""
OTHER_WEIGHTS = (
    *(".bin", ".pt", ".pth", ".ckpt", ".h5", ".ot", ".msgpack", ".gguf", ".ggml", ".tflite", ".nemo"),
    *(".onnx", ".onnx_data", ".onnx.data", ".distcp"),
)
"""Weights in other formats, which nothing here loads."""
ORIGINAL = "original"
"""The folder of a repository that holds the model as its makers' own programs read it."""
SMALL_BYTES = 1 << 27
"""No tokenizer, template or processor has a larger file."""


class WeightsError(ValueError):
    """A model directory must not be loaded; the message names the file and the reason."""


def is_adapter(path: PathLike) -> bool:
    """Return whether the directory holds an adapter, not a whole model."""
    names = _names(Path(path)) or []
    return ADAPTER_CONFIG in names and "config.json" not in names


def is_model_file(name: str) -> bool:
    """Return whether a file of this name in a model's directory may be loaded: its weights and what goes with
    them.
    """
    return not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)


def model_files(path: PathLike) -> list[str]:
    """Return the files of a model, by their paths below its directory: weights, index, companions."""
    root = Path(path)
    index = [INDEX] if INDEX in (_names(root) or []) and not is_adapter(root) else []
    return [*weight_files(root), *index, *companions(root)]


def companions(path: PathLike) -> list[str]:
    """Return the files that go with a model's weights, by paths below its directory: all that are small and
    no weights of anybody, so configurations, tokenizer, templates, processors and code, also in folders.
    """
    return sorted(_companions(Path(path), ""))


def _companions(root: Path, folder: str) -> list[str]:
    names = files.file_names(root / folder)
    if folder and any(name.endswith((".safetensors", *OTHER_WEIGHTS)) for name in names):
        return []  # another model, or a trainer's state
    paths = [
        folder + name
        for name in names
        if is_model_file(name)
        and not name.endswith((".safetensors", ".index.json"))
        and hashing.size_and_mtime(root / folder / name)[0] <= SMALL_BYTES
    ]
    for below in files.folder_names(root / folder):
        if not below.startswith((".", "__")) and below != ORIGINAL:
            paths += _companions(root, f"{folder}{below}/")
    return paths


@contextmanager
def copied(path: PathLike, names: Iterable[str]) -> Iterator[Path]:
    """Copy files of a model's directory, by their paths below it, into a temporary one for the time of the
    context. Where a call on a mount fails for a moment, our calls are repeated; transformers takes the file
    for missing, and goes on without it.
    """
    with TemporaryDirectory() as folder:
        for name in names:
            copy = Path(folder, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(files.read(Path(path, name)))
        yield Path(folder)


def weight_files(path: PathLike) -> list[str]:
    """Return the names of the files that hold the weights, as transformers chooses them. WeightsError if one
    is missing, or if another program would choose others.
    """
    root = Path(path)
    names, listed = _names(root) or [], listed_weights(root)
    is_model = not is_adapter(root)
    missing = [name for name in listed if name not in names]
    if below := [name for name in listed if "/" in name]:
        raise WeightsError(
            f"{root / INDEX}: names {below[0]}, and weights are read beside the index alone, as vLLM does; "
            "move the files there, and write their names into the index without the folder"
        )
    if missing and is_model and INDEX in names:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise WeightsError(
            f"{root / INDEX}: names {missing[0]}{more}, which this directory lacks; fetch the model again, "
            "or remove an index that belongs to other files"
        )
    if missing:
        hint = ""
        if foreign := [name for name in names if name.endswith(OTHER_WEIGHTS)]:
            hint = (
                f"; {foreign[0]} is in another format: write it as safetensors first (what transformers can "
                "load, its save_pretrained writes so)"
            )
        if other_files := [name for name in names if name.endswith(".safetensors")]:
            hint = f"; {other_files[0]} has another name than transformers reads"
        index = f" and no {INDEX}" if is_model else ""
        raise WeightsError(f"{root}: holds no {listed[0]}{index}, so there are no weights to load{hint}")
    if is_model and INDEX in names and WEIGHTS in names and WEIGHTS not in listed:
        raise WeightsError(
            f"{root}: has weights twice: transformers reads {WEIGHTS}, and vLLM the files that {INDEX} "
            "names; remove one or the other"
        )
    if is_model and ADAPTER_CONFIG in names:
        raise WeightsError(
            f"{root}: holds a whole model and {ADAPTER_CONFIG}: transformers adds that adapter and vLLM does "
            "not; give the model without it, or add the two together first"
        )
    return listed


def listed_weights(root: Path) -> list[str]:
    """Return the names of the files that should hold the weights, whether they are there or not."""
    if is_adapter(root):
        return [ADAPTER_WEIGHTS]
    return sorted(set(_weight_map(root / INDEX).values())) if INDEX in (_names(root) or []) else [WEIGHTS]


def check_model_dir(path: PathLike) -> None:
    """Raise WeightsError unless the directory of a model or adapter is whole: its configuration parses, each
    *.safetensors file is whole (its header parses, its tensors fill the file exactly), and the index file, if
    there is one, matches. Reads headers only.
    """
    tensor_names(path)


def tensor_names(path: PathLike) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype as in safetensors, shape), of all files. Checks as check_model_dir does."""
    root = Path(path)
    names = _names(root)
    if names is None:
        raise WeightsError(f"{root}: is not a directory; give a Hugging Face model directory")
    config = ADAPTER_CONFIG if is_adapter(root) else "config.json"
    if config not in names:
        raise _missing(root / config)
    read_json(root / config)
    weights = [root / name for name in weight_files(root)]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    file_of: dict[str, str] = {}
    for file in weights:
        for name, facts in retry("read", file, partial(read_tensors, file), file).items():
            if name in file_of:
                raise WeightsError(f"{file}: tensor {name!r} is in {file_of[name]} already")
            tensors[name], file_of[name] = facts, file.name
    if INDEX in names and not is_adapter(root):
        _check_index(root / INDEX, file_of)
    return tensors


def adapter_scale(path: PathLike) -> float:
    """Return the factor of B A in the weights of an adapter's directory."""
    file = Path(path) / ADAPTER_CONFIG
    config = read_json(file)
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise WeightsError(f"{file}: gives no r and lora_alpha to scale by: {error!r}") from error


def policy_digest(checksums: Mapping[str, FileFacts]) -> str:
    """Return the name of a policy: 16 hex characters, a digest of its *.safetensors files (names and
    contents).
    """
    weights = sorted(
        (name, facts["sha256"]) for name, facts in checksums.items() if name.endswith(".safetensors")
    )
    if not weights:
        raise WeightsError(f"no *.safetensors file among {sorted(checksums)}: a policy is its weights")
    return hashlib.sha256("".join(f"{name} {sha256}\n" for name, sha256 in weights).encode()).hexdigest()[:16]


def _names(root: Path) -> list[str] | None:
    """Return the sorted names of the files in a directory, without dead links; None if it is no directory."""
    try:
        return files.file_names(root)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR}:
            return None
        raise


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(files.read(file))
    except FileNotFoundError:
        raise _missing(file) from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{file}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{file}: must hold a JSON object")
    return value


def _missing(file: Path) -> WeightsError:
    """Return the error for a file that a model's directory lacks; a cache of the Hub has it in a folder."""
    snapshots = file.parent / "snapshots"
    folders = files.folder_names(snapshots) if files.exists(snapshots) else []
    way_out = f"; give the snapshot, {snapshots / folders[0]}" if folders else ""
    if not way_out and file.name == "config.json":
        way_out = "; give the directory of a model, with its config.json"
    return WeightsError(f"{file}: is missing{way_out}")


def read_tensors(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Read the header of a safetensors file, and check it against the file's size."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if prefix == b"version " and size < _POINTER_BYTES:
            raise WeightsError(f"{file}: is a pointer of Git LFS; run `git lfs pull` there to get the file")
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT_BYTES):
            raise WeightsError(
                f"{file}: is truncated or no safetensors file ({size} bytes, header of {length})"
            )
        text = stream.read(length)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    spans: list[tuple[int, int, str]] = []
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if (end - begin) * 8 != math.prod(shape) * _ITEM_BITS[dtype]:
                raise WeightsError(
                    f"{file}: tensor {name!r}, {dtype} {list(shape)}, cannot have {end - begin} bytes"
                )
            tensors[name] = (dtype, shape)
            spans.append((begin, end, name))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WeightsError(f"{file}: its header is damaged: {type(error).__name__}: {error}") from error
    except ValueError as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{file}: its header is damaged: {error}") from error
    position = 0
    for begin, end, name in sorted(spans):
        if begin != position:
            raise WeightsError(f"{file}: tensor {name!r} begins at {begin}, expected {position}")
        position = end
    if 8 + length + position != size:
        raise WeightsError(f"{file}: has {size} bytes, its header describes {8 + length + position}")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor -> file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: has no `weight_map`")
    return {str(name): str(file) for name, file in weight_map.items()}


def _check_index(index: Path, file_of: Mapping[str, str]) -> None:
    weight_map = _weight_map(index)
    for name, file in weight_map.items():
        if file_of.get(name) != file:
            place = f"is in {file_of[name]}" if name in file_of else "is in no file"
            raise WeightsError(f"{index}: tensor {name!r} should be in {file}, it {place}")
    if left_out := sorted(set(file_of) - set(weight_map)):
        raise WeightsError(
            f"{index}: leaves out {len(left_out)} tensors that are there, e.g. {left_out[0]!r}"
        )
