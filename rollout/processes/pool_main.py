"""The program that a process of `rollout.processes.pool` runs.

    python -m rollout.processes.pool_main MODULE:MAKER        stdin: the socket to the node

MAKER's function is called with the array in each line that arrives. The answer is a line with its `value`, or
with the `error` that it raised. A first line says whether MAKER worked. The process exits at end of file.
"""

import contextlib
import importlib
import json
import logging
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any

MEMORY_BYTES = 4 * 2**30
"""Limit of the address space: a completion that needs more makes the library raise MemoryError."""


def main(maker: str) -> None:
    """Serve the calls of one function until the end of the socket."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already; macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rwb") as lines:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # so that libraries do not read from the socket

        def say(answer: bytes) -> None:
            lines.write(answer + b"\n")
            lines.flush()

        try:
            function = _make(maker)
        except Exception as error:
            say(_failure(error))
            return
        say(b"{}")
        for line in lines:
            say(_answer(function, line))


def _make(maker: str) -> Callable[..., Any]:
    module, _, name = maker.partition(":")
    return getattr(importlib.import_module(module), name)()


def _answer(function: Callable[..., Any], line: bytes) -> bytes:
    try:
        return json.dumps({"value": function(*json.loads(line))}).encode()
    except Exception as error:  # the caller decides what it means
        return _failure(error)


def _failure(error: Exception) -> bytes:
    return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the node is gone
        main(sys.argv[1])
