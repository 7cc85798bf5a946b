"""Choose which metrics are drawn, and how."""

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.console.report.charts import Chart, chart
from coordinator.console.report.values import numbers
from coordinator.console.views.heartbeats import is_number
from coordinator.console.views.scores import history

CHARTS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Reward",
        "mean of all samples",
        "",
        (("reward", "training"), ("eval_reward", "evaluation")),
    ),
    ("Loss", "mean over the optimizer's steps", "", (("loss", "loss"),)),
    (
        "KL",
        "of the trainer, a token",
        "",
        (("kl_engine", "to the engine"), ("kl_reference", "to the reference")),
    ),
    ("Entropy", "nats a token", "", (("entropy", "entropy"),)),
    ("Length", "tokens generated a sample", "", (("length", "tokens"),)),
    ("Truncated", "samples cut at rollout.max_tokens", " %", (("truncated", "cut"),)),
    ("Learning rate", "of the last optimizer step", "", (("lr", "rate"),)),
    ("Gradient norm", "before clipping", "", (("grad_norm", "norm"),)),
    (
        "Clipped",
        "tokens without their whole gradient",
        " %",
        (("clip_fraction", "by the clip"), ("correction_fraction", "by the correction for the engine")),
    ),
    ("Flat groups", "groups whose samples have one reward", " %", (("flat_groups", "flat"),)),
    ("Seconds", "of an iteration", " s", (("seconds", "seconds"),)),
    (
        "Tokens per second",
        "over all nodes",
        "",
        (("tokens_per_s", "generated"), ("train_tokens_per_s", "trained")),
    ),
    ("Nodes busy", "share of the time that is work", " %", (("busy_fraction", "busy"),)),
)
"""Title, note, unit, (field of a metrics line, label)."""

SOURCES = 4
"""How many curves of sources one chart has."""
BY_SOURCE = (
    ("Loss by source", "mean over their tokens", "loss_by_source"),
    ("KL by source", "of the trainer to the engine, a token", "kl_engine_by_source"),
    ("Entropy by source", "nats a token", "entropy_by_source"),
)
"""Title, note, field of a metrics line that holds a number for each source."""
SETS = 4
"""How many named sets of evaluations one chart has."""
METRICS = 24
"""How many metrics of rewards and environments are drawn; metrics.jsonl has them all."""

PERCENT = {"truncated", "clip_fraction", "correction_fraction", "flat_groups", "busy_fraction"}


OF_THE_POLICY = {
    "reward",
    "eval_reward",
    "reward_by_source",
    "sample_metrics",
    "eval_sample_metrics",
    "eval_pass_at",
    "eval",
}
"""What measures the policy that sampled an iteration. With cluster.max_async_level above 0 that is not the
policy of the iteration before: then these stand at the policy.
"""


def points(lines: Sequence[Mapping[str, Any]], field: str) -> list[tuple[int, float]]:
    """(iteration, value) of the lines that have the field; fractions in PERCENT are multiplied by 100."""
    scale = 100.0 if field in PERCENT else 1.0
    return [(line["iteration"], scale * line[field]) for line in lines if is_number(line.get(field))]


