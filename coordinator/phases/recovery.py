"""Go through epoch after epoch: which losses and errors a node comes back from, and which end it."""

import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.layout import MASTER
from coordinator.directory.metrics_file import measured
from coordinator.directory.published import Incomplete
from coordinator.keeping.resume import next_iteration
from coordinator.keeping.trainer_states import wait_for_newest
from coordinator.machine.children import ChildError
from coordinator.machine.copy_entries import StoreError
from coordinator.machine.network import NetworkError
from coordinator.machine.oddities import TooFewProcesses
from coordinator.node.flags import call_document
from coordinator.node.node import Node
from coordinator.phases.base_model import prepare_base_model
from coordinator.phases.crews import is_finished
from coordinator.protocol.exits import (
    EpochChanged,
    Exit,
    Fenced,
    NodeEnded,
    NodeLost,
    PhaseEnded,
    TrainerFailed,
)
from coordinator.protocol.fence import is_away
from coordinator.protocol.phase import Phase, phases_of
from coordinator.protocol.snapshot import Board
from coordinator.settings.tree import SettingsError
from rollout.collect import AllGivenUp
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import WeightsError
from rollout.rewards.reward import RewardError
from rollout.storage.files import SharedFsError
from rollout.storage.retry import FULL

log = logging.getLogger(__name__)

MAX_RETURNS = 3
"""How often an iteration may go back for something that is missing."""

LOST_PEER = re.compile("connection|peer|remote|gloo|nccl|another node", re.IGNORECASE)
"""How a trainer's error reads when another rank has caused it."""

EXPECTED = (
    AllGivenUp, RewardError, SharedFsError, EngineError, WeightsError, ChildError, NetworkError, StoreError,
    Incomplete, SettingsError, TooFewProcesses,
)  # fmt: skip
"""Errors whose text says all there is to know; any other error is logged with its traceback."""


def run_epochs(node: Node, iterate: Callable[[Node], None]) -> None:
    """Go through epoch after epoch, until the run is finished."""
    returns: Counter[int] = Counter()
    attempts: Counter[int] = Counter()
    lost: NodeLost | None = None
    is_fenced = False
    while True:
        if node.position.iteration:
            returns.pop(0, None)
        try:
            try:
                if is_fenced:
                    node.come_back()
                    is_fenced = False
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
            is_fenced = True
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
                is_fenced = True
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
    record = node.gathering.gather(partial(_prepare, node)) if node.is_master else node.pending.pend()
    node.enter(record)
    nodes = len(record.members)
    log.info(
        "%d %s part (cluster epoch %d)", nodes, "node takes" if nodes == 1 else "nodes take", record.epoch
    )
    iterate(node)
    if node.is_master:
        if Phase.TRAINING in phases_of(node.settings.kind):
            wait_for_newest(node)
        finish(node)


def _prepare(node: Node) -> None:
    """Do what can be done before the others are there. Raises Ended if another master has come to the end of
    the run since this one looked: its workers have ended, and nobody would come.
    """
    if is_finished(node):
        node.gathering.finish()
        raise NodeEnded(Exit.DONE, _farewell(node))
    prepare_base_model(node)


def _hold(node: Node, loss: NodeLost) -> None:
    """Tell the others that the master has lost a node; their engines stay warm until it gathers all again."""
    node.trainer.leave_epoch()
    beat = node.watch.board.beats.get(loss.rank)
    last = (beat.incarnation, beat.counter) if beat else (0, 0)
    if loss.stalled or loss.ended:  # a process that has come for it may be beating already
        last = (node.record.members[loss.rank].incarnation, sys.maxsize)
    node.gathering.lost[loss.rank] = last
    # If it lives all the same, it has to hear that nobody waits for it.
    comes_anew = loss.rank if loss.stalled or loss.ended else None
    node.flags.tell("lost", str(loss), rank=loss.rank, comes_anew=comes_anew)
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

    def untold() -> str:
        if not node.is_master:
            return "the master to say how the training goes on"
        heard_from = {flag.rank for flag in node.watch.board.called(node.record.epoch, "trainer_failed")}
        absent = sorted(set(node.record.members) - {MASTER} - heard_from)
        return f"{node.run_dir.names(absent)} to end the training job"

    cluster = node.settings.cluster
    patience_s = cluster.node_timeout_s + 2 * cluster.beat_interval_s
    if not node.is_master:  # the master may hold for a lost node, and its word comes as a verdict
        patience_s = 2 * patience_s + cluster.rejoin_timeout_s
    node.watch.wait(all_told, node.check, untold, patience_s)
    calls = node.watch.look(own_too=True).called(node.record.epoch, "trainer_failed")
    documents = [call_document(node.run_dir, flag) for flag in calls]
    final = [document["text"] for document in documents if document.get("comes_again")]
    text = first_cause(
        final or [document["text"] for document in documents] or [node.messages.failure(error)]
    )
    if not node.is_master:
        text = f"{text}; the master did not say how to go on. {node.messages.repair()}"
        raise NodeEnded(Exit.LOST, text, "left")
    attempts[node.position.iteration] += 1
    attempt, most = attempts[node.position.iteration], node.settings.trainer.max_attempts
    if attempt >= most or final:
        raise NodeEnded(Exit.FAILED, f"{text}. {node.messages.repair()}", "failed")
    log.error("%s; attempt %d of %d", text, attempt + 1, most)
    raise EpochChanged


def first_cause(texts: Sequence[str]) -> str:
    """Return the failure that is not just the loss of a peer, which every other rank of the job reports."""
    return min(texts, key=lambda text: bool(LOST_PEER.search(text)))


def finish(node: Node) -> None:
    """Say that nothing is left to do: workers end with 0, those that wait for a master too."""
    node.gathering.finish()
    log.info("%s", _farewell(node))
    trains = Phase.TRAINING in phases_of(node.settings.kind)
    if trains and not _is_newest_evaluated(node) and (text := node.messages.unevaluated()):
        log.info("%s", text)


def _is_newest_evaluated(node: Node) -> bool:
    """Return whether the last iteration has evaluated the policy of the newest checkpoint."""
    newest, line = published.latest_before(node.run_dir, sys.maxsize), node.finished.look().newest
    return line is not None and measured(line) == newest and line.get("eval_reward") is not None


def _farewell(node: Node) -> str:
    done = node.settings.iterations if node.run_dir.crew == "rollout" else None
    return node.messages.finished(done or next_iteration(node.finished, node.settings) - 1)
