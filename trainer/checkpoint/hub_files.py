"""Write the weights as engines load them: Hugging Face safetensors, with the names and shapes of the Hub."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import GenerationConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from rollout.engines.content import content_document, content_sum
from rollout.engines.model_dir import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONTENT, FROZEN, read_tensors
from rollout.storage import delta
from rollout.storage.writer import Writer
from trainer.checkpoint.outputs import Outputs
from trainer.checkpoint.rank_files import (
    dtype_name,
    gather_json,
    rank_and_world,
    spread,
    tensor_file,
    tensor_pieces,
)
from trainer.model.learner import Learner

HOST = torch.device("cpu")
WHOLE_BYTES = 1 << 26
"""A smaller model is one file, which rank 0 writes."""

METADATA = {"format": "pt"}
WORTH = 0.25
"""A delta that has more than this fraction of its file's bytes is not written."""

_BLOCK = re.compile(r"(.*?\.\d+)\.")


def write_weights(
    learner: Learner, outputs: Outputs, dtype: torch.dtype, base_dir: Path
) -> dict[str, dict[str, Tensor]]:
    """Write this rank's share of the weights as `dtype`. `base_dir`: of the policy before, whose FROZEN is
    linked if learner.frozen_file says that it is the same.

    Collective. Each whole tensor goes to one rank, shared out by bytes. A rank holds its own share in host
    memory (with that of its node's copy), and one block at a time on its GPU, which adds it up. With the
    weights go the index, and the sums by which an engine proves that it has them. Returns what this rank's
    own file holds that is trained, by the file's name; nothing if it has none.
    """
    rank, _ = rank_and_world()
    model, parts = learner.model, _parts(learner, dtype)
    owned: dict[int, dict[str, Tensor]] = {}  # by the rank that owns the file
    sums: dict[str, int] = {}
    tensors = saved_tensors(model)
    device = learner.device if len(parts.blocks) > 1 else HOST  # else it is the whole model
    if parts.frozen:
        sums |= _write_frozen(learner, outputs, dtype, parts, base_dir)
    for block in parts.owner:  # in one order on all ranks: a DTensor is gathered by all
        owner = parts.owner[block]
        keeps = outputs.keeps(owner)
        block_tensors = {name: tensors[name] for name in parts.blocks[block]}
        full_tensors = _whole(block_tensors, learner.device, dtype, keeps, device)
        reverted = _reverted(model, full_tensors) if keeps else {}
        if owner == (rank if parts.ranks > 1 else 0):
            sums |= {
                name: content_sum(value) for name, value in reverted.items() if value.is_floating_point()
            }
        if keeps:
            owned.setdefault(owner, {}).update({name: value.to("cpu") for name, value in reverted.items()})
    for owner, block_tensors in owned.items():
        outputs.add(_file_name(owner, parts), tensor_file(block_tensors, METADATA), owner)
    shares = gather_json(sums, "adding up the weights") if parts.ranks > 1 else [sums]
    if outputs.keeps(0):
        outputs.add(CONTENT, content_document({k: v for share in shares for k, v in share.items()}, dtype))
    if outputs.keeps(0) and (parts.ranks > 1 or parts.frozen):
        weight_map = {
            name: FROZEN if block in parts.frozen else _file_name(parts.owner[block], parts)
            for block, shapes in parts.saved.items()
            for name in shapes
        }
        index = {"metadata": {"total_size": parts.bytes}, "weight_map": weight_map}
        outputs.add("model.safetensors.index.json", _json(index))
    return {_file_name(rank, parts): owned[rank]} if rank in owned and rank < parts.ranks else {}


