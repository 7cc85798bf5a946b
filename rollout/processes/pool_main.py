"""The program of a process of `rollout.processes.pool`.

    python -m rollout.processes.pool_main MODULE:MAKER        stdin: the socket to the node

MAKER's function is called with the array in each line that comes; the answer is a line with its `value`, or
the `error` that it raised. The first line says, without being asked, whether MAKER worked. The process exits
at end of file.
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
"""Address space: a completion that makes the library compute something huge gets a MemoryError."""


def main(maker: str) -> None:
    """Serve the calls of one function until the socket is at its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable()
    warnings.simplefilter("ignore")
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already; macOS has none
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with socket.socket(fileno=os.dup(0)) as channel, channel.makefile("rwb") as lines:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # libraries shall not read from the socket

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
    except Exception as error:  # the caller's to judge
        return _failure(error)


def _failure(error: Exception) -> bytes:
    return json.dumps({"error": f"{type(error).__name__}: {error}"}).encode()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the node is gone
        main(sys.argv[1])
