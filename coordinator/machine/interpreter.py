"""Another Python for this node's children: whether it is there, and can take this program's place."""

import functools
import os
import subprocess
from collections.abc import Mapping
from importlib.metadata import version

ANSWER_S = 60.0
"""How long it may take to answer: its files may be on a slow mount."""
_ASKED = "import rollout, trainer; from importlib.metadata import version; print(version('flagpost'))"


def lacks_flagpost(python: str, env: Mapping[str, str]) -> str:
    """Say why `python` cannot run an engine or a trainer here, and what to do; an empty text if it can.

    `env`: variables that it is given beside those of this process.
    """
    return _lacks(python, tuple(sorted(env.items())))


@functools.cache
def _lacks(python: str, env: tuple[tuple[str, str], ...]) -> str:
    command, environment = [python, "-P", "-c", _ASKED], {**os.environ, **dict(env)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        return "there is no such program; install it there, or name another one"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run ({error})"
    answer, needed = done.stdout.decode(errors="replace").strip(), version("flagpost")
    if done.returncode:
        why = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit {done.returncode}"
        return f"flagpost is not installed for it ({why}); install flagpost {needed}"
    return (
        "" if answer == needed else f"it has flagpost {answer}, the node {needed}; install the same for both"
    )
