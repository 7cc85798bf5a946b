"""Environments of several turns: rewards by turn, and states that come again.

    run --environment scripts.rounds:rounds --iterations 20 tiny.warmup_steps=0 rollout.max_tokens=8 \
        rollout.tasks_per_iteration=8 trainer.learning_rate=3e-3 eval.interval=0 rollout.seed=1 \
        trainer.credit=turn trainer.turn_discount=0

`rounds` are eight rounds of "write a digit", each 1 or 0. Mean reward of iterations 1, 4, 8, 12, 16 and 20,
with seeds 1, 2 and 3:

    trainer.credit=turn      1.0 2.3 6.0 7.7 7.9 8.0    0.8 2.0 6.0 7.6 7.9 8.0    1.0 1.9 5.8 7.7 8.0 8.0
    trainer.credit=sample    1.0 1.7 3.9 6.9 7.6 7.9    0.8 1.5 3.8 6.5 7.6 7.9    1.0 1.5 3.7 6.5 7.6 8.0

`stairs` have four steps, the last one alone earns 1; trainer.turn_discount=0.9 rollout.max_tokens=16:

    trainer.credit=state     .27 .67 .95 .86 .97 1.0    .22 .50 .92 .95 .97 1.0    .23 .48 .89 .92 .94 1.0
    trainer.credit=turn      .27 .64 .92 .91 .98 1.0    .22 .52 .92 .95 .95 .98    .23 .48 .91 .91 .94 1.0
    trainer.credit=sample    .27 .62 .94 .88 .94 .97    .22 .48 .84 .97 .94 .84    .23 .50 .89 .91 .92 .94
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


async def stairs(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    """Climb four steps in twelve turns, by a digit and by none in turns; the last step earns 1."""
    return [*await asyncio.gather(*(_climb(task, policy.episode(j)) for j in range(sampling.n)))]


async def _climb(task: Task, episode: Episode) -> Sample:
    step, states = 0, list[str]()
    while step < 4 and len(states) < 12:
        states.append(f"step {step}")
        prompt = f"{'AB'[step % 2]}: "
        turn = await episode.generate(
            task["prompt"] + prompt if len(states) == 1 else f" {prompt}", max_tokens=1
        )
        step += turn.text.isdigit() == (step % 2 == 0)
    sample = episode.sample()
    sample.reward_turns([*[0.0] * (len(states) - 1), float(step == 4)], states)
    return sample
