"""What `run eval` says at its end."""

import pytest

from coordinator.console.commands.evaluate import KEPT, exit_code
from coordinator.protocol.exits import Exit
from rollout.settings import EngineSettings, RolloutSettings


def test_set_without_a_score_is_named_and_is_no_success(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code({"a": {"reward": 0.0}}) is Exit.DONE and not capsys.readouterr().err
    assert exit_code({"a": {"reward": 0.5}, "b": {"samples": 0}}) is Exit.FAILED
    assert capsys.readouterr().err.startswith("run: no score of b: all samples were lost")


def test_of_each_setting_of_rollout_and_engine_it_is_known_whether_an_evaluation_keeps_it() -> None:
    """A new one fails here: add it to KEPT if samples of an evaluation depend on it."""
    of_training = {
        *(
            "tasks_per_iteration",
            "samples_per_task",
            "segment_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
        ),
        *(
            "claims",
            "completion_threshold",
            "grace_period_s",
            "over_sample",
            "dynamic_sampling",
            "dynamic_limit",
        ),
        *("task_sampling", "ratio", "part_interval_s", "teacher", "teachers", "teacher_template"),
    }
    of_the_sets = {"max_tokens", "reward", "rewards", "environment"}
    of_the_engine = {"url", "deterministic", "sleep", "probe_tolerance"}
    lacking = {f"rollout.{name}" for name in set(RolloutSettings.model_fields) - of_training - of_the_sets}
    lacking |= {f"engine.{name}" for name in set(EngineSettings.model_fields) - of_the_engine}
    assert lacking == {key for key in KEPT if key.startswith(("rollout.", "engine."))}
