"""Do work in forked processes, which may hang or die: a fork saves importing torch."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from rollout.engines.model_dir import WeightsError
from scripts.tiny_models import NotTiny
from trainer.model.lora import LoraError
from trainer.model.parallel import LayoutError
from trainer.model.token_logprobs import UnsupportedModel

LIMIT_S = 300.0
"""For one column of one family."""


class Differs(ValueError):
    """It runs, and computes something else."""


class Failed(RuntimeError):
    """What another process said before it failed."""


SAY_IT_ALL = (Differs, Failed, LayoutError, LoraError, NotTiny, UnsupportedModel, WeightsError)
"""Errors whose words are enough without their class."""


def forked(work: Callable[[], Any]) -> tuple[Connection, Any]:
    """Do `work` in a forked process; its pipe gets (True, the result) or (False, why it failed)."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(work, theirs))
    process.start()
    theirs.close()
    return ours, process


def outcome(work: Callable[[], Any]) -> tuple[bool, Any]:
    """Do `work` in a forked process and wait for it. Return (True, the result) or (False, why it failed)."""
    pipe, process = forked(work)
    try:
        found = pipe.recv() if pipe.poll(LIMIT_S) else (False, f"not done within {LIMIT_S:.0f} s")
    except EOFError:
        found = False, "the process died"
    process.kill()
    process.join()
    return found


def _report(work: Callable[[], Any], pipe: Connection) -> None:
    # torch makes its pool of threads anew at its first use after a fork. Two threads that use it first, such
    # as those that load a model, find none ("Invalid thread pool").
    torch.set_num_threads(torch.get_num_threads())
    try:
        pipe.send((True, work()))
    except Exception as error:  # whatever a family raises is what its cell says
        said = " ".join(str(error).split())
        pipe.send((False, said if isinstance(error, SAY_IT_ALL) else f"{type(error).__name__}: {said}"))
    pipe.close()
    os._exit(0)  # threads of an engine, or of a process group whose other rank has failed
