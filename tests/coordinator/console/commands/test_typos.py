"""Words that are no setting."""

from pathlib import Path

import pytest

from coordinator.console.commands.typos import settings_of
from coordinator.settings.tree import SettingsError


def test_settings_are_read_and_a_run_directory_is_answered_with_its_option(tmp_path: Path) -> None:
    assert settings_of(["iterations=3", "rollout.stop=[]"]) == {"iterations": 3, "rollout.stop": []}
    (tmp_path / "run.json").touch()
    with pytest.raises(SettingsError, match=f"; a run directory is given as --log-path {tmp_path}$"):
        settings_of(["iterations=3", str(tmp_path)])
