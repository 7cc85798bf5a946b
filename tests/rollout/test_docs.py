"""docs/tasks.md, and an environment of docs/environments.md: every block works as it stands."""

import asyncio
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollout import Sample, Sampling
from rollout.engines.client import EngineClient
from rollout.environments.environment import resolve_environment
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.tasks.task_set import load_tasks
from rollout.trajectory import Group
from tests.rollout.collecting import collect
from tests.rollout.rewards.scoring import scored
from tests.rollout.rollout_helpers import RunningServer
from tests.user_code import forget

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tasks.md").read_text() + (DOCS / "environments.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
MODULES = {block.partition("\n")[0].removeprefix("# "): block for kind, block in BLOCKS if kind == "python"}
TASKS = [block for kind, block in BLOCKS if kind == "json"]
AGENT = """
import asyncio

from openai import AsyncOpenAI

from rollout import Policy, Sample, Sampling, Task, serve


async def agents(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    async with asyncio.TaskGroup() as group:
        runs = [group.create_task(agent(task, policy, j)) for j in range(sampling.n)]
    return [sample for run in runs for sample in run.result()]


async def agent(task: Task, policy: Policy, j: int) -> list[Sample]:
    async with (
        serve(policy, j) as session,
        AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client,
    ):
        messages = [*task["messages"]]
        for question in ("Are you sure?", "Then answer with the number alone."):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content}
            messages += [said, {"role": "user", "content": question}]
        await client.chat.completions.create(model="policy", messages=messages)
        return session.samples()
"""
"""An agent that asks three times."""
ASKED = {"id": "1", "messages": [{"role": "user", "content": "27+58="}], "answer": "85"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that holds what the page shows, as the current one."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text(TASKS[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    forget(monkeypatch)
    yield tmp_path
    for name in ("my_agent.py", *MODULES):
        sys.modules.pop(name.removesuffix(".py"), None)


def test_every_block_of_python_is_a_file() -> None:
    assert len(TASKS) == 1 and all(name.endswith(".py") for name in MODULES)
    assert {"my_rewards.py", "my_environment.py"} <= set(MODULES)


def test_tasks_load(here: Path) -> None:
    tasks = load_tasks("tasks.jsonl", seed=0, split="train").tasks
    assert [task["id"] for task in tasks] == ["a1", "a2", "3"]
    assert tasks[2]["source"] == "primes"


def test_rewards_score(here: Path) -> None:
    assert scored("my_rewards:score", "it is 85", answer=85).reward == 1.0
    assert scored("my_rewards:score", "?" * 101, answer=85).reward == -0.1
    judged = scored("my_rewards:judge", "86", answer=85)
    assert (judged.reward, judged.metrics) == (0.0, {"characters": 2.0})


def group_of(name: str, url: str) -> Group:
    """The group that an environment of the page makes on a real engine."""
    groups: list[Group] = []

    async def main() -> None:
        async with EngineClient(url) as client:
            await collect(
                [Slot(0, ASKED, seed=7)],
                client=client,
                environment=resolve_environment(name),
                reward=resolve_reward("my_rewards:score"),
                sampling=Sampling(n=3, max_tokens=60, stop=("1", "2", "3")),
                settings=RolloutSettings(),
                on_group=groups.append,
                stop=threading.Event(),
            )

    asyncio.run(main())
    assert groups[0].given_up is None
    return groups[0]


def turns(sample: Sample) -> int:
    """How often something was generated."""
    mask: Any = sample.loss_mask
    return int((mask[1:] > mask[:-1]).sum())


def test_page_has_every_field_of_a_sample() -> None:
    table = PAGE.partition("### What a sample has\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(field.name for field in fields(Sample))


def test_environment_plays_several_turns(here: Path, server: RunningServer) -> None:
    samples = group_of("my_environment:tries", server.url).samples
    assert len(samples) == 3
    assert all(sample.reward == 0.0 and sample.metrics["tries"] == turns(sample) for sample in samples)
    assert any(turns(sample) == 3 for sample in samples)


def test_agent_is_one_conversation_a_sample(here: Path, server: RunningServer) -> None:
    samples = group_of("my_agent:agents", server.url).samples
    assert len(samples) == 3
    assert all(sample.reward is not None for sample in samples)
    assert any(turns(sample) == 3 for sample in samples)
