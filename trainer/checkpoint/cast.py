"""Write a model's weights in another number type, in place: python -m trainer.checkpoint.cast MODEL DTYPE

One file of weights is in memory at a time. Tensors that are no floating-point numbers stay as they are.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollout.engines.model_dir import INDEX, weight_files

DTYPES = {"bfloat16", "float16", "float32"}
"""Number types that a whole model can be written in."""


def cast(model: Path, dtype: str) -> None:
    """Cast the weights in the directory `model` to `dtype`, one of DTYPES, and say so in its config.json.
    ValueError for weights that are quantised.
    """
    path = model / "config.json"
    config = json.loads(path.read_bytes())
    if "quantization_config" in config:
        raise ValueError("its weights are quantised, and no plain numbers")
    total = 0
    for name in weight_files(model):
        total += _cast_file(model / name, getattr(torch, dtype))
    if (model / INDEX).is_file():
        index = json.loads((model / INDEX).read_bytes())
        index["metadata"] = {**index.get("metadata", {}), "total_size": total}
        (model / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    for part in _parts(config):
        part.pop("torch_dtype", None)  # what transformers has called it before
        part["dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n")


def _cast_file(path: Path, dtype: torch.dtype) -> int:
    """Cast the tensors of one file; return their bytes."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {"format": "pt"}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()
    }
    temporary = path.with_name(f".{path.name}")
    save_file(tensors, temporary, metadata)
    os.replace(temporary, path)
    return sum(tensor.nbytes for tensor in tensors.values())


def _parts(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a configuration, and those in it (of the text model, for example) that name a number type."""
    yield config
    for value in config.values():
        if isinstance(value, dict) and {"dtype", "torch_dtype"} & value.keys():
            yield value  # pyright: ignore[reportUnknownVariableType]


def main() -> int:
    """Cast what the command line says; one line for what is wrong."""
    if len(sys.argv) != 3 or sys.argv[2] not in DTYPES:
        usage = f"python -m trainer.checkpoint.cast MODEL {'|'.join(sorted(DTYPES))}"
        print(f"usage: {usage}; got {' '.join(sys.argv[1:]) or 'nothing'}", file=sys.stderr)
        return 2
    try:
        cast(Path(sys.argv[1]), sys.argv[2])
    except (OSError, ValueError, SafetensorError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
