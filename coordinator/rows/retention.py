"""Which checkpoints are kept."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.layout import REMOVED, parse_staging_name
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.settings import CheckpointSettings
from rollout.storage import files


def kept(
    checkpoints: Sequence[int], lines: Sequence[Mapping[str, Any]], settings: CheckpointSettings
) -> set[int]:
    """Return the iterations of `checkpoints` (in order) that stay; `lines` are those of metrics.jsonl.

    The evaluation of iteration N, or else its samples, measures the policy that N - 1 has trained.
    """
    last = checkpoints[-settings.keep_last :]
    every = [n for n in checkpoints if settings.keep_every and n % settings.keep_every == 0]
    evaluated = any(line.get("eval_reward") is not None for line in lines)
    measure = "eval_reward" if evaluated else "reward"
    score = {line["iteration"] - 1: line[measure] for line in lines if line.get(measure) is not None}
    best = sorted((n for n in checkpoints if n in score), key=lambda n: (score[n], n))
    return {*last, *every, *(best[-settings.keep_best :] if settings.keep_best else [])}


def retire_checkpoints(node: Node, iteration: Iteration) -> list[Path]:
    """Rename the checkpoints that the settings do not keep, so that none is ever seen half removed.

    Returns what is to be removed: these, what could not be removed before (another client held a file open),
    and what trainings have left that did not come to an end.
    """
    run_dir = node.run_dir
    there = published.checkpoints(run_dir)
    stay = kept(there, published.metrics_lines(run_dir), node.settings.checkpoints)
    for number in sorted(set(there) - stay):
        files.rename(run_dir.checkpoint(number), run_dir.removed(number, node.record.epoch))
    return [
        run_dir.checkpoints / name
        for name in published.names(run_dir.checkpoints)
        if _is_left(name, iteration)
    ]


def _is_left(name: str, iteration: Iteration) -> bool:
    staged = parse_staging_name(name)
    return name.startswith(REMOVED) or (staged is not None and staged[0] <= iteration.number)
