"""What is expected of a rollout: costs and paces of those before it."""

from pathlib import Path

import pytest

from coordinator.directory import history
from coordinator.directory.history import History
from coordinator.directory.layout import RunDir
from tests.coordinator.examples import write_json

PACE = [100, 10.0, 4]


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    publish(made, 1, [7, 8, 9], {"0": 10, "1": 20, "2": 30}, {"0": PACE})
    publish(made, 2, [9, 5], {"0": 60, "1": 40}, {"1": PACE})
    return made


def publish(
    run_dir: RunDir, iteration: int, tasks: list[int], costs: dict[str, int], paces: dict[str, list[float]]
) -> None:
    write_json(run_dir.iteration_json(iteration), {"tasks": tasks})
    write_json(run_dir.manifest("train", iteration), {"costs": costs, "paces": paces, "slots": 2})


def test_a_task_costs_what_it_did_last_and_a_new_one_as_the_last_iterations_average(run_dir: RunDir) -> None:
    known = History(run_dir, "train")
    assert known.costs(3, [9, 7, 1]) == {0: 60, 1: 10, 2: 50}
    assert known.paces(3) == {"1": PACE}  # rank 0 has left the run
    publish(run_dir, 3, [9], {}, {})
    assert History(run_dir, "train").costs(4, [9]) == {0: 60}
    known.add(3, [9], {"costs": {}, "paces": {}})
    assert known.paces(4) == {"1": PACE}


def test_later_iterations_are_not_looked_at(run_dir: RunDir) -> None:
    assert History(run_dir, "train").costs(2, [9]) == {0: 30}


def test_nothing_is_known_of_the_first_iteration(run_dir: RunDir) -> None:
    assert History(run_dir, "train").costs(1, [9]) == {}


def test_a_manifest_of_an_earlier_version_is_no_obstacle(run_dir: RunDir) -> None:
    old = {"slots": 2, "lengths": {"0": 900}, "paces": {"0": [900, 1.0, 4]}}
    write_json(run_dir.manifest("train", 3), old)
    known = History(run_dir, "train")
    assert known.costs(4, [9]) == {0: 60} and known.paces(4) == {"1": PACE}


def test_an_iteration_that_this_process_has_seen_is_not_read(run_dir: RunDir) -> None:
    known = History(run_dir, "train")
    known.costs(3, [])
    publish(run_dir, 3, [9], {"0": 1}, {})
    known.add(3, [9], {"costs": {"0": 77}})
    assert known.costs(4, [9]) == {0: 77}


def test_a_master_that_adds_before_it_asks_has_read_what_was_there(run_dir: RunDir) -> None:
    known = History(run_dir, "train")
    known.add(3, [4], {"costs": {"0": 77}})
    assert known.paces(4) == {"1": PACE} and known.costs(4, [4, 5, 7]) == {0: 77, 1: 40, 2: 10}


def test_only_the_tasks_seen_last_are_remembered(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 2)
    assert History(run_dir, "train").costs(3, [9, 5, 7]) == {0: 60, 1: 40, 2: 50}


def test_slots_of_an_evaluation_are_its_tasks(run_dir: RunDir) -> None:
    write_json(run_dir.manifest("eval", 1), {"costs": {"1": 12}, "slots": 2})
    assert History(run_dir, "eval").costs(2, range(2)) == {0: 12, 1: 12}
