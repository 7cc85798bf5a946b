"""Environments: how a task becomes samples. One generation by default, or any number of turns of the user's
own.
"""

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import TypeIs

from rollout.engine import Completion, EngineClient, Sampling
from rollout.plugins import PluginError, load_function
from rollout.tasks import Task
from rollout.trajectory import Sample

Messages = Sequence[dict[str, str]]


class EnvironmentSettingError(ValueError):
    """The setting `environment` names nothing usable."""


class Policy:
    """The model as an environment sees it, bound to one group; every call draws with a seed of its own.

    The first call uses the group's seed itself, so that completion j of it has seed + j; later calls hash it
    with their number. An environment that runs its samples at the same time gives each `for_sample(j)`, so
    that the seeds do not depend on which of them is faster.
    """

    def __init__(self, client: EngineClient, sampling: Sampling, seed: int) -> None:
        self._client = client
        self._sampling = sampling
        self._seed = seed
        self._calls = 0

    def for_sample(self, j: int) -> "Policy":
        """A policy for sample j alone: its first call with n=1 draws what completion j of one call for all
        draws.
        """
        return Policy(self._client, self._sampling, self._seed + j)

    async def generate(
        self, prompt: str | Sequence[int] | Messages, *, n: int = 1, max_tokens: int | None = None
    ) -> list[Completion]:
        """`n` completions of a text, of token ids, or of chat messages; `max_tokens` if fewer than the
        setting.
        """
        seed = self._next_seed()
        sampling = replace(self._sampling, n=n, seed=seed, max_tokens=max_tokens or self._sampling.max_tokens)
        tokens_or_text = await self._client.tokenize(prompt) if _is_chat(prompt) else prompt
        return await self._client.generate(tokens_or_text, sampling)

    async def tokenize(self, text: str | Messages) -> list[int]:
        """Token ids of an observation, to append to what was generated; see EngineClient.tokenize."""
        return await self._client.tokenize(text)

    def _next_seed(self) -> int:
        call, self._calls = self._calls, self._calls + 1
        if call == 0:
            return self._seed
        return (
            int.from_bytes(hashlib.sha256(f"call/{self._seed}/{call}".encode()).digest()[:8], "little") >> 2
        )


def _is_chat(prompt: str | Sequence[int] | Messages) -> TypeIs[Messages]:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], dict)


Environment = Callable[[Task, Policy, Sampling], Awaitable[list[Sample]]]
"""Makes the group of a task: `sampling.n` samples."""


async def single_turn(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """The task's prompt, or its messages through the chat template, answered `sampling.n` times."""
    prompt = task["prompt"] if "prompt" in task else task["messages"]
    return [sample_of(completion) for completion in await policy.generate(prompt, n=sampling.n)]


def sample_of(*turns: Completion) -> Sample:
    """The sample of one completion, or of several turns: each turn's prompt is the tokens of the turn before,
    prompt and completion, and then an observation. Observations get loss mask 0. ValueError if a turn's
    prompt does not continue the turn before, i.e. text was tokenised again.
    """
    last = turns[-1]
    token_ids = last.prompt_ids + last.token_ids
    loss_mask = np.zeros(len(token_ids), dtype=np.uint8)
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    for number, turn in enumerate(turns):
        begin, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        if token_ids[:end] != turn.prompt_ids + turn.token_ids:
            raise ValueError(
                f"turn {number} is not continued by the prompt of the last: append token ids, not text"
            )
        loss_mask[begin:end] = 1
        logprobs[begin:end] = turn.logprobs
    return Sample(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=loss_mask,
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        text=last.text,
    )


def resolve_environment(name: str) -> Environment:
    """`single_turn`, or `module:function` with an async function. Raises EnvironmentSettingError."""
    if name == "single_turn":
        return single_turn
    if ":" not in name:
        raise EnvironmentSettingError(f"environment {name!r}: there is single_turn, or give module:function")
    try:
        return load_function(name)
    except PluginError as error:
        raise EnvironmentSettingError(f"environment: {error}") from error
