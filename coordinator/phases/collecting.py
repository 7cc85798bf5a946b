"""Phases 2 and 6 of one node: have its collector make its share, and make the groups durable as they finish.

What is in flight when an epoch ends goes on in the next one, if that makes the same groups; the node says in
`enter` which slots it keeps.
"""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from coordinator.collector.listener import Listener
from coordinator.collector.order import EngineAddress, Order, RecipeNames
from coordinator.directory.layout import MASTER, Kind
from coordinator.directory.published import Incomplete
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases.load_policy import serve
from coordinator.phases.node_share import Share, publish_pictures, slots_of
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import ROLLOUT_OF, Phase
from rollout.collect import Stopped
from rollout.engines.model_facts import layers_with_experts, placeholder
from rollout.engines.special_tokens import read_special_tokens
from rollout.pictures import PictureError
from rollout.storage.retry import SharedFsError

log = logging.getLogger(__name__)

JOIN_S = 10.0


def key_of(node: Node, iteration: Iteration, kind: Kind) -> str:
    """Return a digest of all that decides how a phase makes its groups: in two epochs with the same key, a
    group that was begun in the one can be finished in the other.
    """
    header, settings = iteration.header, node.settings
    parts = [kind, iteration.number, header["policy"], header["opened"], header["code"]]
    parts += [part.model_dump(mode="json") for part in (settings.rollout, settings.eval)]
    parts += [settings.engine.model_dump(mode="json", exclude={"url"})]  # each node may have its own
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def drop_outdated(node: Node, iteration: Iteration) -> None:
    """Give up what is in flight from the epoch before, if no phase of this iteration goes on with it."""
    in_flight = node.collector.in_flight
    if in_flight is None:
        return
    keys = {
        key_of(node, iteration, kind)
        for kind, phase in ROLLOUT_OF.items()
        if iteration.has(phase, node.settings)
    }
    is_ahead = in_flight.iteration > iteration.number and iteration.resume_at >= Phase.CHECKPOINT
    if in_flight.key not in keys and not is_ahead:
        node.collector.drop()


def collect_share(node: Node, iteration: Iteration, share: Share) -> Payload:
    """Have a share made, and its groups made durable as they finish; says how many are short, and how
    long each was in flight.
    """
    node.position.reach(0, 0)
    if share.functions.environment.name == "single_turn" and not share.sets:  # a completion is a sample
        node.position.expect(share.origin.sampling.n, share.origin.sampling.max_tokens)
    if not share.in_flight(node.rank):
        node.collector.drop()
    if share.is_empty(node.rank):
        return {"short": 0}
    policy = node.policies.policy_of(iteration.header["policy_iteration"])
    if policy.digest != iteration.header["policy"]:
        raise Incomplete(
            f"{policy.directory} holds policy {policy.digest} here, but {iteration.header['policy']} on the "
            "master; give all nodes the same model"
        )
    if generates(share):
        node.collector.start()  # it imports what it needs while the engine starts
        begun_s = time.monotonic()
        serve(node, policy)
        if share.kind == "train":
            iteration.engine_s = time.monotonic() - begun_s
    if (in_flight := node.collector.in_flight) is not None:
        iteration.ahead_s += in_flight.ahead_s
    is_paused = False
    with _minding(node, share) as is_engine_lost:
        listener = _listener(node, iteration, share, is_engine_lost)
        try:
            return node.collector.collect(_order(node, iteration, share), listener)
        except Stopped:
            is_paused = True
            node.check()
            raise
        finally:
            if not is_paused:
                node.collector.drop()
            node.outage.persist(partial(node.collector.flush, listener))


def begin_share(node: Node, iteration: Iteration, share: Share, is_over: Callable[[], bool]) -> None:
    """Begin a share of an iteration that is not open yet, until `is_over`: what is in flight then goes on,
    and nothing was published. `is_over` is asked again and again, and may raise.

    Where the share cannot be made nothing is in flight: the phase itself will say why.
    """
    node.collector.drop()
    order = _order(node, iteration, share)
    order = replace(order, is_held=True, slots=share.plan["shares"][str(node.rank)])
    with _minding(node, share) as is_engine_lost:
        listener = _listener(node, iteration, share, is_engine_lost)
        error = node.collector.begin(order, listener, is_over)
    if error is not None:
        log.info("nothing is generated ahead any more: %s", error)


def generates(share: Share) -> bool:
    """Return whether the share's samples come from the engine. Demonstrations cannot evaluate a policy."""
    return share.kind == "eval" or not share.functions.demonstrates


