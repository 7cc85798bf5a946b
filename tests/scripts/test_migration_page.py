"""docs/migration.md: settings are there, names of others lead to the same ones."""

import itertools
import re
from typing import Any

import pytest

from coordinator.settings.loading import build, flatten, known_keys, parse_override
from coordinator.settings.near_names import known_as
from tests.scripts.pages import REPOSITORY

PAGE = REPOSITORY / "docs" / "migration.md"
TABLE = (
    PAGE.read_text().partition("## GRPO, setting by setting")[2].partition("| here |")[2].partition("\n\n")[0]
)
ROWS = [[re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:-1]] for row in TABLE.splitlines()[2:]]
"""Our settings and the names of TRL, verl, prime-rl and OpenRLHF, of each row."""
COMMANDS = re.findall(r"^    (run (?:.*\\\n)+.*)$", PAGE.read_text(), re.MULTILINE)
"""TRL's defaults, and verl's."""
THEIRS = {
    "rollout.temperature": 1.0,
    "rollout.max_tokens": 512,
    "trainer.advantage": "standardised",
    "trainer.aggregation": "token",
    "trainer.ratio": "token",
    "trainer.clip_low": 0.2,
    "trainer.clip_high": 0.2,
    "trainer.overlong": "keep",
    "trainer.keep_flat_groups": True,
    "trainer.engine_correction": "off",
    "trainer.learning_rate": 1e-6,
    "trainer.warmup_steps": 0,
    "trainer.betas": [0.9, 0.999],
    "trainer.eps": 1e-8,
    "trainer.clip_norm": 1.0,
    "trainer.passes": 1,
}
"""What both have."""
TRL = {
    "rollout.tasks_per_iteration": 8,
    "rollout.samples_per_task": 8,
    "trainer.global_batch_size": 64,
    "trainer.clip": "ppo",
    "trainer.kl": "off",
    "trainer.schedule": "linear",
    "trainer.weight_decay": 0.0,
}
VERL = {
    "rollout.tasks_per_iteration": 1024,
    "rollout.samples_per_task": 5,
    "trainer.global_batch_size": 256 * 5,
    "trainer.clip": "dual",
    "trainer.dual_clip": 3.0,
    "trainer.kl": "k3",
    "trainer.kl_coefficient": 0.001,
    "trainer.schedule": "constant",
    "trainer.weight_decay": 0.01,
}
KNOWN = {*known_keys(), *dict(flatten(build({"model": "any/model"}).model_dump(mode="json")))}


def test_settings_of_the_table_are_there() -> None:
    assert len(ROWS) > 15 and all(len(row) == 5 and row[0] for row in ROWS)
    assert {name for row in ROWS for name in row[0]} - KNOWN == set()


def test_name_of_another_trainer_is_answered_with_the_setting_of_the_page() -> None:
    """Where `run` knows a name."""
    meanings: dict[str, set[str]] = {}
    for ours, *others in ROWS:
        for name in itertools.chain(*others):
            meanings.setdefault(name, set()).update(ours)
    answers = {name: known_as(name, known_keys()) for name in meanings}
    assert {
        (name, answer) for name, answer in answers.items() if answer and answer not in meanings[name]
    } == set()


@pytest.mark.parametrize(("command", "theirs"), [*zip(COMMANDS, [TRL, VERL], strict=True)])
def test_command_with_the_defaults_of_another_trainer_has_them(command: str, theirs: dict[str, Any]) -> None:
    typed = dict(parse_override(word) for word in command.split() if re.match(r"\w+\.\w+=", word))
    values = dict(flatten(build({"model": "any/model", "iterations": 1000, **typed}).model_dump(mode="json")))
    assert {name: values[name] for name in {**THEIRS, **theirs}} == {**THEIRS, **theirs}
