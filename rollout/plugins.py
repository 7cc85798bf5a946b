"""Load the user's functions, named as `module:function` or `file.py:function`, and know how to call them."""

import difflib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rollout.module_search import hidden_file, search_here, search_path, searching, working_directory

SUFFIX = ".py"
_IMPORTING = (__file__, importlib.__file__)
_MOST_NAMED = 8
"""So many functions of a module are named to somebody who has named none of them."""


class PluginError(ValueError):
    """A `module:function` cannot be loaded; the message says why."""


def load_function(name: str, *, make: bool = True, only_async: bool = False) -> Callable[..., Any]:
    """Return the function that `module:function` names, or an object of the class that it names, if one is
    called like a function; with `make=False` the class itself. Searches the current directory too; in place
    of a module a file can stand (`rewards/mine.py:score`), whose directory is searched as well. Raises
    PluginError.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PluginError(f"{name!r} is not of the form module:function")
    file = Path(module_name).absolute() if module_name.endswith(SUFFIX) else None
    module_name = module_of(name)
    search_here()
    if (file is None or str(file.parent) == working_directory()) and (hidden := hidden_file(module_name)):
        raise PluginError(hidden)
    try:
        with searching(file.parent) if file else nullcontext():
            module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything when it is imported
        sys.path = search_path()
        if file and not file.is_file():
            raise PluginError(f"{file}: no such file") from error
        error_text = " ".join(str(error).split())
        searched = (
            f"looked for in {working_directory() or 'no directory'}, on PYTHONPATH and in what is installed"
        )
        # The module that lacks a name: of `from queue import Tasks`, of `import queue; queue.Tasks`
        lacking = getattr(error, "name", None) if isinstance(error, ImportError) else None
        lacking = lacking or getattr(getattr(error, "obj", None), "__name__", "")
        is_said = isinstance(error, SyntaxError)
        is_own = not file and f"{module_name}.".startswith(f"{lacking}.")  # the user's module itself
        if isinstance(error, ModuleNotFoundError) and not is_own and not hidden_file(str(lacking)):
            error_text += (
                f"; install it for this Python on every node, or keep the function in a file that does not "
                f"import {lacking}"
            )
        if is_own and (near := difflib.get_close_matches(module_name, _modules_here(), n=1, cutoff=0.8)):
            searched += f"; did you mean {near[0]}:{function_name}?"
        where = hidden_file(str(lacking)) or _raised_at(error) or ("" if is_said else searched)
        raise PluginError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error_text}"
            f"{where and f' ({where})'}"
        ) from error
    sys.path = search_path()  # what this program imports later must be found too
    imported = getattr(module, "__file__", None) or module_name
    if file and os.path.realpath(imported) != os.path.realpath(file):
        if not file.is_file():
            raise PluginError(f"{file}: no such file")
        raise PluginError(f"{file} is hidden by {imported}; give your file another name")
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "no such name" if function is None else f"of type {type(function).__name__}, not a function"
        raise PluginError(
            f"{title_of(name)!r}: {problem} in {imported}"
            f"{_named_like(function_name, module, only_async=only_async, classes=not make)}"
        )
    if (
        not make
        or not inspect.isclass(function)
        or not any("__call__" in vars(base) for base in function.__mro__)
    ):
        return function
    try:
        instance: Any = function()
        return instance
    except Exception as error:  # as of the module
        error_text = " ".join(str(error).split())
        raise PluginError(
            f"class {name!r} cannot be made without arguments: {type(error).__name__}: {error_text}; make an "
            f"object of it in {module_name}, and name that"
        ) from error


def _named_like(typed: str, module: Any, *, only_async: bool, classes: bool) -> str:
    """Say which function of a module (or class, with `classes`) is spelled most like what was typed, else
    which ones it has.
    """
    names = [
        name for name, value in vars(module).items()
        if (inspect.isroutine(value) or (classes and inspect.isclass(value)))
        and value.__module__ == module.__name__ and not name.startswith("_")
        and (is_async(value) or not only_async)
    ]  # fmt: skip
    if near := difflib.get_close_matches(typed, names, n=1):
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(names[:_MOST_NAMED])}" if names else ""


def _raised_at(error: Exception) -> str:
    """Return the line of the user's module that has raised; an empty text if none was reached."""
    lines = (frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _IMPORTING)
    first = next((frame for frame in lines if not frame.filename.startswith("<frozen ")), None)
    return f"{first.filename}, line {first.lineno}" if first else ""


def module_of(name: str) -> str:
    """Return the module of `module:function`, or of `file.py:function`."""
    module = name.partition(":")[0]
    return Path(module).stem if module.endswith(SUFFIX) else module


def with_whole_path(name: str) -> str:
    """Return `file.py:function` with the whole path of a file that is here: a node may be started in another
    directory. Any other name stays as it is.
    """
    file, sign, function = name.partition(":")
    is_here = sign and file.endswith(SUFFIX) and Path(file).is_file()
    return f"{Path(file).absolute()}:{function}" if is_here else name


def is_module_here(name: str) -> bool:
    """Return whether a file of the current directory is the module of that name."""
    return Path(f"{name}{SUFFIX}").is_file()


def _modules_here() -> list[str]:
    """Return the modules of the current directory."""
    return [path.stem for path in Path().glob(f"*{SUFFIX}")]


def title_of(name: str) -> str:
    """Return the short name of `DIR/file.py:function`, file.py:function; any other name stays as it is."""
    file, sign, function = name.partition(":")
    return f"{Path(file).name}:{function}" if sign and file.endswith(SUFFIX) else name


def check_call(function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise PluginError if `function` certainly cannot be called with positional arguments of these names,
    or yields where it should return. What cannot be known passes.
    """
    try:  # the wrapper of a decorator may take others than the function in it
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # it is written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise PluginError(
            f"it takes {signature}, but is called with ({', '.join(arguments)}); give it these parameters"
        ) from None
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError("it yields; it must return its result")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that is called like one, is `async def`."""
    return any(map(inspect.iscoroutinefunction, (function, _called(function))))


def may_be_async(function: Callable[..., Any]) -> bool:
    """Return whether `function`, or one that it wraps, is async, or may be: it takes `*args`, as wrappers do,
    or is written in C.
    """
    codes = [(layer, getattr(_called(layer), "__code__", None)) for layer in layers(function)]
    return any(code is None or code.co_flags & inspect.CO_VARARGS or is_async(layer) for layer, code in codes)


def _called(function: Any) -> Any:
    """Return the function that runs when `function` is called."""
    return function if inspect.isroutine(function) else type(function).__call__


def layers(function: Any) -> Iterator[Any]:
    """Yield the function and those that it wraps, the innermost last; a `partial` is none of them."""
    function_ids: set[int] = set()
    while function is not None and id(function) not in function_ids:
        function_ids.add(id(function))
        if isinstance(function, functools.partial):
            function = function.func
            continue
        yield function
        function = getattr(function, "__wrapped__", None)
