"""docs/environments.md: its agent with a tool works as it stands, and trains what was sampled."""

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from rollout import Sampling, tool_server
from rollout.environments.environment import resolve_environment
from rollout.environments.python_tool import LIMITS
from rollout.environments.tool_calls import PARSERS
from rollout.rewards.resolve import resolve_reward
from rollout.sandbox.run import why_no_sandbox
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import Group
from tests.rollout.collecting import collect
from tests.rollout.templated import QWEN3, TemplatedClient
from tests.user_code import forget

PAGE = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MODULES = {block.partition("\n")[0].removeprefix("# "): block for _, block in BLOCKS}
ADDING = """
import asyncio

from rollout import PYTHON_TOOL, Episode, Policy, Sample, Sampling, Task, run_python


async def adding(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    policy = policy.with_tools([PYTHON_TOOL])
    async with asyncio.TaskGroup() as group:
        games = [group.create_task(play(task, policy.episode(j))) for j in range(sampling.n)]
    return [game.result() for game in games]


async def play(task: Task, episode: Episode) -> Sample:
    turn, used = await episode.generate(task["messages"]), 0
    while turn.calls and used < 4:
        used += 1
        results = [await run_python(call.arguments) for call in turn.calls]
        new = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(turn.calls, results, strict=True)
        ]
        turn = await episode.generate(new)
    return episode.sample(metrics={"calls": used})
"""
"""An environment with the tool of the page's agent."""
SERVED = """
import asyncio

from rollout import Episode, Policy, Sample, Sampling, Task, ToolServer, tool_server


async def served(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    async with tool_server("http://127.0.0.1:9000/mcp") as server, asyncio.TaskGroup() as group:
        policy = policy.with_tools(server.tools)
        games = [group.create_task(play(task, policy.episode(j), server)) for j in range(sampling.n)]
    return [game.result() for game in games]


async def play(task: Task, episode: Episode, server: ToolServer) -> Sample:
    turn, rounds = await episode.generate(task["messages"]), 0
    while turn.calls and rounds < 4:
        rounds += 1
        turn = await episode.generate(await server.answer(turn))
    return episode.sample(metrics={"rounds": rounds})
"""
"""An environment with the tools of an MCP server."""
OTHERS = {"my_tool_environment.py": ADDING, "my_server_environment.py": SERVED}
TABLE = PAGE[PAGE.index("| `rollout.tool_parser` |") :].partition("\n\n")[0]
ASKED = {"id": "1", "messages": [{"role": "user", "content": "27+58="}], "answer": "85"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 27, "b": 58}}\n</tool_call><|im_end|>'


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the page can be imported."""
    for name, text in {**MODULES, **OTHERS}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    forget(monkeypatch)
    yield
    for name in (*OTHERS, *MODULES):
        sys.modules.pop(name.removesuffix(".py"), None)


def group_of(environment: str, client: TemplatedClient) -> Group:
    groups: list[Group] = []
    asyncio.run(
        collect(
            [Slot(0, ASKED, seed=7)],
            client=client,
            environment=resolve_environment(environment),
            reward=resolve_reward("numeric"),
            sampling=Sampling(n=2, max_tokens=400),
            settings=RolloutSettings(),
            on_group=groups.append,
            stop=threading.Event(),
        )
    )
    assert groups[0].given_up is None
    return groups[0]


@pytest.mark.skipif(why_no_sandbox(LIMITS) is not None, reason=f"no sandbox: {why_no_sandbox(LIMITS)}")
@pytest.mark.parametrize("environment", ["my_tool_agent:agents", "my_tool_environment:adding"])
def test_samples_that_call_a_tool_are_rewarded_and_trained(
    environment: str, here: None, tmp_path: Path
) -> None:
    program = CALL.replace('"add"', '"python"').replace(
        '{"a": 27, "b": 58}', '{"code": "print(27 + 58, end=str())"}'
    )
    client = TemplatedClient(tmp_path, QWEN3, program, program, "It is 85.<|im_end|>", "It is 86.<|im_end|>")
    group = group_of(environment, client)
    assert sorted(sample.reward or 0.0 for sample in group.samples) == [0.0, 1.0]
    for sample in group.samples:
        said: Any = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
        assert str(client.tokenizer.decode(said)) == f"{program}{sample.text}<|im_end|>"
        assert "<tool_response>\n85\n</tool_response>" in str(client.tokenizer.decode(sample.token_ids))


def test_tool_of_the_page_is_called(here: None, tmp_path: Path) -> None:
    bad = CALL.replace('"a": 27', '"c": 27')
    client = TemplatedClient(tmp_path, QWEN3, CALL, bad, "It is 85.<|im_end|>", "It is 86.<|im_end|>")
    group = group_of("my_adder:adders", client)
    assert sorted(sample.reward or 0.0 for sample in group.samples) == [0.0, 1.0]
    texts = "".join(str(client.tokenizer.decode(sample.token_ids)) for sample in group.samples)
    assert "<tool_response>\n85.0\n" in texts and "<tool_response>\ngive the numbers a and b\n" in texts


def test_tools_of_a_server_are_called(here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "server.py").write_text(
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('sums')\n"
        "@server.tool()\n"
        "def add(a: int, b: int) -> int: return a + b\n"
        "server.run('stdio')\n"
    )
    command = [sys.executable, str(tmp_path / "server.py")]
    monkeypatch.setattr("my_server_environment.tool_server", lambda _url: tool_server(command))
    client = TemplatedClient(tmp_path, QWEN3, CALL, CALL, "It is 85.<|im_end|>", "It is 86.<|im_end|>")
    group = group_of("my_server_environment:served", client)
    assert sorted(sample.reward or 0.0 for sample in group.samples) == [0.0, 1.0]
    assert [sample.metrics for sample in group.samples] == [{"rounds": 1, "unread_calls": 0}] * 2
    for sample in group.samples:
        assert "<tool_response>\n85\n</tool_response>" in str(client.tokenizer.decode(sample.token_ids))


def test_parsers_of_the_page_are_all_parsers() -> None:
    assert re.findall(r"^\| `(\w+)` \|", TABLE, re.MULTILINE) == list(PARSERS)
    field = RolloutSettings.model_fields["tool_parser"]
    assert get_args(field.annotation) == ("auto", *PARSERS)
