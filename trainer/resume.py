"""Choose the trainer state that a restart continues, and the training that it repeats. Torch-free."""

from collections.abc import Mapping

from trainer.documents import Resume, SavedState, TrainedBatch


def saves_in_background(iteration: int, save_interval: int) -> bool:
    """Return whether the request of this iteration needs a `state_dir`."""
    return save_interval > 1 and iteration % save_interval == 0


def plan_resume(
    iteration: int,
    policy: str,
    states: Mapping[str, SavedState],
    batches: Mapping[int, TrainedBatch | None],
) -> Resume:
    """Choose how to go on from the checkpoint of `iteration`, whose weights have the digest `policy`.

    `states`: the complete trainer states, by directory. `batches`: for every iteration that was trained, its
    batch, or None if the training cannot be repeated. The newest state that leads to `policy` is continued.
    If no state was due yet, training is repeated from the model that the run started from. Otherwise the
    result is Resume(): the base's own `trainer_state/`, or a fresh optimizer.
    """
    known = {k: batch.policy for k, batch in batches.items() if batch is not None} | {iteration: policy}
    usable = [
        (state.iteration, directory)
        for directory, state in states.items()
        if state.iteration <= iteration and known.get(state.iteration, state.policy) == state.policy
    ]
    for begin, directory in sorted(usable, reverse=True):
        repeat = _since(begin, iteration, batches)
        if repeat is not None:
            return Resume(state_dir=directory, state_policy=states[directory].policy, repeat=repeat)
    repeat = _since(0, iteration, batches)
    if repeat and len(repeat) <= max(batch.settings.state_interval for batch in repeat):
        return Resume(from_start=True, repeat=repeat)
    return Resume()


def _since(
    begin: int, iteration: int, batches: Mapping[int, TrainedBatch | None]
) -> tuple[TrainedBatch, ...] | None:
    """Return the batches trained after `begin` up to `iteration`, in order; None if one of them is gone."""
    needed = [batches[trained] for trained in sorted(batches) if begin < trained <= iteration]
    there = tuple(batch for batch in needed if batch is not None)
    return there if len(there) == len(needed) else None