def _order(node: Node, iteration: Iteration, share: Share) -> Order:
    """Return the Order of a share for this node's collector."""
    plan, rank = share.plan, node.rank
    named = {"": (share.functions, share.origin.sampling)}
    named |= {
        named_set.slots.name: (named_set.functions, named_set.slots.sampling) for named_set in share.sets
    }
    recipes = {
        kind: RecipeNames(functions.reward.name, functions.environment.name, sampling)
        for kind, (functions, sampling) in named.items()
    }
    sources = {name: text for functions, _ in named.values() for name, text in functions.sources.items()}
    model = node.policies.policy_of(0).directory
    if share.functions.demonstrates:
        model = node.policies.hold(node.policies.policy_of(0), node.reading()).directory
    return Order(
        key=key_of(node, iteration, share.kind),
        kind=share.kind,
        iteration=iteration.number,
        epoch=node.record.epoch,
        rank=rank,
        incarnation=node.watch.incarnation,
        phase=ROLLOUT_OF[share.kind],
        root=str(node.run_dir.root.absolute()),
        crew=node.run_dir.crew,
        quota=share.quota,
        origin=share.origin,
        recipes=recipes,
        sources=sources,
        settings=share.settings,
        engine=_engine(node, share) if generates(share) else None,
        start_model=str(model.absolute()),
        claim_pause_s=node.settings.cluster.pause_bounds_s[1],
        guest_patience_s=node.settings.cluster.node_timeout_s,
        in_flight=share.in_flight(rank),
        slots=[] if "chunks" in plan else plan["shares"][str(rank)],
        needed=plan["needed"].get(str(rank), 0) if "chunks" not in plan else 0,
        claimed=plan if "chunks" in plan else None,
        first_part=node.first_part(),
        begun=share.begun,
        segment=share.segment,
    )


def _engine(node: Node, share: Share) -> EngineAddress:
    engine, trainer = node.settings.engine, node.settings.trainer
    base = node.policies.policy_of(0).directory
    sections = ["trainer", *(f"trainer.sources.{name}" for name in trainer.sources)]
    uncorrected = (
        f"{section}.engine_correction=off"
        for section, each in zip(sections, trainer.of_all_sources, strict=True)
        if each.engine_correction == "off"
    )
    return EngineAddress(
        node.engine.url,
        node.engine.model,
        engine.request_timeout_s,
        node.engine.restart_patience_s(engine),
        replace(
            node.engine.facts,
            why_no_form="" if share.kind == "eval" else next(uncorrected, ""),
            routed_layers=_routed_layers(base) if trainer.routing_replay and share.kind == "train" else (),
            **_marks(base),
        ),
    )


@cache
def _marks(model: Path) -> dict[str, Any]:
    """Return the facts of the model that the run started from: no training changes its tokens."""
    token = placeholder(model)
    return {"special_tokens": read_special_tokens(model), "placeholder": -1 if token is None else token}


@cache
def _routed_layers(model: Path) -> tuple[int, ...]:
    return layers_with_experts(model)


def _listener(node: Node, iteration: Iteration, share: Share, is_engine_lost: Callable[[], None]) -> Listener:
    def slots(numbers: Sequence[int]) -> list[dict[str, Any]]:
        slots = slots_of(iteration.number, share, numbers)
        try:
            publish_pictures(share, slots, node.run_dir.images)
        except PictureError as error:
            raise NodeEnded(Exit.FAILED, str(error), "failed") from error
        return [
            {"number": slot.number, "task": slot.task, "seed": slot.seed, "kind": slot.kind} for slot in slots
        ]

    def full(error: SharedFsError) -> None:
        node.phase_endings.check_self()
        node.outage.full(error)

    def waited(seconds: float) -> None:
        iteration.waited_s[ROLLOUT_OF[share.kind].label] = seconds

    return Listener(
        stop=node.phase_stop(iteration.number, ROLLOUT_OF[share.kind]),
        slots=slots,
        verify=node.engine.check_serves,
        is_engine_lost=is_engine_lost,
        reach=node.position.reach,
        step=node.position.step,
        full=full,
        claimed=node.leave_claim,
        waited=waited,
        check_self=node.phase_endings.check_self,
        others_are_done=partial(_others_are_done, node, iteration, share),
        lost=node.phase_endings.say_who_is_lost,
        guests=lambda: node.watch.guests,
    )


def _others_are_done(node: Node, iteration: Iteration, share: Share) -> bool:
    """Return whether all other nodes have made their shares. The master's flag comes last of all, so it is
    its heartbeat that says that it waits.
    """
    phase, epoch = ROLLOUT_OF[share.kind], node.record.epoch
    done = node.watch.board.done(epoch, iteration.number, phase)
    if set(node.record.members) - {node.rank, MASTER} - done.keys():
        return False
    beat = node.watch.board.beats.get(MASTER)
    if node.rank == MASTER or beat is None or beat.epoch != epoch:
        return node.rank == MASTER
    heartbeat = node.watch.heartbeat(MASTER)
    is_there = heartbeat.get("phase") == phase.label and heartbeat.get("iteration") == iteration.number
    return is_there and bool(heartbeat.get("waiting_for"))


@contextmanager
def _minding(node: Node, share: Share) -> Generator[Callable[[], None]]:
    """Look after the engine in a thread during a block; yields what raises the error that this has met."""
    if not generates(share):
        yield lambda: None
        return
    generation_over, failed = threading.Event(), list[Exception]()

    def mind() -> None:
        try:
            node.engine.mind(node.settings.engine, node.check, generation_over, node.position.generate)
        except Exception as error:  # for the main thread
            failed.append(error)

    def is_engine_lost() -> None:
        if failed:
            raise failed[0]

    thread = threading.Thread(target=mind, name="mind engine", daemon=True)
    thread.start()
    try:
        yield is_engine_lost
    finally:
        generation_over.set()
        thread.join(JOIN_S)  # it may be loading weights into an engine that it has started again
