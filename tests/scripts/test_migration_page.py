"""docs/migration.md: settings are there, names of others lead to the same ones, rewards of others score."""

import itertools
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.settings.loading import build, flatten, known_keys
from coordinator.settings.suggestions import known_as
from tests.scripts.pages import REPOSITORY, blocks

PAGE = REPOSITORY / "docs" / "migration.md"
TABLE = (
    PAGE.read_text().partition("## GRPO, setting by setting")[2].partition("| here |")[2].partition("\n\n")[0]
)
ROWS = [[re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:-1]] for row in TABLE.splitlines()[2:]]
"""Our settings and the names of TRL, verl, prime-rl and OpenRLHF, of each row."""
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


def test_rewards_of_verl_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks(PAGE) if block.kind == "python")
    verl = ModuleType("my_verl_reward")
    vars(verl)["compute_score"] = lambda data_source, solution_str, ground_truth, extra_info=None: float(
        ground_truth in solution_str
    )
    monkeypatch.setitem(sys.modules, verl.__name__, verl)
    (tmp_path / "my_old_rewards.py").write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, object] = {}
    exec(block.text, names)
    task = {"id": "1", "prompt": "27+58=", "answer": "85", "source": "sums"}
    assert names["from_verl"](task, "it is 85") == 1.0  # type: ignore[operator]
