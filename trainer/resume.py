"""Choose the trainer state that a restart continues, and the training that it repeats. Torch-free."""

from collections.abc import Callable, Collection, Mapping
from functools import cache

from trainer.documents import Resume, SavedState, TrainedBatch

CUT_OFF = 4
"""So many states that were due, one after the other, may be lost before the optimizer starts afresh."""


def saves_in_background(iteration: int, save_interval: int, repeated: int = 0) -> bool:
    """Return whether the request of this iteration needs a `state_dir`. `repeated`: how many iterations its
    job trains again before; after a whole interval of them the state that was due was lost.
    """
    return save_interval > 1 and (iteration % save_interval == 0 or repeated >= save_interval)


def plan_resume(
    iteration: int,
    policy: str,
    states: Mapping[str, SavedState],
    trained: Collection[int],
    batch_of: Callable[[int], TrainedBatch | None],
) -> Resume:
    """Choose how to go on from the checkpoint of `iteration`, whose weights have the digest `policy`.

    `states`: the complete trainer states, by directory. `trained`: every iteration that was trained;
    `batch_of`: its batch, or None if the training cannot be repeated; only what is needed is asked for.
    The newest state that leads to `policy` is continued. If there is none yet, training is repeated from the
    model that the run started from. If that would be very much, the result is Resume(): the base's own
    `trainer_state/`, or a fresh optimizer.
    """
    batch_of = cache(batch_of)

    def leads_on(state: SavedState) -> bool:
        if state.iteration == iteration:
            return state.policy == policy
        batch = batch_of(state.iteration) if state.iteration in trained else None
        return state.iteration < iteration and (batch is None or batch.policy == state.policy)

    by_age = sorted(states, key=lambda directory: (states[directory].iteration, directory), reverse=True)
    for directory in by_age:
        state = states[directory]
        if leads_on(state):
            repeat = _since(state.iteration, iteration, trained, batch_of)
            if repeat is not None:
                return Resume(state_dir=directory, state_policy=state.policy, repeat=repeat)
    repeat = _since(0, iteration, trained, batch_of)
    if repeat and len(repeat) <= CUT_OFF * max(batch.settings.state_interval for batch in repeat):
        return Resume(from_start=True, repeat=repeat)
    return Resume()


def _since(
    begin: int, iteration: int, trained: Collection[int], batch_of: Callable[[int], TrainedBatch | None]
) -> tuple[TrainedBatch, ...] | None:
    """Return the batches trained after `begin` up to `iteration`, in order; None if one of them is gone."""
    batches: list[TrainedBatch] = []
    for number in sorted((number for number in trained if begin < number <= iteration), reverse=True):
        batch = batch_of(number)
        if batch is None:
            return None
        batches.append(batch)
    return tuple(reversed(batches))
