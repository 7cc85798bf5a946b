"""Load the user's own functions, which settings name as `module:function`, and know their source."""

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.origin import Code


class PluginError(ValueError):
    """A `module:function` cannot be loaded; the message says why."""


def load_function(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names. Searches the current directory too. Raises
    PluginError.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PluginError(f"{name!r} is not of the form module:function")
    if os.getcwd() not in sys.path:  # an installed command does not search there; `python -m` does
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything when it is imported
        raise PluginError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__name__}, no function"
        raise PluginError(f"{name!r}: {found} in {getattr(module, '__file__', module_name)}")
    return function


def code_of(name: str, function: Any) -> Code:
    """Return what lies behind the name of a reward or an environment, which is loaded.

    The digest is of the file of the module that `name` names, of the file that defines the function (maybe
    another one), and of the version of the library that a built-in reward asks (`function.library`). It is
    the same on every machine that has the same files. Modules that these files import are not covered.
    """
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    named = {name.partition(":")[0]} if ":" in name else set[str]()
    library = getattr(function, "library", "")
    sources = [_source(module) for module in sorted({*named, getattr(function, "__module__", None) or ""})]
    return Code(name, hashlib.sha256("".join([*sources, _version(library)]).encode()).hexdigest()[:16])


@functools.cache  # the file may change while the process lives, but not what it has loaded
def _source(module: str) -> str:
    """Return the digest of a loaded module's file; empty for a module that has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    with suppress(OSError):
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    return ""


def _version(library: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library) if library else ""
    return ""
