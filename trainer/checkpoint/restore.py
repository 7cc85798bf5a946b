"""Read a trainer state (state.py) into the learner of a run that goes on, in any layout."""

import json
import logging
import math
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DTYPE_MAP, SAVED_OFFSETS_KEY
from torch.distributed.tensor import DTensor

from rollout.storage import files, hashing, known_files
from rollout.storage.retry import retry
from trainer.checkpoint.rank_files import rank_and_world
from trainer.checkpoint.state import DOCUMENT, FORMAT, MASTER, CheckpointError, moment_names
from trainer.documents import SavedState
from trainer.model.learner import Learner
from trainer.model.parallel import local_part
from trainer.model.vision import vision_parameters
from trainer.progress import SILENT, Progress

logger = logging.getLogger(__name__)


def read_document(directory: Path) -> SavedState:
    """Return the `state.json` of a trainer state; raises CheckpointError."""
    path = directory / DOCUMENT
    fresh = f"remove {directory} to start with a fresh optimizer"
    try:
        data = files.read(path)
        version = json.loads(data)["format"]
        if version != FORMAT:
            raise CheckpointError(f"{directory} has format {version}, this version reads {FORMAT}; {fresh}")
        return SavedState.from_json(data)
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is missing or damaged ({error}); restore it, or {fresh}") from error


@torch.no_grad()
def restore(learner: Learner, directory: Path, document: SavedState, progress: Progress = SILENT) -> None:
    """Put the saved weights and moments into `learner`, in its layout; raises CheckpointError.

    Each rank reads what it needs, and verifies its share of the files.
    """
    _verify(directory, document, progress)
    moments = {
        parameter: {kind: torch.zeros_like(parameter) for kind in kinds}
        for parameter, kinds in moment_names(learner).items()
        if document.optimizer_step
    }
    tensors = {
        **{f"{MASTER}.{name}": parameter.detach() for name, parameter in learner.parameters.items()},
        **{
            f"{kind}.{name}": moments[parameter][kind]
            for name, parameter in learner.parameters.items()
            for kind in moments.get(parameter, ())
        },
    }
    _read(tensors, directory, document, vision_parameters(learner.model).keys())
    progress.count_bytes(sum(local_part(tensor).nbytes for tensor in tensors.values()))
    learner.optimizer.state.clear()
    for group in learner.optimizer.param_groups:
        on_device = group["fused"] or group["capturable"]
        for parameter in group["params"] if moments else []:
            step = torch.tensor(
                float(document.optimizer_step), device=parameter.device if on_device else "cpu"
            )
            steps = {} if group["is_muon"] else {"step": step}
            learner.optimizer.state[parameter] = {**steps, **moments[parameter]}
    learner.optimizer_step = document.optimizer_step
    learner.entropy_control = document.entropy_control


def _verify(directory: Path, document: SavedState, progress: Progress) -> None:
    rank, world = rank_and_world()
    for number, (name, facts) in enumerate(sorted(document.files.items())):
        path = directory / name
        try:
            if number % world == rank:
                is_whole = known_files.file_facts(path, progress.count_bytes) == facts
            else:
                is_whole = retry("look at", path, path.stat, path).st_size == facts["bytes"]
        except FileNotFoundError:
            is_whole = False
        if not is_whole:
            raise CheckpointError(
                f"{path} is missing or differs from {DOCUMENT}; restore it, or remove {directory} to start "
                "with a fresh optimizer"
            )


