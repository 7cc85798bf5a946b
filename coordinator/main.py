"""A node from its start to its exit code."""

import contextlib
import logging
import math
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from coordinator.directory.layout import GUESTS, MASTER
from coordinator.directory.published import Incomplete
from coordinator.journal.logs import Prefix
from coordinator.journal.progress_reminder import FIRST_S, progress_reminders
from coordinator.keeping.resume import next_iteration
from coordinator.keeping.trainer_states import wait_for_newest
from coordinator.machine.children import ChildError
from coordinator.machine.copy_entries import StoreError
from coordinator.machine.network import NetworkError
from coordinator.machine.oddities import TooFewProcesses, explained
from coordinator.node.flags import call_document
from coordinator.node.messages import STARTED_BY
from coordinator.node.node import Node
from coordinator.phases.base_model import prepare_base_model
from coordinator.phases.crews import is_finished, open_next
from coordinator.phases.guest_loop import guest_loop
from coordinator.phases.guest_node import Guest
from coordinator.phases.provenance import refuse_changed_code
from coordinator.phases.table import run_iterations
from coordinator.protocol.exits import Ended, EpochChanged, Exit, Fenced, NodeLost, PhaseEnded, TrainerFailed
from coordinator.protocol.fence import is_away
from coordinator.protocol.phase import Phase, phases_of
from coordinator.protocol.placement_records import read_placement, run_dirs
from coordinator.protocol.snapshot import Board
from coordinator.settings.tree import SettingsError
from coordinator.start.announcement import announcement, odd_here
from coordinator.start.directory_access import share_with_group
from coordinator.start.request import StartRequest
from coordinator.start.start import Start, start_master, start_worker
from coordinator.start.start_guest import start_guest
from coordinator.start.wait_for_master import PLACED
from rollout.collect import AllGivenUp
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import WeightsError
from rollout.rewards.builtin import RewardError
from rollout.storage.files import SharedFsError
from rollout.storage.retry import FULL, waiting_for_space

log = logging.getLogger(__name__)

WORKERS_FIRST_S = 45.0
"""After so long without a line a worker says what goes on: its waits say it every 30 s by themselves."""

MAX_RETURNS = 3
"""How often an iteration may go back for something that is missing."""

LOST_PEER = re.compile("connection|peer|remote|gloo|nccl|another node", re.IGNORECASE)
"""How a trainer's error reads when another rank has caused it."""

EXPECTED = (
    AllGivenUp, RewardError, SharedFsError, EngineError, WeightsError, ChildError, NetworkError, StoreError,
    Incomplete, SettingsError, TooFewProcesses,
)  # fmt: skip
"""Errors whose text says all there is to know; any other error is logged with its traceback."""


def live(start: Start, prefix: Prefix, iterate: Callable[[Node], None] | None = None) -> int:
    """Run a node to its end; returns the exit code. Its children end with it, and the others are told why."""
    _allow_many_files()
    is_guest = start.rank >= GUESTS
    node = Guest(start) if is_guest else Node(start)
    iterate = iterate or (guest_loop if is_guest else run_iterations)
    prefix.follow(node.position.prefix, node.position.doing)
    try:
        node.begin()
        prefix.keep(node.run_dir.logs(node.rank), node.events)
        for change in start.changes:
            log.info("%s", change, extra={"event": {"what": "changed", **change._asdict()}})
        if node.is_master and is_finished(node):
            _finish(node)
        else:
            for line in _beginning(node, start):
                log.info("%s", line)
            with waiting_for_space(math.inf, partial(_wait_for_space, node)):
                _run_epochs(node, iterate)
        node.events.add("exit", code=int(Exit.DONE), text="")
        return Exit.DONE
    except Ended as end:
        return _end(node, end)
    except BaseException as error:  # the others must not wait for this node, whatever the error is
        error = node.children.explained(explained(error))
        if not isinstance(error, EXPECTED):
            log.exception("unexpected error")
        gone = f". {gone}" if (gone := node.outage.gone()) else ""
        text = f"{node.messages.failure(error)}{gone}. {node.messages.repair()}"
        return _end(node, Ended(Exit.FAILED, text, "failed"))
    finally:
        node.close()
        prefix.close()


