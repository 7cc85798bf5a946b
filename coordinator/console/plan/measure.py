"""Read what a run has measured of itself: events, manifests, metrics.jsonl, heartbeats."""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from coordinator.console.plan.propose import Device, IterationLoad, RunFigures
from coordinator.console.report.figures import rollout_work
from coordinator.console.report.sources import newest_record, read_events
from coordinator.console.report.timeline import spans_of
from coordinator.console.report.values import numbers, seconds_of
from coordinator.console.views.heartbeats import heartbeat_values
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import placed_crews, read_placement, run_dirs
from coordinator.protocol.snapshot import whole_board
from coordinator.settings.placement import Crews, Place
from coordinator.settings.tree import Crew, RunSettings, SettingsError
from coordinator.start.run_json import NOT_STARTED, find_run
from rollout.engines.model_dir import WeightsError, is_adapter, tensor_names
from rollout.storage import files
from trainer.memory import Shape

RECENT, LEAST = 10, 3
"""The most iterations that are measured, and the fewest that say anything."""
TAIL_BYTES = 4_000_000
"""So much of the end of a file of events is read whole: some hundreds of iterations."""
_R, _T = Phase.TRAIN_ROLLOUT.label, Phase.TRAINING.label


@dataclass(frozen=True)
class Findings:
    """What the run at `root` says."""

    root: Path
    settings: RunSettings
    in_crews: bool
    numbers: tuple[int, ...]
    """The iterations that were measured."""
    now_s: float
    """Mean seconds of one, from its begin to its end. Those of two crews overlap, so each costs less."""
    measured: RunFigures
    machine_rates: dict[int, float]
    """Tokens a busy second of each machine that generates."""
    gpu_bytes: float
    """Memory of the smallest GPU; 0 if there is none."""
    shares_cores: bool
    """Whether nodes without GPUs are on one host."""
    shape: Shape | None
    """Shape of the model; None where its files are not here."""


class _MeasuredCrew:
    """The nodes that generate, or those that train, by machine."""

    def __init__(self, run_dir: RunDir, devices: Mapping[int, int]) -> None:
        self.run_dir = run_dir
        self.devices = devices
        """How many each machine has here."""
        read = read_events(run_dir, TAIL_BYTES * len(devices))
        if read.unreadable:
            names = ", ".join(read.unreadable)
            raise SettingsError(
                f"{run_dir.root}: {names} in events/ cannot be read; repair that, and ask again"
            )
        self.events = {run_dir.machine(rank): read.lines.get(rank, []) for rank in range(len(devices))}
        self.spans = {machine: spans_of(machine, events) for machine, events in self.events.items()}


