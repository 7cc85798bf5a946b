"""Sums of what tensors hold, by which a server proves that it computes with the weights of a directory.

A sum adds up a number for each element that its bits give. It depends neither on order nor on shape, so a
fused tensor has the sum of its parts (q, k and v; gate and up; experts; the slices of tensor parallelism),
and zeros that fill it up add nothing. Elements count as float32: in a wider dtype the same values have the
same sum. What only moves values within a tensor is left to the probe.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollout.engines.answers import WRONG_WEIGHTS
from rollout.engines.model_dir import CONTENT, PathLike, WeightsError, check_model_dir, weight_files
from rollout.storage import files
from rollout.storage.retry import retry_library

Served = Mapping[str, Iterable[int]]
"""Tensor -> the sums of its pieces: slices on other ranks, replicas, packed copies."""

_MODULUS = 2**64
# z -> z (a z + b) modulo 2^64 has another value for each z if a is even and b is odd, and 0 for 0. It is not
# linear, so bits that have gone from one element to another show.
_A, _B = -0x61C8864680B583EC, 0x2545F4914F6CDD1D
_CHUNK = {"cpu": 1 << 15}
_CHUNK_ON_GPU = 1 << 22
"""Elements at a time: on a CPU what its cache holds and torch leaves to one thread, because threads that wait
for each other on busy cores cost a hundred times as much; on a GPU 64 MiB of its memory.
"""
_BLOCK = re.compile(r"(?:^|\.)(\w+\.\d+)\.")
_SUM = re.compile("[0-9a-f]{16}")
_OUTSIDE = "outside of the layers"
_SHOWN = 2
"""Blocks, and tensors of each, that a message names: vLLM's error is cut."""


class WrongContent(RuntimeError):
    """A server has other weights than it should; the message names blocks, tensors and sums."""

    def __init__(self, wrong: Mapping[str, str]) -> None:
        super().__init__(f"{WRONG_WEIGHTS} {_few(list(wrong.values()))}.")


def content_sum(tensor: Tensor) -> int:
    """Return the sum of a floating-point tensor of any shape, 0 <= sum < 2^64."""
    flat = tensor.detach().reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for chunk in flat.split(_CHUNK.get(flat.device.type, _CHUNK_ON_GPU)):
        single = chunk.float()
        total += _mixed(single)
        if chunk.dtype == torch.float64 and not torch.equal(again := single.double(), chunk):
            total += 3 * _mixed((chunk - again).nan_to_num_(nan=0.0).float())  # what float32 leaves over
    return int(total) % _MODULUS


def _mixed(values: Tensor) -> Tensor:
    z = values.view(torch.int32).to(torch.int64)
    squares = z.dot(z) if z.device.type == "cpu" else (z * z).sum()  # GPUs have no dot of integers
    return _A * squares + _B * z.sum()


def content_document(sums: Mapping[str, int], dtype: torch.dtype) -> bytes:
    """Return the file CONTENT of a model directory whose tensors have these sums, as values of `dtype`."""
    tensors = {name: f"{total:016x}" for name, total in sorted(sums.items())}
    return f"{json.dumps({'dtype': _name(dtype), 'tensors': tensors})}\n".encode()


def saved_sums(directory: PathLike, dtype: torch.dtype, share: tuple[int, int] = (0, 1)) -> dict[str, int]:
    """Return name -> sum of the floating-point tensors of a model directory, once they are served as `dtype`.

    They are taken from the file CONTENT, unless there is none or a server rounds to `dtype`; then from the
    tensors. `share`: which of how many readers reads here; each gets a part of the tensors. Raises
    WeightsError for a directory that is no whole model.
    """

    def read() -> dict[str, int]:
        check_model_dir(directory)
        return _saved_sums(directory, dtype, *share)

    try:
        return retry_library("read", Path(directory), read)
    except WeightsError:
        raise
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise WeightsError(f"{os.fspath(directory)}: cannot be read: {error!r}") from error


def _saved_sums(directory: PathLike, dtype: torch.dtype, reader: int, readers: int) -> dict[str, int]:
    written = _read_content(directory)
    if written is not None and _is_within(getattr(torch, written["dtype"]), dtype):
        names = sorted(written["tensors"])[reader::readers]
        return {name: int(written["tensors"][name], 16) for name in names}
    sums: dict[str, int] = {}
    for file in weight_files(directory):
        with safe_open(Path(directory) / file, framework="pt") as opened:
            for name in sorted(opened.keys())[reader::readers]:
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point():
                    sums[name] = content_sum(_as_served(tensor, dtype))
    return sums


def _read_content(directory: PathLike) -> dict[str, Any] | None:
    """Return the document CONTENT of a model directory; None if it has none, or a user's file of the name."""
    # Clients of a shared directory cache missing names; a listing is fresh.
    if CONTENT not in files.listing(Path(directory)):
        return None
    try:
        document = json.loads(files.read(Path(directory) / CONTENT))
        is_ours = (
            document.keys() == {"dtype", "tensors"}
            and isinstance(getattr(torch, document["dtype"]), torch.dtype)
            and all(_SUM.fullmatch(total) for total in document["tensors"].values())
        )
    except (ValueError, AttributeError, TypeError):
        return None
    return document if is_ours else None


