"""The collector that gives up what is late, over-samples and replaces groups."""

import asyncio
import threading
import time
from typing import Any

from rollout.environments.environment import single_turn
from rollout.origin import Sampling
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.tasks.task_set import Task
from rollout.trajectory import Group, Sample
from tests.rollout.collecting import EXACT, FakeClient, collect, slots


def collected(
    work: list[Slot], settings: dict[str, Any], **changes: Any
) -> tuple[dict[int, Group], int, list[str]]:
    """The groups by slot, how many are short, and the tasks that were begun, in order."""
    groups: list[Group] = []
    begun: list[str] = []

    async def timed(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        begun.append(task["id"])
        await asyncio.sleep(task.get("takes_s", 0))
        samples = await single_turn(task, policy, sampling)
        samples[0].reward = task.get("first_reward", 0.5)  # the others get 1
        return samples

    async def main() -> int:
        return await collect(
            work,
            client=FakeClient(),
            environment=timed,
            reward=EXACT,
            sampling=Sampling(n=2),
            settings=RolloutSettings(**settings),
            on_group=groups.append,
            stop=threading.Event(),
            **changes,
        )

    short = asyncio.run(main())
    assert len({group.slot for group in groups}) == len(groups)
    return {group.slot: group for group in groups}, short, begun


def with_fields(work: list[Slot], numbers: set[int], **fields: Any) -> list[Slot]:
    """The slots, with further fields in the tasks of some."""
    for slot in work:
        slot.task.update(fields if slot.number in numbers else {})
    return work


def test_after_the_threshold_the_rest_have_the_grace_period_and_are_given_up_then() -> None:
    work = with_fields(slots(10), {3, 7}, takes_s=60)
    work = with_fields(work, {5}, takes_s=0.1)
    settings = {"concurrency": 20, "completion_threshold": 0.7, "grace_period_s": 1.0}
    started_s = time.monotonic()
    groups, short, _ = collected(work, settings)
    assert time.monotonic() - started_s < 30
    assert {slot for slot, group in groups.items() if group.given_up} == {3, 7}
    assert groups[3].samples == [] and "not finished 1 s after 8 of 10" in str(groups[3].given_up)
    assert short == 0 and set(groups) == set(range(10))


def test_slots_that_were_not_begun_when_the_grace_period_ends_are_short_not_given_up() -> None:
    work = with_fields(slots(4), {2}, takes_s=60)
    settings = {"concurrency": 2, "completion_threshold": 0.5, "grace_period_s": 0.1}
    groups, short, begun = collected(work, settings)
    assert begun == ["t0", "t1", "t2"]
    assert {slot: bool(group.given_up) for slot, group in groups.items()} == {0: False, 1: False, 2: True}
    assert short == 1


def test_over_sampling_keeps_the_first_groups_and_drops_the_rest_without_a_trace() -> None:
    quota = Quota(6, 9)
    work = with_fields(slots(9), {0, 4}, takes_s=60)
    groups, short, begun = collected(
        work, {"concurrency": 40, "over_sample": 1.5}, needed=6, counts=quota.counts
    )
    assert len(begun) == 9
    assert len(groups) == 6 and not {0, 4} & set(groups) and short == 0


def test_group_without_variance_is_replaced_and_no_more_are_begun_than_are_needed() -> None:
    quota = Quota(4, 12, replace_flat=True)
    work = with_fields(slots(12), {1, 3, 4}, first_reward=1.0)  # as the others of its group
    groups, short, begun = collected(work, {"concurrency": 8}, needed=4, counts=quota.counts)
    assert begun == [f"t{number}" for number in range(7)]
    assert set(groups) == set(range(7)) and short == 0
    assert sum(map(quota.counts, groups.values())) == 4


def test_spare_slots_that_are_used_up_leave_groups_short() -> None:
    quota = Quota(4, 6, replace_flat=True)
    work = with_fields(slots(6), {0, 1, 2, 3}, first_reward=1.0)
    groups, short, _ = collected(work, {"concurrency": 8}, needed=4, counts=quota.counts)
    assert len(groups) == 6 and short == 2


def test_over_sampling_begins_a_spare_group_for_one_that_is_late() -> None:
    quota = Quota(4, 12, replace_flat=True)
    # The others take so long that on a busy machine none of them is taken for late: that is twice as long.
    work = with_fields(slots(12), {*range(12)}, takes_s=0.5)
    work = with_fields(work, {1, 2, 4, 5}, takes_s=60)  # as many as are begun beyond the needed ones
    settings = {"concurrency": 40, "over_sample": 1.5}
    groups, short, begun = collected(work, settings, needed=4, counts=quota.counts)
    assert set(groups) == {0, 3, 6, 7} and short == 0
    assert len(begun) == 10, "more than one for each late group, or before they were late"


def test_without_over_sampling_a_late_group_is_waited_for() -> None:
    quota = Quota(4, 12, replace_flat=True)
    work = with_fields(slots(12), {1}, takes_s=1)
    groups, short, begun = collected(work, {"concurrency": 40}, needed=4, counts=quota.counts)
    assert set(groups) == {0, 1, 2, 3} and short == 0 and len(begun) == 4
