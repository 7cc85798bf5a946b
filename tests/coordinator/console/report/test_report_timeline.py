"""Events as spans on one clock, from events made by hand."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.report.faults import all_faults, retries
from coordinator.console.report.figures import (
    held_up,
    phase_times,
    rollout_work,
    shares_by_metrics,
    time_shares,
)
from coordinator.console.report.lanes import Lanes, NodeTitle, lanes
from coordinator.console.report.sources import read_events
from coordinator.console.report.timeline import Timelines, spans_of
from coordinator.directory.layout import RunDir


class Teller:
    """Writes the events of a rank; `ahead_s`: what its clock shows more than the master's."""

    def __init__(self, ahead_s: float = 0.0, host: str = "node-a") -> None:
        self.ahead_s, self.n, self.e = ahead_s, 1, 1
        self.lines: list[dict[str, Any]] = []
        self.say(0.0, "process", host=host)
        self.say(0.0, "epoch", members=[0, 1])

    def say(self, at_s: float, what: str, **more: Any) -> None:
        self.lines.append({"t": at_s + self.ahead_s, "n": self.n, "e": self.e, "what": what, **more})

    def phase(
        self, begin_s: float, end_s: float, work_s: float, phase: str = "training", it: int = 1
    ) -> None:
        self.say(begin_s, "begin", it=it, row=phase)
        self.say(end_s, "end", it=it, row=phase, work_s=work_s)


def told(*tellers: Teller) -> Timelines:
    return Timelines({rank: spans_of(rank, teller.lines) for rank, teller in enumerate(tellers)})


def drawn(timelines: Timelines, iteration: int = 1) -> Lanes:
    nodes = {rank: NodeTitle(f"rank {rank}", "") for rank in range(2)}
    return lanes(timelines.timeline_of(iteration), "", nodes)


def test_clock_of_a_worker_is_aligned_by_the_ends_of_rows() -> None:
    master, worker = Teller(), Teller(ahead_s=5000.0, host="node-b")
    for teller, delays in ((master, (0.0, 0.0)), (worker, (0.3, 0.004))):
        teller.phase(1.0, 4.0 + delays[0], 2.0, "train_rollout")
        teller.phase(5.0, 9.0 + delays[1], 4.0, "training")
    timeline = told(master, worker).timeline_of(1)
    assert [bar.begin_s for bar in timeline.bars[0]] == [0.0, 4.0]
    assert [bar.end_s for bar in timeline.bars[1]] == pytest.approx([3.296, 8.0])
    assert timeline.seconds == pytest.approx(8.0)


def test_clock_that_drifts_is_aligned_anew_in_each_iteration() -> None:
    master, worker = Teller(), Teller(host="node-b")
    for iteration, drift_s in ((1, 0.0), (2, 7.0)):
        master.phase(10.0 * iteration, 10.0 * iteration + 4, 1.0, it=iteration)
        worker.phase(10.0 * iteration + drift_s, 10.0 * iteration + 4 + drift_s, 1.0, it=iteration)
    for iteration in (1, 2):
        timeline = told(master, worker).timeline_of(iteration)
        assert timeline.bars[0][0][:2] == timeline.bars[1][0][:2] == (0.0, 4.0)


def test_row_without_a_common_end_takes_its_clock_from_the_iteration_before() -> None:
    master, worker = Teller(), Teller(ahead_s=-300.0, host="node-b")
    for teller in (master, worker):
        teller.phase(1.0, 2.0, 1.0)
        teller.say(3.0, "begin", it=2, row="training")
        teller.say(5.0, "warning", text="slow")
    timeline = told(master, worker).timeline_of(2)
    assert timeline.bars[1][0][:2] == (0.0, 2.0) and timeline.bars[1][0].span.state == "open"


def test_node_whose_clock_is_unknown_is_named_and_not_drawn() -> None:
    master, stranger = Teller(), Teller(ahead_s=77.0, host="node-b")
    master.phase(1.0, 2.0, 1.0)
    stranger.say(1.0, "begin", it=1, row="training")
    assert drawn(told(master, stranger)).missing == ["1"]


def test_row_that_was_broken_off_lasts_to_the_next_line_and_is_neither_work_nor_waiting() -> None:
    master = Teller()
    master.say(1.0, "begin", it=1, row="training")
    master.say(4.0, "lost", rank=1, text="silent")
    master.e = 2
    master.say(9.0, "epoch", members=[0, 1])
    master.phase(9.5, 11.0, 1.0)
    broken, whole = spans_of(0, master.lines)
    assert (broken.state, broken.end_s, broken.work_s, broken.wait_s) == ("broken", 9.0, 0.0, 0.0)
    assert (whole.state, whole.work_s, whole.wait_s) == ("whole", 1.0, 0.5)
    assert held_up([broken, whole]) == 8.5


def test_row_of_a_killed_process_ends_with_its_last_line() -> None:
    worker = Teller()
    worker.say(1.0, "begin", it=1, row="training")
    worker.say(2.0, "warning", text="hot")
    worker.n, worker.e = 2, 0
    worker.say(50.0, "process", host="node-a")
    assert [(span.end_s, span.process) for span in spans_of(1, worker.lines)] == [(2.0, 1)]


