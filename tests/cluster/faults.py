"""What fault tests aim at (a node's children), and what they judge by (the groups on the disk)."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name, parse_part_name
from coordinator.directory.layout import Kind, RunDir
from rollout.part_file import decode_part
from trainer.job import forks

AGENT = "-m trainer.job.agent "
TRAINER_RANK = "-m trainer "
ENGINE = "-m rollout.engines.embedded.server "
COLLECTOR = "-m coordinator.collector.process "
"""What is in the command lines of a node's children, and in no other's but an agent's and its launcher's."""


def children(node: int, kind: str) -> list[psutil.Process]:
    """The processes of one kind below the node with this pid, or their forks; none while one is ending."""
    try:
        below = psutil.Process(node).children(recursive=True)
        commands = {process: " ".join(process.cmdline()) + " " for process in below}
        clients = {process: command for process, command in commands.items() if forks.__file__ in command}
        program = AGENT if kind == TRAINER_RANK else kind
        found = [
            process for client, command in clients.items() if program in command for process in _forks(client)
        ]
        if found and kind == TRAINER_RANK:
            return [rank for agent in found for rank in agent.children()]
        if found:
            return found
    except psutil.NoSuchProcess:
        return []
    return [
        process
        for process, command in commands.items()
        if kind in command
        and process not in clients
        and not command.startswith("/bin/sh")
        and (kind == AGENT or AGENT not in command)
    ]


def _forks(client: psutil.Process) -> list[psutil.Process]:
    """The fork that a client of `trainer.job.forks` stands for, once it has named its group."""
    words = client.cmdline()
    groups = Path(words[words.index(forks.__file__) + 2])
    return [psutil.Process(int(name)) for name in os.listdir(groups) if name != str(client.pid)]


def has_ended(process: psutil.Process) -> bool:
    """Whether a process is gone, or a zombie: where process 1 reaps nobody, orphans stay that for good."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Place(NamedTuple):
    """A slot of an iteration."""

    kind: Kind
    iteration: int
    slot: int


def durable_parts(run_dir: RunDir, since: int = 0) -> dict[Path, bytes]:
    """Every part of iteration `since` and later ones that lies in the run directory, with its content."""
    return {
        path: path.read_bytes()
        for _, iteration, directory in _iterations(run_dir)
        if iteration >= since
        for path in _parts(directory)
    }


def lost_groups(run_dir: RunDir, kept: dict[Path, bytes]) -> list[Place]:
    """Groups that lay in the parts `kept`, and are not those that count now.

    They count if the manifest takes their slot from one of these parts, which lies there unchanged. A part of
    another policy than the manifest's never counted.
    """
    whole = {path for path, data in kept.items() if path.is_file() and path.read_bytes() == data}
    lost: list[Place] = []
    for kind, iteration, directory in _iterations(run_dir):
        manifest = published.read_manifest(run_dir, kind, iteration) or {"parts": [], "policy": None}
        counting = {
            slot
            for entry in manifest["parts"]
            if directory / entry["file"] in whole
            for slot in entry["slots"]
        }
        for data in (data for path, data in kept.items() if path.parent == directory):
            header, groups = decode_part(data)
            if manifest["policy"] in {None, header.policy}:
                slots = {group.slot for group in groups} - counting
                lost += [Place(kind, iteration, slot) for slot in sorted(slots)]
    return lost


def repeated_groups(run_dir: RunDir) -> list[Place]:
    """Groups that lie in several parts of one policy: finished, and yet generated again."""
    found: Counter[tuple[Place, str]] = Counter()
    for kind, iteration, directory in _iterations(run_dir):
        for path in _parts(directory):
            header, groups = decode_part(path.read_bytes())
            found.update((Place(kind, iteration, group.slot), header.policy) for group in groups)
    return [place for (place, _policy), times in found.items() if times > 1]


def unsound_manifests(run_dir: RunDir) -> list[Path]:
    """Manifests that do not name every slot exactly once."""
    unsound: list[Path] = []
    for kind, iteration, _directory in _iterations(run_dir):
        manifest = published.read_manifest(run_dir, kind, iteration)
        if manifest is not None:
            slots = sorted(slot for entry in manifest["parts"] for slot in entry["slots"])
            if slots != list(range(manifest["slots"])):
                unsound.append(run_dir.manifest(kind, iteration))
    return unsound


def taken_over(run_dir: RunDir, rank: int) -> dict[int, int]:
    """How many groups of each iteration a node has begun ahead and goes on with in its row."""
    events = (run_dir.root / "events" / f"rank_{rank:04d}.jsonl").read_text().splitlines()
    said = [event for event in map(json.loads, filter(None, events)) if event["what"] == "ahead"]
    return {event["it"]: event["groups"] for event in said}


def _iterations(run_dir: RunDir) -> Iterator[tuple[Kind, int, Path]]:
    """Every directory of trajectories: its kind, its iteration, its path."""
    kinds: tuple[Kind, ...] = ("train", "eval")
    for kind in kinds:
        for name in published.names(run_dir.trajectories(kind, 0).parent):
            iteration = parse_iteration_name(name)
            if iteration is not None:
                yield kind, iteration, run_dir.trajectories(kind, iteration)


def _parts(directory: Path) -> list[Path]:
    return [directory / name for name in published.names(directory) if parse_part_name(name)]
