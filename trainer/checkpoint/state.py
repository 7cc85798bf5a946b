"""Save the trainer state, which continues training exactly, in a directory that any layout loads.

state.json                          SavedState; written last, so its presence says that all of it is here
state-00001-of-00003.safetensors    of each rank that had something to write, in files of about FILE_BYTES:
                                    -1.safetensors, -2.safetensors ... if it has more

The tensors are AdamW's moments `exp_avg.<parameter>` and `exp_avg_sq.<parameter>`, or what Muon keeps,
`momentum_buffer.<parameter>`, once a step was taken, and the weights in float32, `master.<parameter>`. The
files have the format of torch.distributed.checkpoint's HuggingFaceStorageWriter: a file holds pieces of
tensors with their offsets. The library's writer is not used: it plans in collectives that send pickles and
must not run beside the collectives of training. Nor is its reader: it maps the files, and a process dies when
its filesystem fails to read a mapped one. A restart reads them in place, on the shared filesystem, each rank
the parts that it needs.
"""

import json
import logging
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor

from rollout.storage import files
from rollout.storage.hashing import FileFacts
from rollout.storage.writer import Writer
from trainer.checkpoint.rank_files import gather_json, rank_and_world, spread, tensor_file
from trainer.documents import SavedState
from trainer.model.learner import Learner
from trainer.model.muon import ADAMW_STATE, MUON_STATE
from trainer.progress import NOT_SAVED

logger = logging.getLogger(__name__)

FORMAT = 2
"""Version of a state directory. Raise it when the names or the meaning of its tensors change."""
DOCUMENT = "state.json"
MASTER = "master"
WHOLE_BYTES = 1 << 26
"""Rank 0 alone writes the whole tensors of a replicated model if they are smaller than this in all."""

FILE_BYTES = 1 << 30
"""A rank's larger state is written as several files, at the same time."""


class CheckpointError(RuntimeError):
    """A checkpoint or trainer state is not what was asked for, is damaged, or could not be written."""


class TensorPiece(NamedTuple):
    """A part of a tensor that this rank writes."""

    offsets: tuple[int, ...]
    """Where the piece begins in the whole tensor."""
    values: Tensor
    """On the CPU."""


def pieces(learner: Learner) -> dict[str, TensorPiece]:
    """Return the pieces of the learner's state that this rank writes: its shards, and its share of whole
    tensors.

    Tensors on a GPU are copied. Tensors in host memory are not, and must not change until they are written.
    """
    tensors = _state_tensors(learner)
    rank, world = rank_and_world()
    bytes_of_whole = {name: t.nbytes for name, t in tensors.items() if not isinstance(t, DTensor)}
    owner = spread(bytes_of_whole, 1 if _are_few(bytes_of_whole) else world)
    written = {}
    layout = learner.layout
    for number, (name, tensor) in enumerate(tensors.items()):
        if isinstance(tensor, DTensor):
            is_mine = number % layout.nodes == layout.node  # each node has all, and writes its share
            piece = _shard(tensor, rank % layout.tensor_parallel_size) if is_mine else None
        else:
            piece = TensorPiece((0,) * tensor.ndim, tensor.to("cpu")) if owner[name] == rank else None
        if piece is not None:
            written[name] = piece
    return written


def lead_writes_all(learner: Learner) -> bool:
    """Return whether rank 0 has all of the state and writes it alone."""
    tensors = _state_tensors(learner)
    return not learner.layout.sharded and _are_few({name: tensor.nbytes for name, tensor in tensors.items()})


def _are_few(bytes_of_whole: Mapping[str, int]) -> bool:
    return sum(bytes_of_whole.values()) < WHOLE_BYTES


def _state_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    kinds = moment_names(learner)
    for name, parameter in learner.parameters.items():
        tensors[f"{MASTER}.{name}"] = parameter.detach()
        if learner.optimizer_step:
            moments = learner.optimizer.state.get(parameter, {})
            for kind in kinds[parameter]:  # a parameter that no step has reached has none
                value = moments.get(kind)
                tensors[f"{kind}.{name}"] = torch.zeros_like(parameter) if value is None else value.detach()
    return tensors


def moment_names(learner: Learner) -> dict[Tensor, tuple[str, ...]]:
    """Return the names of the moments that the optimizer keeps of each parameter."""
    return {
        parameter: MUON_STATE if group["is_muon"] else ADAMW_STATE
        for group in learner.optimizer.param_groups
        for parameter in group["params"]
    }


