"""Add an adapter to its base model: python -m trainer.checkpoint.merge ADAPTER OUT [DTYPE]

OUT is made: a Hugging Face directory with the sum of the weights, in DTYPE (bfloat16, float16, float32), else
in the number type of the base model. The adapter names its base. Needs peft.
"""

import shutil
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from transformers.utils.logging import disable_progress_bar

from rollout.engines.embedded.weights import load_model
from rollout.engines.hub import fetch_model
from rollout.engines.model_dir import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONTENT,
    PROBE,
    companions,
    tensor_names,
)
from trainer.checkpoint.cast import DTYPES
from trainer.documents import RESULT, STATE_DIR

NOT_OF_THE_SUM = {"config.json", ADAPTER_CONFIG, PROBE, CONTENT, RESULT, "README.md"}
"""Files that describe the adapter or its base alone."""


def merge(adapter: Path, out: Path, dtype: torch.dtype | Literal["auto"] = "auto") -> None:
    """Write the sum of an adapter and its base, computed in `dtype`. Raises what transformers and peft raise,
    and WeightsError or UserWarning if tensors of the one or the other are missing.
    """
    from peft import PeftConfig, PeftModel  # here: most programs that import this room do without

    config = PeftConfig.from_pretrained(str(adapter))
    if config.is_prompt_learning:
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise ValueError(
            f"{adapter}: is of the kind {kind}, tokens before a prompt, which no weights can hold; "
            "give an adapter of weights (LoRA)"
        )
    base = str(config.base_model_name_or_path)
    base_dir = Path(base) if Path(base).is_dir() else fetch_model(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers for what has another name now
        warnings.filterwarnings("error", "Found missing adapter keys")  # they would add nothing
        policy = load_model(base_dir, dtype)
        _fit_vocabulary(policy, adapter)
        model = PeftModel.from_pretrained(policy, str(adapter))
    _untie(model)
    model.merge_and_unload().save_pretrained(out)
    for directory in (base_dir, adapter):  # what an adapter has of its own takes the place of its base's
        for name in set(companions(directory)) - NOT_OF_THE_SUM:
            if not name.startswith(f"{STATE_DIR}/"):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(directory / name, out / name)


def _fit_vocabulary(model: Any, adapter: Path) -> None:
    """Give a base model the tokens that were added to it before the adapter, which holds the rows of all."""
    if not (adapter / ADAPTER_WEIGHTS).exists():
        return
    rows = {name: shape[0] for name, (_, shape) in tensor_names(adapter).items() if "lora_" not in name}
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    names = [f"base_model.model.{name}" for name, module in model.named_modules() if module in layers]
    sizes = [rows.get(f"{name}.weight", rows.get(f"{name}.base_layer.weight")) for name in names]
    known = {size for size in sizes if size is not None}
    if len(known) == 1 and (None not in sizes or model.config.get_text_config().tie_word_embeddings):
        model.resize_token_embeddings(known.pop(), mean_resizing=False)


def _untie(model: Any) -> None:
    """Give a layer with an adapter a weight of its own, where it shares one with another: head and embeddings
    are one tensor in many models, and the adapter is on one of them.
    """
    places = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    layers = [layer.base_layer for layer in model.modules() if hasattr(layer, "base_layer")]
    shared = [layer for layer in layers if places[id(getattr(layer, "weight", None))] > 1]
    for layer in shared:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False


def main() -> int:
    """Merge what the command line says; one line for what is wrong."""
    disable_progress_bar()
    if len(sys.argv) not in (3, 4) or not {*sys.argv[3:]} <= DTYPES:
        usage = f"python -m trainer.checkpoint.merge ADAPTER OUT [{'|'.join(sorted(DTYPES))}]"
        print(f"usage: {usage}; got {' '.join(sys.argv[1:]) or 'nothing'}", file=sys.stderr)
        return 2
    adapter, out, *dtype = sys.argv[1:]
    try:
        merge(Path(adapter), Path(out), getattr(torch, dtype[0]) if dtype else "auto")
    except ModuleNotFoundError as error:
        print(f"needs peft ({error}): pip install -e '.[lora]'", file=sys.stderr)
        return 1
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
