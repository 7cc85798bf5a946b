"""What takes the place of the machine in the product's modules, for the time of one simulated run."""

import asyncio
import itertools
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from watchdog.observers import Observer

from coordinator import main
from coordinator.collector import host as collector_host
from coordinator.collector import making
from coordinator.collector import process as collector_process
from coordinator.machine import engine, network, trainer
from coordinator.machine.store import Store
from coordinator.node import identity, node
from coordinator.phases import base_model
from coordinator.settings.tree import RunSettings
from coordinator.start import start as start_module
from coordinator.start import start_guest, user_functions
from coordinator.start.inputs import Inputs, load_inputs
from coordinator.start.user_functions import describe
from rollout.engines.kinds import kind
from rollout.engines.kinds.embedded import Embedded
from rollout.engines.kinds.kind import ServerCommand
from rollout.environment_variables import cores
from rollout.storage import files, hashing, lines
from tests.simulation.children import Children, Machines
from tests.simulation.engines import EngineAdmin, EngineClient
from tests.simulation.loop import Asyncio
from tests.simulation.scheduler import Event, RLock, Thread
from trainer.job import launch

REAL = {"coordinator.cli", "coordinator.console.commands.local", "coordinator.directory.line_writer"} | {
    f"coordinator.machine.{name}"
    for name in ("child", "children", "child_output", "reaper", "network", "signals")
}
"""Modules that no simulated node runs."""
ON_DISK = {
    "rollout.storage.files",
    "rollout.storage.hashing",
    "rollout.storage.lines",
    "rollout.storage.once",
    "rollout.storage.retry",
    "coordinator.phases.metrics",
    "coordinator.phases.base_model",
}
"""Modules that use `os` or `shutil` on the shared directory."""


def put_under(patch: pytest.MonkeyPatch, machines: Machines, model: Path) -> None:
    """The coordinator, as it is loaded, on simulated machines; `model` is what builtin:tiny has become."""
    _patch_machine(patch, machines)
    _patch_surroundings(patch, machines)
    _patch_start(patch, model)


def _patch_machine(patch: pytest.MonkeyPatch, machines: Machines) -> None:
    """Clock, threads, chance, and the shared directory."""
    scheduler, disk = machines.scheduler, machines.disk

    def now_s() -> float:
        return scheduler.now_s + scheduler.process.clock_offset_s

    clock = SimpleNamespace(monotonic=now_s, time=now_s, sleep=scheduler.wait)
    threads = SimpleNamespace(
        Event=partial(Event, scheduler), RLock=partial(RLock, scheduler), Lock=partial(RLock, scheduler),
        Thread=partial(Thread, scheduler),
    )  # fmt: skip
    of_all = [
        (time, clock), (threading, threads), (random, scheduler.random), (asyncio, Asyncio(scheduler)),
        (Observer, _NoEvents), (ThreadPoolExecutor, _OneByOne), (cores, lambda: 2),
    ]  # fmt: skip
    of_files = [(os, disk), (shutil, disk)]
    for name in [name for name in sys.modules if name.partition(".")[0] in {"coordinator", "rollout"}]:
        if name not in REAL:
            _replace(patch, name, of_all + (of_files if name in ON_DISK else []))
    _replace(patch, "trainer.job.launch", [(time, clock)])
    for module in (files, hashing, lines):
        patch.setattr(module, "open", disk.open_file, raising=False)
    read, below = Path.read_bytes, f"{disk.root}/"

    def read_bytes(path: Path) -> bytes:
        if str(path).startswith(below) and disk.is_called():
            disk.enter()
        return read(path)

    patch.setattr(Path, "read_bytes", read_bytes)


def _replace(patch: pytest.MonkeyPatch, module: str, pairs: list[tuple[Any, Any]]) -> None:
    """In a module, whatever it has imported: each real thing by the one in its place."""
    fakes = {id(real): fake for real, fake in pairs}
    for name, value in list(vars(sys.modules[module]).items()):
        if id(value) in fakes:
            patch.setattr(sys.modules[module], name, fakes[id(value)])


