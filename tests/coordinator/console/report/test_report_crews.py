"""The report of a run in which one crew generates and another trains, each by clocks of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.report import curves, write_report
from coordinator.console.report.crews import (
    CrewFigures,
    ahead_s,
    busy_s,
    idle_fraction,
    side_by_side,
    what_would_balance,
)
from coordinator.console.report.sources import CrewEvents, read_crews
from coordinator.console.report.timeline import IDLE, Timelines
from coordinator.console.views.crew_status import crew_dirs
from coordinator.directory.layout import MASTER
from tests.coordinator.example_crews import make_crews

AHEAD_S = 77_777.0 - 5000.0
"""How far the clock of the machine that trains is ahead of that of the rollout crew's master."""


def told_by(root: Path, rollout_s: float, train_s: float, level: int = 1) -> list[CrewEvents]:
    make_crews(root, rollout_s, train_s, level, iterations=8 * (1 + level))
    return read_crews(crew_dirs(root))


@pytest.mark.parametrize(
    ("rollout_s", "train_s", "level", "trusted"),
    [(12.0, 6.0, 1, "train"), (6.0, 9.0, 1, "rollout"), (6.0, 9.0, 3, "rollout"), (6.0, 6.0, 0, "train")],
)
def test_clocks_of_two_crews_are_related_by_who_waits_for_whom(
    tmp_path: Path, rollout_s: float, train_s: float, level: int, trusted: str
) -> None:
    rollout, train = (Timelines(crew.spans) for crew in told_by(tmp_path, rollout_s, train_s, level))
    clocks = (rollout.clock(8), train.clock(8))
    assert ahead_s(rollout, train, clocks, level, trusted) == pytest.approx(AHEAD_S, abs=0.01)
    assert ahead_s(rollout, train, ("here", "here"), level, trusted) == 0.0
    assert ahead_s(rollout, train, ("unknown", clocks[1]), level, trusted) is None


def test_what_the_crews_did_at_one_time_stands_above_each_other(tmp_path: Path) -> None:
    crews = told_by(tmp_path, 12.0, 6.0)
    rollout, train = (Timelines(crew.spans) for crew in crews)
    above, below = side_by_side(rollout, train, [5, 6], 1, "train")
    assert (above.iterations, below.iterations) == ((5, 6, 7), (5, 6))
    assert above.seconds == below.seconds == pytest.approx(24.6, abs=0.3)
    training = [bar.begin_s for bar in below.bars[0] if bar.span.phase == "training"]
    ends = [bar.end_s for bar in above.bars[0] if bar.span.phase == "eval_rollout"]
    assert training == pytest.approx([end + 0.2 for end in ends], abs=0.1), "it trains what was just made"
    assert above.bars.keys() == {0, 1} and below.bars.keys() == {0}


def test_time_between_iterations_is_waiting_for_the_other_crew(tmp_path: Path) -> None:
    rollout, train = told_by(tmp_path, 12.0, 6.0)
    assert idle_fraction(rollout.spans.values()) < 0.01
    assert idle_fraction(train.spans.values()) == pytest.approx(1 - 6.4 * 16 / (12.3 * 15 + 6.4), abs=0.02)
    assert busy_s(train.spans[MASTER]) == pytest.approx(6.3, abs=0.1)
    own = train.spans[MASTER]
    assert {span.iteration for span in own if span.phase == IDLE} >= {2, 3, 8}
    broken = [own[0]._replace(state="broken", iteration=9)]
    assert busy_s(broken) is None


