"""Samples that several iterations generate come out as if one had, as long as the policy is the same."""

import asyncio
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.environments.segments import Segment
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import UNFINISHED, Group, Sample, Span
from tests.models import CONTEXT
from tests.rollout.collecting import collect
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import ScriptedClient

TASK = {"id": "t", "prompt": "12+34=", "target_length": 10}
SEED = 2**62 - 3  # among the largest that a group has


def collected(client: EngineClient, slot: Slot, segment: Segment | None, **sampling: Any) -> Group:
    """The group that one iteration makes of a slot."""
    groups: list[Group] = []

    async def main() -> None:
        async with client:
            await collect(
                [slot],
                client=client,
                environment=single_turn,
                reward=resolve_reward("length"),
                sampling=Sampling(**{"n": 1, "max_tokens": 20, "temperature": 3.0, **sampling}),
                settings=RolloutSettings(),
                segment=segment,
                on_group=groups.append,
                stop=threading.Event(),
            )

    asyncio.run(main())
    return groups[0]


def in_segments(url: str, tokens: int, task: dict[str, Any] = TASK, **sampling: Any) -> list[Group]:
    """What each iteration makes of a group, until it is finished."""
    made: list[Group] = []
    while not made or made[-1].is_unfinished:
        number = len(made) + 1
        slot = Slot(number, task, SEED, made[-1] if made else None)
        made.append(collected(EngineClient(url), slot, Segment(tokens, number, number - 1), **sampling))
    return made


def facts(samples: list[Sample]) -> list[tuple[Any, ...]]:
    return [
        (s.token_ids.tolist(), s.loss_mask.tolist(), s.text, s.finish_reason, s.reward, s.turns)
        for s in samples
    ]


@pytest.mark.parametrize("tokens", [1, 3, 7, 19, 20])
def test_sample_that_was_cut_has_the_tokens_of_an_uncut_one(server: RunningServer, tokens: int) -> None:
    uncut = collected(EngineClient(server.url), Slot(0, TASK, SEED), None, n=8)
    assert {sample.finish_reason for sample in uncut.samples} == {"stop", "length"}
    made = in_segments(server.url, tokens, n=8)
    assert len(made) == -(-20 // tokens)
    assert facts(made[-1].samples) == facts(uncut.samples)
    for sample, whole in zip(made[-1].samples, uncut.samples, strict=True):
        np.testing.assert_allclose(sample.logprobs, whole.logprobs, atol=1e-5)
        assert [span.iteration for span in sample.spans] == list(range(1, len(sample.spans) + 1))
        assert all(span.policy_iteration == span.iteration - 1 for span in sample.spans)
        assert all(one.end == other.begin for one, other in pairwise(sample.spans))
        assert [s.end - s.begin for s in sample.spans[:-1]] == [tokens] * (len(sample.spans) - 1)
        begin, end = sample.spans[0].begin, sample.spans[-1].end
        assert sample.loss_mask.tolist() == [0] * begin + [1] * (end - begin)


@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_stop_string_ends_a_sample_wherever_it_was_cut(server: RunningServer, tokens: int) -> None:
    whole = collected(EngineClient(server.url), Slot(0, TASK, SEED), None, n=8)
    longer = [sample.text for sample in whole.samples if len(sample.text) > 7]
    stop = tuple(part for text in longer for part in (text[4:7], text[5:7]))  # one character ends both
    uncut = collected(EngineClient(server.url), Slot(0, TASK, SEED), None, n=8, stop=stop)
    assert len(stop) > 2 and all(len(sample.text) <= 7 for sample in uncut.samples)
    made = in_segments(server.url, tokens, n=8, stop=stop)
    assert facts(made[-1].samples) == facts(uncut.samples)


def test_group_has_no_reward_before_its_last_sample_has_ended(server: RunningServer) -> None:
    made = in_segments(server.url, 4, n=8)
    for group in made[:-1]:
        assert {sample.reward for sample in group.samples} == {None} and group.given_up is None
        assert {sample.finish_reason for sample in group.samples} >= {UNFINISHED}
    assert None not in {sample.reward for sample in made[-1].samples}


@pytest.mark.parametrize("tokens", [4, 5, 6])
def test_sample_that_fills_the_context_ends_there_wherever_it_was_cut(
    server: RunningServer, tokens: int
) -> None:
    """Ten tokens fit: the second segment fills the context exactly, or does not fit."""
    task = {**TASK, "prompt": "1" * (CONTEXT - 10)}
    uncut = collected(EngineClient(server.url), Slot(0, task, SEED), None, n=8)
    assert max(len(sample.token_ids) for sample in uncut.samples) == CONTEXT
    made = in_segments(server.url, tokens, task, n=8)
    assert facts(made[-1].samples) == facts(uncut.samples)


def test_rest_of_a_sample_is_made_at_once_where_segments_are_off_again(server: RunningServer) -> None:
    uncut = collected(EngineClient(server.url), Slot(0, TASK, SEED), None, n=8)
    begun = in_segments(server.url, 3, n=8)[0]
    whole = collected(EngineClient(server.url), Slot(9, TASK, SEED, begun), Segment(None, 2, 1), n=8)
    assert facts(whole.samples) == facts(uncut.samples) and whole.slot == 9


class OneIsAborted(EngineClient):
    """Aborts the first of the samples in the first segment, which is unfit then."""

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        made = await super().generate(prompt, sampling)
        if sampling.n > 1:
            made[0] = Completion(made[0].prompt_ids, [5], [-1.0], "", "abort")
        return made


def test_sample_that_is_lost_is_lost_for_good_and_changes_no_other_one(server: RunningServer) -> None:
    uncut = collected(EngineClient(server.url), Slot(0, TASK, SEED), None, n=8)
    begun = collected(OneIsAborted(server.url), Slot(0, TASK, SEED), Segment(6, 1, 0), n=8)
    assert len(begun.samples) == 7 and len(begun.failed) == 1
    ended = collected(EngineClient(server.url), Slot(0, TASK, SEED, begun), Segment(None, 2, 1), n=8)
    assert facts(ended.samples) == facts(uncut.samples[1:])
    assert ended.failed == begun.failed and "abort" in ended.failed[0]


def test_prefix_that_the_engine_reads_differently_is_not_gone_on_with() -> None:
    class Retokenises(ScriptedClient):
        async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
            (made,) = await super().generate(prompt, sampling)
            return [Completion([7], made.token_ids, made.logprobs, made.text, made.finish_reason)]

    async def nothing(*_: Any) -> None: ...

    sample = Sample(
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([0, -1, -1], np.float32),
        finish_reason=UNFINISHED,
        text="ab",
        spans=[Span(1, 3, 1, 0)],
    )
    client: Any = Retokenises("more.")
    client.__class__.__aenter__ = nothing
    slot = Slot(0, TASK, SEED, Group(0, "t", "12+34=", [sample]))
    group = collected(client, slot, Segment(None, 2, 1))
    assert group.given_up is not None and "other tokens" in group.given_up