def _patch_surroundings(patch: pytest.MonkeyPatch, machines: Machines) -> None:
    """Child processes, the network, signals, and the locks of a host, where each process has its own."""
    ports = itertools.count(20000)
    host = SimpleNamespace(gethostname=lambda: machines.scheduler.process.host)
    patch.setattr(node, "Children", partial(Children, machines))
    patch.setattr(node, "Events", lambda: _NOTHING_IS_KEPT)
    patch.setattr(node, "Store", lambda below: Store(below or str(_own_directory(machines))))
    patch.setattr(node, "GpuSampler", lambda _period_s: SimpleNamespace(latest=[]))
    patch.setattr(kind, "EngineAdmin", partial(EngineAdmin, machines.engines))
    patch.setattr(Embedded, "command", _start_server_on_gpu)
    patch.setattr(making, "EngineClient", partial(EngineClient, machines.engines))
    patch.setattr(collector_process, "Bell", _Bell)
    patch.setattr(launch, "argv", lambda job: [job])
    patch.setattr(trainer, "free_port", lambda _ip: next(ports))
    patch.setattr(trainer, "interface_towards", lambda _ip: "lo")
    bell = SimpleNamespace(wait=machines.scheduler.wait, close=lambda: None)
    for side in (trainer, collector_host):
        patch.setattr(side, "Doorbell", lambda _path: bell)
    patch.setattr(network, "this_peer", lambda: network.Peer("one machine", ()))
    patch.setattr(identity, "socket", host)
    patch.setattr(main, "progress_reminders", lambda *_, **_more: nullcontext())
    patch.setattr(main, "announcement", lambda *_: [])
    patch.setattr(node, "Signals", lambda _act: SimpleNamespace(begin=lambda _record: None))
    patch.setattr(node, "end_children_if_calls_hang", lambda *_: None)
    for kind_of_node in ("Node", "GuestNode"):
        patch.setattr(main, kind_of_node, lambda start: cast(Any, machines.scheduler.process).become(start))
    patch.setattr(node, "name_of_run", lambda *_: "run")
    patch.setattr(node, "hold_for_process", lambda *_: SimpleNamespace(release=lambda: None))
    patch.setattr(engine, "host_lock", lambda _name: nullcontext(), raising=False)


def _own_directory(machines: Machines) -> Path:
    """For copies of models: each process is on a machine of its own."""
    directory = machines.scratch / f"copies of {machines.scheduler.process.name}"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def _patch_start(patch: pytest.MonkeyPatch, model: Path) -> None:
    """What is slow to make or to load."""
    patch.setattr(base_model, "_from_cache", lambda _node: model)
    for module in (start_module, start_guest):
        patch.setattr(module, "load_inputs", _load_inputs_once)
    loader = SimpleNamespace(call=lambda kind, name, deadline_s: describe(kind, name), close=lambda: None)
    patch.setattr(user_functions, "ProcessPool", lambda *_, **_more: loader)


_command = Embedded.command


def _start_server_on_gpu(*args: Any) -> ServerCommand:
    """So that it has to sleep while the trainer works."""
    return replace(_command(*args), on_gpu=True)


_NOTHING_IS_KEPT = SimpleNamespace(open=lambda *_: None, add=lambda _what, **_more: None, end=lambda: None)
"""In place of a node's events, which have a thread and a file of their own."""

_loaded: dict[str, Inputs] = {}


def _load_inputs_once(settings: RunSettings, given: Mapping[str, Any], _machine: int) -> Inputs:
    key = f"{settings.model_dump_json()} {sorted(given.items())}"
    if key not in _loaded:
        _loaded[key] = load_inputs(settings, given)
    return _loaded[key]


class _Bell:
    """In place of the collector's bell: it looks for messages again and again."""

    def __init__(self, _spool: Path) -> None:
        pass

    async def wait(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class _NoEvents:
    """In place of watchdog's observer: file events are a hint that may never come."""

    def schedule(self, *_args: Any, **_more: Any) -> None:
        raise OSError("no file events in a simulation")


class _OneByOne:
    """In place of a pool of threads, which the scheduler would not know of."""

    def __init__(self, max_workers: int) -> None:
        pass

    def __enter__(self) -> "_OneByOne":
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    map = staticmethod(map)