def by_policy(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the lines with the iteration whose policy they measure as `iteration`, in that order; None where
    each iteration is sampled by the policy of the one before.
    """
    policies = [line.get("policy_iteration") for line in lines]
    known = [policy if isinstance(policy, int) else None for policy in policies]
    if all(policy in {None, line["iteration"] - 1} for policy, line in zip(known, lines, strict=True)):
        return None
    by_iteration = [
        {**line, "iteration": policy} for policy, line in zip(known, lines, strict=True) if policy is not None
    ]
    return sorted(by_iteration, key=lambda line: line["iteration"])


def charts(lines: Sequence[Mapping[str, Any]], fork: int | None = None) -> list[Chart]:
    """Return the charts that have data, with pass@k, and with curves by the names that tasks and rewards
    give. `fork`: the first iteration that is the run's own, if it was forked from another one.
    """
    measured = by_policy(lines)
    axis = "iteration" if measured is None else "policy of iteration"
    measuring = lines if measured is None else measured
    drawn_charts = _fixed_charts({"": lines}, {"": measuring}, axis)
    if passed := _pass_at(measuring, axis):
        drawn_charts.insert(1, passed)
    drawn_charts += _of_sets(measuring, axis)
    if sources := _curves(measuring, "reward_by_source"):
        drawn = list(sources.items())[:SOURCES]
        drawn_charts.append(chart("Reward by source", "mean of the groups", "", drawn, axis))
    for title, note, field in BY_SOURCE:
        if sources := _curves(lines, field):
            drawn_charts.append(chart(title, note, "", list(sources.items())[:SOURCES], "iteration"))
    drawn_charts += _of_the_users(measuring, axis)
    return drawn_charts if fork is None else [drawn.forked_at(fork) for drawn in drawn_charts]


def of_runs(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Chart]:
    """Return the charts of several runs, by name, each with the curves of all of them."""
    by_name = {name: by_policy(lines) for name, lines in runs.items()}
    axis, measuring = "iteration", dict(runs)
    if any(by_name.values()):
        axis = "policy of iteration"
        measuring = {
            name: by_name[name] or [{**line, "iteration": line["iteration"] - 1} for line in lines]
            for name, lines in runs.items()
        }
    drawn_charts = _fixed_charts(runs, measuring, axis)
    of_sets = {name: history(lines) for name, lines in measuring.items()}
    for eval_set in sorted(
        {eval_set for scores in of_sets.values() for eval_set in scores} - {"eval_reward"}
    ):
        drawn = [
            (name, [(iteration, score.reward) for iteration, score in scores.get(eval_set, ())])
            for name, scores in of_sets.items()
        ]
        drawn_charts.append(chart(eval_set, "evaluation set, mean reward", "", drawn, axis))
    return drawn_charts


def _fixed_charts(
    runs: Mapping[str, Sequence[Mapping[str, Any]]],
    measuring: Mapping[str, Sequence[Mapping[str, Any]]],
    axis: str,
) -> list[Chart]:
    """Return those of CHARTS that have data, with the curves of all runs, by name; one run needs no name.
    `measuring`: their lines at what `axis` says.
    """
    drawn_charts: list[Chart] = []
    for title, note, unit, fields in CHARTS:
        is_of_policy = fields[0][0] in OF_THE_POLICY
        drawn = [
            (f"{name} {label}".strip() if len(fields) > 1 or not name else name, data)
            for field, label in fields
            for name, lines in (measuring if is_of_policy else runs).items()
            if (data := points(lines, field))
        ]
        if drawn:
            drawn_charts.append(chart(title, note, unit, drawn, axis if is_of_policy else "iteration"))
    return drawn_charts


def _of_sets(lines: Sequence[Mapping[str, Any]], axis: str) -> list[Chart]:
    """Return charts of the named sets of evaluations, SETS in each."""
    named = [
        (name, [(iteration, score.reward) for iteration, score in scores])
        for name, scores in history(lines).items()
        if name != "eval_reward"
    ]
    several = [named[begin : begin + SETS] for begin in range(0, len(named), SETS)]
    return [chart("Evaluation sets", "mean reward of each", "", drawn, axis) for drawn in several]


def _of_the_users(lines: Sequence[Mapping[str, Any]], axis: str) -> list[Chart]:
    """Return a chart for each metric that the reward or the environment has given, by its name."""
    train, evaluation = _curves(lines, "sample_metrics"), _curves(lines, "eval_sample_metrics")
    user_charts: list[Chart] = []
    for name in sorted({*train, *evaluation})[:METRICS]:
        candidates = (("training", train.get(name)), ("evaluation", evaluation.get(name)))
        drawn = [(label, data) for label, data in candidates if data]
        user_charts.append(chart(name, "metric of the reward or the environment, mean", "", drawn, axis))
    return user_charts


def _curves(lines: Sequence[Mapping[str, Any]], field: str) -> dict[str, list[tuple[int, float]]]:
    """(iteration, value) of each name that the field holds."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in lines:
        for name, value in numbers(line, field).items():
            curves.setdefault(name, []).append((line["iteration"], value))
    return curves


def _pass_at(lines: Sequence[Mapping[str, Any]], axis: str) -> Chart | None:
    """Return the chart of pass@k, if evaluations have several samples a task."""
    curves = _curves(lines, "eval_pass_at")
    drawn = [(f"pass@{k}", [(n, 100.0 * rate) for n, rate in data]) for k, data in curves.items()][-4:]
    return (
        chart("Pass rate", "evaluation tasks solved by one of k samples", " %", drawn, axis)
        if len(curves) > 1
        else None
    )
