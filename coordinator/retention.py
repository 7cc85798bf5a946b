"""Which checkpoints are kept."""

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator import outputs, shared_fs
from coordinator.node import Node
from coordinator.run_dir import REMOVED, parse_staging_name
from coordinator.settings import CheckpointSettings


def kept(
    checkpoints: Sequence[int], lines: Sequence[Mapping[str, Any]], settings: CheckpointSettings
) -> set[int]:
    """Those of `checkpoints`, iterations in order, that stay; `lines` are those of metrics.jsonl.

    What iteration N measures, its evaluation or else its samples, is the policy that N - 1 has trained.
    """
    last = checkpoints[-settings.keep_last :]
    every = [n for n in checkpoints if settings.keep_every and n % settings.keep_every == 0]
    evaluated = any(line.get("eval_reward") is not None for line in lines)
    measure = "eval_reward" if evaluated else "reward"
    score = {line["iteration"] - 1: line[measure] for line in lines if line.get(measure) is not None}
    best = sorted((n for n in checkpoints if n in score), key=lambda n: (score[n], n))
    return {*last, *every, *(best[-settings.keep_best :] if settings.keep_best else [])}


def remove_old_checkpoints(node: Node) -> None:
    """Keep what the settings say. A directory loses its name first, so that none is ever seen half removed.

    What cannot be removed just now (a file that another client holds open) is tried again next time.
    """
    run_dir = node.run_dir
    published = outputs.checkpoints(run_dir)
    stay = kept(published, outputs.metrics_lines(run_dir), node.settings.checkpoints)
    for iteration in sorted(set(published) - stay):
        shared_fs.rename(run_dir.checkpoint(iteration), run_dir.removed(iteration, node.record.epoch))
    for name in outputs.names(run_dir.checkpoints):
        staged = parse_staging_name(name)
        if name.startswith(REMOVED) or (staged and staged[0] <= node.iteration):
            shared_fs.remove_tree(run_dir.checkpoints / name)
