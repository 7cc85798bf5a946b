"""docs/settings.md is what the settings models say now."""

import re
import tomllib

from coordinator.settings.loading import OPTIONS, build, flatten, option_name
from coordinator.settings.node_groups import GroupSettings
from rollout.eval_settings import EvalSetSettings
from scripts import settings_page
from trainer.source_settings import SourceSettings

DEFAULTS = dict(flatten(build({"model": "any/model"}).model_dump(mode="json")))


def test_page_is_fresh() -> None:
    written = settings_page.PAGE.read_text(encoding="utf-8")
    assert written == settings_page.page(), (
        f"the settings have changed: {settings_page.COMMAND} writes the page"
    )


def test_page_names_every_setting_and_every_option() -> None:
    rows, section = list[list[str]](), ""
    for line in settings_page.page().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        rows += [line.split(" | ")] if line.startswith("| `") else []
        if line.startswith("Also, as the"):
            rows += [[f"{section}.{name}", ""] for name in re.findall(r"`(\w+)`", line)]
    of_a_group = {f"cluster.groups.NAME.{name}" for name in GroupSettings.model_fields}
    of_a_set = {f"eval.sets.NAME.{name}" for name in EvalSetSettings.model_fields}
    of_a_source = {f"trainer.sources.NAME.{name}" for name in SourceSettings.model_fields}
    assert {row[0].strip("|` ") for row in rows} == set(DEFAULTS) | of_a_group | of_a_set | of_a_source
    assert {row[-1].strip("|` ") for row in rows} - {""} == set(map(option_name, OPTIONS))


def test_every_setting_says_what_it_means() -> None:
    assert settings_page.undescribed() == []


def test_types_and_defaults_read_as_one_types_them() -> None:
    rows = {
        line.split(" | ")[0].strip("|` "): line.split(" | ")[1:3]
        for line in settings_page.page().splitlines()
    }
    assert rows["trainer.learning_rate"] == ["number > 0", "`1e-6` (`0.0003`)"]
    assert rows["rollout.top_p"] == ["number > 0 and <= 1", "`1`"]
    assert rows["checkpoints.keep_every"] == ["integer >= 1 or `null`", "`null`"]
    assert rows["engine.sleep"] == ["one of `1`, `2`, `restart` or `null`", "`null`"]
    assert rows["trainer.betas"] == ["2 of: number", "`0.9,0.95`"]


def test_file_of_the_page_holds_settings() -> None:
    (block,) = [text.partition("```")[0] for text in settings_page.HEAD.split("```toml\n")[1:]]
    assert build(dict(flatten(tomllib.loads(block)))).trainer.lora.rank == 16
