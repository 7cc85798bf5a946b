"""`run status`: the state of a run, printed once or shown as it changes."""

import json
import sys
import time
from pathlib import Path
from typing import Any

from coordinator.run import Run
from coordinator.status_text import render

AGAIN_S = 2.0
"""How often `--watch` prints where there is no terminal."""


def read_status(root: Path) -> dict[str, Any]:
    """The state of the run at `root`, as INTERFACE `run status --json`; SettingsError if there is none."""
    return Run(root).status()


def show_status(root: Path, as_json: bool, watch: bool) -> None:
    """Print the state of the run at `root`; `watch`: until interrupted, live in a terminal."""
    run = Run(root)
    if watch and not as_json and sys.stdout.isatty():
        from coordinator.live import show_until_interrupted  # it takes rich

        show_until_interrupted(root)
    while True:
        status = run.status()
        print(json.dumps(status) if as_json else render(status, root), flush=True)
        if not watch:
            return
        time.sleep(AGAIN_S)