def _beginning(node: Node, start: Start) -> list[str]:
    """Return the lines that say what begins; of a worker, what its machine lacks."""
    if start.overrides is not None:
        return announcement(start, open_next(node))
    return [] if STARTED_BY in os.environ else odd_here()  # the master has said it of the same machine


def _wait_for_space(node: Node, error: SharedFsError) -> None:
    node.check()
    node.outage.full(error)


def _run_epochs(node: Node, iterate: Callable[[Node], None]) -> None:
    """Go through epoch after epoch, until the run is finished."""
    returns: Counter[int] = Counter()
    attempts: Counter[int] = Counter()
    lost: NodeLost | None = None
    away = False
    while True:
        if node.position.iteration:
            returns.pop(0, None)
        try:
            try:
                if away:
                    node.come_back()
                    away = False
                if lost is not None:
                    _hold(node, lost)
                    lost = None
                _run_epoch(node, iterate)
                return
            except TrainerFailed as error:
                _end_training(node, error, attempts)
            except PhaseEnded:
                raise
            except Exception:
                node.phase_endings.settle()  # an error of a replaced process is no failure of the run
                raise
        except EpochChanged:
            node.trainer.leave_epoch()
        except Fenced:
            away = True
        except NodeLost as error:
            lost = error
        except PhaseEnded:
            raise
        except Exception as error:
            iteration = node.position.iteration
            returns[iteration] += 1
            if returns[iteration] > MAX_RETURNS:
                raise
            if _passes(node, error):
                log.error("%s", error, exc_info=not isinstance(error, (*EXPECTED, FileNotFoundError)))
                away = True
            elif isinstance(error, Incomplete) and node.is_master and iteration != 0:
                log.warning("%s; going back in a new epoch", error)
            else:
                raise


def _passes(node: Node, error: Exception) -> bool:
    """Return whether the error may be gone when the shared directory is back."""
    if isinstance(error, SharedFsError):
        return is_away(error) and error.errno not in FULL  # which was waited for
    if isinstance(error, FileNotFoundError) and _is_below(error.filename, node.run_dir.root):
        return True  # nothing is mounted there
    return node.outage.is_cut_off()


def _is_below(filename: object, root: Path) -> bool:
    return isinstance(filename, str | Path) and Path(filename).is_relative_to(root)


def _run_epoch(node: Node, iterate: Callable[[Node], None]) -> None:
    """Join the others in an epoch, and iterate to the end of the run."""
    joining = node.joining
    record = joining.gather(partial(_prepare, node)) if node.is_master else joining.pend()
    node.enter(record)
    nodes = len(record.members)
    log.info("epoch %d: %d node%s", record.epoch, nodes, "s"[: nodes > 1])
    iterate(node)
    if node.is_master:
        if Phase.TRAINING in phases_of(node.settings.kind):
            wait_for_newest(node)
        _finish(node)


def _prepare(node: Node) -> None:
    """Do what can be done before the others are there. Raises Ended if another master has come to the end of
    the run since this one looked: its workers have ended, and nobody would come.
    """
    if is_finished(node):
        node.joining.finish()
        raise Ended(Exit.DONE, _farewell(node))
    prepare_base_model(node)


def _hold(node: Node, loss: NodeLost) -> None:
    """Tell the others that the master has lost a node; their engines stay warm until it gathers all again."""
    node.trainer.leave_epoch()
    beat = node.watch.board.beats.get(loss.rank)
    counter = sys.maxsize if loss.stalled else beat.counter if beat else 0
    node.joining.lost[loss.rank] = (beat.incarnation if beat else 0, counter)
    node.flags.tell("lost", str(loss), stalled=loss.rank if loss.stalled else None)
    text = str(loss)
    if node.phase_endings.forget_loss() == loss.rank:
        text = f"holding until {node.run_dir.name(loss.rank)} is back"
    log.error("%s", text, extra={"event": {"what": "lost", "rank": loss.rank, "text": str(loss)}})


