"""The main loop: one line for each phase of the protocol table."""

from functools import partial

from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import batch, collecting, crews, evaluation, head_start, metrics, rollout, training
from coordinator.phases.run_phase import run_phase
from coordinator.protocol.phase import Phase

BESIDE_THE_ROLLOUT = (collecting.drop_outdated, rollout.begin_to_verify, rollout.begin_to_fetch)
"""What each node begins beside the phases, as soon as it knows what the iteration is."""


def run_iterations(node: Node) -> None:
    """Run iteration after iteration, until the master says that the run is finished."""
    last = 0
    while (iteration := node.next_iteration(last, crews.open_when_ready)) is not None:
        run_iteration(node, iteration)
        last = iteration.number


def run_iteration(node: Node, iteration: Iteration) -> None:
    """Pass once through the protocol table of docs/protocol.md, phase by phase; `Phase` says who acts."""
    # A step acts if the phase is this node's, raises its flag, and waits for the master's.
    step = partial(run_phase, node, iteration)
    # fmt: off
    step(Phase.ITERATION_START,   rollout.open_iteration,      after=BESIDE_THE_ROLLOUT)
    step(Phase.TRAIN_PLAN,        rollout.plan_train)
    step(Phase.TRAIN_ROLLOUT,     rollout.collect_train,       conclude=rollout.sum_short)
    step(Phase.TRAIN_FILES_READY, rollout.part_checksums,          conclude=rollout.merge_checksums)
    step(Phase.TRAIN_AGGREGATE,   rollout.write_manifest,      after=(batch.begin_batch,))
    step(Phase.EVAL_DECISION,     evaluation.decide_eval)
    step(Phase.EVAL_ROLLOUT,      evaluation.collect_eval,     conclude=evaluation.aggregate_eval)
    step(Phase.ENGINE_STOPPED,    training.stop_engine)
    step(Phase.TRAIN_DATA,        batch.write_batch)
    step(Phase.TRAIN_CONFIG,      training.configure_training)
    step(Phase.TRAINING,          training.train)
    step(Phase.CHECKPOINT,        training.publish_checkpoint, before=(head_start.run,))
    step(Phase.ENGINE_RESTARTED,  training.restart_engine,     conclude=training.note_in_flight)
    step(Phase.ITERATION_END,     metrics.report_timings,      conclude=metrics.end_iteration)
    # fmt: on
