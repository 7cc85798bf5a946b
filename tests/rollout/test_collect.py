"""The collector: how much runs at once, what becomes of failures, how it stops, what it leaves behind."""

import asyncio
import gc
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout import stuck_user_code
from rollout.collect import AllGivenUp, Collector, Stopped
from rollout.engines.answers import EngineError, EngineFacts, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.group_maker import Recipe
from rollout.origin import Code, Sampling
from rollout.part_file import PartHeader, decode_part, encode_part
from rollout.rewards.reward import Reward, RewardError
from rollout.settings import RolloutSettings
from rollout.slots import Listed, Slot
from rollout.storage.retry import retry
from rollout.tasks.task_set import Task, group_seed, load_tasks, task_order
from rollout.trajectory import Group, Sample, line_for_people
from tests.rollout.collecting import EXACT, FakeClient, collect, run, slots
from tests.rollout.rollout_helpers import RunningServer, serving
from tests.rollout.scripted import ScriptedClient

SOME = Code("some", "0" * 16)
HEADER = PartHeader("train", 1, 0, 1, 0, "p", 0, Sampling(), SOME, SOME)


def test_every_slot_becomes_one_scored_group() -> None:
    groups, failure = run(FakeClient(), slots(50))
    assert failure is None
    assert sorted(group.slot for group in groups) == list(range(50))
    for group in groups:
        assert (group.task_id, group.prompt, group.given_up) == (f"t{group.slot}", f"p{group.slot}", None)
        assert [sample.reward for sample in group.samples] == [1.0] * 4


def test_no_slots_is_no_work() -> None:
    assert run(FakeClient(), []) == ([], None)


@pytest.mark.parametrize(
    ("n", "concurrency", "most"), [(4, 16, 16), (4, 18, 16), (1, 7, 7), (4, 3, 4), (8, 1, 8)]
)
def test_samples_in_flight_are_bounded_and_a_large_group_runs_alone(
    n: int, concurrency: int, most: int
) -> None:
    client = FakeClient()
    run(client, slots(30), {"concurrency": concurrency}, sampling=Sampling(n=n))
    assert client.most_in_flight == most


def test_as_many_samples_as_the_engine_can_are_in_flight_unless_a_number_is_given() -> None:
    for concurrency, most in ((None, 24), (16, 16), (40, 40)):
        client = FakeClient()
        client.facts = EngineFacts(samples=27)
        run(client, slots(30), {"concurrency": concurrency})
        assert client.most_in_flight == most


class Judge:
    """An async reward that scores nothing before `opens`. It counts the completions that wait for it, and
    calls `when_full` a moment after there are 32.
    """

    def __init__(self) -> None:
        self.opens = asyncio.Event()
        self.when_full: Callable[[], None] = self.opens.set
        self.waiting = self.most_waiting = 0

    async def __call__(self, task: Task, completion: str) -> float:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        if self.waiting == 32:
            asyncio.get_running_loop().call_later(0.1, self.when_full)
        await self.opens.wait()
        self.waiting -= 1
        return 1.0


def test_groups_that_wait_for_their_rewards_leave_the_engine_to_others_within_a_bound() -> None:
    client, judge = FakeClient(), Judge()
    groups, failure = run(client, slots(30), reward=Reward("my:judge", judge))
    assert failure is None and {group.slot for group in groups} == set(range(30))
    assert all(sample.reward == 1.0 for group in groups for sample in group.samples)
    assert client.most_in_flight == 16, "four groups of four"
    assert judge.most_waiting == 32, "as many again as the engine has places for"


def test_reward_has_group_timeout_s_beside_the_time_of_generating() -> None:
    async def judge(task: Task, completion: str) -> float:
        await asyncio.sleep(60 if task["id"] == "t1" else 1.1)
        return 1.0

    client = FakeClient(delay_s=1.1)
    groups, failure = run(client, slots(3), {"group_timeout_s": 2.0}, reward=Reward("my:judge", judge))
    assert failure is None
    assert {group.slot: group.given_up for group in groups} == {
        0: None,
        1: "TimeoutError: took longer than group_timeout_s = 2",
        2: None,
    }


def test_stop_ends_groups_that_wait_for_their_rewards_too() -> None:
    judge, stop = Judge(), threading.Event()
    judge.when_full = stop.set
    started_s = time.monotonic()
    _, failure = run(FakeClient(), slots(30), reward=Reward("my:judge", judge), stop=stop)
    assert isinstance(failure, Stopped) and time.monotonic() - started_s < 60
    assert judge.most_waiting == 32


