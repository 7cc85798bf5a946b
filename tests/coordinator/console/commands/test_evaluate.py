"""What `run eval` says at its end."""

import pytest

from coordinator.console.commands.evaluate import exit_code
from coordinator.protocol.exits import Exit


def test_set_without_a_score_is_named_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code({"a": {"reward": 0.0}}) is Exit.DONE and not capsys.readouterr().err
    assert exit_code({"a": {"reward": 0.5}, "b": {"samples": 0}}) is Exit.FAILED
    assert capsys.readouterr().err.startswith("run: no score of b: all samples were lost")
