"""Doctors of several nodes for tests: processes of `run doctor`, ended by pid."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.console.doctor import run
from coordinator.start.rank import RANK_VARIABLES
from tests.commands import start_forked

REPOSITORY = Path(__file__).parents[2]
PATIENCE_S = 200.0
IMPORTED = (run,)
"""What a doctor imports, so that its fork need not."""


class Doctors:
    """The doctors of several nodes, started one by one."""

    def __init__(self, nodes: int, patience_s: float = PATIENCE_S) -> None:
        self.nodes = nodes
        self._patience_s = patience_s
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(
        self,
        rank: int,
        root: Path,
        *arguments: str,
        prefix: Sequence[str] = (),
        patch: str = "",
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Start the doctor of `rank`; rank 0 reports in JSON. `patch`: Python that runs before it."""
        words = ["doctor", "--log-path", str(root), *arguments]
        if self.nodes > 1:
            words += ["--peers", str(self.nodes)]
        words += ["--worker", str(rank)] if rank and not environment else ["--json"]
        kept = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        if prefix or patch:
            script = f"import sys\n{patch}\nfrom coordinator.cli import main\nsys.exit(main())"
            self.started[rank] = subprocess.Popen(
                [*prefix, sys.executable, "-c", script, *words],
                cwd=REPOSITORY,
                env=kept | environment,
                start_new_session=True,
                **streams,
            )
        else:
            words = ["coordinator.cli", *words]
            self.started[rank] = start_forked(words, REPOSITORY, kept | environment, **streams)
        return self.started[rank]

    def report(self) -> dict[str, dict[str, Any]]:
        """What rank 0 reports, by check; its exit code agrees with it."""
        out, said = self.end(0)
        try:
            report = json.loads(out)
        except ValueError:
            raise AssertionError(f"no report: {out}{said}") from None
        assert self.started[0].returncode == (0 if report["fit"] else 1), report
        return {check["check"]: check for check in report["checks"]}

    def end(self, rank: int) -> tuple[str, str]:
        """Wait for a doctor: its stdout and stderr."""
        return self.started[rank].communicate(timeout=self._patience_s)

    def close(self) -> None:
        """Kill those that are left."""
        for process in self.started.values():
            if process.poll() is None:
                process.kill()
            process.communicate()
