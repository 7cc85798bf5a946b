"""The charts of `run report`: which there are, and that any values can be drawn."""

import re

import pytest

from coordinator.console.report import curves
from coordinator.console.report.charts import POINTS, chart, nice_ticks, number_text


def test_metric_of_a_reward_or_an_environment_is_a_chart_with_its_name() -> None:
    lines = [
        {"iteration": 1, "sample_metrics": {"tries": 2.0, "characters": 300.0}, "eval_sample_metrics": None},
        {"iteration": 2, "sample_metrics": {"tries": 1.0}, "eval_sample_metrics": {"tries": 3.0, "{0}": 1.0}},
    ]
    drawn = {
        chart.title: [(curve.label, curve.readings) for curve in chart.curves]
        for chart in curves.charts(lines)
    }
    assert list(drawn) == ["characters", "tries", "{0}"]
    assert [label for label, _ in drawn["tries"]] == ["training", "evaluation"]
    assert [value for _, _, value in drawn["tries"][0][1]] == ["2", "1"]
    many = {f"m{number:02}": 1.0 for number in range(99)}
    assert len(curves.charts([{"iteration": 1, "sample_metrics": many}])) == curves.METRICS


def test_source_of_tasks_may_have_any_name() -> None:
    lines = [{"iteration": 1, "reward_by_source": {"{a}": 0.5, "b": 0.25}}]
    (drawn,) = curves.charts(lines)
    assert [curve.marks[0][2] for curve in drawn.curves] == ["iteration 1: {a} 0.5", "iteration 1: b 0.25"]


def test_training_has_charts_by_source_where_there_are_several() -> None:
    lines = [{"iteration": 1, "loss_by_source": {"a": 0.5, "b": 2.5}, "entropy_by_source": {"a": 0.5}}]
    assert [drawn.title for drawn in curves.charts(lines)] == ["Loss by source", "Entropy by source"]


def test_ticks_are_round_and_hold_the_values() -> None:
    assert nice_ticks(0.0, 0.93, 4) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert nice_ticks(0.0, 3.2e-13, 4) == [0.0, 1e-13, 2e-13, 3e-13, 4e-13]
    assert nice_ticks(-0.0071, 0.024, 4) == [-0.01, 0.0, 0.01, 0.02, 0.03]
    assert nice_ticks(1, 3, 6, integers=True) == [1, 2, 3] and nice_ticks(5.0, 5.0, 4)[0] <= 5.0
    assert [number_text(value) for value in (0.6123, 1e-6, 1240.0, 12345.0, 0.0)] == [
        "0.612", "1e-06", "1240", "12.3k", "0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        [0.3, 0.30000000000000004],
        [0.5, 0.5000000000000001],
        [-0.3, -0.30000000000000004],
        [0.0, -0.0],
        [5e-324, 5e-324],
        [-5e-324, 5e-324],
        [1e308, -1e308],
        [1e100, -1e100],
        [1.0, 1.00000001],
        [1e308, 0.5],
    ],
)
def test_any_values_can_be_drawn(values: list[float]) -> None:
    drawn = chart("Loss", "", "", [("loss", list(enumerate(values)))])
    heights = [y for y, _ in drawn.y_ticks]
    assert len(heights) > 1 and heights == sorted(set(heights), reverse=True)
    marks = [mark for curve in drawn.curves for mark in curve.marks]
    assert len(marks) == sum(abs(value) < 1e300 for value in values)
    assert all(heights[-1] <= y <= heights[0] for _, y, _ in marks)
    found = curves.charts([{"iteration": n, "loss": value} for n, value in enumerate(values)])
    assert len(found) == bool(marks)


def test_thousands_of_iterations_become_as_many_points_as_can_be_seen_and_a_band() -> None:
    values = [(number, 9.0 if number == 3333 else number % 2) for number in range(1, 5001)]
    (curve,) = chart("Reward", "", "", [("training", values)]).curves
    assert len(curve.readings) <= POINTS and len(curve.marks) == 1
    assert min(float(y) for y in re.findall(r" ([\d.]+)", curve.band)) < 30  # the peak is in the band
    (short,) = chart("Reward", "", "", [("training", values[:2])]).curves
    assert len(short.marks) == 2 and short.band == ""


def test_what_a_fork_has_taken_over_is_veiled() -> None:
    lines = [{"iteration": n, "loss": 0.1 * n, "entropy": 1.0 if n > 4 else None} for n in range(1, 7)]
    loss, entropy = curves.charts(lines, fork=4)
    places = {iteration: place for place, iteration, _ in loss.curves[0].readings}
    assert loss.fork is not None and entropy.fork is None, "all of its points are the run's own"
    assert places[3] < loss.fork[0] < places[4] and loss.fork[1] == 4
    assert curves.charts(lines)[0].fork is None
    assert curves.charts(lines, fork=9)[0].fork is None, "nothing of its own yet"


def test_chart_whose_lines_never_change_is_a_line_of_text() -> None:
    flat = chart(
        "Clipped", "", " %", [("by the clip", [(1, 0.0), (2, 0.0)]), ("other", [(1, 3.0), (2, 3.0)])]
    )
    assert flat.is_flat and flat.summary == "by the clip 0 %; other 3 %"
    assert not chart("Reward", "", "", [("training", [(1, 0.5), (2, 0.6), (3, 0.5)])]).is_flat
    assert not chart("Reward", "", "", [("training", [(1, 0.5)])]).is_flat, "one iteration says nothing of it"


def test_curves_of_two_runs_are_in_the_same_charts() -> None:
    sets = {"hard": {"reward": 0.5, "error": 0.1}}
    first = [{"iteration": n, "reward": 0.1 * n, "loss": 1.0, "policy_iteration": n - 1} for n in (1, 2)]
    second = [{**line, "loss": 2.0, "eval": sets} for line in first]
    reward, loss, hard = curves.of_runs({"A": first, "B": second})
    assert [curve.label for curve in reward.curves] == ["A training", "B training"]
    assert [curve.label for curve in loss.curves] == ["A", "B"] and loss.axis == "iteration"
    assert hard.title == "hard" and [curve.label for curve in hard.curves] == ["B"]
    older = [{**line, "policy_iteration": 0} for line in first]  # as with cluster.max_async_level
    reward, *_ = curves.of_runs({"A": first, "B": older})
    assert reward.axis == "policy of iteration"
    assert [n for _, n, _ in reward.curves[0].readings] == [0, 1]
