"""Read what the files of a model directory say of the model: its parameters, its context, its chat template.

Without torch. What they do not say for certain is unknown.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from rollout.engines.model_dir import companions, read_json, tensor_names
from rollout.storage import files

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
_ORIGINAL = "original_max_position_embeddings"
_EXPERTS = (
    ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_top_k", "moe_k"),
)
"""How configurations call the number of experts, and of those that a token goes to."""
_IN_EXPERTS = re.compile(r"[^\d]*?\.(\d+)\.(?:.*\.)?experts\.")
_LAYERS = ("layer_types", "layers_block_type", "block_types")
"""Where a configuration names the kind of each layer."""
_RECURRENT = ("linear", "conv", "mamba", "recurrent", "hybrid")
"""Parts of the names of kinds that are no attention alone."""
_QUANTISED = ("quantization_config", "compression_config")
"""Where a configuration says how its weights are quantised, in whichever part of it."""
_QUANTISED_BESIDE = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Files of their own that say so, and of what."""
_QUANTISED_NAMES = ("weight", "_packed", "_blocks")
"""How tensors are named that hold weights, if they are integers."""
DEQUANTISED = ("fp8", "mxfp4")
"""What trainer.checkpoint.dequantise reads."""
_TOKENIZERS_WITH_CODE = ("tekken.json", "tokenizer.model.v3")
"""Files of tokenizers that write a chat by themselves, without a template (mistral-common)."""


def count_parameters(model_dir: Path) -> int:
    """Return the number of parameters in the weights' files; WeightsError if these are not whole."""
    return sum(math.prod(shape) for _, shape in tensor_names(model_dir).values())


