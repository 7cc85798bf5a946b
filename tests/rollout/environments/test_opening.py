"""What a task says to the model first, in every built-in environment: its tools, and never its answer."""

import asyncio
from functools import partial
from typing import Any

import pytest

from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.calculator import calculator
from rollout.environments.environment import single_turn
from rollout.environments.policy import Policy
from rollout.environments.python_tool import python
from rollout.environments.segments import Segment, advance
from rollout.origin import Sampling
from rollout.slots import Slot
from rollout.tasks.task_set import TaskError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
ASK = {"role": "user", "content": "3+4?"}
DEMONSTRATION = {"id": "a", "messages": [ASK, {"role": "assistant", "content": "GOLD"}]}


class Shown(EngineClient):
    """Keeps what the chat template is asked to show."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.conversations: list[Any] = []
        self.tools: list[Any] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        return [Completion([1, 2], [3], [-0.5], "7", "stop")] * sampling.n

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        self.conversations.append(text)
        self.tools.append(template.get("tools"))
        return [len(str(text)), len(str(template))]


ENVIRONMENTS = {
    "single_turn": single_turn,
    "thinking": single_turn,
    "calculator": calculator,
    "python": python,
    "segments": partial(advance, begun=None, segment=Segment(1, 1, 0)),
}
SAMPLING = Sampling(n=2, tool_parser="hermes")
THINKING = Sampling(n=2, tool_parser="hermes", reasoning_end="</think>", thinking_tokens=4)


def shown_by(name: str, task: dict[str, Any]) -> Shown:
    """What the environment shows of a task."""
    client, sampling = Shown(), THINKING if name == "thinking" else SAMPLING
    asyncio.run(ENVIRONMENTS[name](task, Policy(client, sampling, 0), sampling))
    return client


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_answer_of_a_demonstration_is_in_no_prompt(name: str) -> None:
    client = shown_by(name, DEMONSTRATION)
    assert client.conversations and "GOLD" not in str(client.conversations)
    assert "3+4?" in str(client.conversations)


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name != "python"])
def test_tools_of_a_task_are_shown(name: str) -> None:
    assert [TOOL] in shown_by(name, {**DEMONSTRATION, "tools": [TOOL]}).tools
    with pytest.raises((TaskError, ExceptionGroup), match="without the task's `tools`"):
        shown_by(name, {"id": "a", "prompt": "3+4?", "tools": [TOOL]})


def test_environment_with_a_tool_of_its_own_refuses_others() -> None:
    with pytest.raises(TaskError, match="the model has the tool `python` alone"):
        shown_by("python", {**DEMONSTRATION, "tools": [TOOL]})


def test_samples_are_read_with_the_question_alone() -> None:
    assert Slot(0, DEMONSTRATION, 0).prompt == "3+4?"