def test_what_a_superseded_process_still_says_is_left_out() -> None:
    worker = Teller()
    worker.n = 2
    worker.say(1.0, "process", host="node-b")
    worker.say(2.0, "begin", it=1, row="training")
    worker.n = 1
    worker.say(3.0, "begin", it=1, row="checkpoint")
    worker.n = 2
    worker.say(4.0, "end", it=1, row="training", work_s=2.0)
    assert [(span.phase, span.state) for span in spans_of(1, worker.lines)] == [("training", "whole")]


def test_start_of_an_engine_is_not_counted_as_rollout() -> None:
    master = Teller()
    master.say(0.0, "begin", it=1, row="train_rollout")
    master.say(60.0, "engine_ready", seconds=60.0)
    master.say(100.0, "end", it=1, row="train_rollout", work_s=80.0)
    (span,) = spans_of(0, master.lines)
    assert (span.work_s, span.load_s, span.wait_s) == (80.0, 60.0, 20.0)
    blocks = drawn(told(master)).blocks
    assert [(block.style, block.width) for block in blocks] == [
        ("load", 600),
        ("rollout", 200),
        ("rollout wait", 200),
    ]


def test_masters_conclusion_is_work_that_follows_its_waiting() -> None:
    master = Teller()
    master.say(0.0, "begin", it=1, row="train_rollout")
    master.say(100.0, "end", it=1, row="train_rollout", work_s=50.0, then_s=10.0)
    (span,) = spans_of(0, master.lines)
    assert (span.work_s, span.then_s, span.wait_s) == (50.0, 10.0, 50.0)
    assert [(block.style, block.x, block.width) for block in drawn(told(master)).blocks] == [
        ("rollout", 0, 400),
        ("rollout wait", 400, 500),
        ("rollout", 900, 100),
    ]
    assert [(phase.work_s, phase.wait_s) for phase in phase_times({0: [span]})] == [(50.0, 50.0)]
    assert rollout_work({0: [span]}, [0], 1) == {1: {0: 40.0}}


def test_writing_the_checkpoint_is_no_training() -> None:
    node = Teller()
    node.say(0.0, "begin", it=1, row="training")
    node.say(100.0, "end", it=1, row="training", work_s=90.0)
    (span,) = spans_of(0, node.lines)
    line = {"iteration": 1, "checkpoint_seconds": 20.0, "phase_seconds": {"training": 100.0}}
    for shares, trained in ((time_shares({0: [span]}, [line]), 70.0), (shares_by_metrics([line]), 80.0)):
        seconds = {share.name: share.seconds for share in shares}
        assert (seconds["train"], seconds["save"]) == (trained, 20.0)
    (alone, _) = time_shares({0: [span]}, [{"iteration": 2, "checkpoint_seconds": 20.0}])
    assert (alone.name, alone.seconds) == ("train", 90.0), "that line is another iteration's"


@pytest.mark.parametrize("seconds", [None, "60", [1], float("nan"), float("inf"), -3.0])
def test_seconds_that_are_no_number_count_as_none(seconds: object) -> None:
    master = Teller()
    master.say(0.0, "begin", it=1, row="train_rollout")
    master.say(1.0, "engine_ready", seconds=seconds)
    master.say(2.0, "end", it=1, row="train_rollout", work_s=1.0, then_s=seconds)
    master.say(2.0, "retry", text="read", seconds=seconds)
    (span,) = spans_of(0, master.lines)
    assert (span.work_s, span.load_s, span.then_s) == (1.0, 0.0, 0.0)
    assert retries({0: master.lines})[0].seconds == 0.0


def test_loss_of_a_node_is_told_with_the_time_until_the_run_went_on() -> None:
    master, worker = Teller(), Teller(host="node-b")
    master.say(1.0, "begin", it=7, row="training")
    master.say(31.0, "lost", rank=1, text="rank 1 is silent")
    master.e = 2
    master.say(60.0, "epoch", members=[0, 1])
    master.say(61.0, "begin", it=7, row="training")
    worker.n = 2
    worker.say(50.0, "process", host="node-b", at="2026-11-21T20:00:00+00:00")
    worker.say(51.0, "exit", code=3, text="a node was lost")
    told_of = {fault.kind: fault for fault in all_faults({0: master.lines, 1: worker.lines})}
    assert told_of.keys() == {"lost", "new epoch", "started again", "ended"}
    lost = told_of["lost"]
    assert (lost.rank, lost.host, lost.iteration, lost.phase) == (1, "node-b", 7, "training")
    assert lost.went_on_s == 30.0 and told_of["ended"].went_on_s is None


def test_loss_is_told_once_without_what_was_to_be_typed_then() -> None:
    master, worker = Teller(), Teller(host="node-b")
    text = "rank 2 is lost: no heartbeat for 30 s. To bring it back, on that machine: run --worker 2"
    for node, what, said in ((master, "lost", text), (worker, "warning", f"holding: {text}")):
        node.say(1.0, "begin", it=7, row="training")
        node.say(31.0, what, rank=2, text=said)
    master.say(25.0, "error", text=text.replace("30 s", "24 s"))  # while its share was not yet made
    (lost,) = all_faults({0: master.lines, 1: worker.lines})
    assert (lost.kind, lost.text) == ("lost", "rank 2 is lost: no heartbeat for 30 s")