def test_time_in_which_an_epoch_changes_is_not_spent_waiting_for_the_other_crew(tmp_path: Path) -> None:
    make_crews(tmp_path, 12.0, 6.0)
    train = crew_dirs(tmp_path)[1]
    lines = [json.loads(line) for line in train.events(0).read_text().splitlines()]
    for line in lines:
        line["e"] += line.get("it", 0) > 4
    train.events(0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    spans = read_crews(crew_dirs(tmp_path))[1].spans[MASTER]
    idle = {span.iteration for span in spans if span.phase == IDLE}
    assert 5 not in idle and {4, 6} <= idle


@pytest.mark.parametrize(
    ("rollout", "train", "level", "said"),
    [
        (
            CrewFigures(12.0, 2),
            CrewFigures(6.0, 1),
            1,
            "No other split of the 3 devices is faster; one more for generation",
        ),
        (CrewFigures(12.0, 2), CrewFigures(6.0, 1), 1, "would make it 8.0 s, if that scales linearly"),
        (
            CrewFigures(12.0, 2),
            CrewFigures(3.0, 2),
            1,
            "3 devices for generation and 1 for training would be best: 8.0 s",
        ),
        (
            CrewFigures(6.0, 3),
            CrewFigures(20.0, 2),
            1,
            "2 devices for generation and 3 for training would be best: 13.3 s",
        ),
        (
            CrewFigures(6.0, 1),
            CrewFigures(6.0, 1),
            2,
            "An iteration costs the longer of the two, 6.0 s. The crews are balanced.",
        ),
        (
            CrewFigures(6.0, 1),
            CrewFigures(5.0, 1),
            0,
            "take turns, so an iteration costs the sum, 11.0 s; with --max-async",
        ),
        (CrewFigures(90.0, 1), CrewFigures(1.0, 1), 1, "one more for generation would make it 45.0 s"),
    ],
)
def test_report_says_what_would_balance_the_crews(
    rollout: CrewFigures, train: CrewFigures, level: int, said: str
) -> None:
    text = what_would_balance(rollout, train, level)
    assert said in text and text.startswith("Generation takes ")


def test_page_shows_both_crews_with_their_iterations_and_idle_time(tmp_path: Path) -> None:
    make_crews(tmp_path / "run", 12.0, 6.0)
    page = write_report(tmp_path / "run").read_text()
    assert page.count('<figure class="timeline">') == 3
    assert "Iterations 6 to 8 of the train crew, the last ones" in page
    assert page.count('<div class="names crew">rollout</div>') == 3
    assert "rollout rank 1 train_rollout, iteration 7: 12.0 s of work" in page
    assert "s of waiting for the other crew before iteration 7" in page
    assert "for 0 % of the time, the train crew for the rollout crew for 4" in page
    assert "one more for generation would make it" in page
    assert 'title="train rank 2 on node-02"' in page and "Not drawn" not in page
    assert '<span class="key idle"></span>other crew' in page
    assert "--rank-weights" not in page


def test_faults_of_both_crews_are_told_with_their_machines(tmp_path: Path) -> None:
    make_crews(tmp_path / "run", 12.0, 6.0)
    for crew in crew_dirs(tmp_path / "run"):
        path = crew.events(0)
        *lines, last = path.read_text().splitlines()
        event = {**json.loads(last), "what": "warning", "text": f"heard in {crew.crew}"}
        path.write_text("\n".join([*lines, last, json.dumps(event)]) + "\n")
    page = write_report(tmp_path / "run").read_text()
    faults = page.partition('<section id="faults">')[2].partition("</section>")[0]
    assert 'data-name="rank">rollout 0</td>' in faults and 'data-name="rank">train 2</td>' in faults
    assert "heard in rollout" in faults and "heard in train" in faults


def test_page_is_made_while_the_first_groups_are_generated(tmp_path: Path) -> None:
    root = tmp_path / "run"
    make_crews(root, 12.0, 6.0)
    (root / "metrics.jsonl").unlink()
    rollout, train = crew_dirs(root)
    train.events(0).write_text("\n".join(train.events(0).read_text().splitlines()[:2]) + "\n")
    page = write_report(root).read_text()
    assert page.count('<figure class="timeline">') == 3 and "Iteration 8, not finished" in page
    for rank in (0, 1):
        rollout.events(rank).unlink()
    assert '<figure class="timeline">' not in write_report(root).read_text()


def test_crew_whose_clock_nothing_relates_is_named_and_not_drawn(tmp_path: Path) -> None:
    make_crews(tmp_path / "run", 12.0, 6.0)
    rollout = crew_dirs(tmp_path / "run")[0]
    kept = [
        line
        for line in rollout.events(0).read_text().splitlines()
        if '"train_rollout"' in line or '"epoch"' in line
    ]
    rollout.events(0).write_text("\n".join(kept) + "\n")
    page = write_report(tmp_path / "run").read_text()
    assert "Not drawn, since no phase relates their clocks to the master's: rollout rank 0, 1." in page


# ---- where a value stands


def line(number: int, policy: Any, **more: Any) -> dict[str, Any]:
    return {
        "iteration": number,
        "kind": "both",
        "policy_iteration": policy,
        "reward": number / 10,
        "loss": 0.1,
        **more,
    }


def test_rewards_stand_at_the_policy_that_they_measure() -> None:
    lines = [line(number, max(0, number - 2), eval_reward=0.5) for number in range(1, 5)]
    reward, loss = curves.charts(lines)[:2]
    assert (reward.axis, loss.axis) == ("policy of iteration", "iteration")
    assert [(number, value) for _, number, value in reward.curves[0].readings] == [
        (0, "0.1"), (0, "0.2"), (1, "0.3"), (2, "0.4"),
    ]  # fmt: skip
    assert [number for _, number, _ in loss.curves[0].readings] == [1, 2, 3, 4]
    assert reward.curves[1].marks[-1][2] == "policy of iteration 2: evaluation 0.5"


@pytest.mark.parametrize("policies", [[0, 1, 2], [None, None, None], ["x", 1, 2]])
def test_rewards_stand_at_their_iteration_where_each_is_sampled_by_the_one_before(
    policies: list[Any],
) -> None:
    (reward, _loss) = curves.charts([line(number + 1, policy) for number, policy in enumerate(policies)])
    assert reward.axis == "iteration"
    assert [number for _, number, _ in reward.curves[0].readings] == [1, 2, 3]
