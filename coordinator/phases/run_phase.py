"""One phase of the table: act, raise the flag, wait for the master's."""

import time
from collections.abc import Callable, Sequence

from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.protocol.phase import ActsIn, Phase

Act = Callable[[Node, Iteration], Payload | None]
Beside = Callable[[Node, Iteration], None]
Conclude = Callable[[Node, Iteration, dict[int, Payload]], Payload | None]


def run_phase(
    node: Node,
    iteration: Iteration,
    phase: Phase,
    act: Act,
    conclude: Conclude | None = None,
    before: Sequence[Beside] = (),
    after: Sequence[Beside] = (),
) -> None:
    """Run one phase: act if it is ours, raise our flag, wait for the master's.

    Where the master acts alone, the document of its flag is the phase's result. Else all act, and it waits
    for the flags of all, makes a result of their payloads with `conclude`, and raises its own flag last,
    which is empty: the master alone has this result. Every node does what is in `before`, whoever acts, and
    in `after`, once the phase is done.
    """
    if not iteration.has(phase, node.settings):
        return
    number = iteration.number
    node.position.move("running", number, phase.label)
    node.check()
    started_s = iteration.phase_begun_s = time.monotonic()
    node.events.add("begin", it=number, row=phase.label)
    acts = node.is_master or phase.by is ActsIn.ALL
    for side_act in before:
        side_act(node, iteration)
    payload = (act(node, iteration) or {}) if acts else {}
    acted_s = time.monotonic()
    concluded_s = 0.0
    node.check()
    if not node.is_master:
        if acts:
            node.flags.raise_done(number, phase, payload)
        payload = node.flags.wait_master(number, phase)
    elif phase.by is ActsIn.MASTER:
        node.flags.raise_done(number, phase, payload)
    else:
        flags = node.flags.wait_members(number, phase)
        flags_up_s = time.monotonic()
        payloads = node.flags.payloads(flags, payload) if conclude else {}
        payload = (conclude(node, iteration, payloads) or {}) if conclude else {}
        concluded_s = time.monotonic() - flags_up_s
        node.flags.raise_done(number, phase, {})
    iteration.documents[phase] = payload
    idle_s = iteration.waited_s.get(phase.label, 0.0)
    work_s = iteration.work_s[phase.label] = max(0.0, acted_s - started_s + concluded_s - idle_s)
    seconds = {"work_s": round(work_s, 4), "then_s": round(concluded_s, 4)}
    node.events.add("end", it=number, row=phase.label, **seconds)
    iteration.phase_s[phase.label] = time.monotonic() - started_s
    iteration.ended_in[phase.label] = node.record.epoch
    if phase is Phase.ITERATION_START:
        iteration.resume_at = Phase(payload["resume_at"])
        node.flags.clear()
    for side_act in after:
        side_act(node, iteration)
