"""Make a model of the same code with few layers, to try on it what the code of a model can do.

How a model treats padding, packed rows, masks and its cache depends on its code, and not on its weights or on
how often a layer comes. So a trial on the first layers tells the same as one on the whole model, if a layer
of each kind is among them.
"""

import inspect
import logging
import math
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

VOCABULARY = 128
"""Tokens that a short model knows at most."""
SPREAD = 1.7
"""Deviation of the weights, times the root of the hidden size: the context then shows in what a model
predicts."""
WINDOWS = ("sliding_window", "attention_chunk_size")
"""Numbers of a config that say how far back some of its layers see, in tokens."""
_FEWEST = 2
"""Layers, so that one comes behind another."""
_NUMBERS = re.compile("idx|index|layer_id|layer_number|num_hidden_layers")
"""Attributes in which a layer keeps its place, or the place of another, or how many there are."""
_TOKEN = re.compile("_token_id$")


def short_model(
    like: PreTrainedModel,
    dtype: torch.dtype,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    most_bytes: float = math.inf,
) -> PreTrainedModel | None:
    """Return a model with the beginning of the layers of `like`, random weights and a small vocabulary.

    It has the widths of `like` and a layer of each kind. `like` may be sharded or have adapters. Returns None
    if that takes half of the layers or more, if the model would be larger than `most_bytes`, or if it cannot
    be made or computes nothing. Random numbers outside are not touched.
    """
    try:
        return _short_model(type(like), like.config, dtype, device, most_bytes)
    except Exception as error:  # a family's own code may raise anything at a configuration that it never saw
        log.debug("no short model of a %s can be made", type(like).__name__, exc_info=error)
        return None


def _short_model(
    model_class: Any, config: Any, dtype: torch.dtype, device: torch.device, most_bytes: float
) -> PreTrainedModel | None:
    text = config.get_text_config(decoder=True)
    depth = int(text.num_hidden_layers)
    lists = [name for name, value in vars(text).items() if _is_by_layer(value, depth)]
    kinds = _kinds(_blank(model_class, config), depth, lists)
    count = max(_FEWEST, 1 + max(kinds.index(kind) for kind in set(kinds)))
    if 2 * count >= depth:
        return None
    short = _shortened(config, count, lists)
    blank = _blank(model_class, short)
    if _kinds(blank, count, lists) != kinds[:count]:
        return None  # what a layer is depends on the layers behind it, too
    if sum(parameter.numel() for parameter in blank.parameters()) * dtype.itemsize > most_bytes:
        return None
    with torch.random.fork_rng([device] if device.type != "cpu" else []), device:
        torch.manual_seed(0)
        # Random numbers in float64 take four times as long.
        model = model_class._from_config(short, dtype=torch.float32 if dtype == torch.float64 else dtype)
        for parameter in model.eval().parameters():
            parameter.data = parameter.data.to(dtype)
        with torch.no_grad():
            model(input_ids=torch.arange(3)[None], use_cache=False)  # raises if it cannot compute
    return model


def _is_by_layer(value: Any, depth: int) -> bool:
    """Return whether `value` says something of each layer, and is no list of the numbers of some layers."""
    if not isinstance(value, list) or len(value) != depth:
        return False
    return not (all(isinstance(k, int) for k in value) and value == sorted(set(value)))


def _blank(model_class: Any, config: Any) -> Any:
    """Return the model on meta, without memory for its tensors."""
    with torch.device("meta"):
        return model_class._from_config(deepcopy(config))


def _shortened(config: Any, count: int, lists: Sequence[str]) -> Any:
    """Return the configuration with `count` layers, of which `lists` tell, and a small vocabulary."""
    short = deepcopy(config)
    text = short.get_text_config(decoder=True)
    last = min(text.vocab_size, VOCABULARY) - 1
    for name, value in list(vars(text).items()):
        if name in lists:
            setattr(text, name, value[:count])
        elif name.startswith("vocab_size") and isinstance(value, int):
            setattr(text, name, min(value, VOCABULARY))
        elif _TOKEN.search(name) and value is not None:
            setattr(
                text, name, [min(k, last) for k in value] if isinstance(value, list) else min(value, last)
            )
        elif name in ("initializer_range", "init_std"):
            setattr(text, name, SPREAD / math.sqrt(text.hidden_size))
    text.num_hidden_layers = count
    return short


def _kinds(model: Any, depth: int, lists: Sequence[str]) -> list[Hashable]:
    """Return the kind of each layer: modules, shapes and flags, and its entries in the config's `lists`.

    Raises ValueError if no list of modules has `depth` layers.
    """
    config = model.config
    text = config.get_text_config(decoder=True)
    stacks = [
        module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if not stacks:
        raise ValueError(f"a {type(model).__name__} has no list of {depth} layers")
    return [
        (
            tuple(str(getattr(text, name)[k]) for name in lists),
            *(tuple(_description(layers[k], (config, text))) for layers in stacks),
        )
        for k in range(depth)
    ]


def _description(layer: nn.Module, configs: Sequence[Any]) -> Iterator[Hashable]:
    """Yield the properties that decide how a layer computes: neither its place among the layers nor the
    model's own `configs`.
    """
    for path, module in layer.named_modules():
        yield path, type(module)
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            yield name, None if tensor is None else tuple(tensor.shape)
        for name, value in sorted(vars(module).items()):
            if name.startswith("_") or _NUMBERS.search(name) or any(value is config for config in configs):
                continue
            if inspect.isroutine(value):
                yield name, value.__qualname__
            elif value is None or isinstance(value, bool | int | str | Collection | PreTrainedConfig):
                yield name, repr(value)
            else:  # a fraction, above all, which scales what is computed and chooses nothing
                yield name, type(value)


@contextmanager
def short_windows(holders: Iterable[Any], tokens: int) -> Iterator[None]:
    """Inside, a model's windows have at most so many tokens, fewer than are tried, so that a wrong one shows.

    `holders`: the config, from which masks are made, and the modules, whose windows go to the attention.
    """
    before: list[tuple[Any, str, int]] = []
    for holder in holders:
        for name in WINDOWS:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > tokens:
                before.append((holder, name, value))
                setattr(holder, name, tokens)
    try:
        yield
    finally:
        for holder, name, value in before:
            setattr(holder, name, value)
