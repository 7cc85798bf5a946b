"""scripts/models: the page of families is of this transformers, and its columns hold for some."""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers

from scripts.models import columns
from scripts.models.families import NO
from scripts.models.forked import outcome
from scripts.models.page import page, pictures
from scripts.tiny_models import FAMILIES, NotTiny, make_tiny_model, tiny_config
from scripts.tiny_seeing_models import FAMILIES as WITH_PICTURES
from scripts.tiny_seeing_models import make_tiny_seeing
from tests.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
TRIED, SEEING = (
    {row.split("|")[1].strip(): row for row in part.splitlines() if row.startswith("| ")}
    for part in PAGE.split("## With pictures")
)
NOT_TRIED = re.findall(
    r"[\w-]+", " ".join(re.findall(r"^- (.+?):", PAGE.partition("## Not")[2], re.MULTILINE))
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
    "bamba": "alone, no",
    "qwen3_5_text": "alone, no",
    "kimi_linear": "alone, no",
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
    cells = columns.rows(made(family)), columns.shared_prompts(made(family))
    assert words_of(*cells) == SOME[family]
    assert words_of(*TRIED[family].split("|")[2:4]) == SOME[family], "run python -m scripts.models"


def words_of(apart: str, shared: str) -> str:
    return f"{apart.strip().partition(',')[0]}, {'no' if shared.strip() == 'no' else 'yes'}"


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "bamba"])
def test_family_takes_adapters(family: str, made: Callable[[str], Path]) -> None:
    assert int(columns.lora(made(family))) >= 8


@pytest.mark.parametrize("family", ["gpt_oss", "falcon", "bamba"])
def test_family_shares_sequences_as_the_page_says(family: str, made: Callable[[str], Path]) -> None:
    exceptions = re.findall(r"[\w-]+", re.findall(r"correct for all others except: ([^.]*)", PAGE)[0])
    done, said = outcome(partial(columns.context_parallel, made(family)))
    assert done == ((family in exceptions) == TRIED[family].split("|")[2].strip().startswith("alone")), said


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma"])
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_family_with_pictures_is_packed_and_sharded_as_the_page_says(family: str, tmp_path: Path) -> None:
    """One of the two ranks has pictures, and the other one may have none."""
    torch.set_num_threads(1)
    directory = make_tiny_seeing(family, tmp_path / family)
    _, _, rows, shared, sharded, *_ = SEEING[family].split("|")
    assert words_of(rows, shared) == words_of(columns.rows(directory), columns.shared_prompts(directory))
    assert float(columns.sharded(directory)) < columns.CLOSE and float(sharded) < columns.CLOSE


def test_page_has_every_family_with_pictures() -> None:
    assert SEEING.keys() - {"family"} == WITH_PICTURES.keys(), "run python -m scripts.models --pictures"
    text = pictures({"llava": {"rows": "positions", "LoRA": NO + "it | fell"}, "other": "not tiny"})
    assert "\n| llava | positions |  |  | **no**: it \\| fell |  |  |\n" in text
    assert "\n| other | **no**: not tiny | | | | | |\n" in text


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_embedded_engine_agrees_with_the_trainer(family: str, made: Callable[[str], Path]) -> None:
    assert float(columns.embedded_engine(made(family))) < columns.CLOSE


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
    numbers = [rows.partition(", ")[2] or "0", shared, sharded, tensor, engine]
    assert all(float(number) < columns.CLOSE for number in numbers), cells
    assert lora == "14" and vllm == "not tried"
    assert re.search(r"^- bert: the model sees the tokens ", done.stdout, re.MULTILINE)


def compute_in_threads() -> None:
    """Use torch in four threads at the same moment."""
    values, errors = torch.ones(300, 300), list[Exception]()
    begin_s = time.monotonic() + 0.02

    def compute() -> None:
        while time.monotonic() < begin_s:
            pass
        try:
            values.sum()
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=compute) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_threads_of_a_forked_process_may_use_torch_at_once() -> None:
    torch.set_num_threads(1)
    torch.ones(300, 300).sum()  # the pool is there before the fork
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        found = {outcome(compute_in_threads) for _ in range(60)}
    finally:
        sys.setswitchinterval(interval)
    assert found == {(True, None)}


def test_each_no_has_its_figure_or_its_reason() -> None:
    why = "trainer.tensor_parallel_size=2 and {}: transformers has no tensor-parallel plan for it; use 1"
    one = {
        "rows": "masks, 0",
        "tensor parallel": NO + why.format("BloomForCausalLM"),
        "context parallel": NO + "too many values to unpack",
        "vLLM": NO + "error 1.6e-01",
    }
    other = {"rows": NO + "it | fell", "tensor parallel": NO + why.format("FalconForCausalLM")}
    text = page(
        {"bloom": one, "bert": "a bert model looks ahead", "falcon": other, "xlm": "a xlm model looks ahead"},
        "v 1",
    )
    row = "| {} | not tried | not tried | {} | not tried | not tried | {} |"
    assert "correct for all others except: bloom.\n" in text
    assert row.format("bloom | masks, 0", "**no** (1)", "**no** 1e-01") in text
    assert row.format("falcon | **no** (2)", "**no** (1)", "not tried") in text
    assert "\n1. transformers has no tensor-parallel plan for it\n2. it \\| fell\n" in text
    assert text.endswith("\n- bert, xlm: the model looks ahead\n")


@pytest.mark.skipif(
    f"transformers {transformers.__version__}" not in PAGE.partition("##")[0],
    reason="the page was written with another transformers",
)
def test_page_has_every_family() -> None:
    named = {*TRIED, *NOT_TRIED} - {"family"}
    assert named == set(FAMILIES), "run python -m scripts.models"
