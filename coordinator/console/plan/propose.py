"""Propose which devices should generate and which train, from measurements. Pure.

Nodes that take turns need R + T + swap for an iteration; a crew that generates beside one that trains, each
with its own devices, max(R, T). Both are computed for every split of the devices, as if work divided evenly
over devices of equal speed.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LEVELS = (1, 2, 3)
"""Values of --max-async-level that are tried; at 0 crews take turns."""
GOOD_ENOUGH = 0.02
"""A lower level is taken if a higher one saves less: it trains on newer samples."""
TIMES = 20
"""How often the measured iterations are repeated to see what an iteration costs in the long run."""


@dataclass(frozen=True)
class Device:
    """A GPU, or a machine without one."""

    machine: int
    tokens_per_s: float
    """What it generates. One that generates twice as fast is taken to train twice as fast."""


@dataclass(frozen=True)
class IterationLoad:
    """What a measured iteration had to do."""

    tokens: float
    """To be generated; an evaluation counts as the tokens that its seconds would have made."""
    train_s: float
    """Seconds of training on one device of average speed."""


@dataclass(frozen=True)
class RunFigures:
    """What a run says of itself. `fixed`: seconds of an iteration that more devices do not make less."""

    devices: tuple[Device, ...]
    """By device number."""
    iterations: tuple[IterationLoad, ...]
    rollout_fixed_s: float
    """Plan, aggregation, the decision about an evaluation."""
    train_fixed_s: float
    """The batch, the checkpoint."""
    sleep_s: float
    """Freeing the accelerators of the engines, where nodes take turns."""
    load_s: float
    """New weights into the engines."""
    other_s: float
    """Beginning and ending an iteration."""

    def rollouts_s(self, devices: Sequence[int]) -> list[float]:
        """Return the seconds of each iteration's rollout on these devices."""
        rate = sum(self.devices[number].tokens_per_s for number in devices)
        return [work.tokens / rate + self.rollout_fixed_s for work in self.iterations]

    def trainings_s(self, devices: Sequence[int]) -> list[float]:
        """Return the seconds of each iteration's training on these devices."""
        average = fmean(device.tokens_per_s for device in self.devices)
        speed = sum(self.devices[number].tokens_per_s for number in devices) / average
        return [work.train_s / speed + self.train_fixed_s for work in self.iterations]


@dataclass(frozen=True)
class Option:
    """A placement, and what an iteration is expected to cost."""

    rollout: tuple[int, ...]
    """Devices that generate; the same as `train` where nodes take turns."""
    train: tuple[int, ...]
    level: int
    """--max-async-level."""
    rollout_s: float
    train_s: float
    swap_s: float
    """Sleeping and loading; the loading alone in two crews, where it belongs to the rollout."""
    seconds: float
    refused: str = ""
    """Why it cannot be; empty: it can."""

    @property
    def is_collocated(self) -> bool:
        """Whether the nodes take turns."""
        return self.rollout == self.train


Refuse = Callable[[Sequence[int], Sequence[int]], str]
"""Says why these devices cannot generate while those train; an empty text if they can."""


def propose(measured: RunFigures, refuse: Refuse) -> tuple[Option, ...]:
    """Return all options, the best first: the one of fewest seconds that is not refused. Where a split is as
    fast, to six digits, the nodes stay one crew.
    """
    options = [_collocated(measured), *_splits(measured, refuse)]
    return tuple(sorted(options, key=lambda option: (bool(option.refused), float(f"{option.seconds:.6g}"))))


def _collocated(measured: RunFigures) -> Option:
    every = tuple(range(len(measured.devices)))
    rollout_s, train_s = fmean(measured.rollouts_s(every)), fmean(measured.trainings_s(every))
    swap_s = measured.sleep_s + measured.load_s
    return Option(
        every, every, 0, rollout_s, train_s, swap_s, rollout_s + train_s + swap_s + measured.other_s
    )


def _splits(measured: RunFigures, refuse: Refuse) -> Iterator[Option]:
    """Yield the splits in which the last devices train, and those in which the first ones do."""
    count = len(measured.devices)
    every = tuple(range(count))
    pairs = [(every[:size], every[size:]) for size in range(1, count)]
    machines = Counter(device.machine for device in measured.devices)
    differ = len({(device.tokens_per_s, machines[device.machine]) for device in measured.devices}) > 1
    for rollout, train in pairs + [(later, first) for first, later in pairs] if differ else pairs:
        each_s = measured.other_s + measured.load_s
        rollouts_s = [seconds + each_s for seconds in measured.rollouts_s(rollout)]
        trainings_s = [seconds + measured.other_s for seconds in measured.trainings_s(train)]
        by_level = {level: seconds_each(rollouts_s, trainings_s, level) for level in LEVELS}
        enough_s = min(by_level.values()) * (1 + GOOD_ENOUGH)
        level = next(level for level in LEVELS if by_level[level] <= enough_s)
        rollout_s, train_s = fmean(rollouts_s) - each_s, fmean(trainings_s) - measured.other_s
        refused = refuse(rollout, train)
        yield Option(rollout, train, level, rollout_s, train_s, measured.load_s, by_level[level], refused)


def seconds_each(rollouts_s: Sequence[float], trainings_s: Sequence[float], level: int) -> float:
    """Return the seconds an iteration takes two crews in the long run, if these come again and again.

    Rollout i begins after rollout i - 1 and training i - 1 - level, training i after rollout i and training
    i - 1.
    """
    sampled_s, trained_s = 0.0, [0.0]
    for number in range(TIMES * len(rollouts_s)):
        needed = trained_s[max(0, number - level)]
        sampled_s = max(sampled_s, needed) + rollouts_s[number % len(rollouts_s)]
        trained_s.append(max(sampled_s, trained_s[-1]) + trainings_s[number % len(trainings_s)])
    half = len(trained_s) // 2
    return (trained_s[-1] - trained_s[half]) / (len(trained_s) - 1 - half)


def slowness(measured: RunFigures, devices: Sequence[int], weights: Mapping[int, float]) -> float:
    """Return how many times longer these devices work with weights, by machine, than with the best ones."""
    rates = machine_rates(measured, devices)
    longest = max(weights[machine] / rate for machine, rate in rates.items())
    return longest * sum(rates.values()) / sum(weights[machine] for machine in rates)


def machine_rates(measured: RunFigures, devices: Sequence[int]) -> dict[int, float]:
    """Return the tokens/s that the devices of each machine generate together."""
    rates: dict[int, float] = {}
    for number in devices:
        device = measured.devices[number]
        rates[device.machine] = rates.get(device.machine, 0.0) + device.tokens_per_s
    return rates


def rank_weights(measured: RunFigures, option: Option) -> tuple[float, ...]:
    """Return a weight for each machine by what its devices do in the option; the smallest is 1.

    Only the machines of one crew are compared with each other. So that the weights hold for both crews, the
    machine that is in both has its weight of the rollout crew, and those that only train are compared with
    it.
    """
    weights, training = (machine_rates(measured, crew) for crew in (option.rollout, option.train))
    shared = weights.keys() & training.keys()
    scale = min(weights.values()) / min(training.values())
    for machine in shared:
        scale = weights[machine] / training[machine]
    weights = {**{machine: rate * scale for machine, rate in training.items()}, **weights}
    least = min(weights.values())
    return tuple(round(weights[machine] / least, 1) for machine in sorted(weights))
