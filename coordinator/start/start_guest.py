"""START of a guest: as that of a worker, but nobody waits for it, and it is in no epoch."""

import json
import logging
import socket
from dataclasses import replace
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.machine.host_lock import acquire, host_lock
from coordinator.protocol import placement_records
from coordinator.settings import loading
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.directory_access import refuse_strangers
from coordinator.start.inputs import difference, load_inputs
from coordinator.start.log_path import check_log_path
from coordinator.start.request import StartRequest
from coordinator.start.run_json import fixed_of, read_run_json, refuse_changes
from coordinator.start.start import NodeStart, absolute, node_start
from coordinator.start.wait_for_master import await_master
from rollout.settings_tree import Mark, marked
from rollout.storage import files, once

log = logging.getLogger(__name__)

OF_GUESTS = {*marked(RunSettings, Mark.PER_MACHINE, Mark.PER_GUEST)}
"""Settings that a guest may have for itself: they change no sample."""
PATIENCE = ClusterSettings()
"""How long a guest waits for a master, whose settings it does not know yet."""
MOST = 100
"""Guests of one machine."""


def start_guest(request: StartRequest) -> NodeStart:
    """Wait for a living master, and take its settings; SettingsError says what keeps this machine from being
    a guest. Nothing is written before.
    """
    root = request.root
    overrides = absolute(request.overrides)
    loading.check_each(overrides)
    for key in overrides:
        if key not in OF_GUESTS:
            allowed = ", ".join(sorted(OF_GUESTS))
            raise SettingsError(
                f"{loading.option_name(key)}: a guest takes its settings from the run; leave it out (a guest "
                f"has its own {allowed})"
            )
    placement = placement_records.read_placement(root)
    run_dir = next(
        candidate
        for candidate in placement_records.run_dirs(root, placement)
        if candidate.crew in {"main", "rollout"}
    )
    record = await_master(run_dir, placement, PATIENCE.rejoin_timeout_s, PATIENCE.node_timeout_s)
    check_log_path(root)
    refuse_strangers(root, request.allow_shared_dir)
    of_run = RunSettings.published(record.settings)
    _refuse(of_run)
    settings = loading.overlay(of_run, overrides).of_crew("rollout")
    run = read_run_json(run_dir)
    inputs = load_inputs(settings, overrides, GUESTS)
    refuse_changes(run, fixed_of(of_run, inputs))
    if text := difference(inputs.codes(), record.inputs, record.master_host):
        raise SettingsError(text)
    rank = _rank_of(run_dir, request.guest or _name(run["run_id"]))
    start = node_start(rank, run_dir, run["run_id"], loading.overlay(of_run, overrides), inputs, of_run)
    return replace(start, inputs=replace(inputs, local=overrides), followed_epoch=record.epoch)


def _refuse(settings: RunSettings) -> None:
    if settings.rl_phase == "update":
        raise SettingsError(
            "this run trains on trajectories that are there: it generates nothing, and needs no guest"
        )
    if not settings.claims:
        raise SettingsError(
            "this run splits its rollouts by --rank-weights beforehand; to have guests, start its master "
            "again with rollout.claims=true"
        )


def _name(run_id: str) -> str:
    """Return a name for this guest: the machine's, with a number if another guest of the run is there."""
    host = socket.gethostname()
    for number in range(MOST):
        lock = host_lock(f"{run_id}.guest.{number}")
        if acquire(lock, lambda: None, 0.01):
            _held.append(lock)
            return f"{host}-{number}" if number else host
    raise SettingsError(f"{MOST} guests of this run are on {host} already")


_held: list[object] = []
"""The lock on the name, for as long as this process lives."""


def _rank_of(run_dir: RunDir, name: str) -> int:
    """Return the rank of the guest of this name: the one that it had before, or the next one."""
    files.make_directory(run_dir.guests)
    document = json.dumps({"name": name}).encode()
    numbers: set[int] = set()
    for file in published.names(run_dir.guests):
        number = file.removeprefix("r").removesuffix(".json")
        if number.isdecimal():
            numbers.add(int(number))
            if files.content(_record(run_dir, int(number))) == document:
                return int(number)
    rank = max(numbers, default=GUESTS - 1) + 1
    while not once.create_once(_record(run_dir, rank), document):
        rank += 1
    return rank


def _record(run_dir: RunDir, rank: int) -> Path:
    return run_dir.guests / f"r{rank}.json"
