"""Keep what the user's code and ours find when they import: the user's directory comes behind all else."""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PACKAGES = ("rollout", "trainer", "coordinator")
"""Ours. The current directory may have files of these names."""
_searched: list[str] = []
"""Where this process searched for modules before it loaded code of the user's."""


@contextmanager
def searching(directory: Path) -> Iterator[None]:
    """Have imports search a directory right before the current one, and later behind it. Do nothing where
    they search it earlier.
    """
    user_directory, place = working_directory(), str(directory)
    index = sys.path.index(user_directory) if user_directory in sys.path else len(sys.path)
    if place in sys.path[: index + 1]:
        yield
        return
    sys.path.insert(index, place)
    try:
        yield
    finally:
        sys.path = [path for path in search_path() if path != place] + [place]


def search_here() -> None:
    """Have imports search the current directory, behind everything else: a file there may well be named like
    one of our packages, of the standard library, or of what is installed.
    """
    sys.path = search_path()
    for package in PACKAGES:  # what finds an editable installation of them is asked after all of sys.path
        with suppress(ImportError):
            importlib.import_module(package)
    if (user_directory := working_directory()) and user_directory not in sys.path:
        sys.path.append(user_directory)
    if not _searched:
        _searched.extend(sys.path)


def working_directory() -> str:
    """Return the current directory; empty if it was removed, which user code may have gone to."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def search_path() -> list[str]:
    """Return where imports search: where they do now, and last where they did before the user's code was
    loaded, which may have taken that away, or put there what is no path.
    """
    now: Any = sys.path
    paths = [path for path in now if isinstance(path, str)] if isinstance(now, list) else list[str]()
    return list(dict.fromkeys([*paths, *_searched]))


def keep_process() -> None:
    """Keep code of the user's from taking what this program needs in the same process: calls that are as deep
    as before, and files that others can read.
    """
    least, limit = sys.getrecursionlimit(), sys.setrecursionlimit
    sys.setrecursionlimit = lambda new, /: limit(max(new, least))
    mask = os.umask(0o077)
    os.umask(mask)
    os.umask = lambda _new, /: mask


def hidden_file(module_name: str) -> str:
    """Say that imports of a module miss its file in the current directory, and what to do; an empty text if
    they find it, or one that is equal, or if there is none.
    """
    if not module_name:
        return ""
    top, *inner = module_name.split(".")
    spec = None
    with suppress(ValueError, ImportError):
        spec = importlib.util.find_spec(top)
    file = _source_file(Path(top), inner)
    if file is None or spec is None:
        return ""
    places = spec.submodule_search_locations or [str(spec.origin).removesuffix(".py")]
    for other in filter(None, (_source_file(Path(place), inner) for place in places)):
        if other.samefile(file) or other.read_bytes() == file.read_bytes():
            return ""
    kind = "Flagpost's own package" if top in PACKAGES else "Python's own module"
    kind = kind if top in {*PACKAGES, *sys.stdlib_module_names} else f"the installed module at {places[0]}, "
    path = file.absolute()
    return f"{path} is hidden by {kind} {top!r}, which imports find first; give your file another name"


def is_installed(library: str) -> bool:
    """Return whether a library can be imported: a folder of that name in the current directory is none."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def _source_file(top: Path, inner: Sequence[str]) -> Path | None:
    """Return the file of a module in the package, or the module, at `top`; None if there is none."""
    module = top.joinpath(*inner)
    files = (module / "__init__.py", module.with_name(f"{module.name}.py"))
    return next((file for file in files if file.is_file()), None)
