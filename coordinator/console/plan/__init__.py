"""`run plan`: what placement, level and weights a run should go on with, by what it has measured."""

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

from coordinator.console.plan.measure import Findings, measure
from coordinator.console.plan.propose import Device, Option, RunFigures, propose, rank_weights, slowness
from coordinator.settings.number_ranges import iterations_text, ranges
from coordinator.settings.tree import SettingsError
from trainer.memory import least_bytes

WORTH = 1.05
"""Other weights are proposed where those of now take so many times as long."""
SHOWN = 8
"""How many options are printed; --json has all."""
GUESTS = (1, 2, 4)
"""For so many guests is said what an iteration would take."""
ASSUMPTION = (
    "Computed as if work divided evenly over devices. It does not where a few long samples decide when a\n"
    "rollout ends, or where the batch of a device gets small: then a smaller crew is faster than it says."
)


SHARES_CORES = (
    "These nodes share the cores of one machine: there neither two crews nor weights gain anything. For "
    "nodes on machines of their own: --devices N"
)


def show_plan(root: Path, devices: int | None, as_json: bool) -> None:
    """Print what was measured, the options and the best of them; with `devices`, for that many of them."""
    findings = measure(root)
    measured = findings.measured if devices is None else _resized(findings.measured, devices)
    options = propose(measured, _refuse(findings, measured))
    words = "" if _is_one_machine(findings, measured) else command(findings, measured, options[0])
    if as_json:
        print(json.dumps(_document(findings, measured, options, words), indent=1))
        return
    for line in _text(findings, measured, options, words):
        print(line)


def _is_one_machine(findings: Findings, measured: RunFigures) -> bool:
    """Return whether one crew, planned for as it is, has nodes that share the cores of a machine."""
    same = len(measured.devices) == len(findings.measured.devices)
    return findings.shares_cores and same and not findings.in_crews


