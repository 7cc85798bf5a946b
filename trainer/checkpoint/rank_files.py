"""Share out what the ranks of a job write together, and tell each rank what all have written."""

import heapq
import json
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import _TYPES
from torch import Tensor

from rollout.storage.writer import FileSink, Produce
from trainer.peers import waiting_for_peers

ROOM_BYTES = 4096
"""A rank can send the others this much JSON in one collective."""

_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a number type in safetensors."""
    return _NAMES[dtype]


def rank_and_world() -> tuple[int, int]:
    """This process's rank in its job, and the number of ranks; (0, 1) without a job."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def local_rank_and_world() -> tuple[int, int]:
    """Return this process's number among its node's ranks, and how many they are; (0, 1) without a job."""
    return int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def spread(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return name -> the rank that writes it. The largest goes first, each to the rank that has least so far.
    All ranks find the same without talking.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owner[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owner


def gather_json(value: Any, doing: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `value`, a JSON value, in the order of the ranks. A collective on CPU tensors."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    data = json.dumps(value).encode()
    with waiting_for_peers(doing):
        room = ROOM_BYTES
        while True:  # mostly once; a value that does not fit says how long it is
            own_box = len(data).to_bytes(8, "little") + data[:room].ljust(room)
            boxes = [torch.empty(8 + room, dtype=torch.uint8) for _ in range(world)]
            dist.all_gather(boxes, torch.frombuffer(bytearray(own_box), dtype=torch.uint8), group=group)
            texts = [box.numpy().tobytes() for box in boxes]
            sizes = [int.from_bytes(text[:8], "little") for text in texts]
            if max(sizes) <= room:
                return [json.loads(text[8 : 8 + size]) for text, size in zip(texts, sizes, strict=True)]
            room = max(sizes)


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Produce:
    """Return the Produce of a safetensors file of these CPU tensors, for storage's `Writer`, which hashes it
    meanwhile.
    """

    def produce(sink: FileSink) -> None:
        for piece in tensor_pieces(tensors, metadata):
            sink.write(piece)

    return produce


def tensor_pieces(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file of these CPU tensors, piece by piece.

    The library can write into a file or into memory only. Format: the header's length (8 bytes, little
    endian), the header (JSON, padded with spaces to 8 bytes), the tensors (little endian).
    """
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    # Wide items first, so that each tensor begins at a multiple of its item's size.
    order = sorted(contiguous, key=lambda name: (-contiguous[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor, begin = contiguous[name], end
        end += tensor.nbytes
        kind = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**kind, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        yield contiguous[name].reshape(-1).view(torch.uint8).numpy().data
