"""The state of a run in words, for `run status` and for the live view. Pure."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from coordinator.console.views.crew_status import GOING
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.scores import scores
from coordinator.directory.layout import MASTER
from coordinator.journal.control_characters import one_line
from coordinator.machine.run_command import node_command
from coordinator.node.position import GATHERING, UNITS
from coordinator.protocol.watch import ENDED
from coordinator.settings.number_ranges import iterations_text

NAMED = 3
"""At most this many of the ranks that are waited for are named."""
WAITED_S = 1.0
"""Shorter waits are not mentioned."""
GIB = 2**30

Status = dict[str, Any]
Node = dict[str, Any]


def all_plain(content: Any) -> Any:
    """Apply `one_line` to all strings of a JSON document except its keys."""
    if isinstance(content, str):
        return one_line(content)
    if isinstance(content, dict):
        return {key: all_plain(value) for key, value in cast("dict[str, Any]", content).items()}
    if isinstance(content, list):
        return [all_plain(value) for value in cast("list[Any]", content)]
    return content


def duration(seconds: float, digits: int = 0) -> str:
    """Write a duration: `34 s` (with `digits` after the point, and one more below a second), `12 min`,
    `3.2 h`, `2.1 days`.
    """
    if seconds < 100:
        return f"{seconds:.{digits + 1 if digits and seconds < 1 else digits}f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def is_going(status: Status) -> bool:
    """Return whether the run, or a crew of it, works or waits for nodes."""
    return status["state"] in GOING


def of_crew(crew: Status, lead: str = "") -> str:
    """Say where one of two crews is, and what it waits for; `lead`: who leads it."""
    return f"{crew['crew']} crew{lead}: {_place(crew)}"


def led_by(crew: Status) -> str:
    """`, led by rank 2 (node-c), epoch 3`; nothing before a master was there."""
    master: Node = crew["nodes"][MASTER]
    if master["state"] == "never_seen":
        return ""
    host = f" ({master['host']})" if master["host"] else ""
    return f", led by rank {master['rank']}{host}, cluster epoch {crew['epoch']}"


def _place(crew: Status) -> str:
    if crew["nodes"][MASTER]["state"] == "never_seen":
        return "no master yet"
    if crew["state"] == "finished":
        return f"finished, iteration {crew['iteration']}"
    holding = "holding" if crew["state"] == "holding" else ""
    return ", ".join(filter(None, [holding, where(crew), waiting(crew), space_wait(crew)]))


def where(status: Status) -> str:
    """Say where a crew is: `iteration 5 of 8, train_rollout for 12 s, about 30 s left`, or what its nodes do
    first: `starting the engine`.
    """
    is_within = status["iteration"] <= (status["iterations"] or 0)  # not if the last start asked for fewer
    total = f" of {status['iterations']}" if is_within else ""
    text = f"iteration {status['iteration']}{total}"
    if status["waits_for"]:
        return text if status["iteration"] else "not begun"
    gathers = status["phase"] == GATHERING and status["waiting_for"]  # `waiting` says whom, and how long
    if status["state"] != "finished" and status["phase"] not in {"", ENDED} and not gathers:
        text += f", {status['phase']}"
    if not is_going(status):
        return text
    master = status["nodes"][MASTER]
    text += f" for {duration(master['row_s'])}" if master["row_s"] >= WAITED_S and not gathers else ""
    text += f", {status['work']}" if status["work"] and not space_wait(status) else ""
    left_s = status["left_s"]
    return text if left_s is None or left_s < WAITED_S else f"{text}, about {duration(left_s)} left"


def waiting(crew: Status) -> str:
    """Say what a crew waits for: `waiting for rank 2 (node-c) for 34 s`; an empty text for nothing."""
    ranks: list[int] = crew["waiting_for"]
    if not is_going(crew) or not (ranks or crew["waits_for"]):
        return ""
    hosts = {node["rank"]: node["host"] for node in crew["nodes"]}
    several = len(set(hosts.values())) > 1
    names = [
        f"{rank} ({hosts[rank]})" if several and hosts.get(rank) else f"{rank}" for rank in ranks[:NAMED]
    ]
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    whom = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(names)}{more}" if ranks else crew["waits_for"]
    comma = "" if ranks else ","
    since = f"{comma} for {duration(crew['waiting_s'])}" if crew["waiting_s"] >= WAITED_S else ""
    return f"waiting for {whom}{since}"


def space_wait(crew: Status) -> str:
    """Say that nodes of a crew wait for space on a full disk: `waiting for free space on /shared (0 of 12 MB
    free: free some there; it gives up after 300 s) for 3 min`; an empty text if none does.
    """
    return f"{crew['work']} for {duration(crew['work_s'])}" if is_going(crew) and crew["work_s"] else ""


def missing(status: Status) -> set[str]:
    """Return the names of the nodes that are waited for."""
    crews: list[Status] = status["crews"]
    return {node["name"] for crew in crews for node in crew["nodes"] if node["rank"] in crew["waiting_for"]}


def repairs(status: Status, root: Path) -> list[str]:
    """For each node that the run waits for, say why it did not start, and give the command that brings it
    there. Of a run that has stopped say why, and give the command that goes on.
    """
    lines: list[str] = []
    for crew in status["crews"]:
        if crew["state"] == "stopped":
            master: Node = crew["nodes"][MASTER]
            place = f"on {master['host']}" if master["host"] else "on its machine"
            reason, _, command = crew["ending"].partition(". To ")
            command = command or f"go on, {place}: {node_command(root, master['rank'])}"
            lines += [text for text in (reason, f"to {command}") if text and text not in lines]
        for node in crew["nodes"] if crew["state"] == "holding" else ():
            if node["state"] == "alive" or node["rank"] not in crew["waiting_for"]:
                continue
            lines += [node["error"]] if node.get("error") else []
            place = f"on {node['host']}" if node["host"] else "on its machine"
            was_there = node["state"] != "never_seen"
            purpose = f"to bring {node['name']} back" if was_there else f"to start {node['name']}"
            lines.append(f"{purpose}, {place}: {node_command(root, node['rank'])}")
    return lines


def nodes_of(status: Status) -> list[Node]:
    """Return the nodes; in a finished run without their phases, which say nothing any more."""
    nodes: list[Node] = status["nodes"]
    if status["state"] != "finished":
        return nodes
    return [
        {**node, "phase": "", "tasks_assigned": 0, "samples_assigned": 0, "tokens_per_s": None}
        for node in nodes
    ]


def tasks(node: Node) -> str:
    """Tasks done and assigned: `37/64`. In phases without tasks, parts of the training (`2/3 parts`), or what
    was read of files, whose sum is not always known (`5/8 MB`, `5 MB`).
    """
    done, total = node["tasks_done"], node["tasks_assigned"]
    unit = UNITS.get(node["phase"], "MB")
    if unit == "MB" and done == total:
        return f"{done} MB" if done else ""
    return f"{done}/{total}{'' if unit == 'tasks' else f' {unit}'}" if total else ""


def samples(node: Node) -> str:
    """Samples done and assigned, where each is a completion of the engine: `301/512`."""
    return f"{node['samples_done']}/{node['samples_assigned']}" if node["samples_assigned"] else ""


def tokens(node: Node) -> str:
    """Tokens per second of a node that generates; empty for a lost node, whose last figure is old."""
    return f"{node['tokens_per_s']:,.0f}" if node["tokens_per_s"] and node["state"] == "alive" else ""


def gpus(node: Node) -> str:
    """`8 x 61/80 GiB 97 %`: number of GPUs, and the average of their memory and use."""
    listed: list[dict[str, Any]] = node["gpus"]
    if not listed:
        return ""
    used, total = (sum(gpu.get(key) or 0 for gpu in listed) / len(listed) / GIB for key in _MEMORY)
    busy = [gpu["busy"] for gpu in listed if gpu.get("busy") is not None]
    use = f" {100 * sum(busy) / len(busy):.0f} %" if busy else ""
    return f"{f'{len(listed)} x ' if len(listed) > 1 else ''}{used:.0f}/{total:.0f} GiB{use}"


_MEMORY = ("used_bytes", "total_bytes")


def rewards(line: dict[str, Any] | None) -> str:
    """Give the last metrics: `last finished: iteration 4, reward 0.612, eval_reward 0.900 ± 0.026`."""
    if line is None:
        return ""
    texts = [f"reward {line['reward']:.3f}"] if is_number(line.get("reward")) else []
    texts += [f"{score.name} {score}" for score in scores(line)]
    return ", ".join([f"last finished: iteration {line['iteration']}", *texts])


def render(status: Status, root: Path) -> str:
    """Write the state for a person, one line per node, with the columns that have something to show."""
    status = all_plain(status)
    going = is_going(status)
    nodes = nodes_of(status)
    crews: list[Status] = status["crews"]
    columns = [
        [title, *cells]
        for title, cell in CELLS.items()
        if any(cells := [cell(node) for node in nodes]) and (title != "crew" or len(crews) > 1)
    ]
    epoch = f" (cluster epoch {status['epoch']})"
    places = [", ".join(filter(None, [where(crews[0]), waiting(crews[0]), space_wait(crews[0])]))]
    if len(crews) > 1:
        epoch, places = "", [of_crew(crew, led_by(crew)) for crew in crews]
    elif not going:
        places = [f"it {'ended with' if status['state'] == 'finished' else 'was last in'} {places[0]}"]
        places = places if status["iteration"] else ["it has begun no iteration"]
    last = rewards(status["last_metrics"])
    lines = [
        f"{one_line(str(root))}: run {status['run_id']} is {status['state']}{epoch}",
        *lineage(status.get("forked_from")),
        *places,
        *repairs(status, root),
        "",
        *table(columns, RIGHT),
        *(["", last] if last else []),
    ]
    return "\n".join(lines)


def lineage(forked_from: Mapping[str, Any] | None) -> Iterable[str]:
    """Say which runs a run was forked from, a line each, the parent first."""
    while forked_from:
        rescored = forked_from.get("rescored")
        samples = f", whose samples of {iterations_text(rescored)} have other rewards" if rescored else ""
        yield f"forked from {forked_from['directory']} at iteration {forked_from['iteration']}{samples}"
        forked_from = forked_from.get("forked_from")


def _measured(node: Node) -> str:
    """Give the weight by which the node generates, as measured; the slowest node has 1."""
    weight = node.get("measured_weight")
    return f"{weight:g}" if weight is not None else ""


def _silence(node: Node) -> str:
    return f"{node['silent_s']:.1f} s" if node["state"] in {"alive", "silent"} else ""


def table(columns: Iterable[Sequence[str]], right: Collection[str]) -> list[str]:
    """Return the lines of a table. Each column begins with its title; those that `right` names are aligned
    there.
    """
    padded: list[list[str]] = []
    for cells in columns:
        width, side = max(map(len, cells)), ">" if cells[0] in right else "<"
        padded.append([f"{cell:{side}{width}}" for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]


CELLS: dict[str, Callable[[Node], str]] = {
    "crew": lambda node: node["crew"],
    "rank": lambda node: str(node["rank"]),
    "host": lambda node: node["host"][:20],
    "address": lambda node: node["address"],
    "state": lambda node: node["state"],
    "phase": lambda node: node["phase"],
    "tasks": tasks,
    "samples": samples,
    "tokens/s": tokens,
    "GPUs": gpus,
    "weight": lambda node: f"{node['weight']:g}",
    "measured": _measured,
    "silent": _silence,
}
"""The columns of a table of nodes; the live view has some of them."""
RIGHT = {"rank", "tasks", "samples", "tokens/s", "weight", "measured", "silent"}
"""Columns of numbers."""