def test_process_that_started_again_comes_between_the_loss_and_the_epoch_that_it_enters() -> None:
    master, worker = Teller(), Teller(host="node-b")
    for node in (master, worker):
        node.say(1.0, "begin", it=7, row="training")
    master.say(31.0, "lost", rank=1, text="rank 1 is silent")
    worker.n, worker.e = 2, 0
    worker.say(50.0, "process", host="node-b", at="2026-11-21T20:00:00+00:00")
    master.e = worker.e = 2
    for node in (master, worker):
        node.say(60.0, "epoch", members=[0, 1])
    told = all_faults({0: master.lines, 1: worker.lines})
    assert [fault.kind for fault in told] == ["lost", "started again", "new epoch"]
    assert told[1].text.endswith("20:00:00, 49.0 s after the last event of the one before")


def test_how_long_a_node_was_away_is_not_said_of_two_clocks() -> None:
    node = Teller(host="node-b")
    node.say(40.0, "begin", it=7, row="training")
    node.say(5.0, "process", host="node-b", at="2026-11-21T20:00:00+00:00")  # the machine was off between
    node.say(50.0, "process", host="node-c", at="2026-11-21T21:00:00+00:00")
    assert [fault.text.partition(", from ")[2] for fault in all_faults({0: node.lines})] == [
        "2026-11-21T20:00:00",
        "2026-11-21T21:00:00",
    ]


def test_setting_that_is_not_what_it_was_at_the_last_start_is_told() -> None:
    master = Teller()
    master.say(1.0, "changed", text="iterations is 3, at the last start it was 2")
    (changed,) = all_faults({0: master.lines})
    assert (changed.kind, changed.text) == ("changed", "iterations is 3, at the last start it was 2")
    assert changed.went_on_s is None


def test_warnings_that_differ_in_numbers_are_one_line_and_retries_are_summed() -> None:
    master = Teller()
    for iteration in (1, 2, 3):
        master.phase(iteration, iteration + 0.5, 0.1, it=iteration)
        master.say(iteration + 0.6, "warning", text=f"a request took {iteration}.5 s")
        master.say(iteration + 0.7, "retry", text="read: Stale file handle", seconds=0.5)
    (warning,) = all_faults({0: master.lines})
    assert (warning.iteration, warning.times, warning.until) == (1, 3, 3)
    (repeated,) = retries({0: master.lines})
    assert (repeated.times, repeated.seconds, repeated.host) == (3, 1.5, "node-a")


def test_torn_lines_are_left_out_and_old_rows_of_long_files_skipped(tmp_path: Path) -> None:
    master = Teller()
    for iteration in range(1, 100):
        master.phase(iteration, iteration + 0.5, 0.1, it=iteration)
    path = RunDir(tmp_path).events(0)
    path.parent.mkdir()
    texts = [json.dumps(line) for line in master.lines]
    texts[50:50] = [
        "",
        '{"t": 3.1, "n": 1, "e"',
        '{"t": "x", "n": 1, "e": 1, "what": "begin"}',
        "[1]",
        "\x00",
    ]
    path.write_text("\n".join([*texts, '{"t": 10']))
    (path.parent / "rank_x.jsonl").write_text("not a rank")
    assert read_events(RunDir(tmp_path)).lines == {0: master.lines}
    tail = read_events(RunDir(tmp_path), budget_bytes=2000)
    assert tail.skipped and 10 < len(tail.lines[0]) < 50
    assert [line["what"] for line in tail.lines[0][:2]] == ["process", "epoch"]


def test_events_that_cannot_be_read_are_named_and_the_others_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, master = RunDir(tmp_path), Teller()
    run_dir.events(0).parent.mkdir()
    for rank in (0, 1):
        run_dir.events(rank).write_text("".join(json.dumps(line) + "\n" for line in master.lines))
    run_dir.events(2).mkdir()
    os.mkfifo(run_dir.events(3))
    run_dir.events(4).symlink_to("nowhere")
    failing = [errno.ESTALE, errno.EIO]
    really = Path.open

    def opened(path: Path, *words: Any, **more: Any) -> Any:
        if path == run_dir.events(1) and failing:
            raise OSError(failing.pop(), "fails, then works")
        return really(path, *words, **more)

    monkeypatch.setattr(Path, "open", opened)
    events = read_events(run_dir)
    assert events.lines == {0: master.lines, 1: master.lines} and not failing
    assert events.unreadable == [run_dir.events(rank).name for rank in (2, 3, 4)]
    assert not events.skipped
    failing.append(errno.EACCES)
    assert read_events(run_dir).unreadable == [run_dir.events(rank).name for rank in (1, 2, 3, 4)]


def test_directory_of_events_that_is_none_is_named(tmp_path: Path) -> None:
    directory = RunDir(tmp_path).events(0).parent
    directory.write_text("")
    assert read_events(RunDir(tmp_path)).unreadable == [directory.name]
