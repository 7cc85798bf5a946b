# pyright: reportUnknownMemberType=false
"""The picture of a run: its rewards over the iterations."""

import logging
from pathlib import Path

from coordinator import outputs
from coordinator.run_dir import RunDir

log = logging.getLogger(__name__)


def draw_rewards(run_dir: RunDir) -> Path | None:
    """reward.png in the run directory; None if there is nothing to draw, or no matplotlib to draw it with."""
    lines = outputs.metrics_lines(run_dir)
    sampled = [(line["iteration"], line["reward"]) for line in lines if line.get("reward") is not None]
    greedy = [
        (line["iteration"], line["eval_reward"]) for line in lines if line.get("eval_reward") is not None
    ]
    if not sampled:
        return None
    try:
        import matplotlib
    except ImportError:
        log.info("no picture of the rewards: pip install matplotlib")
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    axes.plot(
        *zip(*sampled, strict=True),
        marker="o",
        markersize=4,
        color="#1f6feb",
        label="sampled, training tasks",
    )
    if greedy:
        axes.plot(
            *zip(*greedy, strict=True), marker="s", color="#d9730d", linestyle="--", label="evaluation tasks"
        )
    axes.set(xlabel="iteration", ylabel="mean reward", title=run_dir.root.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if all(0 <= reward <= 1 for _, reward in [*sampled, *greedy]):
        axes.set_ylim(-0.02, 1.02)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path = run_dir.root / "reward.png"
    figure.savefig(path)
    pyplot.close(figure)
    return path
