"""What the files of a model directory say of the model: its parameters, its context, its chat template.

Without torch. What they do not say for certain is unknown.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout.engines.model_dir import read_json, tensor_names
from rollout.storage import files

_CONTEXT = ("max_position_embeddings", "n_positions")
_TOKENIZERS_WITH_CODE = ("tekken.json", "tokenizer.model.v3")
"""Files of tokenizers that write a chat by themselves, without a template (mistral-common)."""


def count_parameters(model_dir: Path) -> int:
    """Return the number of parameters in the weights' files; WeightsError if these are not whole."""
    return sum(math.prod(shape) for _, shape in tensor_names(model_dir).values())


def context_tokens(model_dir: Path) -> int | None:
    """Return the longest sequence of the model, in tokens; None where config.json does not say it for
    certain: it has no such number, or positions are scaled.
    """
    config = read_json(model_dir / "config.json")
    text = config.get("text_config", config)
    if not isinstance(text, dict) or _is_scaled(text) or _is_scaled(config):
        return None
    found = [text[name] for name in _CONTEXT if type(text.get(name)) is int and text[name] > 0]
    return max(found, default=None)


def _is_scaled(config: Mapping[str, Any]) -> bool:
    """Return whether a factor lengthens the context; families with several kinds of layers have several."""
    rope = [config.get(name) for name in ("rope_scaling", "rope_parameters")]
    nested = [value for one in rope if isinstance(one, dict) for value in one.values()]
    return any("factor" in one for one in [*rope, *nested] if isinstance(one, dict))


def may_have_chat_template(model_dir: Path) -> bool:
    """Return False only if the directory has a tokenizer's configuration and no chat template anywhere."""
    names = set(files.file_names(model_dir))
    if "tokenizer_config.json" not in names or names & set(_TOKENIZERS_WITH_CODE):
        return True
    if any(name.endswith(".jinja") or name.startswith("chat_template") for name in names):
        return True
    config = read_json(model_dir / "tokenizer_config.json")
    return bool(config.get("chat_template")) or "auto_map" in config