def _end_training(node: Node, error: TrainerFailed, attempts: Counter[int]) -> None:
    """End the job here. The master decides, once every node has said that its trainer is gone, or is lost.

    A trainer fails too when one of its peers dies: the loss of a node comes first, and is no failed attempt.
    """
    node.trainer.leave_epoch()
    node.watch.know_trainer_failure()
    node.flags.tell("trainer_failed", node.messages.failure(error), comes_again=error.comes_again)

    def all_told(board: Board) -> bool | None:
        ranks = {flag.rank for flag in board.called(node.record.epoch, "trainer_failed")}
        return True if node.is_master and ranks >= set(node.record.members) - {MASTER} else None

    cluster = node.settings.cluster
    patience_s = cluster.node_timeout_s + 2 * cluster.beat_interval_s
    if not node.is_master:  # the master may hold for a lost node, and its word comes as a verdict
        patience_s = 2 * patience_s + cluster.rejoin_timeout_s
    node.watch.wait(all_told, node.check, lambda: "all nodes to end the training job", patience_s)
    calls = node.watch.look(whole=True).called(node.record.epoch, "trainer_failed")
    documents = [call_document(node.run_dir, flag) for flag in calls]
    final = [document["text"] for document in documents if document.get("comes_again")]
    text = first_cause(
        final or [document["text"] for document in documents] or [node.messages.failure(error)]
    )
    if not node.is_master:
        text = f"{text}; the master did not say how to go on. {node.messages.repair()}"
        raise Ended(Exit.LOST, text, "left")
    attempts[node.position.iteration] += 1
    attempt, most = attempts[node.position.iteration], node.settings.trainer.max_attempts
    if attempt >= most or final:
        raise Ended(Exit.FAILED, f"{text}. {node.messages.repair()}", "failed")
    log.error("%s; attempt %d of %d", text, attempt + 1, most)
    raise EpochChanged


def first_cause(texts: Sequence[str]) -> str:
    """Return the failure that is not just the loss of a peer, which every other rank of the job reports."""
    return min(texts, key=lambda text: bool(LOST_PEER.search(text)))


def _finish(node: Node) -> None:
    """Say that nothing is left to do: workers end with 0, those that wait for a master too."""
    node.joining.finish()
    log.info("%s", _farewell(node))


def _farewell(node: Node) -> str:
    done = node.settings.iterations if node.run_dir.crew == "rollout" else None
    return node.messages.finished(done or next_iteration(node.finished, node.settings) - 1)


def _allow_many_files() -> None:
    """Hundreds of samples at once have several connections each; many systems allow 1024 unless asked."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS takes no infinity
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _end(node: Node, end: Ended) -> int:
    if end.tell is not None and not node.watch.fence.tripped:  # else the call would hang with the mount
        try:
            node.flags.tell(end.tell, end.text)
        except OSError as error:
            log.error("the other nodes could not be told: %s", error)
    return _say(end)


def _say(end: Ended) -> int:
    level = logging.INFO if end.code in {Exit.DONE, Exit.MOVED} else logging.ERROR
    log.log(level, "%s", end.text, extra={"event": {"what": "exit", "code": int(end.code)}})
    return end.code


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
    with progress_reminders(prefix.doing, first_s=WORKERS_FIRST_S if machine else FIRST_S):
        try:
            share_with_group(root)
            placement = read_placement(root)
            if request.placed_as not in {None, placement.to_json()}:
                raise Ended(Exit.MOVED, PLACED)
            leads = machine == MASTER and (crew == "main" or run_dirs(root, placement)[0].crew == crew)
            start = (start_master if leads else start_worker)(request, placement)
            if leads and not request.accept_code_change:
                refuse_changed_code(start.run_dir, start.of_run)
        except Ended as end:
            return _say(end)
        except SettingsError:
            raise
        except EXPECTED as error:
            name = f"rank {machine}" if crew == "main" else f"{crew} rank {machine}"
            return _say(Ended(Exit.FAILED, f"{name} could not start: {error}"))
        with show(root) if leads else contextlib.nullcontext():
            return live(start, prefix)


def run_guest(request: StartRequest, prefix: Prefix) -> int:
    """Start a guest and run it to its exit code."""
    with progress_reminders(prefix.doing, first_s=WORKERS_FIRST_S):
        try:
            share_with_group(request.root)
            start = start_guest(request)
        except Ended as end:
            return _say(end)
        except SettingsError:
            raise
        except EXPECTED as error:
            return _say(Ended(Exit.FAILED, f"this guest could not start: {error}"))
        return live(start, prefix)
