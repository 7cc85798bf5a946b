"""Single turns in segments: an iteration adds at most so many tokens to a sample, and the next one goes on.

So a long sample does not hold up its whole iteration (rollout.segment_tokens).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollout.engines.answers import RequestRefused
from rollout.engines.completion import Completion, whole_characters
from rollout.environments.policy import Policy
from rollout.environments.turns import opening, sample_of
from rollout.origin import Sampling
from rollout.tally import warn_once
from rollout.tasks.task_set import Task
from rollout.trajectory import UNFINISHED, Group, Sample, Span


@dataclass(frozen=True)
class Segment:
    """What an iteration adds to a sample."""

    tokens: int | None
    """The most tokens that it adds; None: all that are left."""
    iteration: int
    policy_iteration: int
    """The iteration whose training made the policy, as in Span."""


async def advance(
    task: Task, policy: Policy, sampling: Sampling, begun: Group | None, segment: Segment
) -> list[Sample]:
    """Begin the samples of a task, or go on with those of `begun` that are unfinished. What has neither ended
    by itself nor reached `sampling.max_tokens` or the engine's context is unfinished afterwards.

    The embedded engine draws the same tokens as without interruption, as long as the policy is the same.
    """
    if begun is not None:
        return list(
            await asyncio.gather(*(_go_on(sample, policy, sampling, segment) for sample in begun.samples))
        )
    limit = min(segment.tokens or sampling.max_tokens, sampling.max_tokens)
    completions = await policy.for_task(task).generate(opening(task), n=sampling.n, max_tokens=limit)
    return [
        replace(
            sample_of(completion),
            finish_reason=_finish_reason(completion, limit, sampling.max_tokens),
            spans=_spans(completion, segment),
            index=index,
        )
        for index, completion in enumerate(completions)
    ]


async def _go_on(sample: Sample, policy: Policy, sampling: Sampling, segment: Segment) -> Sample:
    if sample.finish_reason != UNFINISHED:
        return replace(sample)
    drawn = int(sample.loss_mask.sum())
    tokens_left = sampling.max_tokens - drawn
    limit = min(segment.tokens or tokens_left, tokens_left)
    try:
        (completion,) = await policy.resumed(sample.index, drawn).generate(
            sample.token_ids.tolist(), max_tokens=limit
        )
    except RequestRefused as error:  # the tokens so far fill the context: all of them are of this model
        warn_once("segment", f"a sample ends after {drawn} tokens: {error}")
        return replace(sample, finish_reason="length")
    if completion.prompt_ids != sample.token_ids.tolist():
        raise ValueError("the engine has gone on with other tokens than it was given")
    text = whole_characters(sample.text) + completion.text
    if (end := await _stop_across(sample, completion, policy, sampling.stop)) is not None:
        count, stop = end
        completion = replace(
            completion,
            token_ids=completion.token_ids[:count],
            logprobs=completion.logprobs[:count],
            routes=None
            if completion.routes is None
            else completion.routes[: len(completion.prompt_ids) + count],
            finish_reason="stop",
        )
        text = (text + completion.stop_string).partition(stop)[0]
    added = sample_of(completion)
    if added.routes is not None and sample.routes is not None:  # those of the policy that has drawn it
        added.routes[: len(sample.routes) - 1] = sample.routes[:-1]
    return replace(
        added,
        loss_mask=np.concatenate([sample.loss_mask, added.loss_mask[len(sample.loss_mask) :]]),
        logprobs=np.concatenate([sample.logprobs, added.logprobs[len(sample.logprobs) :]]),
        finish_reason=_finish_reason(completion, limit, tokens_left),
        text=text,
        turns=[],
        spans=[*sample.spans, *_spans(completion, segment)],
        index=sample.index,
    )


async def _stop_across(
    sample: Sample, completion: Completion, policy: Policy, stops: Sequence[str]
) -> tuple[int, str] | None:
    """Return with how many tokens the completion ends a stop string that has begun in the sample, and that
    string; None if it ends none. The engine searches what it adds alone.
    """
    room = max(map(len, stops), default=0) - 1
    before = whole_characters(sample.text)
    added = completion.text + completion.stop_string  # which may end one that is longer, or comes first
    seam = before[-room:] + added[:room] if room > 0 else ""
    if not any(stop in seam for stop in stops):
        return None
    drawn = sample.token_ids[sample.loss_mask > 0].tolist()
    for count in range(1, len(completion.token_ids) + 1):
        text = await policy.detokenize([*drawn, *completion.token_ids[:count]])
        if (stop := next((stop for stop in stops if stop in text), None)) is not None:
            return count, stop
    return None


def _finish_reason(completion: Completion, limit: int, tokens_left: int) -> str:
    """Return UNFINISHED for a completion that has ended only because no more than `limit` were asked for, of
    the `tokens_left` ones that the sample may still have.
    """
    is_cut = completion.finish_reason == "length" and len(completion.token_ids) == limit < tokens_left
    return UNFINISHED if is_cut else completion.finish_reason


def _spans(completion: Completion, segment: Segment) -> list[Span]:
    begin = len(completion.prompt_ids)
    end = begin + len(completion.token_ids)
    return [Span(begin, end, segment.iteration, segment.policy_iteration)] if end > begin else []