def _shard(tensor: DTensor, tensor_rank: int) -> TensorPiece | None:
    """This rank's part; None if it is empty, or if another rank writes the same.

    `tensor_rank`: this rank's place among the ranks that share each layer. They hold copies of every tensor
    that is not split among them.
    """
    mesh = tensor.device_mesh
    placements = dict(zip(mesh.mesh_dim_names or (), tensor.placements, strict=True))
    split_there = "tensor" in placements and not placements["tensor"].is_replicate()
    if tensor_rank and not split_there:
        return None
    [chunk] = tensor.__create_chunk_list__()
    return TensorPiece(tuple(chunk.offsets), tensor.to_local().to("cpu")) if chunk.sizes.numel() else None


def write_pieces(pieces_of_rank: dict[str, TensorPiece], writer: Writer, below: str = "") -> None:
    """Write this rank's pieces to its files, whose names begin with `below`; none if there is nothing."""
    rank, world = rank_and_world()
    sizes = {name: piece.values.nbytes for name, piece in pieces_of_rank.items()}
    count = -(-sum(sizes.values()) // FILE_BYTES)
    file_of = spread(sizes, max(count, 1))
    for number in sorted(set(file_of.values())):
        pieces_of_file = {name: piece for name, piece in pieces_of_rank.items() if file_of[name] == number}
        offsets = {name: {SAVED_OFFSETS_KEY: piece.offsets} for name, piece in pieces_of_file.items()}
        values = {name: piece.values for name, piece in pieces_of_file.items()}
        content = tensor_file(values, {CUSTOM_METADATA_KEY: json.dumps(offsets)})
        part = f"-{number + 1}" if count > 1 else ""
        writer.add(f"{below}state-{rank + 1:05d}-of-{world:05d}{part}.safetensors", content)


class StateSaver:
    """Writes trainer states in the background, one at a time. Every rank of a job has one."""

    def __init__(self, timeout_s: float) -> None:
        """A save that takes longer than `timeout_s` fails."""
        self._timeout_s = timeout_s
        self._group: Any = None
        self._thread = ThreadPoolExecutor(1, "trainer-state")
        self._pending: tuple[Path, Future[None]] | None = None

    def start(self, learner: Learner, directory: Path, document: SavedState) -> None:
        """Begin to write into the empty `directory`; `document` without its files. Collective.

        Until `finish` has returned, the learner's tensors may be moved but not changed.
        """
        self.finish()
        if self._group is None and rank_and_world()[1] > 1:
            # A group for this thread: two threads' collectives in one group could meet in different orders.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        written = pieces(learner)
        self._pending = directory, self._thread.submit(self._save, written, directory, document)

    def finish(self) -> None:
        """Wait until the state is durable. If it cannot be written, the log says so and training goes on: a
        restart repeats more. Raises CheckpointError if neither has happened within the timeout.
        """
        if self._pending is None:
            return
        (directory, saving), self._pending = self._pending, None
        try:
            saving.result(self._timeout_s)
        except TimeoutError as error:
            raise CheckpointError(
                f"{directory} was not written within {self._timeout_s:g} s; look at its filesystem, or raise "
                "trainer.collective_timeout_s"
            ) from error

    def _save(self, pieces_of_rank: dict[str, TensorPiece], directory: Path, document: SavedState) -> None:
        files_or_error: dict[str, FileFacts] | str
        try:
            with Writer(directory) as writer:
                write_pieces(pieces_of_rank, writer)
                files_or_error = writer.finish()
        except (OSError, SafetensorError) as error:  # the others must not wait for this rank's share
            files_or_error = f"{error}"
        shares = gather_json(files_or_error, f"writing {directory}", self._group)
        if rank_and_world()[0] != 0:
            return
        written: dict[str, FileFacts] = {}
        for rank, share in enumerate(shares):
            if isinstance(share, str):
                logger.error("%s: training rank %d could not write: %s", NOT_SAVED, rank, share)
                return
            written |= share
        try:
            files.publish(directory / DOCUMENT, document.model_copy(update={"files": written}).to_json())
        except OSError as error:
            logger.error("%s: %s could not be written: %s", NOT_SAVED, directory / DOCUMENT, error)