def _as_served(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor, rounded to `dtype` if that is narrower."""
    return tensor if _is_within(tensor.dtype, dtype) else tensor.to(dtype)


def module_sums(module: torch.nn.Module) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the sums of a model's parameters, a tied one once, and of its buffers."""
    return (
        {name: [content_sum(tensor)] for name, tensor in module.named_parameters()},
        {
            name: [content_sum(tensor)]
            for name, tensor in module.named_buffers()
            if tensor.is_floating_point()
        },
    )


def differences(expected: Mapping[str, int], served: Served) -> dict[str, str]:
    """Block -> what differs there between the tensors of a directory and those of a server.

    A block is a layer: `layers.3` in whatever model. A server may fuse and rename the tensors in it. Equal
    pieces of a tensor are replicas, and count once. So do equal tensors outside of the layers: they are tied.
    """
    wrong: dict[str, str] = {}
    should, does = _by_block(expected), _by_block(_actual(served))
    for block in sorted(should.keys() | does.keys()):
        right, actual = should.get(block, {}), does.get(block, {})
        if _total(block, right) == _total(block, actual):
            continue
        named = [name for name in sorted(right.keys() & actual.keys()) if right[name] != actual[name]]
        texts = [f"{name} is {actual[name]:016x}, should be {right[name]:016x}" for name in named]
        totals = f"all its tensors are {_total(block, actual):016x}, should be {_total(block, right):016x}"
        wrong[block] = f"{block}: {_few(texts) if texts else totals}"
    return wrong


def left_out(expected: Mapping[str, int], served: Served) -> list[str]:
    """Return how the names of a module's tensors begin, for each module that is not a server's by name, and
    without which a block of a directory is what the server has. Outside of the layers it may be so with it,
    too, if it is equal to another one.
    """
    beginnings: list[str] = []
    does = _by_block(_actual(served))
    for block, sums in _by_block(expected).items():
        total = _total(block, does.get(block, {}))
        if block == _OUTSIDE or _total(block, sums) != total:
            modules = {module for name in sums for module in _around(name)}
            modules -= {module for name in served for module in _around(name)}
            beginnings += [name for name in sorted(modules) if _total(block, _without(sums, name)) == total]
    return beginnings


def _around(name: str) -> Iterator[str]:
    """Yield how the names of all tensors begin that are in a module with this one."""
    yield from (name[: at + 1] for at, letter in enumerate(name) if letter == ".")


class Proof:
    """What is proved of one server's weights, over all that it loads."""

    def __init__(self) -> None:
        self._left_out: list[str] = []
        """Modules that this server may not have: nothing computes with them, such as the last layers of a
        tower of which an earlier one is looked at."""
        self._unproved: set[str] | None = None
        """Blocks whose tensors the server does not have as they are in the files; None: not known yet."""

    @property
    def has_begun(self) -> bool:
        """Whether `begin` or `check` was called."""
        return self._unproved is not None

    @property
    def unproved(self) -> list[str]:
        """The blocks that are not proved."""
        return sorted(self._unproved or ())

    def begin(self, expected: Mapping[str, int], served: Served) -> None:
        """Take what differs right after a start for tensors that this server changes when it loads them."""
        self._left_out = left_out(expected, served)
        self._unproved = set(self._differences(expected, served))

    def _differences(self, expected: Mapping[str, int], served: Served) -> dict[str, str]:
        wrong = differences(expected, served)
        for module in self._left_out if wrong else ():
            without = differences(_without(expected, module), served)
            wrong = {block: text for block, text in wrong.items() if block in without}
        return wrong

    def check(self, expected: Mapping[str, int], served: Served) -> None:
        """Raise WrongContent if the server has not what is `expected`, beside the blocks that are not proved.

        A block that agrees once is proved from then on.
        """
        wrong = self._differences(expected, served)
        self._unproved = (self._unproved or set()) & wrong.keys()
        if unproved := {block: text for block, text in wrong.items() if block not in self._unproved}:
            raise WrongContent(unproved)


def check_adapter(expected: Mapping[str, int], slots: Iterable[Served]) -> None:
    """Raise WrongContent unless one of a server's `slots` for adapters has what is `expected`."""
    wrong = {"": "no adapter"}
    for served in slots:
        if not (wrong := differences(expected, served)):
            return
    raise WrongContent(wrong)


def _actual(served: Served) -> dict[str, int]:
    return {name: sum(set(pieces)) % _MODULUS for name, pieces in served.items()}


def _without(sums: Mapping[str, int], module: str) -> dict[str, int]:
    return {name: total for name, total in sums.items() if not name.startswith(module)}


def _by_block(sums: Mapping[str, int]) -> dict[str, dict[str, int]]:
    blocks: dict[str, dict[str, int]] = {}
    for name, total in sums.items():
        match = _BLOCK.search(name)
        blocks.setdefault(match[1] if match else _OUTSIDE, {})[name] = total
    return blocks


def _total(block: str, sums: Mapping[str, int]) -> int:
    return sum(set(sums.values()) if block == _OUTSIDE else sums.values()) % _MODULUS


def _few(texts: list[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _is_within(dtype: torch.dtype, wider: torch.dtype) -> bool:
    """Return whether `wider` has every value of `dtype`."""
    narrow, other = torch.finfo(dtype), torch.finfo(wider)
    return (
        narrow.eps >= other.eps
        and narrow.max <= other.max
        and narrow.smallest_normal >= other.smallest_normal
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