def count_active_parameters(model_dir: Path) -> int:
    """Return the number of parameters that compute a token: of a mixture, those of the experts it goes to."""
    experts, active = count_experts(model_dir)
    share = min(1.0, active / experts) if experts and active else 1.0
    sizes = {name: math.prod(shape) for name, (_, shape) in tensor_names(model_dir).items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(sizes.values()) - round(of_experts * (1 - share))


def count_experts(model_dir: Path) -> tuple[int, int]:
    """Return how many experts a layer has, and how many of them a token goes to; 0 where none are named."""
    text = _configs(model_dir)[1]
    experts, active = (
        next((text[key] for key in keys if type(text.get(key)) is int), 0) for keys in _EXPERTS
    )
    return experts, active


def layers_with_experts(model_dir: Path) -> tuple[int, ...]:
    """Return the numbers of the layers that have experts, from 0, by the names of their tensors."""
    layers = {int(name[1]) for name in map(_IN_EXPERTS.match, tensor_names(model_dir)) if name}
    count = _configs(model_dir)[1].get("num_hidden_layers", math.inf)
    return tuple(sorted(layer for layer in layers if layer < count))  # beyond: those that guess ahead


def context_tokens(model_dir: Path) -> int | None:
    """Return the longest sequence of the model, in tokens; None where config.json does not say it for
    certain: it has no such number, or positions are scaled.
    """
    if (limit := steady_tokens(model_dir)) is not None:
        return limit
    config, text = _configs(model_dir)
    stretched = [rope for rope in _ropes(config, text) if "factor" in rope]
    # Llama 3's rescaling lets the positions be as many as they are named.
    if any(rope.get("rope_type", rope.get("type")) != "llama3" for rope in stretched):
        return None
    return _positions(text)


def most_tokens(model_dir: Path) -> int | None:
    """Return the length, in tokens, beyond which the model has no positions whatever its configuration means:
    scaled positions may be counted in max_position_embeddings, or come on top. None where nothing says it.
    """
    if (limit := context_tokens(model_dir)) is not None:
        return limit
    config, text = _configs(model_dir)
    if (positions := _positions(text)) is None:
        return None
    ropes = [rope for rope in _ropes(config, text) if isinstance(rope.get("factor"), int | float)]
    scaled = [rope["factor"] * (rope.get(_ORIGINAL) or positions) for rope in ropes]
    return max([positions, *map(int, scaled)])


def _positions(text: Mapping[str, Any]) -> int | None:
    lengths = [text[name] for name in _CONTEXT if type(text.get(name)) is int and text[name] > 0]
    return max(lengths, default=None)


def steady_tokens(model_dir: Path) -> int | None:
    """Return the longest sequence, in tokens, up to which all positions keep the frequencies of short ones;
    None where they do at any length.

    Beyond it `longrope` (Phi 3 to 4, with a long context) and `dynamic` change what every token means, also
    those before: engines do it for all that runs at once, or by their own limit, and the cache keeps what
    was. So no sequence gets longer.
    """
    config, text = _configs(model_dir)
    limits: list[Any] = []
    for rope in _ropes(config, text):
        kind = str(rope.get("rope_type", rope.get("type")))
        context_tokens = text.get("max_position_embeddings")
        if kind == "longrope":
            original = text.get(_ORIGINAL, context_tokens)
            limits.append(rope.get(_ORIGINAL, original))
        elif "dynamic" in kind:
            limits.append(context_tokens)
    return min((limit for limit in limits if type(limit) is int and limit > 0), default=None)


def keep_frequencies(model: Any) -> None:
    """Let a model of transformers never change its frequencies: it would for padding behind short rows too.

    See `steady_tokens`. transformers chooses them in each call, for the whole batch, by these attributes.
    """
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {layer: _kept(rope) for layer, rope in cast("dict[str, Any]", kind).items()}
        elif kind is not None:
            module.rope_type = _kept(kind)


def keep_causal(model: Any) -> None:
    """Let the decoder of a model of transformers never see ahead where it is given no mask. PaliGemma's would
    without pictures: it calls itself bidirectional, for what it sees of a prompt.
    """
    sees_ahead = getattr(model.config.get_text_config(), "use_bidirectional_attention", None)
    if sees_ahead is True and hasattr(model.base_model, "get_image_features"):
        for module in model.get_decoder().modules():
            if getattr(module, "is_causal", True) is False:
                module.is_causal = True


def _kept(kind: Any) -> Any:
    return "steady" if kind == "longrope" or "dynamic" in str(kind) else kind


def quantisation(model_dir: Path) -> str | None:
    """Return how the weights are quantised, in the words of the model's files; None if they are numbers of 16
    bits or more.
    """
    for part in _parts(read_json(model_dir / "config.json")):
        for method in filter(None, map(part.get, _QUANTISED)):
            return method if isinstance(method, str) else str(method.get("quant_method", "unknown"))
    for name in files.file_names(model_dir):
        if name in _QUANTISED_BESIDE:
            return _QUANTISED_BESIDE[name]
    for name, (dtype, _) in tensor_names(model_dir).items():
        if dtype.startswith(("F4", "F6_", "F8_")) or (dtype[0] in "IU" and name.endswith(_QUANTISED_NAMES)):
            return f"{name} is {dtype}"
    return None


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration and those inside it."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _parts(cast("dict[str, Any]", value))


def _configs(model_dir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config.json, and the part of it that is about text."""
    config = read_json(model_dir / "config.json")
    text = config.get("text_config", config)
    return config, text if isinstance(text, dict) else {}


def _ropes(*configs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the configurations' entries about positions; families with several kinds of layers have
    several.
    """
    ropes = [config.get(name) for config in configs for name in ("rope_scaling", "rope_parameters")]
    nested = [value for rope in ropes if isinstance(rope, dict) for value in rope.values()]
    return [rope for rope in [*ropes, *nested] if isinstance(rope, dict)]


def may_have_chat_template(model_dir: Path) -> bool:
    """Return False only if the directory has a tokenizer's configuration and no chat template anywhere."""
    names = set(companions(model_dir))
    if "tokenizer_config.json" not in names or names & set(_TOKENIZERS_WITH_CODE):
        return True
    if any(name.endswith(".jinja") or name.startswith("chat_template") for name in names):
        return True
    config = read_json(model_dir / "tokenizer_config.json")
    return bool(config.get("chat_template")) or "auto_map" in config


def template_text(model_dir: Path) -> str:
    """Return all text that may be a chat template of the model."""
    companion_names = companions(model_dir)
    names = [name for name in companion_names if name.endswith(".jinja")]
    named = [name for name in companion_names if name in ("tokenizer_config.json", "chat_template.json")]
    templates = [str(read_json(model_dir / name).get("chat_template", "")) for name in named]
    return "\n".join([*(files.read(model_dir / name).decode(errors="replace") for name in names), *templates])


def takes_pictures(model_dir: Path) -> bool:
    """Return whether the model has a part for pictures."""
    return feature_token(model_dir) is not None


def has_processor(model_dir: Path) -> bool:
    """Return whether the directory says how pictures become what the model takes."""
    return not {"processor_config.json", "preprocessor_config.json"}.isdisjoint(files.file_names(model_dir))


def feature_token(model_dir: Path) -> int | None:
    """Return the token that stands for a feature of a picture; None if the model has no part for pictures."""
    config = read_json(model_dir / "config.json")
    token = config.get("image_token_index", config.get("image_token_id"))
    return token if isinstance(config.get("vision_config"), dict) and type(token) is int else None


def placeholder(model_dir: Path) -> int | None:
    """Return the token that stands for a picture in a prompt; None if the model has no part for pictures."""
    token = feature_token(model_dir)
    begin = read_json(model_dir / "config.json").get("boi_token_index")  # of Gemma 3, which has two
    return begin if token is not None and type(begin) is int else token


def attention_heads(model_dir: Path) -> tuple[int, int]:
    """Return how many heads have queries, and how many keys; 0 where config.json does not say."""
    text = _configs(model_dir)[1]
    heads = text.get("num_attention_heads")
    heads = heads if type(heads) is int else 0
    key_heads = text.get("num_key_value_heads")
    return heads, key_heads if type(key_heads) is int else heads


def recurrent_layers(model_dir: Path) -> list[str]:
    """Return the kinds of layers, as config.json names them, in which a token depends on those before it
    otherwise than by attention.
    """
    text = _configs(model_dir)[1]
    lists = [text[name] for name in _LAYERS if isinstance(text.get(name), list)]
    kinds = {str(kind) for of_layers in lists for kind in of_layers}
    return sorted(kind for kind in kinds if any(word in kind for word in _RECURRENT))


def vocabulary_size(model_dir: Path) -> int | None:
    """Return how many tokens the model knows; None where config.json does not say."""
    size = _configs(model_dir)[1].get("vocab_size")
    return size if type(size) is int and size > 0 else None
