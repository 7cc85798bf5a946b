"""scripts/recipes: every file is understood as it stands, and those for a CPU run."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.settings.loading import build
from coordinator.settings.settings_file import read_file
from coordinator.start.estimate import memory_text
from tests.cluster.cluster import REPOSITORY, Cluster
from tests.cluster.conftest import serving
from tests.scripts.pages import commands

RECIPES = REPOSITORY / "scripts" / "recipes"
FILES = sorted(RECIPES.glob("*.toml"))
PAGE = REPOSITORY / "docs" / "recipes.md"
TYPED = [
    (file.name, command)
    for file in FILES
    for command in re.findall(r"^#     (.+)$", file.read_text(), re.MULTILINE)
]
ON_PAGE = [command for command in commands(PAGE) if "scripts/recipes/" in command]
SMALL = (
    *("--iterations", "1", "rollout.tasks_per_iteration=8", "tiny.warmup_steps=4"),
    *("eval.max_tasks=4", "trainer.global_batch_size=16"),
)
SIZES: dict[str, dict[str, int]] = {
    "Qwen/Qwen3-0.6B": {"hidden": 1024, "layers": 28, "kv": 1024, "q": 2048, "wide": 3072, "head": 0},
    "Qwen/Qwen3-0.6B-Base": {"hidden": 1024, "layers": 28, "kv": 1024, "q": 2048, "wide": 3072, "head": 0},
    "Qwen/Qwen3-1.7B": {"hidden": 2048, "layers": 28, "kv": 1024, "q": 2048, "wide": 6144, "head": 0},
    "Qwen/Qwen3-8B": {"hidden": 4096, "layers": 36, "kv": 1024, "q": 4096, "wide": 12288, "head": 151936},
    "Qwen/Qwen2.5-7B-Instruct": {
        **{"hidden": 3584, "layers": 28, "kv": 512, "q": 3584, "wide": 18944, "head": 152064}
    },
}
"""From the configurations on the Hub."""


def tensors(model: str) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's matrices."""
    of = SIZES[model]
    layer = {
        "q_proj": (of["q"], of["hidden"]),
        "k_proj": (of["kv"], of["hidden"]),
        "v_proj": (of["kv"], of["hidden"]),
        "o_proj": (of["hidden"], of["q"]),
        "gate_proj": (of["wide"], of["hidden"]),
        "up_proj": (of["wide"], of["hidden"]),
        "down_proj": (of["hidden"], of["wide"]),
    }
    found = {"model.embed_tokens.weight": (of["head"] or 151936, of["hidden"])}
    if of["head"]:
        found["lm_head.weight"] = (of["head"], of["hidden"])
    return found | {
        f"model.layers.{n}.{name}.weight": shape for n in range(of["layers"]) for name, shape in layer.items()
    }


@pytest.mark.parametrize(("file", "command"), [*TYPED, *((PAGE.name, command) for command in ON_PAGE)])
def test_command_of_a_recipe_is_understood(
    file: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(REPOSITORY)
    words = shlex.split(command.replace("/shared/", f"{tmp_path}/"))
    if words[0] != "run" or "--worker" in words or "export" in words:
        assert command.startswith(
            (
                "vllm serve",
                "python -m rollout.engines.embedded.server",
                "python -m scripts.real_model",
                "run --worker 1",
                "run export --merge",
            )
        )
        return
    assert (REPOSITORY / words[words.index("--config") + 1]).is_file()
    monkeypatch.setattr("sys.argv", [*words, "--settings-only"])
    assert main() == 0, capsys.readouterr().err


def test_every_recipe_says_how_it_is_run_and_is_on_the_page() -> None:
    assert {name for name, _ in TYPED} == {file.name for file in FILES} and len(FILES) >= 9
    table = PAGE.read_text()
    assert [
        file.name for file in FILES if f"[{file.name}](../scripts/recipes/{file.name})" not in table
    ] == []


@pytest.mark.parametrize("file", [file for file in FILES if "gpu" in file.name], ids=lambda file: file.name)
def test_memory_of_the_page_is_what_the_start_would_say(file: Path) -> None:
    (row,) = (line for line in PAGE.read_text().splitlines() if f"| [{file.name}]" in line)
    _, model, count, memory = (cell.strip() for cell in row.strip("|").split("|"))
    settings = build(read_file(file))
    after_sft = settings.model.startswith("runs/sft")
    assert model == settings.model or after_sft
    text = memory_text(tensors("Qwen/Qwen3-0.6B" if after_sft else model), settings.trainer, int(count), 80e9)
    assert "too little" not in text and f"{memory} GB or more" in text, text


def test_recipes_for_a_cpu_run_one_after_the_other(tmp_path: Path, cache: Path) -> None:
    """In the current directory of the files' paths, which is not the repository."""
    place = tmp_path / "runs"
    place.mkdir()

    def run(recipe: str, name: str, *words: str) -> list[dict[str, Any]]:
        nodes = Cluster(place / name, cache, tmp_path)
        try:
            nodes.start(0, "--config", str(RECIPES / recipe), *SMALL, *words)
            assert nodes.wait() == [0], nodes.everything_said()
            return nodes.metrics()
        finally:
            nodes.close()

    lines = run("tool-agent-cpu.toml", "agent")
    assert [line["iteration"] for line in lines] == [1] and "calls" in lines[0]["sample_metrics"]
    assert all("eval_reward" in line for line in run("sft-cpu.toml", "sft"))
    made = place / "sft" / "checkpoints" / "iteration_000001"
    assert len(run("rl-after-sft-cpu.toml", "rl", "--model", str(made))) == 1
    with serving(place / "rl" / "checkpoints" / "iteration_000001", tmp_path / "log") as url:
        (first,) = run("distill-cpu.toml", "distill", f"rollout.teacher={url}/v1")
    assert first["kl_reference"] is not None
