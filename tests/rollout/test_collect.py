"""The collector: how much runs at once, what becomes of failures, how it stops, what it leaves behind."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.collect import AllGivenUp, GroupCollector, Stopped
from rollout.engines.answers import EngineError, EngineFacts
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.group_maker import Recipe
from rollout.origin import Sampling
from rollout.rewards.reward import Reward
from rollout.settings import RolloutSettings
from rollout.slots import ListedSlots, Slot
from rollout.tasks.task_set import Task, group_seed, load_tasks, task_order
from rollout.trajectory import Group, Sample
from tests.rollout.collecting import EXACT, FakeClient, collect, run, slots
from tests.rollout.rollout_helpers import RunningServer, serving


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


def test_group_that_is_given_up_is_handed_over_once_however_often_the_collector_runs() -> None:
    """As one that is made alone, since it may end its process."""
    groups: list[Group] = []

    async def picky(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        if task["id"] == "t0":
            raise ValueError("not that one")
        return await single_turn(task, policy, sampling)

    async def main() -> None:
        recipes = {"": Recipe(picky, EXACT, Sampling(n=4))}
        collector = GroupCollector(client=FakeClient(), recipes=recipes, settings=RolloutSettings())
        for slot in slots(2):
            await collector.run(ListedSlots([slot]), groups.append, threading.Event())
        await collector.end()

    asyncio.run(main())
    assert [group.slot for group in groups] == [0, 1]


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
