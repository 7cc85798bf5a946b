"""What becomes of a group whose samples or rewards are not as they should be."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollout import tally
from rollout.engines.answers import RequestRefused
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.origin import Code, Sampling
from rollout.part_file import PartHeader, decode_part, encode_part
from rollout.rewards.reward import Reward, RewardError
from rollout.slots import Slot
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample, line_for_people
from tests.rollout.collecting import FakeClient, run, slots
from tests.rollout.scripted import ScriptedClient

SOME = Code("some", "0" * 16)
HEADER = PartHeader("train", 1, 0, 1, 0, "p", 0, Sampling(), SOME, SOME)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]


def fails_in_sample(j: int) -> Reward:
    """A reward that raises for sample j of task t1, and for all of task t2."""
    seen: dict[str, int] = {}

    def judge(task: Task, completion: str) -> float:
        seen[task["id"]] = seen.get(task["id"], -1) + 1
        if task["id"] == "t2" or (task["id"] == "t1" and seen["t1"] == j):
            raise KeyError("answer")
        return float(seen[task["id"]])

    return Reward("my:judge", judge)


def test_sample_whose_reward_raises_is_left_out_of_its_group_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    groups, failure = run(FakeClient(), slots(3), reward=fails_in_sample(2))
    by_slot = {group.slot: group for group in groups}
    assert failure is None
    assert [sample.reward for sample in by_slot[1].samples] == [0.0, 1.0, 3.0]
    assert by_slot[1].given_up is None
    assert by_slot[1].failed == ["reward 'my:judge', task 't1': KeyError: 'answer'"]
    assert by_slot[2].samples == [] and "KeyError" in str(by_slot[2].given_up)
    assert by_slot[0].failed == []
    errors = [record for record in caplog.records if record.exc_info]
    assert len(errors) == 1 and "KeyError" in str(errors[0].exc_info)
    assert len(by_slot[2].failed) == 4
    assert "1 of 3 groups was given up, 5 samples were lost" in caplog.text


def test_reward_that_raises_ends_the_collection_where_the_setting_says_so() -> None:
    _, failure = run(FakeClient(), slots(2), {"on_reward_error": "run"}, reward=fails_in_sample(0))
    assert isinstance(failure, RewardError) and "task 't1'" in str(failure)


def test_reward_that_an_environment_has_set_stays() -> None:
    async def half(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        samples[0].reward = 0.25
        return samples

    groups, _ = run(FakeClient(), slots(1), environment=half)
    assert [sample.reward for sample in groups[0].samples] == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (None, "got NoneType"),
        ([], "got an empty list"),
        (["85"], "a list with str: '85'"),
        ([None], "a list with NoneType: None; "),
    ],
)
def test_environment_that_returns_no_samples_becomes_a_tombstone(result: Any, got: str) -> None:
    async def broken(task: Task, policy: Any, sampling: Sampling) -> Any:
        return result

    groups, failure = run(FakeClient(), slots(1), environment=broken)
    assert failure is None and got in str(groups[0].given_up)


@pytest.mark.parametrize(("logprob", "is_said"), [(-6.0, True), (-0.1, False)])
def test_copies_that_chance_does_not_make_are_warned_of(
    logprob: float, is_said: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "_warned", set[str]())

    async def same(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        for sample in samples:
            sample.logprobs = np.where(sample.loss_mask == 1, logprob, 0.0).astype(np.float32)
        return samples

    groups, failure = run(FakeClient(), slots(1), environment=same)
    assert failure is None and len(groups[0].samples) == 4
    assert ("all 4 samples of task 't0' are the same" in caplog.text) == is_said


def spoil(**fields: Any) -> Callable[[Sample], None]:
    def spoil(sample: Sample) -> None:
        for name, value in fields.items():
            setattr(sample, name, value)

    return spoil


def at(name: str, place: int, value: float) -> Callable[[Sample], None]:
    """Set one number of an array; a sample of this engine has one prompt token and one trained token."""

    def spoil(sample: Sample) -> None:
        getattr(sample, name)[place] = value

    return spoil


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (at("logprobs", 1, math.nan), "the logprob of its token 1 is nan"),
        (at("logprobs", 1, -math.inf), "the logprob of its token 1 is -inf"),
        (at("logprobs", 0, math.nan), "the logprob of its token 0 is nan"),
        (at("loss_mask", 0, 1), "its first token is trained"),
        (at("loss_mask", 1, 2), "its loss_mask has values other than 0 and 1"),
        (at("token_ids", 1, -1), "its token_ids are not token ids"),
        (spoil(token_ids=np.array([3.0, 4.5])), "its token_ids are not token ids: float64"),
        (spoil(logprobs=np.zeros(1, np.float32)), "have the shapes"),
        (spoil(logprobs=[None, None]), "the logprob of its token 0 is nan"),
        (spoil(logprobs=["a", "b"]), "logprobs do not consist of numbers"),
        (spoil(finish_reason="content_filter"), "its finish_reason is 'content_filter'"),
        (spoil(finish_reason="abort"), "its finish_reason is 'abort'"),
        (spoil(reward=math.nan), "its reward is nan"),
        (spoil(reward=-1.1e15), "its reward is -1100000000000000.0, expected a finite number up to 1e+15"),
        (spoil(metrics={"calls": math.inf}), "its calls is inf"),
        (spoil(metrics={"calls": 1e308}), "its calls is 1e+308, expected a finite number up to 1e+30"),
        (spoil(metrics={"calls": "many"}), "its metric 'calls' is 'many', expected a number"),
        (spoil(text=None), "its text is NoneType"),
        (spoil(turns=["hello"]), "its turns are not a list of Turn"),
    ],
)
def test_sample_that_cannot_be_trained_is_left_out_and_the_rest_of_its_group_stays(
    spoil: Callable[[Sample], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        for sample in samples[1:] if task["id"] == "t0" else samples:
            spoil(sample)
        return samples

    groups, failure = run(FakeClient(), slots(2), environment=broken)
    assert failure is None
    first, second = sorted(groups, key=lambda group: group.slot)
    assert first.given_up is None and len(first.samples) == 1 and len(first.failed) == 3
    assert second.samples == [] and "no sample is left" in str(second.given_up)
    assert all(reason in text for text in [*first.failed, second.given_up]), first.failed
    assert "7 samples were lost" in caplog.text
    assert len(decode_part(encode_part(groups, HEADER))[1]) == 2


def test_what_is_numbers_all_the_same_can_be_stored() -> None:
    async def loose(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        more: Any = {
            "reward": np.float32(0.5),
            "metrics": {"calls": np.int64(2)},
            "finish_reason": "eos_token",
        }
        return [Sample(token_ids=[3, 4], loss_mask=[False, True], logprobs=[0, 0], text="", **more)]  # type: ignore

    groups, failure = run(FakeClient(), slots(1), environment=loose)
    assert failure is None
    (group,) = decode_part(encode_part(groups, HEADER))[1]
    (sample,) = group.samples
    assert (sample.reward, sample.metrics, sample.finish_reason) == (0.5, {"calls": 2.0}, "stop")
    assert (sample.token_ids.tolist(), sample.loss_mask.tolist()) == ([3, 4], [0, 1])


def test_environment_that_demonstrates_may_leave_logprobs_open_and_they_survive_a_part() -> None:
    async def taught(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        for sample in samples:
            sample.logprobs[1] = math.nan
        samples[0].logprobs[0] = math.nan  # of the prompt
        return samples

    taught.demonstrates = True  # type: ignore[attr-defined]
    groups, failure = run(FakeClient(), slots(1), environment=partial(taught))
    assert failure is None and len(groups[0].samples) == 3 and "token 0 is nan" in groups[0].failed[0]
    (group,) = decode_part(encode_part(groups, HEADER))[1]
    assert np.isnan(group.samples[0].logprobs).tolist() == [False, True]
    line = json.loads(line_for_people(group, rank=0, model_version="p"), parse_constant=pytest.fail)
    assert [sample["tokens"] for sample in line["samples"]] == [1, 1, 1]


def test_conversation_is_kept_from_the_prompt_on() -> None:
    async def twice(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        prompt = task["messages"] if task["id"] != "opened" else [{"role": "user", "content": "2+2?"}]
        plays = [policy.episode(j) for j in range(sampling.n)]
        for episode in plays:
            await episode.generate(prompt)
            if task["id"] != "once":
                await episode.generate([{"role": "user", "content": "sure?"}])
        return [episode.sample(reward=1.0) for episode in plays]

    client = ScriptedClient(*["4."] * 5)
    names = ("twice", "opened", "once")
    work = [Slot(slot, {"id": name, "messages": CHAT}, seed=0) for slot, name in enumerate(names)]
    groups, failure = run(client, work, {"concurrency": 1}, environment=twice, sampling=Sampling(n=1))
    assert failure is None
    groups = decode_part(encode_part(groups, HEADER))[1]
    assert [group.prompt for group in groups] == ["system: be brief\n\nuser: 2+2"] * 3
    shown = [[(turn.role, turn.text) for turn in group.samples[0].turns] for group in groups]
    asked_again = [("assistant", "4"), ("user", "sure?"), ("assistant", "4")]
    assert shown == [asked_again, [("user", "2+2?"), *asked_again], []]


def test_single_turn_that_a_stop_string_ended_is_its_text() -> None:
    class Stopping(FakeClient):
        async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
            made = await super().generate(prompt, sampling)
            return [replace(completion, stop_string="!") for completion in made]

    groups, _ = run(Stopping(), slots(1), sampling=Sampling(n=1, stop=("!",)))
    assert groups[0].samples[0].turns == []
    groups, _ = run(Stopping(), slots(1), sampling=Sampling(n=1))
    assert [turn.text for turn in groups[0].samples[0].turns] == ["p0!"]


def test_engine_whose_logprobs_are_too_few_costs_the_group() -> None:
    class Short(FakeClient):
        async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
            return [Completion([3], [4, 5], [-0.5], prompt, "stop") for _ in range(sampling.n)]

    groups, failure = run(Short(), slots(1))
    assert failure is None and "2 token ids, but 1 logprobs" in str(groups[0].given_up)


def test_request_that_the_engine_refuses_costs_its_group_only() -> None:
    client = FakeClient(fail=lambda prompt: RequestRefused("too long") if prompt == "p1" else None)
    groups, failure = run(client, slots(3))
    assert failure is None
    assert {group.slot: group.given_up for group in groups} == {
        0: None,
        1: "RequestRefused: too long",
        2: None,
    }
