"""The policy as its own teacher: only the first prompt of a sample gets the hint, and all else stays."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.environments.calculator import HINT, calculator
from rollout.environments.environment import single_turn
from rollout.environments.policy import Policy
from rollout.environments.self_teacher import SelfTeacher
from rollout.environments.turns import sample_of
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.tasks.task_set import TaskError
from rollout.trajectory import Group, Sample
from tests.models import CONTEXT
from tests.rollout.collecting import collect
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import ScriptedClient, user
from tests.rollout.templated import LLAMA3, MISTRAL3, QWEN3, TemplatedClient

TASK = {"id": "t", "prompt": "2+3=", "answer": 5}
CHAT = {"id": "t", "messages": [{"role": "system", "content": "Add."}, *user("2+3?")], "answer": "5"}
TEACHER = SelfTeacher("answer", "{hint}! {prompt}")
LETTER = -0.01


class Scoring(ScriptedClient):
    """Finds a token the less likely the later letter it is, and keeps what it was asked about."""

    def __init__(self, *lines: str | Exception, error: Exception | None = None) -> None:
        super().__init__(*lines)
        self.scored: list[str] = []
        self.error = error

    async def tokenize_whole(self, text: Any, **template: Any) -> list[int]:
        return await self.tokenize(text)

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        if self.error is not None:
            raise self.error
        self.scored.append("".join(map(chr, token_ids)))
        return [LETTER * token for token in token_ids[1:]]


def taught(client: Scoring, task: dict[str, Any], environment: Any = single_turn) -> Sample:
    """The sample that an environment makes, with what its teacher says of it."""

    async def main() -> Sample:
        sampling = Sampling(n=1, max_tokens=100)
        policy = Policy(client, sampling, 1)
        (sample,) = await environment(task, policy, sampling)
        sample.teacher_logprobs = await TEACHER.of_task(task, policy).logprobs(sample)
        return sample

    return asyncio.run(main())


async def two_turns(task: dict[str, Any], policy: Policy, _sampling: Sampling) -> list[Sample]:
    """Asks twice, with words of its own before the task's, and opens a text as a conversation."""
    prompt = user(task["prompt"]) if "prompt" in task else task["messages"]
    episode = policy.episode()
    await episode.generate([*user("Be quick."), *prompt])
    await episode.generate("again")
    return [episode.sample()]


@pytest.mark.parametrize(
    ("task", "environment", "lines", "scored"),
    [
        (TASK, single_turn, ["5."], "5! 2+3=5."),
        (CHAT, single_turn, ["5."], "sAdd..u5! 2+3?.a5."),
        (TASK, calculator, ["<<1", "5."], "5! 2+3=<<1=1\n5."),
        (CHAT, calculator, ["5."], f"s{HINT}\n\nAdd..u5! 2+3?.a5."),
        (TASK, two_turns, ["six.", "5."], "uBe quick..u5! 2+3=.asix.again5."),
        (CHAT, two_turns, ["six.", "5."], "uBe quick..sAdd..u5! 2+3?.asix.again5."),
    ],
)
def test_first_prompt_gets_the_hint_and_all_else_stays(
    task: dict[str, Any], environment: Any, lines: list[str], scored: str
) -> None:
    client = Scoring(*lines)
    sample = taught(client, task, environment)
    assert client.scored == [scored]
    wanted = LETTER * sample.token_ids * sample.loss_mask
    assert sample.teacher_logprobs == pytest.approx(wanted) and sample.loss_mask.sum() > 1


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL3])
def test_tools_that_a_template_shows_stay_where_they_are(tmp_path: Path, template: str) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
    client, scored = TemplatedClient(tmp_path, template, "5"), list[list[int]]()

    async def keep(token_ids: Sequence[int]) -> list[float]:
        scored.append(list(token_ids))
        return [0.0] * (len(token_ids) - 1)

    client.prompt_logprobs = keep

    async def main() -> tuple[list[int], list[int]]:
        policy = Policy(client, Sampling(max_tokens=100), 1).with_tools([tool])
        (completion,) = await policy.generate(CHAT["messages"])
        await TEACHER.of_task(CHAT, Policy(client, Sampling(), 1)).logprobs(sample_of(completion))
        wanted = await policy.tokenize(TEACHER.hinted(CHAT)["messages"])
        return [*wanted, *completion.token_ids], completion.prompt_ids

    wanted, prompt = asyncio.run(main())
    assert scored == [wanted] and "add" in client.tokenizer.decode(prompt)


