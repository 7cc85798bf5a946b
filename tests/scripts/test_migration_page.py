"""docs/migration.md: settings are there, names of others lead to the same ones."""

import itertools
import re

from coordinator.settings.loading import build, flatten, known_keys
from coordinator.settings.suggestions import known_as
from tests.scripts.pages import REPOSITORY

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
