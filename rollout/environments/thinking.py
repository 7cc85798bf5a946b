"""Single turns with a budget for the reasoning: reasoning that is longer is ended, and the model answers."""

import asyncio

from rollout.environments.policy import Episode, Policy
from rollout.environments.turns import Prompt
from rollout.origin import Sampling
from rollout.trajectory import Sample


async def think_and_answer(prompt: Prompt, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Answer a prompt `sampling.n` times. Reasoning that goes on after `sampling.thinking_tokens` tokens is
    ended by `sampling.reasoning_end`, which is not trained. The rest of `sampling.max_tokens` is left for the
    answer. The metric `reasoning_cut` says whether that was so.
    """
    async with asyncio.TaskGroup() as group:
        plays = [group.create_task(_play(prompt, policy.episode(j), sampling)) for j in range(sampling.n)]
    return [play.result() for play in plays]


async def _play(prompt: Prompt, episode: Episode, sampling: Sampling) -> Sample:
    end, budget = sampling.reasoning_end or "", sampling.thinking_tokens
    turn = await episode.generate(prompt, max_tokens=budget)
    text, is_cut = turn.text, False
    if turn.finish_reason == "length" and len(turn.token_ids) == budget and episode.tokens_left:
        appended = "" if end in text else f"\n{end}\n\n"
        turn = await episode.generate(appended)
        text += appended + turn.text
        is_cut = bool(appended)
    sample = episode.sample(metrics={"reasoning_cut": float(is_cut)})
    sample.text = text
    return sample
