"""Load the user's own functions, which settings name as `module:function`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


class PluginError(ValueError):
    """A `module:function` cannot be loaded; the message says why."""


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names. Searches the current directory too. Raises PluginError."""
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
