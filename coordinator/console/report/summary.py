"""The top of the page: the state of the run in a few numbers, and what to do next."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.console.report.curves import points
from coordinator.console.report.figures import Balance
from coordinator.console.report.values import duration, phases_s
from coordinator.console.views import status_text
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.scores import history
from coordinator.directory.layout import RunDir
from rollout.engines.model_dir import is_adapter
from trainer.settings import ROUNDING_KL

Lines = Sequence[Mapping[str, Any]]

SOLVED = 0.97
"""A mean reward above this, where most tasks score the same in all samples, is that of solved tasks."""
RECENT = 10
"""How many iterations advice is based on."""
MUCH_TRUNCATED, MOST_FLAT = 0.1, 0.9
LOST_ENTROPY = 0.05
"""Part of the first iterations' largest entropy below which it is said to be lost."""
HELD_FRACTION = 0.05
"""Interruptions are mentioned if they took more than this part of the time."""


@dataclass(frozen=True)
class Tile:
    """A number at the top."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """What to do next, and the command or option for it, if there is one."""

    text: str
    command: str = ""


def tiles(status: Mapping[str, Any], lines: Lines) -> list[Tile]:
    """Rewards, iterations, hours, how busy the nodes were; missing figures are left out."""
    shown = [
        _change("Reward", points(lines, "reward")),
        *_evaluations(lines),
    ]
    done = len({line["iteration"] for line in lines})
    planned = f" of {status['iterations']}" if status["iterations"] else ""
    shown.append(Tile("Iterations", f"{done}{planned}", f"with {nodes_text(status['num_nodes'])}"))
    seconds = [value for _, value in points(lines, "seconds")]
    if seconds:
        each = f"median {duration(sorted(seconds)[len(seconds) // 2])} an iteration"
        shown.append(Tile("Time", duration(sum(seconds)), each))
    busy = [(line["busy_fraction"], phases_s(line)) for line in lines if _has(line, "busy_fraction")]
    if total := sum(spent for _, spent in busy):
        share = sum(fraction * spent for fraction, spent in busy) / total
        held_s = sum(
            line["seconds"] - phases_s(line) for line in lines if _has(line, "seconds") and phases_s(line)
        )
        is_worth_saying = held_s > HELD_FRACTION * sum(seconds)
        without = f", without {duration(held_s)} of interruptions" if is_worth_saying else ""
        note = f"of the time{without}; the rest they waited"
        shown.append(Tile("Nodes busy", f"{100 * share:.0f} %", note))
    if speeds := points(lines, "tokens_per_s"):
        shown.append(Tile("Generated", f"{speeds[-1][1]:,.0f}", "tokens a second, last iteration"))
    return [tile for tile in shown if tile is not None]


def _evaluations(lines: Lines) -> list[Tile | None]:
    """Return a tile for each score of the evaluations, with the interval of the last one."""
    names = {"eval_reward": "Evaluation"}
    return [
        _change(names.get(name, name), [(n, score.reward) for n, score in scores], scores[-1][1].margin)
        for name, scores in history(lines).items()
    ]


def _change(label: str, values: Sequence[tuple[int, float]], margin: str = "") -> Tile | None:
    """`0.120 -> 0.810`; `margin`: of the last value."""
    if not values:
        return None
    (first, before), (last, after) = values[0], values[-1]
    if first == last:
        return Tile(label, f"{after:.3f}", f"iteration {last}{margin and f',{margin}'}")
    note = f"iteration {first} to {last}{margin and f'; the last{margin}'}"
    return Tile(label, f"{before:.3f} \N{RIGHTWARDS ARROW} {after:.3f}", note)


def _has(line: Mapping[str, Any], *names: str) -> bool:
    return all(is_number(line.get(name)) for name in names)


def nodes_text(count: int) -> str:
    return f"{count} node{'s' if count > 1 else ''}"


def advice(
    root: Path,
    status: status_text.Status,
    lines: Lines,
    weights: Balance | None,
    checkpoint: int | None,
    sound_kl: float = ROUNDING_KL,
) -> list[Advice]:
    """Return the advice on what to do next. `sound_kl`: TrainerSettings.sound_kl of the run."""
    advices: list[Advice] = []
    path = shlex.quote(str(root))
    if status["state"] == "holding":
        advices += _holding(root, status)
    elif status["state"] == "stopped":
        where = f"iteration {status['iteration']}" if status["iteration"] else "the start"
        advices.append(Advice(f"It stopped in {where}. What the nodes said:", f"run logs --log-path {path}"))
        advices.append(_again(status, path))
    elif status["state"] == "finished" and checkpoint:
        model_copy, merge = "A copy of the newest model, verified", ""
        if is_adapter(RunDir(root).checkpoint(checkpoint)):
            model_copy, merge = "The newest adapter, added to its base model", "--merge "
        command = f"run export {merge}--iteration {checkpoint} --log-path {path} -o DIR"
        advices.append(Advice(f"It is done. {model_copy}, for the Hub, a server or another run:", command))
    if weights is not None and weights.worth_it:
        saved = weights.now_s - weights.then_s
        advices.append(
            Advice(
                f"The rollout waits for its slowest node. These weights, from the next start on, would save "
                f"about {duration(saved)} of {duration(weights.now_s)} an iteration:",
                weights.option,
            )
        )
    return advices + _of_learning(lines, sound_kl)


def _of_learning(lines: Lines, sound_kl: float) -> list[Advice]:
    """Return the advice by the means of the last RECENT iterations."""
    advices: list[Advice] = []
    if _recent(lines, "truncated") > MUCH_TRUNCATED:
        text = "of the samples of late are cut before they end; if their answers should be longer, give them"
        advices.append(
            Advice(f"{_recent(lines, 'truncated'):.0%} {text} more tokens:", "rollout.max_tokens=...")
        )
    flat = _recent(lines, "flat_groups")
    if flat > MOST_FLAT and SOLVED < _recent(lines, "reward") <= 1.0:
        text = (
            f"The tasks are solved (reward {_recent(lines, 'reward'):.3f}): stop here, or take harder ones:"
        )
        advices.append(Advice(text, "--tasks ..."))
    elif flat > MOST_FLAT:
        text = "of the tasks of late score the same in all their samples and teach nothing: they are too "
        text += "easy or too hard (run samples --flat). Replace such tasks as they come:"
        advices.append(Advice(f"{flat:.0%} {text}", "rollout.dynamic_sampling=true"))
    if (kl := _recent(lines, "kl_engine")) > sound_kl:
        text = (
            f"Engine and trainer differ by {kl:.2g} (kl_engine): they should compute with the same numbers:"
        )
        advices.append(Advice(text, "trainer.save_dtype=..."))
    entropies = [value for _, value in points(lines, "entropy")]
    if len(entropies) > RECENT and _recent(lines, "entropy") < LOST_ENTROPY * max(entropies[:RECENT]):
        text = "The entropy has fallen to nothing: the samples of a task are nearly the same. Go back to an "
        text += "earlier checkpoint with a lower learning rate, or a KL penalty:"
        advices.append(Advice(text, "trainer.kl=k3 trainer.kl_coefficient=..."))
    return advices


def _recent(lines: Lines, name: str) -> float:
    """Return the mean of the newest RECENT values of a metric; 0 without any."""
    values = [line[name] for line in lines if _has(line, name)][-RECENT:]
    return sum(values) / len(values) if values else 0.0


def _again(status: status_text.Status, path: str) -> Advice:
    """Return the command that resumes a run; nodes of one host were most likely started by `run local`."""
    hosts = [node["host"] for node in status["nodes"]]
    if len(hosts) > 1 and len(set(hosts)) == 1:
        return Advice("To go on from there; settings stay as they were:", f"run local --log-path {path}")
    elsewhere = ", and run --worker RANK on the machine of each other rank" if len(hosts) > 1 else ""
    text = f"To go on from there, on the master's machine{elsewhere}; settings stay as they were:"
    return Advice(text, f"run --master --log-path {path}")


def _holding(root: Path, status: status_text.Status) -> list[Advice]:
    """Return the commands that bring missing nodes back; if there are many, the first ones."""
    command = f"run status --log-path {shlex.quote(str(root))} --watch"
    commands = [line.partition(": ") for line in status_text.repairs(status, root)]
    if not commands:
        return [Advice("It holds until its nodes are there.", command)]
    shown = [
        Advice(f"It holds. {reason[:1].upper()}{reason[1:]}:", repair)
        for reason, _, repair in commands[: status_text.NAMED]
    ]
    more = len(commands) - len(shown)
    return [*shown, Advice(f"It holds for {nodes_text(more)} more:", command)] if more else shown
