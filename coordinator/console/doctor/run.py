"""`run doctor`: check whether this directory, this node and this network are fit for a run.

Without `--peers` one node tests the directory from two processes. With it the nodes meet in
`<log-path>/doctor/` (`meeting`), each does the same checks, and rank 0 reports. The doctor does not touch the
files of a run in the directory, and removes its own.
"""

import contextlib
import secrets
import shlex
import signal
import sys
from collections.abc import Generator, Mapping
from pathlib import Path

from coordinator.console.doctor import probe
from coordinator.console.doctor.checks import Check, failed, judge_mount
from coordinator.console.doctor.meeting import WORK, DoctorError, DoctorGuest, Host, doctor_directory
from coordinator.console.doctor.peers import attend, checks_between
from coordinator.console.doctor.report import Checks, Report
from coordinator.directory.layout import MASTER
from coordinator.machine.filesystems import Mount, find_mount
from coordinator.machine.signals import is_ignored_hangup
from coordinator.protocol.exits import Exit
from coordinator.settings.tree import SettingsError
from coordinator.start.directory_access import share_with_group
from coordinator.start.log_path import check_log_path
from coordinator.start.rank import RANK_VARIABLES, resolve_rank
from rollout.storage import files
from rollout.storage.retry import retry


def run_doctor(root: Path, nodes: int, rank: int, limit_s: float, as_json: bool) -> int:
    """Check `root` from this node, and between `nodes` nodes if there are several; return the exit code.

    Rank 0 reports. `limit_s`: how long nodes wait for each other to come. SettingsError for a `root` that
    cannot be a run directory.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if not is_ignored_hangup(number):
            signal.signal(number, _interrupt)
    share_with_group(root)
    with Report(root, nodes, prints=rank == MASTER, as_json=as_json) as report:
        if rank != MASTER:
            return _take_part(root, nodes, rank, limit_s, report)
        retry("look at", root, lambda: check_log_path(root))
        try:
            _lead(root, nodes, limit_s, report)
        except OSError as error:
            report.add(failed(report.current, error))
        report.end()
        return Exit.DONE if report.fit else Exit.FAILED


def doctor_rank(worker: str | None, nodes: int, environment: Mapping[str, str]) -> int:
    """Resolve the rank of this node as `run` does; rank 0 where nothing names another."""
    if nodes == 1:
        if worker is not None:
            raise SettingsError(f"--worker {worker} without other nodes; add --peers N, the number of nodes")
        return MASTER
    scheduled = any(environment.get(variable) for variable in RANK_VARIABLES)
    rank = resolve_rank(worker is None and not scheduled, worker, nodes, environment, ())
    if rank >= nodes:
        raise SettingsError(f"rank {rank} is outside --peers {nodes} (workers are 1 to {nodes - 1})")
    return rank


def command(root: Path, nodes: int, rank: int) -> str:
    """Write the command for the node of `rank`."""
    worker = f" --worker {rank}" if rank != MASTER else ""
    return f"run doctor --peers {nodes}{worker} --log-path {shlex.quote(str(root))}"


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _lead(root: Path, nodes: int, limit_s: float, report: Report) -> None:
    """Do the own checks of rank 0, then those with the other nodes."""
    mount = find_mount(root.resolve())
    site = doctor_directory(root)
    with _site(root) as is_new, contextlib.ExitStack() as stack:
        report.take(_leftovers(site))
        work = stack.enter_context(_work_in(site / f"{secrets.token_hex(4)}{WORK}"))
        host = stack.enter_context(contextlib.closing(Host(site, nodes))) if nodes > 1 else None
        report.take(_own_checks(root, is_new, work, mount))
        if host:
            if absent := host.absent():
                typed = [command(root, nodes, rank) for rank in sorted(absent)]
                report.say("", f"waiting {limit_s:g} s for the other nodes; type there:", *typed, "")
            missing = {rank: command(root, nodes, rank) for rank in host.gather(limit_s)}
            report.take(checks_between(host, missing, mount, work))
            report.end()
            host.step("end", {"fit": report.fit})


def _take_part(root: Path, nodes: int, rank: int, limit_s: float, report: Report) -> int:
    """Do as a worker what rank 0 asks, and print what it found."""
    try:
        guest = DoctorGuest(root, rank)
        print(f"rank {rank}: waiting for rank 0, which reports", flush=True)
        guest.join(limit_s, command(root, nodes, MASTER))

        def own_checks() -> list[Check]:
            mount = find_mount(root.resolve())
            with _work_in(guest.work_directory()) as work:
                report.take(_own_checks(root, False, work, mount))
            return report.checks

        fit = attend(guest, rank, own_checks)
    except NotADirectoryError:
        check_log_path(root)
        raise
    except DoctorError as error:
        print(f"run: {error}", file=sys.stderr)
        return Exit.FAILED
    print(f"rank {rank}: {root} {'can' if fit else 'cannot'} carry a run, says rank 0", flush=True)
    return Exit.DONE if fit else Exit.FAILED


def _own_checks(root: Path, is_new: bool, work: Path, mount: Mount) -> Checks:
    """Return the checks that a node does by itself."""
    yield "directory", lambda: [probe.check_directory(root, is_new, work), judge_mount(mount)]
    yield from probe.node_checks(work, mount)


def _leftovers(site: Path) -> Checks:
    """Report files of other doctors in the directory; these may be alive, so nothing is removed."""
    if names := files.listing(site):
        figure = f"{len(names)} names of another doctor in {site}"
        check = Check("leftovers", figure, "warn", f"if no other runs now: rm -r {shlex.quote(str(site))}")
        yield "leftovers", lambda: [check]


@contextlib.contextmanager
def _site(root: Path) -> Generator[bool]:
    """Make the doctors' directory, and remove it again; yield whether `root` had to be made too."""
    missing = [path for path in (root, *root.parents) if not retry("look for", path, path.exists)]
    try:
        files.make_directory(doctor_directory(root))
        yield bool(missing)
    finally:
        for path in (doctor_directory(root), *missing):
            with contextlib.suppress(OSError):  # others work in it
                path.rmdir()


@contextlib.contextmanager
def _work_in(work: Path) -> Generator[Path]:
    """Make `work` for this process, and remove it again."""
    try:
        files.make_directory(work)
        yield work
    finally:
        files.remove_tree(work)