def _resized(measured: RunFigures, count: int) -> RunFigures:
    """Return the measurements for another number of devices, all of the average speed, on machines of the
    largest size.
    """
    if count < 1:
        raise SettingsError(f"--devices {count}: give a number of devices, 1 or more")
    if count == len(measured.devices):
        return measured
    size = max(Counter(device.machine for device in measured.devices).values())
    rate = fmean(device.tokens_per_s for device in measured.devices)
    return replace(measured, devices=tuple(Device(number // size, rate) for number in range(count)))


def _refuse(findings: Findings, measured: RunFigures) -> Callable[[Sequence[int], Sequence[int]], str]:
    """Return a function that says why a split cannot be: it does not divide as set, or does not fit."""
    engine, trainer = findings.settings.engine, findings.settings.trainer

    def undivided(devices: Sequence[int], size: int) -> bool:
        counts = Counter(measured.devices[number].machine for number in devices)
        return any(count % size for count in counts.values())

    def refuse(rollout: Sequence[int], train: Sequence[int]) -> str:
        if undivided(rollout, engine.tensor_parallel_size or 1):
            return f"engine.tensor_parallel_size={engine.tensor_parallel_size} does not divide its devices"
        for setting in ("tensor_parallel_size", "context_parallel"):
            if undivided(train, size := getattr(trainer, setting)):
                return f"trainer.{setting}={size} does not divide its devices"
        if findings.shape is not None and findings.gpu_bytes:
            on_machines = Counter(measured.devices[number].machine for number in train).values()
            sharing = min(on_machines) if trainer.layout == "hybrid" else len(train)
            needed = least_bytes(findings.shape, trainer, sharing)
            if needed > findings.gpu_bytes:
                has = findings.gpu_bytes / 1e9
                return f"training takes at least {needed / 1e9:.0f} GB a GPU, which has {has:.0f}"
        return ""

    return refuse


def command(findings: Findings, measured: RunFigures, best: Option) -> str:
    """Return the command to type on the master's machine for an option; empty: the run goes on as it is."""
    cluster, words = findings.settings.cluster, list[str]()
    machines = max(device.machine for device in measured.devices) + 1
    if machines != cluster.num_nodes:
        words += ["--num-nodes", str(machines)]
    if not best.is_collocated:
        words += ["--place", f"rollout={','.join(ranges(best.rollout))}"]
        words += ["--place", f"train={','.join(ranges(best.train))}", "--max-async-level", str(best.level)]
        trainer = findings.settings.trainer
        if trainer.engine_correction == "off" and trainer.clip != "likelihood":
            words.append("trainer.engine_correction=truncated")
    elif findings.in_crews:
        words += ["--reset-settings", "cluster.place", "--reset-settings", "cluster.max_async_level"]
    weights = rank_weights(measured, best)
    weights_now = cluster.rank_weights if machines == cluster.num_nodes else None
    proposed, present = dict(enumerate(weights)), dict(enumerate(weights_now or [1.0] * machines))
    crews = (best.rollout, best.train)
    if any(slowness(measured, crew, present) > WORTH * slowness(measured, crew, proposed) for crew in crews):
        words += ["--rank-weights", ",".join(f"{weight:g}" for weight in weights)]
    return shlex.join(["run", "--master", "--log-path", str(findings.root), *words]) if words else ""


def _text(findings: Findings, measured: RunFigures, options: Sequence[Option], words: str) -> list[str]:
    best = options[0]
    crews = "two crews, one generates and one trains" if findings.in_crews else "one crew: all take turns"
    same = len(measured.devices) == len(findings.measured.devices)
    lines = [
        f"measured: {iterations_text(findings.numbers)} of {findings.root}, {_seconds(findings.now_s)} s "
        f"each, by {_count(findings.measured)} in {crews}"
    ]
    lines += [
        f"  rank {rank}: {rate:,.0f} tokens per second while busy"
        for rank, rate in findings.machine_rates.items()
    ]
    swap_s, other_s = _seconds(measured.sleep_s + measured.load_s), _seconds(measured.other_s)
    lines.append(f"  engines swap to training and load its weights: {swap_s} s; other: {other_s} s")
    lines += ["", f"expected seconds{'' if same else f' with {_count(measured)}'}:", _row("", *COLUMNS)]
    # The one crew is always among what is shown: the others are compared with it.
    shown = [n for n, option in enumerate(options) if n < SHOWN - 1 or option.is_collocated]
    for option in (options[number] for number in shown):
        if option.refused:
            lines.append(f"{_name(option):<42}  {option.refused}")
            continue
        seconds = (option.rollout_s, option.train_s, option.swap_s, option.seconds)
        lines.append(_row(_name(option), *map(_seconds, seconds)))
        if option is best and findings.settings.claims:
            lines += _with_guests(measured, best)
    if len(options) > len(shown):
        lines.append(f"and {len(options) - len(shown)} more: --json")
    lines += ["", *ASSUMPTION.splitlines(), "", _verdict(findings, measured, options)]
    if _is_one_machine(findings, measured):
        lines.append(SHARES_CORES)
    if words:
        elsewhere = (
            "" if len(findings.machine_rates) < 2 and not findings.in_crews else ", on the others as before"
        )
        lines += [f"once the run has stopped, type on the master's machine{elsewhere}:", f"  {words}"]
    return lines


def _with_guests(measured: RunFigures, best: Option) -> list[str]:
    """Return rows for guests beside one crew, each as fast as an average device of it."""
    count, work_s = len(measured.devices), best.rollout_s - measured.rollout_fixed_s
    lines: list[str] = []
    for guests in GUESTS if best.is_collocated else ():
        saved_s = work_s * guests / (count + guests)
        seconds = (best.rollout_s - saved_s, best.train_s, best.swap_s, best.seconds - saved_s)
        lines.append(_row(f"  and run guest on {guests} more", *map(_seconds, seconds)))
    return lines


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


COLUMNS = ("rollout", "training", "swap", "iteration")


def _row(name: str, *cells: str) -> str:
    return f"{name:<42}" + "".join(f"{cell:>11}" for cell in cells)


def _name(option: Option) -> str:
    if option.is_collocated:
        return f"one crew in turns, {len(option.rollout)} device{'s' if len(option.rollout) > 1 else ''}"
    rollout, train = (",".join(ranges(devices)) for devices in (option.rollout, option.train))
    return f"rollout={rollout} train={train}, level {option.level}"


def _verdict(findings: Findings, measured: RunFigures, options: Sequence[Option]) -> str:
    best = options[0]
    together = next(option for option in options if option.is_collocated)
    if not best.is_collocated:
        times = together.seconds / best.seconds
        return f"best: two crews, {times:.2f} times as fast as one crew on the same devices"
    splits = [option for option in options[1:] if not option.refused]
    if findings.in_crews:
        return (
            f"go back to one crew: {_seconds(splits[0].seconds)} s in two"
            if splits
            else "go back to one crew"
        )
    if len(measured.devices) == 1:
        return "stay with one crew: one device cannot be split"
    if not splits:
        return "stay with one crew: no split of the devices is possible"
    return f"stay with one crew: the best split would take {_seconds(splits[0].seconds)} s"


def _count(measured: RunFigures) -> str:
    devices, machines = len(measured.devices), len({device.machine for device in measured.devices})
    parts = ((devices, "device"), (machines, "node"))
    return " on ".join(f"{number} {noun}{'s' if number > 1 else ''}" for number, noun in parts)


def _document(
    findings: Findings, measured: RunFigures, options: Sequence[Option], words: str
) -> dict[str, object]:
    """Return the document of --json; options from the best one on."""
    return {
        "iterations": findings.numbers,
        "in_crews": findings.in_crews,
        "seconds": findings.now_s,
        "tokens_per_busy_s": findings.machine_rates,
        "measured": asdict(measured),
        "options": [asdict(option) for option in options],
        "rank_weights": rank_weights(measured, options[0]),
        "command": words,
    }
