"""A tool that runs Python in the sandbox (`rollout.sandbox`), and an environment whose model has it."""

import asyncio
import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollout.environment_variables import cores
from rollout.environments.policy import Episode, Policy
from rollout.environments.tool_calls import Tool
from rollout.environments.turns import opening
from rollout.origin import Sampling
from rollout.sandbox.run import Limits, Outcome, run
from rollout.tasks.task_set import Task, TaskError
from rollout.trajectory import Sample

PYTHON_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and return what it prints. It keeps nothing between calls.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program; it must print."}},
            "required": ["code"],
        },
    },
}
"""The tool's description, as in the OpenAI API."""
LIMITS = Limits(wall_s=10.0, cpu_s=5)
MOST_CALLS = 8
"""Turns with calls in an episode of `python`; the budget of tokens ends most earlier."""
_CUT = "\n[... {} characters are left out ...]\n"


async def run_python(
    arguments: Mapping[str, Any], *, limits: Limits = LIMITS, most_characters: int = 4000
) -> str:
    """Return the text that the model reads after a call of PYTHON_TOOL: the output of the program in
    `arguments`, the end of its error, or what is wrong with the call. A longer text is cut in its middle. As
    many programs as there are cores run at the same time. Raises NoSandbox where the machine has none.
    """
    code = arguments.get("code")
    if not isinstance(code, str) or set(arguments) != {"code"}:
        return (
            f"error: python takes the text `code` and nothing else, got {', '.join(arguments) or 'nothing'}"
        )
    program = functools.partial(run, code, limits=limits)
    text = _said(await asyncio.get_running_loop().run_in_executor(_threads(), program), limits)
    if len(text) <= most_characters:
        return text
    half = most_characters // 2
    return text[:half] + _CUT.format(len(text) - 2 * half) + text[len(text) - half :]


def _said(ended: Outcome, limits: Limits) -> str:
    if ended.timed_out:
        return f"{ended.stdout}error: it was ended after {limits.wall_s:g} s"
    if ended.exit_code == 0:
        return ended.stdout or "(it printed nothing)"
    error = "\n".join(ended.stderr.strip().splitlines()[-10:]) or f"exit code {ended.exit_code}"
    return f"{ended.stdout}error: {error}"


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(cores(), "python tool")


async def python(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Answer the task, with PYTHON_TOOL at hand. The metric `calls` counts the programs."""
    if task.get("tools"):
        raise TaskError(f"task {task['id']!r}: the model has the tool `python` alone; leave `tools` out")
    policy = policy.with_tools([PYTHON_TOOL])
    async with asyncio.TaskGroup() as group:
        played = [group.create_task(_play(task, policy.episode(j))) for j in range(sampling.n)]
    return [episode.result() for episode in played]


async def _play(task: Task, episode: Episode) -> Sample:
    beginning = opening(task)
    messages = [{"role": "user", "content": beginning}] if isinstance(beginning, str) else beginning
    turn, calls = await episode.generate(messages), 0
    for _ in range(MOST_CALLS):
        if not turn.calls:
            break
        calls += len(turn.calls)
        results = await asyncio.gather(*(run_python(call.arguments) for call in turn.calls))
        turn = await episode.generate(
            [
                {"role": "tool", "tool_call_id": call.id, "content": result}
                for call, result in zip(turn.calls, results, strict=True)
            ]
        )
    return episode.sample(metrics={"calls": calls})
