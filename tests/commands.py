"""`run` in forks of the test process, which has imported what a process of its own would import first."""

import atexit
import faulthandler
import gc
import logging
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from coordinator import cli, main
from coordinator.console.commands import crews_here
from coordinator.machine import run_command

ASK_RUN = run_command.ask_run
IMPORTED = (cli, main, crews_here)
"""What a node imports first, so that its fork need not."""


def run_forked(
    arguments: Sequence[str], cwd: Path, environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Return the end of `run` with these arguments, in that directory and environment."""
    with TemporaryFile() as out, TemporaryFile() as err:
        code = start_forked([cli.__name__, *arguments], cwd, environment, stdout=out, stderr=err).wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(
            ["run", *arguments], code, out.read().decode(), err.read().decode()
        )


def ask_forked(
    words: Sequence[str], cwd: Path | None = None, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """In place of `run_command.ask_run`; not in other threads than the main one, whose forks may inherit
    locks that nobody will let go of.
    """
    if threading.current_thread() is not threading.main_thread():
        return ASK_RUN(words, cwd, environment)
    return run_forked(words, cwd or Path.cwd(), environment or os.environ)


def start_forked(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], **streams: Any
) -> "subprocess.Popen[Any]":
    """Start what `python -m` with these words would be, in a session of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process with threads, which is forked
        return subprocess.Popen(
            [sys.executable, "-m", *words],
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            start_new_session=True,
            preexec_fn=partial(_become, words, cwd, environment),  # does not return: nothing is executed
            **streams,
        )


def _become(words: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
    """End this process as the module would, forgetting that it was one of tests."""
    code: object = 1
    try:
        gc.freeze()
        gc.enable()
        faulthandler.disable()
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # by which subprocess knows that the program is there
        atexit._clear()
        for number in signal.valid_signals() - {signal.SIGINT}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        logging.root.handlers.clear()
        warnings.resetwarnings()
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.orig_argv = [*words], [sys.executable, "-m", *words]
        sys.path = [str(cwd), *sys.path]
        sys.modules.pop(words[0], None)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
