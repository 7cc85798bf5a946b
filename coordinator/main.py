"""A node from its start to its exit code."""

import contextlib
import logging
import math
import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from coordinator.directory.layout import GUESTS, MASTER
from coordinator.journal.logs import Prefix
from coordinator.journal.progress_reminder import FIRST_S, progress_reminders
from coordinator.machine.oddities import explained
from coordinator.machine.run_command import STARTED_BY
from coordinator.node.node import Node
from coordinator.phases.crews import is_finished, open_next
from coordinator.phases.guest_loop import guest_loop
from coordinator.phases.guest_node import GuestNode
from coordinator.phases.provenance import refuse_changed_code
from coordinator.phases.recovery import EXPECTED, finish, run_epochs
from coordinator.phases.table import run_iterations
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.placement_records import read_placement, run_dirs
from coordinator.settings.tree import SettingsError
from coordinator.start.announcement import announcement, odd_here
from coordinator.start.directory_access import share_with_group
from coordinator.start.request import StartRequest
from coordinator.start.start import NodeStart, start_master, start_worker
from coordinator.start.start_guest import start_guest
from coordinator.start.wait_for_master import PLACED
from rollout.storage.files import SharedFsError
from rollout.storage.retry import waiting_for_space

log = logging.getLogger(__name__)

WORKERS_FIRST_S = 45.0
"""After so long without a line a worker says what goes on: its waits say it every 30 s by themselves."""


def run_to_exit_code(start: NodeStart, prefix: Prefix, iterate: Callable[[Node], None] | None = None) -> int:
    """Run a node to its end; returns the exit code. Its children end with it, and the others are told why."""
    _allow_many_files()
    is_guest = start.rank >= GUESTS
    node = GuestNode(start) if is_guest else Node(start)
    iterate = iterate or (guest_loop if is_guest else run_iterations)
    prefix.follow(node.position.prefix, node.position.doing, node.messages.elsewhere)
    try:
        node.begin()
        prefix.keep(node.run_dir.logs(node.rank), node.events)
        for change in start.changes:
            log.info("%s", change, extra={"event": {"what": "changed", **change._asdict()}})
        if node.is_master and is_finished(node):
            finish(node)
        else:
            for line in _beginning(node, start):
                log.info("%s", line)
            with waiting_for_space(math.inf, partial(_wait_for_space, node)):
                run_epochs(node, iterate)
        node.events.add("exit", code=int(Exit.DONE), text="")
        return Exit.DONE
    except NodeEnded as end:
        return _end(node, end)
    except BaseException as error:  # the others must not wait for this node, whatever the error is
        error = node.children.explained(explained(error))
        if not isinstance(error, EXPECTED):
            log.exception("unexpected error")
        where_gone = f". {where_gone}" if (where_gone := node.outage.absence()) else ""
        text = f"{node.messages.failure(error)}{where_gone}. {node.messages.repair()}"
        return _end(node, NodeEnded(Exit.FAILED, text, "failed"))
    finally:
        node.close()
        prefix.close()


def _beginning(node: Node, start: NodeStart) -> list[str]:
    """Return the lines that say what begins; of a worker, what its machine lacks."""
    if start.overrides is not None:
        return announcement(start, open_next(node))
    return [] if STARTED_BY in os.environ else odd_here()  # the master has said it of the same machine


def _wait_for_space(node: Node, error: SharedFsError) -> None:
    node.check()
    node.outage.full(error)


def _allow_many_files() -> None:
    """Hundreds of samples at once have several connections each; many systems allow 1024 unless asked."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS takes no infinity
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _end(node: Node, end: NodeEnded) -> int:
    if end.tell is not None and not node.watch.fence.tripped:  # else the call would hang with the mount
        try:
            node.flags.tell(end.tell, end.text)
        except OSError as error:
            log.error("the other nodes could not be told: %s", error)
    return _say(end)


def _say(end: NodeEnded) -> int:
    level = logging.INFO if end.code in {Exit.DONE, Exit.MOVED} else logging.ERROR
    log.log(level, "%s", end.text, extra={"event": {"what": "exit", "code": int(end.code)}})
    return end.code


def _say_interrupted() -> int:
    text = "interrupted before it took part in a run; the same command starts it again"
    return _say(NodeEnded(Exit.INTERRUPTED, text))


def run_node(
    request: StartRequest,
    prefix: Prefix,
    show: Callable[[Path], AbstractContextManager[None]] = lambda _root: contextlib.nullcontext(),
) -> int:
    """Run START and then the node's life; returns the exit code, which is MOVED if another placement holds
    than the one asked for. SettingsError: nothing was written. `show`: how the master shows the run while it
    goes on.
    """
    root, machine, crew = request.root, request.rank, request.crew
    with progress_reminders(prefix.doing, prefix.remind, first_s=WORKERS_FIRST_S if machine else FIRST_S):
        try:
            share_with_group(root)
            placement = read_placement(root)
            if request.placed_as not in {None, placement.to_json()}:
                raise NodeEnded(Exit.MOVED, PLACED)
            leads = machine == MASTER and (crew == "main" or run_dirs(root, placement)[0].crew == crew)
            start = (start_master if leads else start_worker)(request, placement)
            if leads and not request.accept_code_change:
                refuse_changed_code(start.run_dir, start.of_run)
        except NodeEnded as end:
            return _say(end)
        except SettingsError:
            raise
        except KeyboardInterrupt:
            return _say_interrupted()
        except EXPECTED as error:
            name = f"rank {machine}" if crew == "main" else f"{crew} rank {machine}"
            return _say(NodeEnded(Exit.FAILED, f"{name} could not start: {error}"))
        with show(root) if leads else contextlib.nullcontext():
            return run_to_exit_code(start, prefix)


def run_guest(request: StartRequest, prefix: Prefix) -> int:
    """Start a guest and run it to its exit code."""
    with progress_reminders(prefix.doing, prefix.remind, first_s=WORKERS_FIRST_S):
        try:
            share_with_group(request.root)
            start = start_guest(request)
        except NodeEnded as end:
            return _say(end)
        except SettingsError:
            raise
        except KeyboardInterrupt:
            return _say_interrupted()
        except EXPECTED as error:
            return _say(NodeEnded(Exit.FAILED, f"this guest could not start: {error}"))
        return run_to_exit_code(start, prefix)
