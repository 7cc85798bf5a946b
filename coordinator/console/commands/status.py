"""`run status`: print the state of a run once, or show it as it changes."""

import json
import sys
import time
from pathlib import Path

from coordinator.console.views.run import Run
from coordinator.console.views.status_text import render
from coordinator.directory.layout import RunDir
from coordinator.start.run_json import has_run
from coordinator.start.wait_for_master import what_is_there

AGAIN_S = 2.0
"""How often `--watch` prints where there is no terminal."""


def show_status(root: Path, as_json: bool, watch: bool) -> None:
    """Print the state of the run at `root`; `watch`: until interrupted, live in a terminal, and from its
    beginning on.
    """
    if watch and not root.is_file() and not has_run(root):
        present = what_is_there(RunDir(root))
        print(f"waiting for a run at {root}{present}; Ctrl+C to stop", file=sys.stderr, flush=True)
        while not has_run(root):
            time.sleep(AGAIN_S)
    run = Run(root)
    if watch and not as_json and sys.stdout.isatty():
        from coordinator.console.views.terminal import show_until_interrupted  # it takes rich

        show_until_interrupted(root)
    while True:
        status = run.status()
        print(json.dumps(status) if as_json else render(status, root), flush=True)
        if not watch:
            return
        time.sleep(AGAIN_S)
