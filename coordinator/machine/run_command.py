"""Commands that call `run`. Asked as another process of this machine, it refuses in its own words."""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordinator.settings.tree import SettingsError

PATIENCE_S = 120.0
"""How long an answer may take; reading the settings takes half a second."""

STARTED_BY = "FLAGPOST_STARTED_BY"
"""The environment variable in which `run local` tells its nodes the command that starts them all."""


def run_command(*words: str) -> list[str]:
    """Return the command that calls this installation's `run` with these words."""
    return [sys.executable, "-P", "-m", "coordinator.cli", *words]


def node_command(root: Path, machine: int) -> str:
    """Return what a person types to start the node of a machine."""
    role = f"--worker {machine}" if machine else "--master"
    return f"run {role} --log-path {shlex.quote(str(root))}"


def ask_run(
    words: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = PATIENCE_S,
) -> subprocess.CompletedProcess[str]:
    """Call `run` with these words and return how it has ended, with its output; TimeoutExpired."""
    return subprocess.run(
        run_command(*words),
        cwd=cwd,
        env=dict(environment if environment is not None else os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        check=False,
    )


def settings_of(words: Sequence[str], cwd: Path | None = None, option: str = "--settings-only") -> str:
    """Return the settings that `run WORDS` would go by; SettingsError with the line by which it refuses the
    words. With the option --dry-run it looks at what they name, too, and loads code that they name.
    """
    try:
        ended = ask_run([*words, option], cwd)
    except subprocess.TimeoutExpired:
        raise SettingsError(f"run {option} has not answered within {PATIENCE_S:.0f} s; try again") from None
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines() or [f"run {option} failed"]
        raise SettingsError(lines[-1].removeprefix("run: "))
    return ended.stdout
