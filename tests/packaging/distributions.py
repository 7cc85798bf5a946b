"""Wheel and sdist of this checkout, and environments that have nothing of their own but one of them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

from tests.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
ANYWHERE = Marker("python_version >= '3'")
PACKAGES = ("coordinator", "rollout", "trainer")
MODULES = ("flagpost_command",)
"""Modules of scripts/ that stand beside the packages when they are installed."""
NOT_SOURCES = (
    *(".git", ".venv*", "runs", "build", "dist", "*.egg-info"),
    *("__pycache__", ".pytest_cache", ".ruff_cache", ".hypothesis"),
)
"""What a checkout holds that git does not."""


@dataclass(frozen=True)
class Distributions:
    """Files that `python -m build` made."""

    sdist: Path
    wheel: Path
    """Made from the sdist."""
    wheel_of_checkout: Path


def copy_of_checkout(destination: Path) -> Path:
    """The sources alone: a build writes beside them, and reads what an earlier build has left there."""
    return shutil.copytree(REPOSITORY, destination, ignore=shutil.ignore_patterns(*NOT_SOURCES))


def build(sources: Path, destination: Path) -> Distributions:
    """Build all three without the network: setuptools is that of the tests."""
    command = [sys.executable, "-m", "build", "--no-isolation"]
    _run([*command, "--outdir", str(destination / "both"), str(sources)])
    _run([*command, "--wheel", "--outdir", str(destination / "direct"), str(sources)])
    (sdist,) = (destination / "both").glob("*.tar.gz")
    (wheel,) = (destination / "both").glob("*.whl")
    (direct,) = (destination / "direct").glob("*.whl")
    return Distributions(sdist, wheel, direct)


def environment(directory: Path, *, with_pip: bool = False) -> Path:
    """The interpreter of a new environment that borrows libraries of the tests: those that flagpost needs."""
    venv.create(directory, with_pip=with_pip, symlinks=True)
    python = directory / "bin" / "python"
    link_needed_libraries(python)
    return python


def borrow_libraries(python: Path) -> None:
    """Let an environment see all libraries of the tests, behind its own.

    The line in a .pth file adds their directory, but not what .pth files there would add: so the checkout,
    which the tests have installed in place, is not seen.
    """
    (_site_packages(python) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")


def _site_packages(python: Path) -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return python.parents[1] / "lib" / version / "site-packages"


def link_needed_libraries(python: Path) -> None:
    """Link what flagpost needs without its extras into an environment, and nothing else: a library that only
    an extra brings is missing there, as for a user.
    """
    own = _site_packages(python)
    names = {"flagpost"}
    waiting = list(PROJECT["dependencies"])
    while waiting:
        requirement = Requirement(waiting.pop())
        if requirement.name.lower() in names or not (requirement.marker or ANYWHERE).evaluate({"extra": ""}):
            continue
        names.add(requirement.name.lower())
        library = metadata.distribution(requirement.name)
        waiting += library.requires or ()
        tops = {path.parts[0] for path in library.files or () if path.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            source = Path(sysconfig.get_path("purelib")) / top
            if source.exists() and not (own / top).exists():
                (own / top).symlink_to(source)


def install(python: Path, wheel: Path) -> None:
    """Install a wheel, and nothing else."""
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    _run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)])


def bare_variables(home: Path) -> dict[str, str]:
    """The environment of a user who never saw the checkout."""
    ours = {"PYTHONPATH", "RUN_LOG_PATH", "RANK", "NODE_RANK", "SLURM_NODEID", "MASTER_ADDR"}
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "OMP_NUM_THREADS": "1"}


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
