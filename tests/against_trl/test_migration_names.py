"""The names of TRL on docs/migration.md are those that TRL has."""

from trl import GRPOConfig, ModelConfig  # type: ignore[import-not-found]

from tests.scripts.test_migration_page import ROWS


def test_names_are_fields_of_its_configuration() -> None:
    theirs = {name for row in ROWS for name in row[1]} - {"peft_config"}
    known = GRPOConfig.__dataclass_fields__.keys() | ModelConfig.__dataclass_fields__.keys()
    assert theirs and theirs - known == set()
