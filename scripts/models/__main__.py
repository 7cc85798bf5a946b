"""Try every family of decoders that transformers has, and write docs/models.md.

    .venv/bin/python -m scripts.models [--families qwen3,gpt_oss | --pictures] [--vllm PYTHON] [--page FILE]

For each family a tiny random model is made, with layers of each kind that the family has. In a forked
process with a deadline it is packed, trained in each layout, and served; see columns.py. `--vllm`: an
interpreter that has vLLM for CPUs, such as .venv-vllm/bin/python. With `--families` the page is printed, else
it is written; with `--pictures` its last table alone. Progress goes to stderr.
"""

import argparse
import logging
import os
import subprocess
from pathlib import Path

import torch
import transformers

from scripts.models.families import REPOSITORY, try_all
from scripts.models.page import PICTURES, page, pictures
from scripts.tiny_models import FAMILIES
from scripts.tiny_seeing_models import FAMILIES as SEEING
from scripts.tiny_seeing_models import make_tiny_seeing


def main() -> None:
    """Try the families and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", action="store_true", help="write the table of pictures alone")
    parser.add_argument("--families", help="some of them, separated by commas; default: all")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="families at a time")
    parser.add_argument("--page", type=Path, default=REPOSITORY / "docs" / "models.md")
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if options.pictures:
        seen = dict(try_all(list(SEEING), options.vllm, options.jobs, make_tiny_seeing))
        end = pictures({family: seen[family] for family in SEEING})
        options.page.write_text(f"{_parts(options.page)[0].rstrip()}\n\n{end}", encoding="utf-8")
        return
    families = options.families.split(",") if options.families else list(FAMILIES)
    tried = dict(try_all(families, options.vllm, options.jobs))
    text = page({family: tried[family] for family in families}, _versions(options.vllm))
    if options.families:
        print(text)
    else:
        options.page.write_text(f"{text}\n{_parts(options.page)[1]}", encoding="utf-8")


def _parts(page: Path) -> tuple[str, str]:
    """Return the page up to its last table, and that."""
    heading = PICTURES.partition("\n")[0]
    before, _, end = page.read_text(encoding="utf-8").partition(heading)
    return before, heading + end


def _versions(vllm_python: str | None) -> str:
    made = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    if not vllm_python:
        return made
    ask = "import transformers, vllm; print(vllm.__version__, transformers.__version__)"
    theirs = subprocess.run([vllm_python, "-c", ask], capture_output=True, text=True, check=True).stdout
    vllm, beside = theirs.split()[-2:]
    return f"{made}, and vLLM {vllm} beside transformers {beside}"


if __name__ == "__main__":
    main()
