"""`run profile`: ask a node for a profile of its next optimizer step, wait for it, and say what it shows."""

import logging
import secrets
import time
from pathlib import Path
from typing import Any

from coordinator.console.views.crew_status import GOING, crew_dirs
from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.file_names import ProfileRequest
from coordinator.directory.layout import RunDir
from coordinator.protocol.exits import Exit
from coordinator.protocol.records import Records
from coordinator.protocol.snapshot import whole_board
from coordinator.settings.tree import SettingsError
from rollout.storage import files

log = logging.getLogger(__name__)

POLL_S = 1.0
SAY_S = 15.0
"""How often it is said what the run does meanwhile."""


def profile_next_step(root: Path, machine: int | None) -> int:
    """Print where the trace of `machine` is (None: the first that trains), and its costliest operators.

    It waits as long as the run goes on. SettingsError if nothing trains.
    """
    run = Run(root)
    run_dir = crew_dirs(root)[-1]  # of two, the one that trains
    crew = _crew(run, run_dir)
    machines = [run_dir.machine(rank) for rank in range(crew["num_nodes"])]
    machine = machines[0] if machine is None else machine
    if machine not in machines:
        raise SettingsError(
            f"--rank {machine}: it does not train; give one of {', '.join(map(str, machines))}"
        )
    record = Records(run_dir).newest(whole_board(run_dir).records, wait=False)
    if record is not None and record.settings.get("rl_phase") == "rollout":
        raise SettingsError(f"{root}: nothing trains: the run only generates (--rl-phase rollout)")
    if crew["state"] not in GOING:
        raise SettingsError(f"{root}: nothing trains: the run is {crew['state']}; start it, then ask again")
    request = ProfileRequest(run_dir.rank(machine), secrets.token_hex(4))
    path = run_dir.master / request.name
    files.mark(path)
    try:
        answer = _wait(run, run_dir, request)
    finally:
        files.remove(path)
    text = files.read(answer).decode()
    trace = answer.with_suffix(".json.gz")
    is_there = trace.name in published.names(trace.parent)
    print(f"{trace}\n\n{text}" if is_there else text, end="")
    return Exit.DONE if is_there else Exit.FAILED


def _crew(run: Run, run_dir: RunDir) -> dict[str, Any]:
    """Return the state of the crew that trains, as `run status --json` has it."""
    return next(crew for crew in run.status()["crews"] if crew["crew"] == run_dir.crew)


def _wait(run: Run, run_dir: RunDir, request: ProfileRequest) -> Path:
    """Return the file that says what came of the request. SettingsError if the run ends before."""
    logs, name = run_dir.logs(request.rank), run_dir.name(request.rank)
    said_s = float("-inf")
    while True:
        crew = _crew(run, run_dir)  # before the listing: a run that ends may have answered
        if answers := [listed for listed in published.names(logs) if request.is_answer(listed)]:
            return logs / answers[0]
        if crew["state"] not in GOING:
            raise SettingsError(
                f"{run_dir.root}: the run is {crew['state']}, and {name} has taken no step since you asked"
            )
        if time.monotonic() - said_s > SAY_S:
            said_s, node = time.monotonic(), crew["nodes"][request.rank]
            where = f"{node['phase'] or 'no row'} of iteration {node['iteration']}"
            log.warning("waiting for the next step of %s, which is %s, in %s", name, node["state"], where)
        time.sleep(POLL_S)
