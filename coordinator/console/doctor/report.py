"""The report of `run doctor`: print each row as soon as it is known."""

import contextlib
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Self

from coordinator.console.doctor.checks import Check, failed
from coordinator.protocol.exits import Exit
from rollout.storage import files

HANG_S = 150.0
"""The doctor makes a call on the shared directory more often than this; after it, one call hangs."""
COLORS = {"ok": 32, "slow": 33, "warn": 33, "fail": 31}

Checks = Generator[tuple[str, Callable[[], list[Check]]]]
"""Each check's name and function."""


class Report:
    """Rows of checks. While it is open, a thread ends the process if the shared directory stops answering."""

    def __init__(self, root: Path, nodes: int, *, prints: bool, as_json: bool = False) -> None:
        self.checks: list[Check] = []
        self.current = "directory"
        """The check in progress."""
        self._root = root
        self._nodes = nodes
        self._prints = prints and not as_json
        self._json = prints and as_json
        self._ended = False
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._guard, name="doctor", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    @property
    def fit(self) -> bool:
        """Whether no check has failed."""
        return all(check.verdict != "fail" for check in self.checks)

    def take(self, checks: Checks) -> None:
        """Do each check and add its rows; a check that cannot be done has failed. What `checks` holds open,
        such as a process that writes in the directory, is closed even if a signal ends a check.
        """
        with contextlib.closing(checks):
            for self.current, check in checks:
                try:
                    rows = check()
                except OSError as error:
                    rows = [failed(self.current, error)]
                for row in rows:
                    self.add(row)

    def add(self, check: Check) -> None:
        """Add a row, and print it."""
        if self._prints and not self.checks:
            self._print_row("check", "figure", "verdict", "what to do")
        self.checks.append(check)
        if self._prints:
            self._print_row(check.name, check.figure, check.verdict, check.advice)

    def say(self, *lines: str) -> None:
        """Print lines that are not rows to stderr: what the reader waits for."""
        if self._prints or self._json:
            sys.stdout.flush()
            print(*lines, sep="\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Print the summary, once."""
        if self._ended:
            return
        self._ended = True
        if self._json:
            print(json.dumps(self._to_dict()), flush=True)
        if self._prints:
            print(f"\n{self._summary()}", flush=True)

    def _summary(self) -> str:
        bad = [check.name for check in self.checks if check.verdict == "fail"]
        poor = [check.name for check in self.checks if check.verdict in {"slow", "warn"}]
        if bad:
            return f"{self._root} cannot carry a run: {', '.join(bad)}"
        return f"{self._root} can carry a run" + (f"; look at: {', '.join(poor)}" if poor else "")

    def _to_dict(self) -> dict[str, Any]:
        rows = [check.to_dict() for check in self.checks]
        return {"log_path": str(self._root), "nodes": self._nodes, "fit": self.fit, "checks": rows}

    def _print_row(self, name: str, figure: str, verdict: str, advice: str) -> None:
        columns = shutil.get_terminal_size((120, 24)).columns
        wide = max(30, min(58, columns - 62))
        figures = textwrap.wrap(figure, wide)
        advices = textwrap.wrap(advice, max(24, columns - 28 - wide))
        names = textwrap.wrap(name, 15)
        for i in range(max(len(names), len(figures), len(advices))):
            cells = [column[i] if i < len(column) else "" for column in (names, figures, [verdict], advices)]
            shown = f"{cells[0]:<15}  {cells[1]:<{wide}}  {_colored(f'{cells[2]:<7}', verdict)}  {cells[3]}"
            print(shown.rstrip(), flush=True)

    def _guard(self) -> None:
        """End the process, with a row, when a call hangs: the thread that made the call cannot."""
        calls, since_s = 0, time.monotonic()
        while not self._closed.wait(0.5):
            if (now := sum(files.operations.values())) != calls:
                calls, since_s = now, time.monotonic()
            elif time.monotonic() - since_s > HANG_S:
                figure = f"no answer from {self._root} for {HANG_S:.0f} s"
                self.add(Check(self.current, figure, "fail", "the mount hangs: see its server, and dmesg"))
                self.end()
                if not (self._prints or self._json):
                    print(f"run: {figure}: the mount hangs", file=sys.stderr, flush=True)
                os._exit(Exit.FAILED)


def _colored(text: str, verdict: str) -> str:
    if verdict not in COLORS or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{COLORS[verdict]}m{text}\x1b[0m"
