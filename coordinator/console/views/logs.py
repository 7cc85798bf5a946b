"""`run logs`: print the log files of the run directory, and what is added to them.

Each time, directories are listed and files are opened again, since a client may show an open file as it was
before. Only names that a listing has shown are opened.
"""

import os
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from coordinator.console.views.crew_status import crew_dirs
from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.file_names import Beat
from coordinator.directory.layout import RunDir
from coordinator.journal.control_characters import plain
from coordinator.protocol.heartbeat import read_beat
from coordinator.protocol.snapshot import whole_board
from coordinator.settings.tree import SettingsError

POLL_S = 0.5
LIST_POLLS = 4
"""List the directories for new processes and files in every n-th poll."""
BLOCK_BYTES = 64 * 1024
MOST_BYTES = 1 << 26
"""No more of a log's end is read, however long its lines are."""

_NODE = re.compile(r"node\.(\d+)\.log", re.ASCII)
_ENGINE = re.compile(r"engine\.(\d+)\.(\d+)\.log", re.ASCII)
_TRAINER = re.compile(r"trainer\.e(\d+)\.i(\d+)\.(\d+)\.log", re.ASCII)


Node = tuple[RunDir, int]
"""A node: its crew's run directory, and its rank there."""


def show_logs(root: Path, rank: int | None, lines: int, follow: bool) -> None:
    """Print the last `lines` of each log: of all nodes, or of `rank` with its engine and trainer.

    Where two crews have a node on one machine, both are `rank`. `follow`: print new lines too, until
    interrupted. SettingsError if there are no logs.
    """
    Run(root)
    crews = crew_dirs(root)
    nodes = nodes_with_logs(crews)
    ranks = sorted({run_dir.machine(its_rank) for run_dir, its_rank in nodes})
    if not ranks or rank not in {None, *ranks}:
        scope = "" if rank is None else f" of rank {rank}"
        choices = (
            f"there are logs of {', '.join(map(str, ranks))}" if ranks else "no node has written any yet"
        )
        raise SettingsError(f"{root / 'logs'}: no logs{scope}; {choices}")
    printer = LogPrinter(crews, rank, sys.stdout)
    try:
        printed = printer.begin(lines, unfinished_too=not follow)
        if not (printed or follow):
            first, of_it = next(node for node in nodes if rank in {None, node[0].machine(node[1])})
            raise SettingsError(f"{first.logs(of_it)}: no logs there yet; -f waits for them")
        polls = 0
        while follow:
            time.sleep(POLL_S)
            polls += 1
            printer.poll(look=polls % LIST_POLLS == 0)
    except BrokenPipeError:  # `run logs | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def nodes_with_logs(crews: Sequence[RunDir]) -> list[Node]:
    """Return the nodes that have a directory for logs, by rank."""
    names = published.names(crews[0].logs(0).parent)
    nodes = ((run_dir, run_dir.rank_of(name)) for run_dir in crews for name in names)
    return sorted(
        [(run_dir, rank) for run_dir, rank in nodes if rank is not None],
        key=lambda node: (crews.index(node[0]), node[1]),
    )


