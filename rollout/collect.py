"""The collector: slots in, finished groups out, as many at once as the engine should see."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout.engine import EngineClient, EngineError, RequestRefused, Sampling
from rollout.environment import Environment, Policy
from rollout.rewards import Reward, score
from rollout.tasks import Task
from rollout.trajectory import Group, Sample

log = logging.getLogger(__name__)

_STOP_POLL_S = 0.1  # a threading.Event cannot wake an event loop


ALL_FAILED_MIN = 4
"""So many groups given up, and no other, are not bad luck: the reward or the environment does not work."""


class AllGivenUp(RuntimeError):
    """Not one group came to an end; the message says why the first was given up."""


class Stopped(Exception):
    """`stop` was set before all slots were finished."""


@dataclass(frozen=True)
class Slot:
    """One group to make: the slot's number in the iteration, its task, its group seed."""

    number: int
    task: Task
    seed: int


@dataclass
class _Work:
    """What all groups of one collect share."""

    client: EngineClient
    environment: Environment
    reward: Reward
    sampling: Sampling
    group_timeout_s: float
    given_up: int = field(default=0, init=False)


async def collect(
    slots: Sequence[Slot],
    *,
    client: EngineClient,
    environment: Environment,
    reward: Reward,
    sampling: Sampling,
    concurrency: int,
    group_timeout_s: float,
    on_group: Callable[[Group], None],
    stop: threading.Event,
) -> None:
    """Make every slot's group of `sampling.n` samples and hand each to `on_group` as it finishes, in any
    order.

    `concurrency` bounds the samples in flight; a group larger than that runs alone. `sampling.seed` is not
    used. A group that takes longer than `group_timeout_s`, whose environment or reward raises, or whose
    request the engine refuses, is handed over as a tombstone. Raises EngineError when the engine fails and
    Stopped within a second of `stop`, with the rest cancelled; what `on_group` raises ends the collection
    too. AllGivenUp when there are several groups and not one came to an end: then nothing was handed over.
    """
    work = _Work(client, environment, reward, sampling, group_timeout_s)
    queue = iter(slots)  # shared: each worker takes the next slot when it has finished one
    held: list[Group] = []
    finished = 0

    def hand_over(group: Group) -> None:
        """Tombstones are final, so they wait for a group that shows that the reward works at all."""
        nonlocal finished
        finished += group.given_up is None
        held.append(group)
        while finished and held:
            on_group(held.pop(0))

    async def worker() -> None:
        for slot in queue:
            hand_over(await _finish(slot, work))

    in_flight = min(len(slots), max(1, concurrency // sampling.n))
    workers = {asyncio.create_task(worker()) for _ in range(in_flight)}
    pending = workers
    try:
        while pending:
            if stop.is_set():
                raise Stopped(f"stopped with {len(pending)} of {in_flight} groups in flight")
            done, pending = await asyncio.wait(
                pending, timeout=_STOP_POLL_S, return_when=asyncio.FIRST_EXCEPTION
            )
            for task in done:
                task.result()
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    if len(held) >= ALL_FAILED_MIN:
        raise AllGivenUp(f"all {len(held)} groups were given up, e.g. {held[0].task_id}: {held[0].given_up}")
    for group in held:
        on_group(group)
    if work.given_up:
        log.warning("%d of %d groups were given up", work.given_up, len(slots))


async def _finish(slot: Slot, work: _Work) -> Group:
    """The slot's group, or its tombstone; EngineError if the engine fails."""
    task = slot.task
    prompt = task["prompt"] if "prompt" in task else task["messages"][-1]["content"]
    try:
        async with asyncio.timeout(work.group_timeout_s) as deadline:
            samples = await _generate(slot, work)
            return Group(slot.number, task["id"], prompt, samples)
    except Exception as error:  # the environment and the reward may be the user's: they may raise anything
        reason = _first_cause(error)
        if isinstance(reason, EngineError) and not isinstance(reason, RequestRefused):
            raise reason from None
        if deadline.expired():
            reason = TimeoutError(f"took longer than group_timeout_s = {work.group_timeout_s:g}")
    work.given_up += 1
    log.log(
        logging.ERROR if work.given_up == 1 else logging.WARNING,
        "slot %d, task %r is given up: %s",
        slot.number,
        task["id"],
        reason,
        exc_info=reason if work.given_up == 1 else None,
    )
    return Group(slot.number, task["id"], prompt, [], given_up=f"{type(reason).__name__}: {reason}")


async def _generate(slot: Slot, work: _Work) -> list[Sample]:
    policy = Policy(work.client, work.sampling, slot.seed)
    samples = await work.environment(slot.task, policy, work.sampling)
    _check_samples(samples)
    scored = await asyncio.gather(
        *(score(work.reward, slot.task, sample) for sample in samples), return_exceptions=True
    )
    for failure in scored:
        if failure is not None:
            raise failure
    return samples


def _first_cause(error: Exception) -> Exception:
    """Out of the groups that asyncio.TaskGroup makes of exceptions; an engine's failure goes before the
    others.
    """
    if isinstance(error, ExceptionGroup):
        return _first_cause((error.subgroup(EngineError) or error).exceptions[0])
    return error


def _check_samples(samples: object) -> None:
    """An environment of the user's own must return what a part can carry; ValueError says what it did not."""
    if not isinstance(samples, list) or not samples or not all(isinstance(s, Sample) for s in samples):
        raise ValueError(
            f"the environment must return a non-empty list of Sample, got {type(samples).__name__}"
        )
    for sample in samples:
        shapes = {sample.token_ids.shape, sample.loss_mask.shape, sample.logprobs.shape}
        if shapes != {(sample.token_ids.size,)}:
            raise ValueError(f"a sample's token_ids, loss_mask and logprobs have the shapes {sorted(shapes)}")
