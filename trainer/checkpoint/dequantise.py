"""Write a model's quantised weights as numbers: python -m trainer.checkpoint.dequantise MODEL OUT

OUT is made: a Hugging Face directory with the weights in bfloat16, which a run can train. For FP8 with scales
(`fp8`, as DeepSeek and Qwen ship it) and MXFP4 (`mxfp4`, as gpt-oss), whose numbers are products of a weight
and its scale. Takes the memory of the whole model in bfloat16. Needs accelerate, which comes with peft.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from rollout.engines.embedded.weights import load_model
from rollout.engines.model_dir import companions
from rollout.engines.model_facts import DEQUANTISED, quantisation

CONFIGS: dict[str, Any] = dict(zip(DEQUANTISED, (FineGrainedFP8Config, Mxfp4Config), strict=True))


def dequantise(model_dir: Path, out: Path) -> None:
    """Write the model with its weights in bfloat16. Raises ValueError for weights that are not quantised, or
    in another way, and what transformers raises.
    """
    method = quantisation(model_dir)
    if method not in CONFIGS:
        kinds = " and ".join(CONFIGS)
        raise ValueError(f"{model_dir}: quantised: {method or 'no'}; {kinds} can be written as numbers")
    model: Any = load_model(model_dir, torch.bfloat16, quantization_config=CONFIGS[method](dequantize=True))
    # Else what is saved would be quantised again, without a word of it in the configuration.
    model._weight_conversions = None
    model.save_pretrained(out)
    for name in set(companions(model_dir)) - {"config.json", "README.md"}:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(model_dir / name, out / name)


def main() -> int:
    """Dequantise what the command line says; one line for what is wrong."""
    disable_progress_bar()
    if len(sys.argv) != 3:
        got = " ".join(sys.argv[1:]) or "nothing"
        print(f"usage: python -m trainer.checkpoint.dequantise MODEL OUT; got {got}", file=sys.stderr)
        return 2
    model_dir, out = map(Path, sys.argv[1:])
    try:
        dequantise(model_dir, out)
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
