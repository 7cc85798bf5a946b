"""Functions for processes of a pool: what libraries do at their worst."""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from typing import Any


def make_echo() -> Callable[..., Any]:
    return lambda *arguments: list(arguments)


def make_pid() -> Callable[[], int]:
    return os.getpid


def make_set_order() -> Callable[[], list[str]]:
    return lambda: list({"red", "green", "blue", "cyan", "black", "white"})


def make_trouble() -> Callable[..., Any]:
    """A function that does what it is told."""
    acts: dict[str, Callable[[], Any]] = {
        "pid": os.getpid,
        "sleep": lambda: time.sleep(600),
        "hang in C": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),  # no signal handler or thread ever runs
        "die": lambda: os.kill(os.getpid(), signal.SIGSEGV),
        "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(7),
        "print": lambda: print("noise") or sys.stderr.write("noise\n"),
        "read": lambda: sys.stdin.read(),
        "raise": lambda: {}["no such key"],
        "eat memory": lambda: len(b"x" * 2**34),
        "no JSON": lambda: object(),
    }
    return lambda name: acts[name]()


def make_exit() -> Callable[..., Any]:
    os._exit(3)


def make_nothing() -> Callable[..., Any]:
    raise ImportError("no module named sympathy")
