"""The live view of a run as lines of a terminal: one line per node, what it waits for, the rewards. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from coordinator.console.views import status_text as words
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.scores import scores
from coordinator.console.views.status_text import Node, Status, duration
from coordinator.journal.control_characters import one_line

QUIET_S = 5.0
"""A shorter silence is not shown: heartbeats and readings are seconds apart."""
HISTORY = 40
"""At most this many rewards are drawn."""
BAR = (6, 30)
"""Least and most cells of a progress bar; with less room there is none."""
HOST_LETTERS = 8
"""A host's name keeps at least this many letters."""
LEAST_ROWS = 4
"""Fewest rows of the table: its head, two nodes, the line about the others. Rewards are left out for them."""
GAP = "  "
STATES = {"alive": "green", "left": "red", "silent": "red", "never_seen": "yellow", "waits": "dim"}
"""Colours of the nodes of a run that goes on. In one that has ended no node needs attention."""


@dataclass(frozen=True)
class TerminalCharacters:
    """The characters that a terminal can show."""

    done: str
    open: str
    levels: str


UNICODE = TerminalCharacters("━", "─", "▁▂▃▄▅▆▇█")
ASCII = TerminalCharacters("#", ".", "_.-=+*#@")


def view(
    status: Status,
    lines: Sequence[dict[str, Any]],
    root: Path,
    *,
    width: int,
    height: int,
    shown: Collection[str] = (),
    note: str = "",
    signs: TerminalCharacters = UNICODE,
) -> list[Text]:
    """Return lines of at most `width` cells and, if that leaves room for a node, at most `height` rows.

    Commands may be wider: a person copies them, and the terminal folds them without a line end. `lines`: of
    metrics.jsonl. `shown`: columns that stay while the run goes on, empty or not (see `filled_columns`).
    `note`: what is wrong with the reading itself.
    """
    status = words.all_plain(status)
    state: str = status["state"]
    head = Text.assemble(
        (one_line(root.name), "bold"),
        ": ",
        (state, "red" if state == "holding" and status["waiting_for"] else ""),
    )
    crews: list[Status] = status["crews"]
    places = [Text(words.of_crew(crew), "red" if crew["state"] == "holding" else "") for crew in crews]
    if len(crews) == 1:
        head.append(f", {words.where(crews[0])}")
        epoch = f", cluster epoch {status['epoch']}"
        head.append(epoch if head.cell_len + len(epoch) <= width else "")
        places = [Text(words.waiting(crews[0]), "red" if state == "holding" else "dim")]
    full = words.space_wait(crews[0]) if len(crews) == 1 else ""
    notes = [Text(one_line(text), "red") for text in (note, full) if text]
    repairs = [Text(command) for command in words.repairs(status, root)][: max(1, height // 8)]
    curve = _rewards(lines, width, signs)
    around = [head, *notes, *places, *repairs]
    room = height - sum(rows_of(line, width) for line in around)
    curve = curve if room - len(curve) >= LEAST_ROWS else []
    room -= len(curve)
    columns = shown if words.is_going(status) else ()
    table = _table(status, width, room, {*columns, *filled_columns(status)}, signs)
    for line in (head, *places, *table, *curve):
        line.truncate(width, overflow="crop")
    return [*around, *table, *curve]


def filled_columns(status: Status) -> set[str]:
    """Return the optional columns for which this run has something to show."""
    nodes = words.nodes_of(status)
    columns = {name for name, cell in OPTIONAL.items() if any(cell(node) for node in nodes)}
    if len({node["host"] for node in nodes} - {""}) > 1:
        columns.add("host")
    return columns | ({"phase"} if any(node["phase"] for node in nodes) else set[str]())


OPTIONAL = {name: words.CELLS[name] for name in ("tasks", "samples", "tokens/s", "GPUs")}


def _state(node: Node, going: bool) -> tuple[str, str]:
    """Return the state of a node in words, and its colour."""
    state: str = node["state"]
    if not going:
        return state.replace("_", " "), ""
    is_silent = state == "silent"
    if state in {"alive", "silent"} and node["silent_s"] >= (words.WAITED_S if is_silent else QUIET_S):
        return f"silent {duration(node['silent_s'])}", STATES["silent"] if is_silent else ""
    if state == "alive" and node["waiting_s"] >= words.WAITED_S:
        return f"waits {duration(node['waiting_s'])}", STATES["waits"]
    return state.replace("_", " "), STATES[state]


def _table(
    status: Status, width: int, room: int, names: Collection[str], signs: TerminalCharacters
) -> list[Text]:
    """Return the head and one line per node; without room for all, first the nodes that need attention."""
    nodes = words.nodes_of(status)
    unshown: list[Node] = []
    if len(nodes) + 1 > room:
        missing = words.missing(status)  # the sort is stable
        nodes = sorted(nodes, key=lambda node: (node["state"] == "alive", node["name"] not in missing))
        keep = max(1, room - 2)  # without the head and the line about the others
        nodes, unshown = nodes[:keep], nodes[keep:]
    states = [_state(node, words.is_going(status)) for node in nodes]
    crews = [Text(node["crew"]) for node in nodes]
    columns: dict[str, list[Text]] = {
        **({"crew": crews} if len(status["crews"]) > 1 else {}),
        "rank": [Text(str(node["rank"])) for node in nodes],
        "host": [Text(node["host"]) for node in nodes],
        "state": [Text(f"{text:<11}", style) for text, style in states],
        "phase": [
            Text(f"{node['phase']:<13}", style if style != "green" else "")
            for node, (_, style) in zip(nodes, states, strict=True)
        ],
        **{name: [Text(cell(node)) for node in nodes] for name, cell in OPTIONAL.items()},
    }
    columns = {
        name: cells
        for name, cells in columns.items()
        if name not in {"host", "phase", *OPTIONAL} or name in names
    }
    spare = width + len(GAP) - sum(_width(name, cells) + len(GAP) for name, cells in columns.items())
    if spare < 0 and "host" in columns:
        most = max(HOST_LETTERS, _width("host", columns["host"]) + spare)
        for cell in columns["host"]:
            cell.truncate(most, overflow="ellipsis" if signs is UNICODE else "crop")
        spare = 0
    if "tasks" in columns and spare > BAR[0]:
        bars = [_bar(node, min(spare - 1, BAR[1]), signs) for node in nodes]
        numbers = _aligned("tasks", columns["tasks"], right=True)
        columns["tasks"] = [
            Text.assemble(bar, " ", number) for bar, number in zip(bars, numbers[1:], strict=True)
        ]
    table = [
        _aligned(name, cells, name in {"rank", "samples", "tokens/s"}) for name, cells in columns.items()
    ]
    rows = [Text(GAP).join(row) for row in zip(*table, strict=True)]
    rows[0].stylize("dim")
    return [*rows, *([_rest(unshown)] if unshown else [])]


def _rest(nodes: Sequence[Node]) -> Text:
    alive = sum(node["state"] == "alive" for node in nodes)
    states = "all alive" if alive == len(nodes) else f"{alive} of them alive"
    return Text(f"... and {len(nodes)} more, {states}", "dim")


def _width(name: str, cells: Sequence[Text]) -> int:
    return max(len(name), *(cell.cell_len for cell in cells))


def _aligned(name: str, cells: Sequence[Text], right: bool = False) -> list[Text]:
    """Pad the title and the cells to one width."""
    width = _width(name, cells)
    padded = [Text(name), *(cell.copy() for cell in cells)]
    for cell in padded:
        cell.align("right" if right else "left", width)
    return padded


def _bar(node: Node, cells: int, signs: TerminalCharacters) -> Text:
    counted = "samples" if node["samples_assigned"] else "tasks"
    total = node[f"{counted}_assigned"]
    if "/" not in words.tasks(node):
        return Text(" " * cells)
    done = min(cells, cells * node[f"{counted}_done"] // total)
    return Text.assemble((signs.done * done, "green"), (signs.open * (cells - done), "dim"))


def _rewards(lines: Sequence[dict[str, Any]], width: int, signs: TerminalCharacters) -> list[Text]:
    """`reward 0.412 ▁▂▄▆█ 0.953   evaluation 0.930 ± 0.022 in iteration 9`; nothing before a reward."""
    rewards = [line["reward"] for line in lines if is_number(line.get("reward"))]
    last = next((line for line in reversed(lines) if scores(line)), None)
    text = Text()
    if last is not None:
        names = {"eval_reward": "evaluation"}
        texts = [f"{names.get(score.name, score.name)} {score}" for score in scores(last)]
        text.append(f"{', '.join(texts)} in iteration {last['iteration']}")
    if rewards:
        room = width - text.cell_len - len("reward -0.000  -0.000    ")
        levels = sparkline(rewards[-max(1, min(HISTORY, room)) :], signs.levels)
        drawn = rewards[-len(levels) :]
        first = f"{drawn[0]:.3f} " if len(drawn) > 1 else ""
        text = Text.assemble(f"reward {first}", (levels, "green"), f" {drawn[-1]:.3f}   ", text)
    return [Text(), text] if text else []


def sparkline(values: Sequence[float], levels: str) -> str:
    """Draw one character per value, scaled from the lowest to the highest; equal values at half height."""
    low, high = min(values), max(values)
    if high == low:
        return levels[len(levels) // 2 - 1] * len(values)
    top = len(levels) - 1
    return "".join(levels[round((value - low) / (high - low) * top)] for value in values)


def rows_of(line: Text, width: int) -> int:
    """Count the rows that a line takes in a terminal of this width."""
    return max(1, -(-line.cell_len // width))