def _write_frozen(
    learner: Learner, outputs: Outputs, dtype: torch.dtype, parts: "_WriterShares", base_dir: Path
) -> dict[str, int]:
    """Write or link the file of what no step changes, and return the sums of its tensors. Collective the
    first time.
    """
    if learner.frozen_sums is None or learner.frozen_file is None:
        tensors = saved_tensors(learner.model)
        frozen: dict[str, Tensor] = {}
        for block in parts.frozen:
            block_tensors = {name: tensors[name] for name in parts.blocks[block]}
            frozen |= _reverted(learner.model, _whole(block_tensors, learner.device, dtype, keep=True))
        learner.frozen_sums = {
            name: content_sum(value) for name, value in frozen.items() if value.is_floating_point()
        }
        if learner.frozen_file is None:
            outputs.add(FROZEN, tensor_file(frozen, METADATA))
    if learner.frozen_file is not None:
        outputs.link(FROZEN, base_dir / FROZEN, learner.frozen_file)
    return learner.frozen_sums


def holds_frozen(learner: Learner, path: Path, dtype: torch.dtype) -> bool:
    """Return whether the file, of the policy that the learner was loaded from, holds what no step changes as
    it would be written.
    """
    parts = _parts(learner, dtype)
    frozen = {
        name: (dtype_name(value.dtype), tuple(value.shape))
        for block in parts.frozen
        for name, value in parts.saved[block].items()
    }
    return read_tensors(path) == frozen


class _WriterShares(NamedTuple):
    """Which rank writes what: the same in each iteration."""

    blocks: dict[str, list[str]]
    """The names of the learner's tensors, see _blocks."""
    saved: dict[str, dict[str, Tensor]]
    """What becomes of them in the file: names and shapes, without contents."""
    frozen: list[str]
    """Blocks that no step changes."""
    owner: dict[str, int]
    """Any other block -> the rank that writes it."""
    ranks: int
    """How many ranks write a file."""
    bytes: int


def _parts(learner: Learner, dtype: torch.dtype) -> _WriterShares:
    """Return who writes what; worked out once for a learner."""
    parts = learner.saved_as.get(dtype)
    if parts is None:
        model = learner.model
        tensors = saved_tensors(model)
        blocks = _blocks(model, tensors)
        saved = {block: _reverted(model, _meta(tensors, names, dtype)) for block, names in blocks.items()}
        frozen = [block for block, names in blocks.items() if _is_frozen([tensors[name] for name in names])]
        every = {block: sum(tensor.nbytes for tensor in shapes.values()) for block, shapes in saved.items()}
        sizes = {block: size for block, size in every.items() if block not in frozen}
        ranks = 1 if sum(sizes.values()) < WHOLE_BYTES else min(rank_and_world()[1], len(sizes))
        parts = _WriterShares(blocks, saved, frozen, spread(sizes, ranks), ranks, sum(every.values()))
        learner.saved_as[dtype] = parts
    return parts


def _is_frozen(tensors: Sequence[Tensor]) -> bool:
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    return parameters != [] and not any(parameter.requires_grad for parameter in parameters)


