"""The program that a process of `rollout.processes.pool` runs.

    python -P pool_main.py MODULE:MAKER        stdin: the socket to the node

A first line has the parameters of MAKER and what holds for the process; the answer says whether MAKER worked.
Then MAKER's function is called with the array in each line that arrives. The answer is a line with its
`value`, or with the `error` that it raised. The process exits at end of file.
"""

import contextlib
import importlib
import logging
import numbers
import os
import resource
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from decimal import Decimal
from json import dumps, loads  # code of the user's may set others in the module
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[1]
"""Whose frames in a traceback say nothing of the user's code."""
MEMORY_BYTES = 4 * 2**30
"""Limit of a library's address space: a completion that needs more makes it raise MemoryError."""


def main(maker: str) -> None:
    """Serve the calls of one function until the end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rwb") as lines:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that libraries do not read from the socket
        pid = os.getpid()

        def answer(function: Callable[..., Any], arguments: list[Any]) -> None:
            try:
                text = dumps({"value": function(*arguments)}, default=_as_number)
            except BaseException as error:  # the caller decides what it means
                text = dumps(_failure(error))
            if os.getpid() != pid:  # the function has forked: one answer is enough
                os._exit(0)
            lines.write(text.encode() + b"\n")
            lines.flush()

        functions: list[Callable[..., Any]] = []
        first = loads(lines.readline())
        _search(first["path"])
        if first["is_library"]:
            _restrict()
        else:
            importlib.import_module("rollout.module_search").keep_process()
        answer(lambda: functions.append(_make(maker, first["parameters"])), [])
        for line in lines if functions else ():
            answer(functions[0], loads(line))


def _search(path: list[str]) -> None:
    """Search for modules where the node does: our packages come first, as for the node
    (rollout.module_search.search_here).
    """
    sys.path[:] = [str(Path(__file__).parents[2]), *path]
    for package in ("rollout", "trainer", "coordinator"):
        importlib.import_module(package)
    sys.path[:] = path


def _restrict() -> None:
    """Keep a library from filling the memory, and from saying anything."""
    logging.disable()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already; macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _make(maker: str, parameters: list[Any]) -> Callable[..., Any]:
    module, _, name = maker.partition(":")
    with importlib.import_module("rollout.processes.imports").importing():
        make = getattr(importlib.import_module(module), name)
    return make(*parameters)


def _as_number(value: Any) -> float:
    """Return a value that JSON has no word for as a number: one of numpy, or a tensor that holds one."""
    is_real = isinstance(value, numbers.Real | Decimal) or type(value).__name__ in ("bool", "bool_")
    if is_real or getattr(value, "ndim", None) == 0:  # numpy's bool is no Real
        return float(value)
    raise TypeError(f"returned {value!r}; it must be a number, or hold numbers")


def _failure(error: BaseException) -> dict[str, str]:
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else f"it raised {error!r}"
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    # What we say of what a function returns is said in full; no line of the user's has raised it.
    is_ours = isinstance(error, ValueError | TypeError) and Path(raised_in).is_relative_to(_PACKAGE)
    shown = "" if is_ours else "".join(traceback.format_exception(_users(error))).rstrip()
    return {"error": text, "traceback": shown}


def _users(error: BaseException) -> BaseException:
    """Return the error with its traceback from the user's code on; with all of it where there is none."""
    frame = error.__traceback__
    while frame is not None and Path(frame.tb_frame.f_code.co_filename).is_relative_to(_PACKAGE):
        frame = frame.tb_next
    return error.with_traceback(frame) if frame is not None else error


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the node is gone
        main(sys.argv[1])
