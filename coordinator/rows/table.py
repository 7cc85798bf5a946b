"""The main loop: one line a row of the protocol table."""

from functools import partial

from coordinator.node.node import Node
from coordinator.protocol.phases import By, Phase
from coordinator.rows import metrics, resume, rollout, training


def run_iterations(node: Node) -> None:
    """RUN: iteration after iteration, until the master says that the run is finished."""
    while (iteration := node.next_iteration(open_next)) is not None:
        run_iteration(node, iteration)


def run_iteration(node: Node, iteration: int) -> None:
    """One pass of the protocol table in README.md, row by row."""
    step = partial(node.step, iteration)  # act if the row is ours, raise our flag, wait for the master's
    # fmt: off
    step(Phase.ITERATION_START,   rollout.open_iteration,      by=By.MASTER)
    step(Phase.TRAIN_PLAN,        rollout.plan_train,          by=By.MASTER)
    step(Phase.TRAIN_ROLLOUT,     rollout.collect_train,       then=rollout.sum_short)
    step(Phase.TRAIN_FILES_READY, rollout.name_parts,          then=rollout.merge_names)
    step(Phase.TRAIN_AGGREGATE,   rollout.write_manifest,      by=By.MASTER)
    step(Phase.EVAL_DECISION,     rollout.decide_eval,         by=By.MASTER)
    step(Phase.EVAL_ROLLOUT,      rollout.collect_eval,        then=rollout.aggregate_eval)
    step(Phase.ENGINE_STOPPED,    training.stop_engine)
    step(Phase.TRAIN_DATA,        training.write_batch,        by=By.MASTER)
    step(Phase.TRAIN_CONFIG,      training.configure_training, by=By.MASTER)
    step(Phase.TRAINING,          training.train)
    step(Phase.CHECKPOINT,        training.publish_checkpoint, by=By.MASTER)
    step(Phase.ENGINE_RESTARTED,  training.restart_engine)
    step(Phase.ITERATION_END,     metrics.report_timings,      then=metrics.end_iteration)
    # fmt: on


def open_next(node: Node) -> int | None:
    """The first iteration that is not finished; None when there is none left to do."""
    iteration = resume.next_iteration(node.run_dir, node.settings)
    last = node.settings.iterations
    return None if last is not None and iteration > last else iteration
