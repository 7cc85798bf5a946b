"""scripts/models.py: the page of families is of this transformers, and its columns hold for some."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from scripts import models
from scripts.tiny_models import FAMILIES, NotTiny, make_tiny_model, tiny_config
from tests.paths import REPOSITORY

PAGE = models.PAGE.read_text(encoding="utf-8")
TRIED, NOT_TRIED = (
    {row.split("|")[1].strip(): row for row in part.splitlines() if row.startswith("| ")}
    for part in PAGE.split("## Not")
)
SOME = {
    "qwen3": "positions, yes",
    "llama": "positions, yes",
    "gemma2": "positions, yes",
    "glm4": "positions, yes",
    "deepseek_v3": "positions, yes",
    "qwen3_moe": "positions, yes",
    "afmoe": "masks, yes",
    "gpt_oss": "masks, yes",
    "opt": "masks, yes",
    "bamba": "one a row, no",
    "qwen3_5_text": "one a row, no",
    "kimi_linear": "one a row, no",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("families")
    return lambda family: (
        root / family if (root / family).is_dir() else make_tiny_model(family, root / family)
    )


@pytest.mark.parametrize("family", SOME)
def test_family_is_packed_as_the_page_says(family: str, made: Callable[[str], Path]) -> None:
    cells = models.rows(made(family)), models.shared_prompts(made(family))
    assert ", ".join(cell.partition(",")[0] for cell in cells) == SOME[family]
    words = [cell.strip().partition(",")[0] for cell in TRIED[family].split("|")[2:4]]
    assert ", ".join(words) == SOME[family], "run scripts/models.py"


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "bamba"])
def test_family_takes_adapters(family: str, made: Callable[[str], Path]) -> None:
    assert int(models.lora(made(family)).split()[0]) >= 8


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_embedded_engine_agrees_with_the_trainer(family: str, made: Callable[[str], Path]) -> None:
    assert float(models.embedded_engine(made(family))) < models.CLOSE


def test_model_has_layers_of_each_kind_that_its_family_has() -> None:
    for family in ("gpt_oss", "gemma3_text", "qwen3_next", "lfm2", "bamba", "nemotron_h"):
        kinds = tiny_config(family).layer_types
        assert len(set(kinds)) > 1, family
        assert len(kinds) == tiny_config(family).num_hidden_layers < 6
    with pytest.raises(NotTiny, match="its text model is a family of its own"):
        tiny_config("gemma3")


def test_script_tries_each_column_in_a_process_of_its_own() -> None:
    argv = [sys.executable, "-W", "ignore", "-m", "scripts.models", "--families", "qwen3,bert"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [
        cell.strip() for cell in re.findall(r"^\| qwen3 \|(.*)\|$", done.stdout, re.MULTILINE)[0].split("|")
    ]
    rows, shared, sharded, tensor, lora, engine, vllm = cells
    numbers = [*(cell.split(", ")[1] for cell in (rows, shared)), sharded, tensor, engine]
    assert all(float(number) < models.CLOSE for number in numbers), cells
    assert lora == "14 modules" and vllm == "not tried"
    assert re.search(r"^\| bert \| a bert model sees the tokens .*\|$", done.stdout, re.MULTILINE)


@pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in PAGE.partition("##")[0],
    reason="the page was written with another transformers",
)
def test_page_has_every_family() -> None:
    named = {*TRIED, *NOT_TRIED} - {"family"}
    assert named == set(FAMILIES), "run scripts/models.py"
