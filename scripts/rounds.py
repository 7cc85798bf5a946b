"""An environment whose turns have rewards of their own: eight rounds of "write a digit", each 1 or 0.

    run --environment scripts.rounds:rounds --iterations 20 tiny.warmup_steps=0 rollout.max_tokens=8 \
        rollout.tasks_per_iteration=8 trainer.learning_rate=3e-3 eval.interval=0 rollout.seed=1 \
        trainer.credit=turn trainer.turn_discount=0

Mean reward of iterations 1, 4, 8, 12, 16 and 20, with seeds 1, 2 and 3:

    trainer.credit=turn      1.0 2.3 6.0 7.7 7.9 8.0    0.8 2.0 6.0 7.6 7.9 8.0    1.0 1.9 5.8 7.7 8.0 8.0
    trainer.credit=sample    1.0 1.7 3.9 6.9 7.6 7.9    0.8 1.5 3.8 6.5 7.6 7.9    1.0 1.5 3.7 6.5 7.6 8.0
"""

import asyncio

from rollout import Episode, Policy, Sample, Sampling, Task


async def rounds(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Play all samples of the group at the same time."""
    return [*await asyncio.gather(*(_play(task, policy.episode(j)) for j in range(sampling.n)))]


async def _play(task: Task, episode: Episode) -> Sample:
    earned: list[float] = []
    for number in range(8):
        turn = await episode.generate(task["prompt"] if number == 0 else " Next: ", max_tokens=1)
        earned.append(float(turn.text.isdigit()))
    sample = episode.sample()
    sample.reward_turns(earned)
    return sample