def measure(root: Path) -> Findings:
    """Measure the last iterations of a run. SettingsError if there are too few, or no run."""
    crews_at = run_dirs(root)
    record = newest_record(crews_at[0])
    if record is None:
        find_run(root)
        raise SettingsError(NOT_STARTED.format(root))
    settings = RunSettings.published(record.settings)
    heartbeats = [
        heartbeat_values(run_dir, beat)
        for run_dir in crews_at
        for beat in whole_board(run_dir, published.names).beats.values()
    ]
    places = placed_crews(root, read_placement(root)) or _one_crew(crews_at[0], settings)
    sides = [
        _MeasuredCrew(run_dir, {place.machine: len(place.devices) for place in places[run_dir.crew]})
        for run_dir in crews_at
    ]
    generator = next((side for side in sides if side.run_dir.crew != "train"), sides[0])
    trainer = next((side for side in sides if side.run_dir.crew != "rollout"), sides[0])
    lines = {line["iteration"]: line for line in published.metrics_lines(crews_at[0])}
    rollouts = _rollouts(generator, _steady(generator, _R) & _steady(trainer, _T), lines)
    rates = _rates(generator, rollouts)
    each = {machine: rate / generator.devices[machine] for machine, rate in rates.items()}
    average = fmean(each[machine] for machine in each for _ in range(generator.devices[machine]))
    totals: Counter[int] = Counter()
    for side in sides:
        totals.update(side.devices)
    devices = [Device(machine, each.get(machine, average)) for machine in sorted(totals.elements())]
    speeds = {
        machine: count * each.get(machine, average) / average for machine, count in trainer.devices.items()
    }
    rows = [numbers(lines[rollout.number], "phase_seconds") for rollout in rollouts]
    evaluated = [row.get(Phase.EVAL_ROLLOUT.label, 0.0) * sum(rates.values()) for row in rows]
    trained_s = [row[_T] * _slowness(speeds, settings) for row in rows]

    def spent(*phases: Phase) -> float:
        return median(sum(row.get(phase.label, 0.0) for phase in phases) for row in rows)

    in_crews = len(sides) > 1
    overhead_s = [row.get(_R, 0.0) - rollout.longest_s for row, rollout in zip(rows, rollouts, strict=True)]
    measured = RunFigures(
        devices=tuple(devices),
        iterations=tuple(
            IterationLoad(sum(rollout.tokens.values()) + more, train_s)
            for rollout, more, train_s in zip(rollouts, evaluated, trained_s, strict=True)
        ),
        rollout_fixed_s=median(max(0.0, seconds) for seconds in overhead_s)
        + spent(Phase.TRAIN_PLAN, Phase.TRAIN_FILES_READY, Phase.TRAIN_AGGREGATE, Phase.EVAL_DECISION),
        train_fixed_s=spent(Phase.TRAIN_DATA, Phase.TRAIN_CONFIG, Phase.CHECKPOINT),
        sleep_s=spent(Phase.ENGINE_STOPPED),
        load_s=median(max(rollout.load_s.values()) for rollout in rollouts) + spent(Phase.ENGINE_RESTARTED),
        other_s=spent(Phase.ITERATION_START, Phase.ITERATION_END),
    )
    hosts = Counter(beat.get("host") for beat in heartbeats)
    return Findings(
        root=root,
        settings=settings,
        in_crews=in_crews,
        numbers=tuple(rollout.number for rollout in rollouts),
        now_s=fmean(seconds_of(lines[rollout.number], "seconds") for rollout in rollouts),
        measured=measured,
        machine_rates=rates,
        gpu_bytes=min(
            (gpu["total_bytes"] for beat in heartbeats for gpu in beat.get("gpus", [])), default=0.0
        ),
        shares_cores=max(hosts.values(), default=0) > 1
        and not any(beat.get("gpu_count") for beat in heartbeats),
        shape=_shape(crews_at[0], settings),
    )


def _one_crew(run_dir: RunDir, settings: RunSettings) -> Crews:
    """Return the places of a run where nothing is placed. A machine that does not beat has one device."""
    beats = whole_board(run_dir, published.names).beats
    counts = [
        max(1, heartbeat_values(run_dir, beats[rank]).get("gpu_count", 1)) if rank in beats else 1
        for rank in range(settings.cluster.num_nodes)
    ]
    crew: Crew = "main"
    return {crew: tuple(Place(machine, tuple(range(count))) for machine, count in enumerate(counts))}


@dataclass(frozen=True)
class _Rollout:
    """A measured rollout, by machine."""

    number: int
    busy_s: dict[int, float]
    """Seconds of generating."""
    load_s: dict[int, float]
    """Seconds of the rollout in which an engine loaded weights: before, in one crew."""
    tokens: dict[int, float]

    @property
    def longest_s(self) -> float:
        """Seconds of the machine that was last."""
        return max(self.busy_s[machine] + self.load_s[machine] for machine in self.busy_s)


