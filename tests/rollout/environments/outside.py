"""Play environments of other processes with an engine that a test scripts."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.engines.completion import Completion
from rollout.environments.environment import Environment
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample
from tests.rollout.scripted import ScriptedClient

PAGE = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
MODULES = {
    block.partition("\n")[0].removeprefix("# "): block
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
}
"""The Python of the page, by the name of its file."""


class Saying(ScriptedClient):
    """Answers with `say(prompt, seed)`, whatever the order of the requests."""

    def __init__(self, say: Callable[[str, int], str]) -> None:
        super().__init__()
        self.say = say
        self.prompts: list[str] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        text = "".join(map(chr, prompt))
        self.prompts.append(text)
        self.lines.insert(0, self.say(text, sampling.seed or 0))
        return await super().generate(prompt, sampling)


def played(
    environment: Environment, task: Task, say: Callable[[str, int], str], *, n: int = 2, max_tokens: int = 50
) -> list[Sample]:
    """The samples of a task, which the environment makes within four minutes."""

    async def main() -> list[Sample]:
        sampling = Sampling(n=n, max_tokens=max_tokens)
        async with asyncio.timeout(240):
            return await environment(task, Policy(Saying(say), sampling, 100), sampling)

    return asyncio.run(main())