class SavedPiece(NamedTuple):
    """A part of a tensor in a file."""

    path: Path
    begin: int
    """The byte of the file at which it begins."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where it begins in the whole tensor."""

    @property
    def end(self) -> tuple[int, ...]:
        """Where it ends there."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.shape, strict=True))


def _saved(directory: Path, document: SavedState) -> dict[str, list[SavedPiece]]:
    """Return the parts of each tensor, from the headers of all files."""
    saved: dict[str, list[SavedPiece]] = {}
    for path in (directory / name for name in document.files):
        begin = 8 + int.from_bytes(_bytes(path, 0, 8), "little")
        header = json.loads(_bytes(path, 8, begin))
        offsets = json.loads(header.pop("__metadata__")[CUSTOM_METADATA_KEY])
        for name, entry in header.items():
            at, place = tuple(offsets[name][SAVED_OFFSETS_KEY]), begin + entry["data_offsets"][0]
            part = SavedPiece(path, place, DTYPE_MAP[entry["dtype"]], tuple(entry["shape"]), at)
            saved.setdefault(name, []).append(part)
    return saved


def _bytes(path: Path, begin: int, end: int) -> bytearray:
    data = bytearray()
    for piece in hashing.pieces(path, begin, end):
        data += piece
    return data


def _read(tensors: dict[str, Tensor], directory: Path, document: SavedState, vision: Set[str]) -> None:
    """Fill `tensors` in place: of each tensor the part that this rank holds. `vision`: parameters that may be
    there and not trained any more (trainer.freeze_vision).
    """
    saved = _saved(directory, document)
    sizes = {
        name: tuple(map(max, zip(*(part.end for part in parts), strict=True)))
        for name, parts in saved.items()
        if name in tensors or name.partition(".")[2] not in vision
    }
    if len(sizes) < len(saved) and rank_and_world()[0] == 0:
        logger.warning(
            "%s: vision tower and projector were trained up to here, and from now on they are not; "
            "trainer.freeze_vision=false goes on with that",
            directory,
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if sizes != shapes:
        kinds = [{name.partition(".")[0] for name in names} for names in (sizes, shapes)]
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"{directory} is of another trainer.optimizer: it has {', '.join(sorted(kinds[0]))}, not "
                f"{', '.join(sorted(kinds[1]))}; set it back, or remove it for a fresh state"
            )
        odd = sorted(name for name in sizes.keys() | shapes.keys() if sizes.get(name) != shapes.get(name))
        if {name.partition(".")[2] for name in odd} <= vision:
            raise CheckpointError(
                f"{directory} was saved with trainer.freeze_vision=true; set it back, or remove it for "
                "a fresh state"
            )
        raise CheckpointError(f"{directory} is not the trainer state of this model, e.g. {odd[:3]}")
    for name, tensor in tensors.items():
        offsets = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            [chunk] = tensor.__create_chunk_list__()
            offsets = tuple(chunk.offsets)
        target = local_part(tensor)
        if sum(_fill(target, offsets, part) for part in saved[name]) != target.numel():
            raise CheckpointError(
                f"{directory} lacks parts of {name}; remove it to start with a fresh optimizer"
            )


def _fill(target: Tensor, offsets: tuple[int, ...], part: SavedPiece) -> int:
    """Read the rows of `part` that overlap `target`, and put the overlap into it; returns its size.

    `offsets`: where `target` begins in the whole tensor.
    """
    ends = [offset + size for offset, size in zip(offsets, target.shape, strict=True)]
    low = [max(pair) for pair in zip(offsets, part.offsets, strict=True)]
    high = [min(pair) for pair in zip(ends, part.end, strict=True)]
    if any(begin >= end for begin, end in zip(low, high, strict=True)):
        return 0
    row = math.prod(part.shape[1:]) * part.dtype.itemsize
    first, count = (low[0] - part.offsets[0], high[0] - low[0]) if low else (0, 1)
    data = _bytes(part.path, part.begin + first * row, part.begin + (first + count) * row)
    rows = torch.frombuffer(data, dtype=part.dtype).view(count, *part.shape[1:])
    source_slices = [
        slice(begin - at, end - at) for begin, end, at in zip(low, high, part.offsets, strict=True)
    ]
    target_slices = [slice(begin - at, end - at) for begin, end, at in zip(low, high, offsets, strict=True)]
    overlap = target[tuple(target_slices)]
    overlap.copy_(rows[(slice(None), *source_slices[1:])].reshape(overlap.shape))
    return overlap.numel()