def _rollouts(
    side: _MeasuredCrew, steady: Container[int], lines: Mapping[int, Mapping[str, Any]]
) -> list[_Rollout]:
    """Return the last rollouts that were trained on; SettingsError if they are too few."""
    rollouts: list[_Rollout] = []
    reloads = {machine: _reloads(events) for machine, events in side.events.items()}
    for number, work_s in sorted(rollout_work(side.spans, side.devices, len(lines)).items()):
        line = lines.get(number)
        if number in steady and line and _T in numbers(line, "phase_seconds"):
            load_s = {machine: min(reloads[machine].get(number, 0.0), work_s[machine]) for machine in work_s}
            busy_s = {machine: work_s[machine] - load_s[machine] for machine in work_s}
            if tokens := _tokens(side.run_dir, number, line):
                rollouts.append(_Rollout(number, busy_s, load_s, tokens))
    if len(rollouts) < LEAST or not any(sum(rollout.busy_s.values()) for rollout in rollouts[-RECENT:]):
        raise SettingsError(
            f"{side.run_dir.root}: run plan needs {LEAST} iterations that sampled and trained, and there "
            f"{'is' if len(rollouts) == 1 else 'are'} {len(rollouts)} (the first one after a start does not "
            "count); let the run go on, a finished one with more --iterations"
        )
    return rollouts[-RECENT:]


def _rates(side: _MeasuredCrew, rollouts: Sequence[_Rollout]) -> dict[int, float]:
    """Return the tokens a busy second of each machine that made some."""
    rates: dict[int, float] = {}
    for machine in side.devices:
        tokens = sum(rollout.tokens.get(machine, 0.0) for rollout in rollouts)
        seconds = sum(rollout.busy_s[machine] for rollout in rollouts)
        if tokens and seconds:
            rates[machine] = tokens / seconds
    return rates


def _steady(side: _MeasuredCrew, phase: str) -> set[int]:
    """Return the iterations whose phase followed one of the same epoch on every node: nothing was started."""
    by_node: list[set[int]] = []
    for spans in side.spans.values():
        epochs = {span.iteration: span.epoch for span in spans if span.phase == phase}
        by_node.append({number for number in epochs if epochs.get(number - 1) == epochs[number]})
    return set[int].intersection(*by_node)


def _reloads(lines: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return the seconds in which an engine loaded weights inside of a rollout, by iteration."""
    by_iteration: dict[int, float] = {}
    phase, number = "", 0
    for line in lines:
        if line["what"] == "begin":
            phase, number = line["row"], line["it"]
        elif line["what"] == "reload" and phase == _R:
            by_iteration[number] = by_iteration.get(number, 0.0) + seconds_of(line, "seconds")
    return by_iteration


def _tokens(run_dir: RunDir, number: int, line: Mapping[str, Any]) -> dict[int, float]:
    """Return the tokens that each machine has generated in an iteration: shared out by its groups. {} where
    the manifest is gone.
    """
    manifest = published.read_manifest(run_dir, "train", number) or {}
    total = manifest.get("tokens") or seconds_of(line, "length") * seconds_of(line, "samples")
    groups: dict[int, int] = {}
    for part in manifest.get("parts", []):
        machine = run_dir.machine(part["rank"])
        groups[machine] = groups.get(machine, 0) + len(part["slots"])
    every = sum(groups.values())
    return {machine: total * count / every for machine, count in groups.items()} if every and total else {}


def _slowness(speeds: Mapping[int, float], settings: RunSettings) -> float:
    """Return the seconds on one average device for each second of a training on machines of these speeds.

    Each machine gets tokens by its weight, and all wait for the last one.
    """
    configured = settings.cluster.rank_weights or ()
    weights = {machine: configured[machine] if machine < len(configured) else 1.0 for machine in speeds}
    return sum(weights.values()) / max(weights[machine] / speeds[machine] for machine in speeds)


def _shape(run_dir: RunDir, settings: RunSettings) -> Shape | None:
    """Return the shape of the model from the newest checkpoint, with adapters from the model they are for."""
    newest = max(published.checkpoints(run_dir), default=None)
    directories = [run_dir.checkpoint(newest)] if newest else []
    try:
        adapters = 0
        for directory in [*directories, Path(settings.model), run_dir.base_model]:
            if not files.is_directory(directory):
                continue
            tensors = {name: shape for name, (_, shape) in tensor_names(directory).items()}
            if not is_adapter(directory):
                return Shape.from_tensors(tensors, adapters, settings.trainer.freeze_vision)
            adapters = Shape.from_tensors(tensors).all
    except (WeightsError, OSError):
        pass
    return None
