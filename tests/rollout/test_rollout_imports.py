"""What importing the package costs, and what it must not reach for."""

import subprocess
import sys

import pytest

LIGHT = [
    "collect",
    "engines.admin",
    "engines.answers",
    "engines.bodies",
    "engines.client",
    "engines.completion",
    "engines.embedded.protocol",
    "engines.kinds.choice",
    "engines.model_dir",
    "environments.environment",
    "evaluation",
    "quota",
    "rewards.builtin",
    "rewards.math",
    "processes.pool",
    "processes.killable_rewards",
    "settings",
    "tasks.reasoning_gym",
    "tasks.sampling",
    "tasks.task_set",
    "trajectory",
]


def modules_after(statement: str) -> set[str]:
    script = f"import sys\n{statement}\nprint(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(answer.stdout.split())


@pytest.mark.parametrize(
    "forbidden", [{"torch", "transformers", "vllm", "aiohttp", "trainer", "coordinator"}]
)
def test_all_that_the_coordinator_imports_is_light(forbidden: set[str]) -> None:
    imported = modules_after(f"import {', '.join(f'rollout.{name}' for name in LIGHT)}")
    assert "rollout" in imported
    assert not imported & forbidden


def test_the_server_reaches_for_neither_trainer_nor_coordinator() -> None:
    imported = modules_after("import rollout.engines.embedded.server")
    assert "torch" in imported
    assert not imported & {"trainer", "coordinator"}
