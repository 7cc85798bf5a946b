"""Load a model whose ranks hold shards: each reads its own parts of the files, and never holds it whole.

transformers gives some tensors other names when it loads them, and makes others from several (the experts of
a layer, for example). A tensor that is only renamed is read in slices. Others are made whole by transformers'
own conversion, one at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.models.auto.auto_factory import _get_model_class

from rollout.engines.embedded.weights import auto_model, refuse_incomplete
from rollout.engines.model_dir import WeightsError, copied, read_json, tensor_names, weight_files
from trainer.model.parallel import local_part

TensorNames = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype and shape of each tensor, as `rollout.engines.model_dir.tensor_names` returns them."""
Read = Callable[[str], Any]
"""Gives the slice of a tensor in the files: index it to read it."""


@dataclass(frozen=True)
class TensorSource:
    """Where the value of a tensor of the model comes from."""

    keys: tuple[str, ...]
    """Tensors in the files, in the order in which a conversion takes them."""
    patterns: tuple[str, ...] = ()
    """For each key the pattern of `converter` that it matches."""
    converter: Any = None
    """transformers' conversion of the keys into one or several tensors; None: the key is the tensor."""
    first: str = ""
    """The name by which the conversion knows its result."""


def blank_model(model_dir: Path, dtype: torch.dtype) -> tuple[Any, dict[str, TensorSource]]:
    """Return the causal LM of a Hugging Face directory on meta, and where the value of each of its tensors
    is.

    Reads the headers of the files only. Raises WeightsError if a parameter is not there, or is of another
    shape.
    """
    names = tensor_names(model_dir)
    model, _ = blank_of_files(model_dir, names, dtype)
    sources = _sources(model, names)
    _tie(model, sources, model_dir)
    return model, sources


def blank_of_files(model_dir: Path, names: TensorNames, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """Return the causal LM on meta, and which of the tensors that were found in its files it does not know.
    Raises WeightsError as `blank_model`, and if transformers has no such model.
    """
    config, model_class = _class_of(model_dir)
    if model_class.config_class is config.sub_configs.get("text_config"):  # the decoder of a multimodal model
        config = config.get_text_config()
    shapes = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (_, shape) in names.items()}
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=shapes,
        dtype=dtype,
        device_map="meta",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    refuse_incomplete(model_dir, model, info)
    return model, sorted(info["unexpected_keys"])


def _class_of(model_dir: Path) -> tuple[Any, Any]:
    """Return the configuration of a model, and its class."""
    with copied(model_dir, ["config.json"]) as copy:
        try:
            config: Any = AutoConfig.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
        except (ValueError, OSError) as error:
            if "model_type" not in read_json(model_dir / "config.json"):
                raise  # whatever it is, the trainer will explain
            reason = " ".join(str(error).replace(str(copy), model_dir.name).split())
            raise WeightsError(
                f"{model_dir}: transformers cannot read its config.json: {reason:.300}"
            ) from error
    try:
        return config, _get_model_class(config, auto_model(config.model_type)._model_mapping)
    except KeyError:
        raise WeightsError(
            f"{model_dir}: transformers has no causal language model of type {config.model_type!r}"
        ) from None


def _sources(model: Any, names: Mapping[str, Any]) -> dict[str, TensorSource]:
    """By the model's own names; found as transformers' convert_and_load_state_dict_in_model does."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    sources: dict[str, TensorSource] = {}
    for key in sorted(names, key=_natural):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, state)
        if name not in state:
            continue
        if pattern is None:
            sources[name] = TensorSource((key,))
        else:
            before = sources.get(name, TensorSource((), (), of_pattern[pattern], name))
            sources[name] = TensorSource(
                (*before.keys, key), (*before.patterns, pattern), before.converter, name
            )
    for source in [source for source in sources.values() if source.converter is not None]:
        for target in source.converter.target_patterns[1:]:  # one tensor may become several
            name = source.first.replace(source.converter.target_patterns[0], target)
            if name in state:
                sources.setdefault(name, source)
    return sources


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Numbers in the order of their values: experts are merged in this order."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]


def _tie(model: Any, sources: Mapping[str, TensorSource], model_dir: Path) -> None:
    """Tie what the configuration ties, although the files hold it twice, unless the two differ.

    transformers compares values, which are not there on meta.
    """
    for target, source in list(model.all_tied_weights_keys.items()):
        if model.get_parameter(target) is model.get_parameter(source):
            continue
        with _files(model_dir) as read:
            target_value, other = (_whole(sources[name], name, model, read) for name in (target, source))
            same = torch.equal(target_value, other)
        if same:
            holder, _, name = target.rpartition(".")
            setattr(model.get_submodule(holder), name, model.get_parameter(source))
        else:
            model.all_tied_weights_keys.pop(target)


@contextmanager
def _files(model_dir: Path) -> Iterator[Read]:
    """Inside the context the files are open."""
    with ExitStack() as stack:
        slices: dict[str, Any] = {}
        for name in weight_files(model_dir):
            file = stack.enter_context(safe_open(model_dir / name, "pt"))
            slices |= dict.fromkeys(file.keys(), file)

        yield lambda key: slices[key].get_slice(key)


def _whole(source: TensorSource, name: str, model: Any, read: Read) -> Tensor:
    """Return the whole value of the tensor `name` of the model."""
    if source.converter is None:
        return read(source.keys[0])[...]
    return _converted(source, model, read, torch.float32)[name]


def _converted(source: TensorSource, model: Any, read: Read, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors that transformers makes of the keys, read as `dtype`, by the model's names."""
    converter = deepcopy(source.converter)
    for key, pattern in zip(source.keys, source.patterns, strict=True):
        converter.add_tensor(source.first, key, pattern, lambda key=key: read(key)[...].to(dtype))
    values = converter.convert(source.first, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in values.items()}