def test_environment_with_a_prompt_of_its_own_is_an_error() -> None:
    async def other(_task: Any, policy: Policy, _sampling: Sampling) -> list[Sample]:
        return [sample_of(*await policy.generate("Something else"))]

    with pytest.raises(TaskError, match="begins with another prompt than the task's, so"):
        taught(Scoring("5."), TASK, other)


def test_feedback_of_an_environment_is_the_hint_of_its_own_sample() -> None:
    teacher = SelfTeacher("feedback", "{prompt} {hint}")
    assert teacher.hinted(TASK, "{prompt} fails")["prompt"] == "2+3= {prompt} fails"
    assert TEACHER.hinted(TASK, "fails")["prompt"] == "5! 2+3="
    for task in (TASK, {**TASK, "feedback": ""}):
        with pytest.raises(TaskError, match=r"task 't': has no `feedback` for rollout.teacher=self:feedback"):
            teacher.hinted(task)


def made(client: EngineClient, task: dict[str, Any], **settings: Any) -> Group:
    """The group that a collection makes of a task."""
    groups: list[Group] = []

    async def main() -> None:
        async with client:
            await collect(
                [Slot(0, task, 7)],
                client=client,
                environment=single_turn,
                reward=resolve_reward("length"),
                sampling=Sampling(n=2, max_tokens=6, temperature=1.0),
                settings=RolloutSettings(**{"teacher": "self:answer", **settings}),
                on_group=groups.append,
                stop=threading.Event(),
            )

    asyncio.run(main())
    return groups[0]


@pytest.mark.parametrize("task", [TASK, {**CHAT, "messages": user("2+3?")}])
def test_samples_are_stored_with_what_their_own_engine_says(
    server: RunningServer, task: dict[str, Any]
) -> None:
    group = made(
        EngineClient(server.url), {**task, "target_length": 3}, teacher_template="so {hint}. {prompt}"
    )
    assert len(group.samples) == 2 and group.failed == []
    hinted = SelfTeacher("answer", "so {hint}. {prompt}").hinted(task)

    async def prompt_ids() -> list[int]:
        async with EngineClient(server.url) as client:
            if "prompt" in hinted:
                return await client.tokenize_whole(hinted["prompt"])
            return await client.tokenize(hinted["messages"])

    prompt = asyncio.run(prompt_ids())
    for sample in group.samples:
        generated = sample.token_ids[sample.loss_mask == 1].tolist()
        logprobs = EngineAdmin(server.url).prompt_logprobs([*prompt, *generated])[len(prompt) - 1 :]
        assert sample.teacher_logprobs is not None
        assert sample.teacher_logprobs[sample.loss_mask == 1] == pytest.approx(logprobs, abs=1e-6)
        assert not sample.teacher_logprobs[sample.loss_mask == 0].any()
        assert np.abs(sample.teacher_logprobs - sample.logprobs).max() > 1e-3


def test_sample_that_is_too_long_behind_the_hint_is_lost(server: RunningServer) -> None:
    group = made(EngineClient(server.url), {**TASK, "answer": "9" * CONTEXT, "target_length": 3})
    assert group.samples == [] and group.given_up is not None
    assert "teacher, task 't': POST /v1/completions: 400" in group.failed[0]
    assert f"the context of {CONTEXT}" in group.failed[0]


def test_sample_without_a_hint_is_lost_and_an_engine_that_fails_ends_the_collection() -> None:
    without = {"id": "t", "prompt": "2+3=", "target_length": 3}
    group = made(Scoring("5.", "6."), without)
    assert group.failed[0] == "teacher, task 't': has no `answer` for rollout.teacher=self:answer"
    refused = made(Scoring("5.", "6.", error=RequestRefused("400: no")), {**without, "answer": "5"})
    assert refused.failed[0] == "teacher, task 't': 400: no"
    with pytest.raises(EngineError, match="gone"):
        made(Scoring("5.", "6.", error=EngineError("gone")), {**without, "answer": "5"})