class LogPrinter:
    """Print logs as `tail` does: a line that names the file comes before output of another file."""

    def __init__(self, crews: Sequence[RunDir], rank: int | None, out: TextIO) -> None:
        """`rank`: print the logs of this node, its engine and its trainer; None: the nodes' own logs of
        all."""
        self._crews = crews
        self._rank = rank
        self._out = out
        self._offsets: dict[Path, int] = {}
        """By file, how many bytes were printed."""
        self._followed: list[Path] = []
        self._last: Path | None = None

    def begin(self, lines: int, unfinished_too: bool = False) -> int:
        """Print the last lines of the newest processes' files; return how many files there are.

        `unfinished_too`: print an unfinished last line too.
        """
        self._followed = self._files()
        for path in self._followed:
            try:
                data, end = tail(path, lines)
            except OSError:  # a short fault of the mount: print what comes later
                continue
            unfinished = b"" if unfinished_too else data[data.rfind(b"\n") + 1 :]
            self._offsets[path] = end - len(unfinished)
            self._print(path, data[: len(data) - len(unfinished)])
        return len(self._followed)

    def poll(self, look: bool) -> None:
        """Print what was added since; `look`: in new files too."""
        if look:
            self._followed += [path for path in self._files() if path not in self._followed]
        for path in self._followed:
            try:
                with open(path, "rb") as file:
                    file.seek(self._offsets.get(path, 0))
                    data = file.read()
            except OSError:  # it may be unreadable for a moment
                continue
            lines = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(lines)
            self._print(path, lines)

    def _print(self, path: Path, data: bytes) -> None:
        if not data:
            return
        if path != self._last:
            between = "\n" if self._last else ""
            self._out.write(f"{between}==> {path.relative_to(self._crews[0].root)} <==\n")
            self._last = path
        text = plain(data.decode("utf-8", "replace"))
        self._out.write(text if text.endswith("\n") else f"{text}\n")
        self._out.flush()

    def _files(self) -> list[Path]:
        nodes = [
            (run_dir, rank)
            for run_dir, rank in nodes_with_logs(self._crews)
            if self._rank in {None, run_dir.machine(rank)}
        ]
        try:
            beats = {run_dir: whole_board(run_dir, published.names).beats for run_dir in self._crews}
            return [path for node in nodes for path in self._files_of(node, beats[node[0]].get(node[1]))]
        except OSError:
            if not self._followed:
                raise
            return []

    def _files_of(self, node: Node, beat: Beat | None) -> list[Path]:
        run_dir, rank = node
        directory = run_dir.logs(rank)
        pid = read_beat(run_dir, beat).get("pid") if beat else None
        names = newest_process(directory, published.names(directory), pid)
        return [directory / name for name in names if self._rank is not None or _NODE.fullmatch(name)]


def newest_process(directory: Path, names: Sequence[str], pid: int | None) -> list[str]:
    """Return the logs of one process: the node's own, and the last ones of its engine and its trainer.

    The process is `pid`, which sends heartbeats; if `pid` has no log, the process whose log was written last.
    In containers every process of a rank may have the same pid: of several engines the last written counts.
    """
    nodes = {number: name for (number,), name in _found(_NODE, names)}
    engines = _found(_ENGINE, names)
    if pid not in {*nodes, *(numbers[0] for numbers, _ in engines)}:
        pid = max(nodes, key=lambda number: _written_s(directory / nodes[number]), default=None)
    engine_logs = sorted(
        (_written_s(directory / name), numbers, name)
        for numbers, name in engines
        if pid in {numbers[0], None}
    )
    trainers = [name for _, name in _found(_TRAINER, names)]
    return [
        *([nodes[pid]] if pid in nodes else []),
        *(name for _, _, name in engine_logs[-1:]),
        *trainers[-1:],
    ]


def _found(pattern: re.Pattern[str], names: Iterable[str]) -> list[tuple[tuple[int, ...], str]]:
    """Return (numbers, name) of each name that fits the pattern, sorted by the numbers."""
    matches = filter(None, map(pattern.fullmatch, names))
    return sorted((tuple(map(int, match.groups())), match[0]) for match in matches)


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def tail(path: Path, lines: int) -> tuple[bytes, int]:
    """Return (the last `lines` of a file, an unfinished one included; its size), read from its end."""
    with open(path, "rb") as file:
        end = start = file.seek(0, os.SEEK_END)
        blocks: list[bytes] = []
        newlines = 0
        while start and newlines <= lines and end - start < MOST_BYTES:
            step = min(BLOCK_BYTES, start)
            start -= step
            file.seek(start)
            blocks.append(file.read(step))
            newlines += blocks[-1].count(b"\n")
    data = b"".join(reversed(blocks))
    pieces = data.split(b"\n")
    return b"\n".join(pieces[-lines - data.endswith(b"\n") :]), end