def held_tensors(model: Any) -> dict[str, tuple[Any, str]]:
    """Return name -> (module, attribute) of each parameter and buffer: a module stays when its tensors are
    replaced, or when another module is put around it. Tied parameters come once.
    """
    tensor_ids: set[int] = set()
    places: dict[str, tuple[Any, str]] = {}
    for prefix, module in model.named_modules():
        for attribute, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in tensor_ids:
                tensor_ids.add(id(tensor))
                places[f"{prefix}.{attribute}" if prefix else attribute] = (module, attribute)
    return places


@torch.no_grad()
def fill(
    model: Any,
    places: Mapping[str, tuple[Any, str]],
    sources: Mapping[str, TensorSource],
    model_dir: Path,
    device: torch.device,
    read_one: Callable[[int], object] = lambda size: None,
) -> None:
    """Give the tensors of `places` their values: this rank's parts from the files, and buffers on `device`.

    `model` is the transformers model, sharded, with memory for its parts but without values. `read_one` is
    called with the bytes of each part that was read.
    """
    ties = dict(model.all_tied_weights_keys)
    ties |= {source: target for target, source in ties.items()}
    computed: list[tuple[Any, str]] = []
    converted: tuple[TensorSource | None, dict[str, Tensor]] = None, {}
    with _files(model_dir) as read:
        for name, (module, attribute) in places.items():
            tensor = getattr(module, attribute)
            source = sources.get(name) or sources.get(ties.get(name, ""))
            if source is None:
                computed.append((module, attribute))
                continue
            if source.converter is None:
                value = read(source.keys[0])
            else:
                if converted[0] is not source:
                    converted = None, {}  # frees the one before
                    converted = source, _converted(source, model, read, tensor.dtype)
                value = converted[1][name]
            if attribute in module._buffers:
                module._buffers[attribute] = value[...].to(device, tensor.dtype)
            else:
                copy_part(tensor, value)
            read_one(local_part(tensor).nbytes)
    _compute_buffers(model, computed, device)


def copy_part(tensor: Tensor, value: Any) -> None:
    """Copy this rank's part of `value`, a tensor or its slice in a file, into a parameter."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(value[...])
        return
    local = tensor.to_local()
    if local.numel():
        [chunk] = tensor.__create_chunk_list__()
        spans = zip(chunk.offsets, chunk.sizes, strict=True)
        local.copy_(value[tuple(slice(offset, offset + size) for offset, size in spans) or ...])


def _compute_buffers(model: Any, computed: Sequence[tuple[Any, str]], device: torch.device) -> None:
    """Compute what no file holds (frequencies of rotary embeddings) as transformers does after loading."""
    owners = {
        id(module): owner
        for owner in model.modules()  # outer ones first
        if isinstance(owner, PreTrainedModel)
        for module in owner.modules()
    }
    for module in model.modules():
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                tensor._is_hf_initialized = True  # it stays as it is
    for module, attribute in computed:
        buffer = module._buffers[attribute]
        nothing = float("nan") if buffer.is_floating_point() else 0
        module._buffers[attribute] = torch.full_like(buffer, nothing, device="cpu")
    holders = {id(module) for module, _ in computed}
    with initialization.guard_torch_init_functions():
        for module in reversed(list(model.modules())):  # inner ones first
            # Some buffers get their value from a module around theirs: falcon_h1's mup_vector.
            if id(module) in owners and any(id(inner) in holders for inner in module.modules()):
                owners[id(module)]._init_weights(module)
    for module, attribute in computed:
        module._buffers[attribute] = module._buffers[attribute].to(device)
