"""What the ranks of a job write together: who writes what, durably, and what all have written."""

import hashlib
import heapq
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from rollout.storage.files import FileFacts
from trainer.peers import waiting_for_peers

_DURABLE_THREADS = 8
ROOM_BYTES = 4096
"""Of JSON that every rank can tell the others in one collective."""


def rank_and_world() -> tuple[int, int]:
    """Of this process in its job; a process without a job is alone."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def spread(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Name -> the rank that writes it: the largest first, each to the rank that has least. All ranks find
    the same without talking.
    """
    loads = [(0, rank) for rank in range(ranks)]
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = heapq.heappop(loads)
        owner[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owner


def gather_json(value: Any, doing: str, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's `value`, a JSON value, in the order of the ranks. A collective on CPU tensors."""
    _, world = rank_and_world()
    if world == 1:
        return [value]
    data = json.dumps(value).encode()
    with waiting_for_peers(doing):
        room = ROOM_BYTES
        while True:  # mostly once: what does not fit says how long it is
            mine = len(data).to_bytes(8, "little") + data[:room].ljust(room)
            boxes = [torch.empty(8 + room, dtype=torch.uint8) for _ in range(world)]
            dist.all_gather(boxes, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group=group)
            texts = [box.numpy().tobytes() for box in boxes]
            sizes = [int.from_bytes(text[:8], "little") for text in texts]
            if max(sizes) <= room:
                return [json.loads(text[8 : 8 + size]) for text, size in zip(texts, sizes, strict=True)]
            room = max(sizes)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """A safetensors file of CPU tensors, with the mode of an ordinary file: safetensors' own is 0600.

    `metadata`: one entry. safetensors writes several in a random order, and equal files would differ.
    """
    os.listdir(path.parent)  # another rank may have made it; a client of a shared filesystem looks anew
    path.touch()
    mode = path.stat().st_mode
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, path, metadata=dict(metadata))
    path.chmod(mode)
    return path


def make_durable(paths: Sequence[Path], root: Path) -> dict[str, FileFacts]:
    """Flush the content of files to the disk; their facts, by their paths below `root`."""
    with ThreadPoolExecutor(_DURABLE_THREADS) as pool:
        facts = pool.map(_durable_facts, paths)
        return {str(path.relative_to(root)): info for path, info in zip(paths, facts, strict=True)}


def _durable_facts(path: Path) -> FileFacts:
    fsync_path(path)
    return file_facts(path)


def file_facts(path: Path) -> FileFacts:
    """Size and checksum of a file."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return {"bytes": stream.tell(), "sha256": digest}


def publish(path: Path, data: bytes) -> None:
    """Write a file whole, then give it its name, durably."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    fsync_path(temporary)
    temporary.replace(path)
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
