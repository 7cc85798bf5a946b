"""The phases of a guest: it makes chunks of each rollout that is open, and takes up each new policy."""

import logging
import signal
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from coordinator.directory import published
from coordinator.directory.layout import MASTER
from coordinator.directory.published import Incomplete
from coordinator.keeping import policy_choice
from coordinator.node.flags import read_flag
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import evaluation, rollout
from coordinator.phases.guest_node import GuestNode
from coordinator.phases.load_policy import serve
from coordinator.protocol.exits import PhaseEnded
from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import Board
from rollout.collect import Stopped
from rollout.engines.answers import EngineError

log = logging.getLogger(__name__)

COLLECTS = {
    Phase.TRAIN_PLAN: (Phase.TRAIN_ROLLOUT, rollout.collect_train),
    Phase.EVAL_DECISION: (Phase.EVAL_ROLLOUT, evaluation.collect_eval),
}
"""By the phase that plans who makes what: the phase in which it is made, and what a node does in that."""


class GuestStep(NamedTuple):
    """What a guest does next. `phase` is that of the master's newest flag: a plan, by which it makes groups,
    or CHECKPOINT, whose policy it loads.
    """

    iteration: int
    phase: Phase


def guest_loop(node: Node) -> None:
    """Make groups of one rollout after the other, as long as the epoch lasts."""
    guest = cast("GuestNode", node)  # `live` takes one function for nodes and guests
    while True:
        guest.position.move("running", waiting_for=[MASTER])
        following = guest.flags.wait_until(lambda board: _next(guest, board))
        guest.visited.add((guest.record.epoch, *following))
        if following.phase is Phase.CHECKPOINT:
            _load_next(guest, following.iteration)
        else:
            _collect(guest, following)
        if guest.leaves.is_set():
            guest.watch.interrupt(signal.SIGTERM)
        guest.check()


def _next(guest: GuestNode, board: Board) -> GuestStep | None:
    """Return the Next work in the phase that the master is in, if that is not done yet."""
    number, phase = guest.newest_phase(board)
    if phase not in COLLECTS:
        if not number or phase < Phase.CHECKPOINT:
            return None
        phase = Phase.CHECKPOINT
    following = GuestStep(number, phase)
    return following if (guest.record.epoch, *following) not in guest.visited else None


def _load_next(guest: GuestNode, number: int) -> None:
    """Have the engine answer with the policy that samples the iteration after `number`."""
    sampler = policy_choice.sampled_by(number + 1, guest.settings)
    if sampler not in published.checkpoints(guest.run_dir):
        return
    guest.position.move("running", number, Phase.ENGINE_RESTARTED.label)
    try:
        serve(guest, guest.policies.policy_of(sampler))
    except (Incomplete, EngineError, OSError) as error:
        if sampler in published.checkpoints(guest.run_dir) and not isinstance(error, Incomplete):
            raise
        log.info("%s; looking again when it is needed", error)  # nobody keeps it for a guest


def _collect(guest: GuestNode, following: GuestStep) -> None:
    """Make chunks by the plan of a phase, until none is left."""
    number, plan = following
    phase, collect = COLLECTS[plan]
    guest.flags.clear()
    if guest.watch.heart.is_replaced():
        raise guest.phase_endings.superseded()
    iteration = Iteration(number)
    try:
        for earlier in (Phase.ITERATION_START, plan):
            flag = guest.watch.board.done(guest.record.epoch, number, earlier)[MASTER]
            iteration.documents[earlier] = read_flag(guest.run_dir, flag)
    except (KeyError, FileNotFoundError):
        return  # it is over
    if not iteration.documents[plan].get("chunks"):
        return
    guest.position.move("running", number, phase.label)
    guest.events.add("begin", it=number, row=phase.label)
    begun_s = time.monotonic()
    try:
        _make(guest, iteration, phase, collect)
    finally:
        guest.collector.drop()
        guest.outage.persist(guest.give_back)
    work_s = time.monotonic() - begun_s
    guest.position.wait_for([MASTER])
    guest.flags.wait_until(lambda _board: guest.is_over(number, phase) or guest.leaves.is_set() or None)
    guest.events.add("end", it=number, row=phase.label, work_s=round(work_s, 4))


def _make(
    guest: GuestNode, iteration: Iteration, phase: Phase, collect: Callable[[Node, Iteration], object]
) -> None:
    try:
        collect(guest, iteration)
    except Stopped:
        log.info("the others have made the rest: the phase is over")
    except PhaseEnded:
        raise
    except Exception as error:
        guest.watch.look()
        guest.check()
        if not guest.is_over(iteration.number, phase):
            raise
        log.info("the phase is over (%s)", error)
    else:
        if count := guest.position.describe()["done"]:
            log.info("made %d group%s", count, "s"[: count > 1])