def test_group_is_handed_over_as_soon_as_it_is_finished() -> None:
    order: list[str] = []

    class Client(FakeClient):
        async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
            order.append(f"asked {prompt}")
            return await super().generate(prompt, sampling)

    run(Client(), slots(2), {"concurrency": 4}, on_group=lambda group: order.append(f"got p{group.slot}"))
    assert order == ["asked p0", "got p0", "asked p1", "got p1"]


def test_group_that_takes_too_long_becomes_a_tombstone() -> None:
    async def slow(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        await asyncio.sleep(60 if task["id"] == "t1" else 0)
        return await single_turn(task, policy, sampling)

    groups, failure = run(FakeClient(), slots(3), {"group_timeout_s": 1.5}, environment=slow)
    assert failure is None
    reasons = {group.slot: group.given_up for group in groups}
    assert reasons == {0: None, 1: "TimeoutError: took longer than group_timeout_s = 1.5", 2: None}
    assert next(group for group in groups if group.slot == 1).samples == []


def test_group_whose_reward_raises_becomes_a_tombstone_and_the_first_traceback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def judge(task: Task, completion: str) -> float:
        if task["id"] in ("t1", "t2"):
            raise KeyError("answer")
        return 1.0

    groups, failure = run(FakeClient(), slots(4), reward=Reward("my:judge", judge))
    assert failure is None
    given_up = {group.slot: group.given_up for group in groups if group.given_up}
    assert set(given_up) == {1, 2}
    assert "reward 'my:judge', task 't1': KeyError: 'answer'" in given_up[1]
    shown = [bool(record.exc_info) for record in caplog.records if "loses a sample" in record.getMessage()]
    assert shown == [True], "the other seven are counted"
    assert any(r.levelno == logging.WARNING and "2 of 4 groups" in r.getMessage() for r in caplog.records)


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
    assert "1 of 3 groups were given up, 5 samples were lost" in caplog.text


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


@pytest.mark.parametrize("result", [None, [], [1]])
def test_environment_that_returns_no_samples_becomes_a_tombstone(result: Any) -> None:
    async def broken(task: Task, policy: Any, sampling: Sampling) -> Any:
        return result

    groups, failure = run(FakeClient(), slots(1), environment=broken)
    assert failure is None and "non-empty list of Sample" in str(groups[0].given_up)


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
        (at("token_ids", 1, -1), "its token_ids are no token ids"),
        (spoil(token_ids=np.array([3.0, 4.5])), "its token_ids are no token ids: float64"),
        (spoil(logprobs=np.zeros(1, np.float32)), "have the shapes"),
        (spoil(logprobs=[None, None]), "the logprob of its token 0 is nan"),
        (spoil(logprobs=["a", "b"]), "it does not consist of numbers"),
        (spoil(finish_reason="content_filter"), "its finish_reason is 'content_filter'"),
        (spoil(finish_reason="abort"), "its finish_reason is 'abort'"),
        (spoil(reward=math.nan), "its reward is nan"),
        (spoil(reward=-1.1e15), "its reward is -1100000000000000.0, expected a finite number up to 1e+15"),
        (spoil(metrics={"calls": math.inf}), "its calls is inf"),
        (spoil(metrics={"calls": 1e308}), "its calls is 1e+308, expected a finite number up to 1e+30"),
        (spoil(metrics={"calls": "many"}), "it does not consist of numbers"),
        (spoil(text=None), "its text is NoneType"),
        (spoil(turns=["hello"]), "its turns are no list of Turn"),
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


CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"}]


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


@pytest.mark.parametrize("in_task", [False, True])
@pytest.mark.parametrize(
    "failure", [asyncio.CancelledError, SystemExit, KeyboardInterrupt, pytest.fail.Exception]
)
def test_environment_that_cancels_itself_or_exits_costs_its_group_only(
    failure: type[BaseException], in_task: bool
) -> None:
    async def fails() -> None:
        raise failure

    async def leaks(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t1" and in_task and not issubclass(failure, SystemExit | KeyboardInterrupt):
            async with asyncio.TaskGroup() as group:  # those two end the loop, and main() takes it up again
                group.create_task(fails())
                await asyncio.sleep(0.1)
                raise failure
        elif task["id"] == "t1":
            await fails()
        return await single_turn(task, policy, sampling)

    groups, error = run(FakeClient(), slots(3), environment=leaks)
    assert error is None
    assert {group.slot for group in groups if group.given_up} == {1}


def test_group_that_is_given_up_is_handed_over_once_however_often_the_collector_runs() -> None:
    """As one that is made alone, since it may end its process."""
    groups: list[Group] = []

    async def picky(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t0":
            raise ValueError("not that one")
        return await single_turn(task, policy, sampling)

    async def main() -> None:
        recipes = {"": Recipe(picky, EXACT, Sampling(n=4))}
        collector = Collector(client=FakeClient(), recipes=recipes, settings=RolloutSettings())
        for slot in slots(2):
            await collector.run(Listed([slot]), groups.append, threading.Event())
        await collector.end()

    asyncio.run(main())
    assert [group.slot for group in groups] == [0, 1]


def test_environment_that_swallows_its_cancellation_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stuck_user_code, "CANCEL_S", 0.05)

    async def stubborn(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        for _ in range(2):
            try:
                await asyncio.sleep(0.5 if task["id"] == "t0" else 0)
            except asyncio.CancelledError:
                continue
        return await single_turn(task, policy, sampling)

    run(FakeClient(), slots(2), {"over_sample": 2.0}, environment=stubborn, needed=1)
    assert "1 groups go on although they are cancelled" in caplog.text


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # of a coroutine that is cut off
@pytest.mark.parametrize("catches", [asyncio.CancelledError, BaseException])
def test_environment_that_never_lets_go_costs_its_group_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, catches: type[BaseException]
) -> None:
    monkeypatch.setattr(stuck_user_code, "CANCEL_S", 0.05)
    still_there: list[bool] = []

    async def holds_on() -> None:
        while not still_there:
            try:
                await asyncio.sleep(60)
            except catches:
                continue

    async def stubborn(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t1":
            async with asyncio.TaskGroup() as group:
                group.create_task(holds_on())
                await holds_on()
        return await single_turn(task, policy, sampling)

    groups, failure = run(FakeClient(), slots(3), {"group_timeout_s": 1.5}, environment=stubborn)
    still_there.append(False)
    gc.collect()
    assert failure is None
    assert {group.slot: group.given_up for group in groups} == {
        0: None,
        1: "TimeoutError: took longer than group_timeout_s = 1.5",
        2: None,
    }
    assert "1 groups go on although they are cancelled" in caplog.text


def test_loop_that_is_late_because_the_process_was_suspended_is_not_interrupted() -> None:
    with stuck_user_code.interrupting(60.0, "group_timeout_s") as say_free:
        for _ in range(2):
            signal.raise_signal(signal.SIGALRM)  # as when the process goes on after a long stop
            say_free()
        signal.raise_signal(signal.SIGALRM)
        with pytest.raises(TimeoutError, match="longer than group_timeout_s = 60"):
            signal.raise_signal(signal.SIGALRM)


@pytest.mark.parametrize("where", ["reward", "environment"])
def test_code_that_blocks_the_event_loop_is_interrupted(where: str) -> None:
    def block(task: Task) -> None:
        if task["id"] == "t1":
            time.sleep(60)

    async def judge(task: Task, completion: str) -> float:
        block(task)
        return 1.0

    async def environment(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if where == "environment":
            block(task)
        return await single_turn(task, policy, sampling)

    reward = Reward("my:judge", judge) if where == "reward" else EXACT
    handler, started = signal.getsignal(signal.SIGALRM), time.monotonic()
    settings = {"group_timeout_s": 2.0, "concurrency": 1}  # one group at a time
    groups, failure = run(
        FakeClient(),
        slots(3),
        settings,
        reward=reward,
        environment=environment,
        **{"sampling": Sampling(n=1)},
    )
    assert failure is None and time.monotonic() - started < 50
    assert {group.slot for group in groups if group.given_up} == {1}
    assert signal.getsignal(signal.SIGALRM) is handler
    assert "blocked the event loop for longer than group_timeout_s = 2" in " ".join(
        str(group.given_up) for group in groups
    )


def test_call_on_the_directory_is_never_interrupted() -> None:
    def judge(task: Task, completion: str) -> float:
        retry("wait for", Path("/"), lambda: time.sleep(0.7))
        return 1.0

    groups, failure = run(FakeClient(), slots(1), {"group_timeout_s": 0.3}, reward=Reward("my:judge", judge))
    assert failure is None and "blocked the event loop" not in str(groups[0].given_up)


def test_engine_failure_ends_the_collection_and_keeps_what_was_finished() -> None:
    client = FakeClient(fail=lambda prompt: EngineError("gone") if prompt == "p5" else None)
    groups, failure = run(client, slots(100), {"concurrency": 4})
    assert isinstance(failure, EngineError) and str(failure) == "gone"
    assert [group.slot for group in groups] == [0, 1, 2, 3, 4]
    assert client.in_flight == 0


def test_engine_failure_inside_a_task_group_of_an_environment_is_one_too() -> None:
    async def parallel(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        async with asyncio.TaskGroup() as group:
            for j in range(sampling.n):
                group.create_task(policy.for_sample(j).generate(task["prompt"]))
        return []

    _, failure = run(FakeClient(fail=lambda _: EngineError("gone")), slots(3), environment=parallel)
    assert isinstance(failure, EngineError)


def test_stop_cancels_what_is_in_flight() -> None:
    client, stop = FakeClient(delay_s=60), threading.Event()
    timer = threading.Timer(0.2, stop.set)
    timer.start()
    started = time.monotonic()
    groups, failure = run(client, slots(100), stop=stop)
    assert isinstance(failure, Stopped) and groups == []
    assert time.monotonic() - started < 30
    assert client.cancelled == 4 and client.in_flight == 0
    timer.join()


def test_stop_that_is_set_already_starts_nothing() -> None:
    stop = threading.Event()
    stop.set()
    client = FakeClient()
    assert isinstance(run(client, slots(3), stop=stop)[1], Stopped)
    assert client.most_in_flight == 0


def test_error_of_the_receiver_ends_the_collection() -> None:
    def full(group: Group) -> None:
        raise OSError(28, "No space left on device")

    client = FakeClient()
    _, failure = run(client, slots(20), on_group=full)
    assert isinstance(failure, OSError) and client.in_flight == 0


def collect_from(url: str, work: list[Slot], concurrency: int, **changes: Any) -> dict[int, Group]:
    groups: list[Group] = []

    async def main() -> None:
        async with EngineClient(url, retry_s=0.5) as client:
            await collect(
                work,
                client=client,
                environment=single_turn,
                reward=EXACT,
                settings=RolloutSettings(concurrency=concurrency, group_timeout_s=60),
                on_group=groups.append,
                stop=threading.Event(),
                **changes,
            )

    asyncio.run(main())
    return {group.slot: group for group in groups}


def test_trajectories_are_the_same_whoever_asks_and_however_much_at_once(server: RunningServer) -> None:
    tasks = load_tasks("builtin:arithmetic", seed=0, split="train").tasks
    work = [
        Slot(k, tasks[t], group_seed(0, "train", 1, k))
        for k, t in enumerate(task_order(len(tasks), 0, 0, 40))
    ]
    sampling = Sampling(n=4, max_tokens=6)
    whole = collect_from(server.url, work, sampling=sampling, concurrency=256)
    halves = collect_from(server.url, work[::2], sampling=sampling, concurrency=8) | collect_from(
        server.url, work[:0:-2], sampling=sampling, concurrency=4
    )
    assert whole.keys() == halves.keys() == set(range(40))
    for k, group in whole.items():
        one, two = ([s.token_ids.tolist() for s in g.samples] for g in (group, halves[k]))
        assert one == two and group.given_up is None


def test_engine_killed_while_it_generates_ends_the_collection(model_dir: Path) -> None:
    with serving(model_dir) as running:
        timer = threading.Timer(0.3, running.process.kill)
        timer.start()
        with pytest.raises(EngineError):
            collect_from(running.url, slots(500), sampling=Sampling(n=8, max_tokens=200), concurrency=64)
        timer.join()


@pytest.mark.parametrize("may_all_fail", [False, True])
def test_groups_that_are_all_given_up_are_handed_over_where_that_may_be(may_all_fail: bool) -> None:
    def judge(task: Task, completion: str) -> float:
        raise KeyError("answer")

    groups, failure = run(FakeClient(), slots(5), reward=Reward("my:judge", judge), may_all_fail=may_all_fail)
    assert isinstance(failure, AllGivenUp) is not may_all_fail and len(groups) == 5 * may_all_fail
