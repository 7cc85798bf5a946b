"""docs/gpus.md, and the metrics of docs/monitoring.md: commands work, figures follow from the settings."""

import json
import re
import shlex
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.cli import main
from coordinator.directory.chain import write_proof
from coordinator.directory.layout import FORMAT
from coordinator.journal.tracker_feed import SINKS
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import metrics
from coordinator.settings.loading import build, flatten, parse_override
from coordinator.start.estimate import memory_text, time_text
from rollout.engines.kinds.vllm import Vllm
from rollout.settings import EngineSettings
from tests.coordinator.examples import run_dir_at, tree, write_checkpoint, write_json
from trainer.memory import ENDS_BYTES, Shape, gathered_bytes, held_bytes, inputs_bytes, least_bytes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, METRICS = ((DOCS / name).read_text() for name in ("gpus.md", "monitoring.md"))
COMMANDS = re.findall(r"^ {4,6}((?:run|hf) .+)$", PAGE, re.MULTILINE)
STARTS = [
    command for command in COMMANDS if re.search(r" \w+\.[\w.-]+=", command) and command.startswith("run ")
]
EXPORT = [command for command in COMMANDS if command.startswith(("run export", "hf upload"))]
CODE = re.findall(r"`([^`\n]+)`", PAGE)
DEFAULTS = dict(flatten(build({"model": "any/model"}).model_dump(mode="json")))


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table whose first column has this heading."""
    table = page[page.index(f"| {heading} |") :].partition("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table[2:]]


def full_name(name: str) -> str:
    """The dotted name of a setting; a table of the page leaves `trainer.` out."""
    return name if name in DEFAULTS else f"trainer.{name}"


def test_no_command_of_the_page_goes_untested() -> None:
    assert len(STARTS) == 6 and len(EXPORT) == 2


@pytest.mark.parametrize("command", STARTS)
def test_command_of_the_page_is_understood(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(command)
    monkeypatch.setattr("sys.argv", [*words, "--settings-only"])
    assert main() == 0
    settings = dict(flatten(json.loads(capsys.readouterr().out)))
    given = [word.partition("=")[0] for word in words if "." in word and "=" in word]
    assert given and all(settings.get(name, "given") != DEFAULTS.get(name) for name in given)


def test_exported_model_is_what_the_next_command_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run_dir_at(tmp_path / "exp1")
    fixed = {"model": {"name": "some/model", "digest": "m0"}, "tasks": {"name": "sums.jsonl"}}
    write_json(run_dir.run_json, {"run_id": "c0ffee", "format": FORMAT, "fixed": fixed})
    write_checkpoint(run_dir.checkpoint(12), 12)
    write_proof(run_dir, "c0ffee", "ba5e", run_dir.checkpoint(12))
    export, upload = EXPORT
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", shlex.split(export.replace("/shared", str(tmp_path))))
    assert main() == 0
    assert tree(tmp_path / upload.split()[-1]) == {
        "config.json",
        "model.safetensors",
        "README.md",
        "proof.json",
    }


def test_settings_of_the_page_take_these_values() -> None:
    given = [code for code in CODE if re.fullmatch(r"[a-z_.]+=[\w,]+", code)]
    assert {"trainer.layout=sharded", "trainer.save_interval=10", "engine.sleep=2"} <= set(given)
    for name, value in map(parse_override, given):
        build({"model": "any/model", full_name(name): value})


def test_arguments_for_a_server_of_adapters_are_those_that_ours_gets() -> None:
    ours = Vllm(EngineSettings(), gpus=1).command("model", socket="s", lora_rank=16)
    (serve,) = (code for code in CODE if code.startswith("vllm serve"))
    assert {"--enable-lora", "--max-lora-rank=16"} <= set(ours.argv)
    assert "--enable-lora --max-lora-rank 16" in serve
    for name, value in ours.env.items():
        assert "LORA" not in name or f"`{name}={value}`" in PAGE


HIDDEN, INTERMEDIATE, LAYERS, KEYS, VOCABULARY = 3584, 18_944, 28, 512, 152_064
LAYER = 2 * (HIDDEN + KEYS) * HIDDEN + HIDDEN + 2 * KEYS + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
"""Parameters of a layer of Qwen2.5-7B: attention with biases, the gated MLP, two norms."""
ENDS = 2 * VOCABULARY * HIDDEN
ALL = LAYERS * LAYER + ENDS + HIDDEN
ADAPTERS = LAYERS * 16 * (2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INTERMEDIATE))


TENSORS = {
    f"model.layers.{number}.{name}": shape
    for number in range(LAYERS)
    for name, shape in {
        "q.weight": (HIDDEN, HIDDEN),
        "o.weight": (HIDDEN, HIDDEN),
        "k.weight": (KEYS, HIDDEN),
        "v.weight": (KEYS, HIDDEN),
        "q.bias": (HIDDEN,),
        "k.bias": (KEYS,),
        "v.bias": (KEYS,),
        "gate.weight": (INTERMEDIATE, HIDDEN),
        "up.weight": (INTERMEDIATE, HIDDEN),
        "down.weight": (HIDDEN, INTERMEDIATE),
        "before.weight": (HIDDEN,),
        "after.weight": (HIDDEN,),
    }.items()
} | {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "lm_head.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
}


def test_table_of_memory_is_what_run_plan_computes() -> None:
    """`run plan` refuses a crew whose trainer does not fit by the same arithmetic."""
    whole, adapted = Shape.from_tensors(TENSORS), Shape.from_tensors(TENSORS, ADAPTERS)
    assert (whole.all, whole.layer, whole.ends) == (ALL, LAYER, ENDS)

    def bytes_of(shape: Shape, gpus: int, **settings: Any) -> tuple[float, float]:
        trainer = build({"model": "any", **settings}).trainer
        return held_bytes(shape, trainer, gpus), gathered_bytes(shape, trainer, gpus)

    replicated, sharded = ({"trainer.layout": layout} for layout in ("replicated", "sharded"))
    expected = {
        ("replicated", "any"): bytes_of(whole, 8, **replicated),
        ("sharded", "8"): bytes_of(whole, 8),
        ("sharded", "16"): bytes_of(whole, 16),
        ("sharded, `cpu_offload`", "8"): bytes_of(whole, 8, **sharded, **{"trainer.cpu_offload": True}),
        ("sharded, `tensor_parallel_size=2`", "8"): bytes_of(whole, 8, **{"trainer.tensor_parallel_size": 2}),
        ("sharded, `lora.rank=16`", "8"): bytes_of(adapted, 8),
        ("replicated, `lora.rank=16`", "any"): bytes_of(adapted, 8, **replicated),
        ("the same, `nf4`", "any"): bytes_of(
            adapted, 8, **{"trainer.lora.rank": 16, "trainer.lora.base_dtype": "nf4"}
        ),
    }
    assert bytes_of(whole, 1) == expected["replicated", "any"]
    assert expected["sharded", "8"] == (16 * ALL / 8, 2 * (2 * LAYER + ENDS))
    stated = {
        (layout, gpus): (float(held.split()[0]), float(also))
        for layout, gpus, held, also in rows(PAGE, "layout")
    }
    assert stated.keys() == expected.keys()
    for key, sizes in expected.items():
        assert stated[key] == tuple(round(size / 1e9, 1) for size in sizes), key


def test_sizes_in_the_text_are_those_of_the_same_model() -> None:
    flat = PAGE.replace("\n", " ")
    assert f"({ALL / 1e9:.2f}e9 parameters; {LAYER / 1e8:.2f}e8 per layer" in flat.replace("  ", " ")
    assert f"{ENDS / 1e9:.2f}e9 in embeddings and head" in flat
    trainer = build({"model": "any"}).trainer
    inputs, ends = inputs_bytes(Shape.from_tensors(TENSORS), trainer), ENDS_BYTES * ENDS
    assert f"(8192: {inputs / 1e9:.1f} GB for all layers)" in flat
    assert f"({ends / 1e9:.1f} GB), while their" in flat
    needed = least_bytes(Shape.from_tensors(TENSORS), trainer, 8)
    kept = 2 * 8192 * (8 * INTERMEDIATE + 16 * HIDDEN)
    assert f"32 bytes x hidden size per token ({kept / 1e9:.1f} GB)" in flat
    backward = 2 * (2 * LAYER + ENDS) + kept + 2 * ENDS / 2 + 6 * LAYER
    assert needed == pytest.approx(16 * ALL / 8 + inputs + backward)
    assert f"({12 * ALL / 1e9:.1f} GB if one node trains the whole model" in flat
    assert f"holds all of it in float32 ({4 * ALL / 1e9:.1f} GB)" in flat
    assert f"has {14 * ALL / 1e9:.0f} GB, {12 * ALL / 1e9:.0f} of them the state" in flat


def test_estimate_of_the_page_is_what_the_start_says() -> None:
    settings = build({"model": "any/model"})
    memory, time = (
        line for line in PAGE.splitlines() if line.startswith(("[rank 0] memory", "[rank 0] time"))
    )
    parameters = sum(prod(shape) for shape in TENSORS.values())
    assert memory == f"[rank 0] memory    {memory_text(TENSORS, settings.trainer, 1, 81559 * 2**20)}"
    assert time == f"[rank 0] time      {time_text(parameters, settings, 1, ['NVIDIA H100 80GB HBM3'])}"


def test_table_of_metrics_names_what_a_line_has(tmp_path: Path) -> None:
    settings, record = SimpleNamespace(kind="both"), SimpleNamespace(epoch=1)
    node = SimpleNamespace(run_dir=run_dir_at(tmp_path), settings=settings, record=record, idle_s=0.0)
    line: dict[str, Any] = metrics._metrics(
        cast(Node, node), Iteration(1), {0: {"work_s": 1.0, "wait_s": 0.0}}
    )
    named = [name for row in rows(METRICS, "name") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(named) == sorted(line)


def test_trackers_of_the_page_are_those_that_there_are() -> None:
    (sentence,) = re.findall(r"numbers to trackers: (.+?), each an extra", METRICS.replace("\n", " "))
    assert [name for name in re.findall(r"`(\w+)`", sentence) if name in SINKS] == list(SINKS)
