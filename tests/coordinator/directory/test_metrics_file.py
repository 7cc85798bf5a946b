"""metrics.jsonl is read on, whatever happens to it, and says the same as when it is read anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations, MetricsFile, NewLines
from rollout.storage import files
from rollout.storage.lines import append_line


def line(iteration: int, kind: str = "both", **more: Any) -> dict[str, Any]:
    return {"iteration": iteration, "kind": kind, **more}


def append(run_dir: RunDir, *lines: dict[str, Any]) -> None:
    for one in lines:
        append_line(run_dir.metrics, json.dumps(one))


def numbers(run_dir: RunDir, lines: NewLines) -> list[int]:
    return [one["iteration"] for one in lines.read()[0]]


def test_each_line_is_read_and_parsed_once(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    new, sizes = NewLines(run_dir), list[int]()
    read = files.read_from

    def counted(path: Path, start: int) -> bytes:
        data = read(path, start)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(files, "read_from", counted)
    assert numbers(run_dir, new) == []
    append(run_dir, line(1), line(2))
    assert numbers(run_dir, new) == [1, 2]
    for iteration in range(3, 60):
        append(run_dir, line(iteration))
        assert numbers(run_dir, new) == [iteration]
        assert numbers(run_dir, new) == []
    assert max(sizes[1:]) <= 3 * len(json.dumps(line(59)) + "\n"), "not what was read before"


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])


def other_run(path: Path) -> None:
    path.write_text("".join(json.dumps(line(n, reward=0.5)) + "\n" for n in range(1, 9)))


def last_line_overwritten(path: Path) -> None:
    """As two clients do that append at once on NFS."""
    data = path.read_bytes()
    path.write_bytes(data[:-40] + (json.dumps(line(7)) + "\n").encode().rjust(40))


@pytest.mark.parametrize("change", [truncated, other_run, last_line_overwritten, Path.unlink])
def test_file_that_is_not_the_one_before_is_read_anew(
    run_dir: RunDir, change: Callable[[Path], None]
) -> None:
    append(run_dir, *(line(n) for n in range(1, 6)))
    shown, finished = MetricsFile(run_dir), FinishedIterations(run_dir)
    assert len(shown.read()) == finished.look().last("both") == 5
    change(run_dir.metrics)
    assert shown.read() == published.metrics_lines(run_dir)
    last = max((one["iteration"] for one in published.metrics_lines(run_dir)), default=0)
    assert finished.look().last("both") == last != 5


@pytest.mark.parametrize("cut", [1, 5])
def test_line_that_a_crash_has_torn_is_read_when_it_is_whole(run_dir: RunDir, cut: int) -> None:
    """It may lack only its newline; then it counts at once."""
    append(run_dir, line(1))
    shown, finished = MetricsFile(run_dir), FinishedIterations(run_dir)
    shown.read()
    with run_dir.metrics.open("ab") as file:
        file.write((json.dumps(line(2)) + "\n").encode()[:-cut])
    for _ in range(2):
        assert len(shown.read()) == finished.look().last("both") == (2 if cut == 1 else 1)
    append(run_dir, line(2, again=True), line(3))
    assert [one["iteration"] for one in shown.read()] == [1, 2, 3]
    assert shown.read() == published.metrics_lines(run_dir) and finished.look().last("both") == 3


def test_line_that_was_appended_twice_counts_once_and_kinds_count_apart(run_dir: RunDir) -> None:
    shown, finished = MetricsFile(run_dir), FinishedIterations(run_dir, keeps_scores=True)
    append(run_dir, line(1, reward=0.1), line(2, "rollout"), line(1, reward=0.9), line(1, "eval"))
    assert [one.get("reward") for one in shown.read()] == [0.1, None, None]
    finished.look()
    assert (finished.last("both"), finished.last("both", "rollout"), finished.last("update")) == (1, 2, 0)
    assert finished.score(0) == 0.1 and finished.newest == line(2, "rollout")
    append(run_dir, line(3, eval_reward=0.7, reward=0.2))
    assert finished.look().score(2) == 0.7 and finished.score(0) is None, "evaluations alone count now"


def test_odd_lines_are_left_out(run_dir: RunDir) -> None:
    odd = [
        7,
        [],
        None,
        {},
        {"iteration": "1", "kind": "both"},
        {"iteration": 1},
        {"iteration": 1, "kind": []},
    ]
    run_dir.metrics.write_text("".join(json.dumps(one) + "\n" for one in [*odd, line(4)]) + "\n\n{")
    assert (
        published.metrics_lines(run_dir) == [line(4)] and FinishedIterations(run_dir).look().last("both") == 4
    )
