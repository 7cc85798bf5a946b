"""docs/algorithms.md: every block and command in it works as it stands, and its tables tell the truth."""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any, get_args

import pytest

from rollout.environments.demonstration import check_demonstrations
from rollout.environments.labelled import check_labels
from rollout.environments.preference import check_preferences
from rollout.tasks.task_set import load_tasks
from trainer import algorithms
from trainer.settings import TrainerSettings

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = re.findall(r"(?:^    |`)(run [^`\n]*)", PAGE, re.MULTILINE)
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\|$", PAGE, re.MULTILINE)
]


@pytest.fixture
def with_the_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's own preset, as if it stood in trainer/algorithms.py."""
    (block,) = [text for kind, text in BLOCKS if kind == "python"]
    there: dict[str, Any] = {"Any": Any, "PRESETS": dict(algorithms.PRESETS)}
    exec(block, there)
    monkeypatch.setattr("trainer.loss_settings.PRESETS", there["PRESETS"])


def test_no_block_of_the_page_goes_untested() -> None:
    assert [kind for kind, _ in BLOCKS] == ["toml", "json", "json", "json", "python"]
    sources = tomllib.loads(BLOCKS[0][1])["trainer"]["sources"]
    assert TrainerSettings.model_validate({"sources": sources}).sources.keys() == {"math", "code"}
    assert len(COMMANDS) == len([line for line in PAGE.splitlines() if re.search(r"(^    |`)run ", line)])


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_settings_that_there_are(command: str, with_the_preset: None) -> None:
    given = dict(word.split("=") for word in shlex.split(command) if word.startswith("trainer."))
    values: dict[str, Any] = {key.removeprefix("trainer."): value for key, value in given.items()}
    if rank := values.pop("lora.rank", None):
        values["lora"] = {"rank": rank}
    settings = TrainerSettings.model_validate(values)
    assert settings.algorithm == values.get("algorithm", "default")


def test_preset_of_ones_own_composes_the_loss(with_the_preset: None) -> None:
    settings = TrainerSettings(algorithm="reinforce")
    assert (settings.clip, settings.aggregation, settings.engine_correction) == (
        "likelihood",
        "constant",
        "truncated",
    )


def test_written_answers_of_the_page_are_tasks(tmp_path: Path) -> None:
    blocks = [text for kind, text in BLOCKS if kind == "json"]
    for block, check in zip(blocks, (check_demonstrations, check_preferences, check_labels), strict=True):
        (tmp_path / "tasks.jsonl").write_text(block)
        check(load_tasks(str(tmp_path / "tasks.jsonl"), seed=0, split="train"))


def test_table_of_presets_is_what_they_set() -> None:
    rows = {row[0].strip("`"): row for row in ROWS if row[0].strip("`") in algorithms.PRESETS}
    assert list(rows) == list(algorithms.PRESETS)
    for name, (_, advantage, clip, aggregation, more, paper) in rows.items():
        settings = TrainerSettings(algorithm=name)
        assert (settings.advantage, settings.aggregation) == (advantage, aggregation)
        assert ("flat groups count" in more) == settings.keep_flat_groups
        assert paper in str(algorithms.PRESETS[name].__doc__)
        assert settings.clip in clip
        if settings.clip == "ppo":
            written = re.findall(r"\d[\d.e-]*", clip)
            assert [float(bound) for bound in written] == [settings.clip_low, settings.clip_high]
            assert clip.startswith(settings.ratio)


def test_table_of_pieces_names_every_value() -> None:
    rows = {name: row for row in ROWS if len(row) == 2 for name in re.findall(r"`(\w+)`", row[0])}
    for name in ("advantage", "ratio", "clip", "aggregation", "engine_correction", "kl", "kl_in", "overlong"):
        values = get_args(TrainerSettings.model_fields[name].annotation)
        missing = [value for value in values if f"`{value}`" not in rows[name][1]]
        assert not missing, f"{name}: {missing}"