def write_deltas(learner: Learner, writer: Writer, files: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write beside each of these files of weights its delta to the one that this learner has written before,
    if there was one and the delta is WORTH it; and keep the files' tensors for the next time.
    """
    for name, tensors in files.items():
        if before := learner.written.get(name):
            old, new = (tensor_pieces(each, METADATA) for each in (before, tensors))
            if (data := delta.encode(old, new, WORTH)) is not None:
                writer.add(delta.delta_name(name), data)
    # Without a GPU they may be the parameters themselves.
    is_own = learner.device.type != "cpu"
    learner.written = {
        name: {key: tensor if is_own else tensor.clone() for key, tensor in tensors.items()}
        for name, tensors in files.items()
    }


def write_adapter(learner: Learner, outputs: Outputs, base: str, dtype: torch.dtype) -> None:
    """Write the adapters as peft does, for the model `base`: rank 0 alone, they are small. Collective."""
    rank, _ = rank_and_world()
    full_tensors = _whole(learner.parameters, learner.device, dtype, rank == 0)
    if rank:
        return
    from trainer.model import lora  # peft takes a while to import

    tensors, config = lora.saved_adapter(learner.model, full_tensors, base)
    outputs.add(ADAPTER_WEIGHTS, tensor_file(tensors, METADATA))
    outputs.add(ADAPTER_CONFIG, _saved(config, ADAPTER_CONFIG))


def write_config(model: Any, outputs: Outputs, dtype: torch.dtype, generation: bool) -> None:
    """Write config.json, and if wanted the generation config, as save_pretrained does."""
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 changes the class
    config = json.loads(model.config.to_json_string())
    config.pop("transformers_weights", None)  # save_pretrained leaves it out as well
    config["dtype"] = str(dtype).removeprefix("torch.")
    outputs.add(CONFIG_NAME, _json(config))
    if generation and model.can_generate():
        saved = _saved(model.generation_config or GenerationConfig(), GENERATION_CONFIG_NAME)
        outputs.add(GENERATION_CONFIG_NAME, saved)


def _saved(config: Any, name: str) -> bytes:
    """Return the file that a library's own `save_pretrained` makes of a configuration, by way of the local
    disk.
    """
    with TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        return Path(directory, name).read_bytes()


def _json(document: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(document, indent=2, sort_keys=True)}\n".encode()


def saved_tensors(model: Any) -> dict[str, Tensor]:
    """Return name -> parameter or persistent buffer that a checkpoint holds. A tied one comes once, by the
    name that transformers ties the others to.
    """
    tied = model.all_tied_weights_keys
    left_out = set(model._keys_to_ignore_on_save or ())
    chosen: dict[int, str] = {}
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        if name not in left_out and (id(tensor) not in chosen or chosen[id(tensor)] in tied):
            chosen[id(tensor)] = name
    return {name: tensor for name, tensor in state.items() if chosen.get(id(tensor)) == name}


def _blocks(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Groups of tensors that can each be reverted to the Hub's names and shapes alone: a layer, for example,
    whose merged experts become many tensors.
    """
    blocks: dict[str, list[str]] = {}
    for name in tensors:
        match = _BLOCK.match(name)
        blocks.setdefault(match[1] if match else name, []).append(name)
    separate = {
        name: tensor.shape
        for names in blocks.values()
        for name, tensor in _reverted(model, _meta(tensors, names)).items()
    }
    together = {name: tensor.shape for name, tensor in _reverted(model, _meta(tensors, tensors)).items()}
    return blocks if separate == together else {"": list(tensors)}


def _meta(
    tensors: Mapping[str, Tensor], names: Iterable[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return the shapes of tensors, as they would be saved, without their contents."""
    return {
        name: torch.empty(
            tensors[name].shape,
            dtype=dtype if tensors[name].is_floating_point() and dtype else tensors[name].dtype,
            device="meta",
        )
        for name in names
    }


def _reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with the Hub's names and shapes, some of which transformers changes when it loads
    them.
    """
    return revert_weight_conversion(model, tensors)


def _whole(
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
    keep: bool,
    place: torch.device = HOST,
) -> dict[str, Tensor]:
    """Return the tensors as `dtype`, whole and on the device `place`; none unless this rank is to `keep`
    them.

    Collective for DTensors, which are put together on `device`, one by one.
    """
    full_tensors = {}
    for name, tensor in tensors.items():
        if keep or isinstance(tensor, DTensor):
            value = tensor.detach().to(device, dtype if tensor.is_floating_point() else None)
            if isinstance(value, DTensor):
                value = value.full_tensor()
            if keep:
                full_tensors[name] = value.to(place)
    return full_tensors


def _file_name(rank: int, parts: _WriterShares) -> str:
    if parts.ranks == 1 and not parts.frozen:  # transformers takes a file of this name alone
        return "model.safetensors"
    return f"model-{rank + 1:05d}-of-{parts.ranks:05d}.safetensors"
