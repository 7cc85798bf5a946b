"""The commands `run` and `flagpost`, as pip installs them.

A module beside the packages: a user's file of the same name as one of them may be found in its place. That is
refused here, before any of them is imported.
"""

import importlib.util
import sys
from pathlib import Path

FILES = {"coordinator": "cli.py", "rollout": "slots.py", "trainer": "algorithms.py"}
"""A file of each of our packages, by which it is known: in a checkout they do not lie beside this module."""


def main() -> int:
    """Call the command line; return its exit code."""
    if hidden := _hidden_package():
        print(f"run: {hidden}", file=sys.stderr)
        return 2
    from coordinator import cli

    return cli.main()


def _hidden_package() -> str:
    """Say which file imports find in place of one of our packages, and what to do; empty if none is."""
    for package, file in FILES.items():
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None and Path(spec.origin).with_name(file).exists():
            continue
        place = (spec and (spec.origin or next(iter(spec.submodule_search_locations or ())))) or "nothing"
        return (
            f"imports of {package!r} find {place}, which is not ours: take {Path(place).parent} off "
            "PYTHONPATH (an empty part of it is the current directory), or give that file another name"
        )
    return ""
