"""`run report`: the page of made-up runs, whole, broken and hostile."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.report import write_report
from coordinator.console.report.figures import balance, waiting
from coordinator.console.report.samples import chosen_slots, group_text, reading, shortened
from coordinator.console.report.summary import advice, tiles
from coordinator.directory.layout import RunDir
from coordinator.protocol.records import Records, claim
from coordinator.protocol.snapshot import whole_board
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from tests.coordinator.example_run import State, make_run
from tests.coordinator.examples import record, write_json

HOSTILE = "</script><script>alert(1)</script>"


def page_of(run_dir: RunDir) -> str:
    return write_report(run_dir.root).read_text()


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_page_tells_the_run_in_one_file_that_needs_no_other(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "exp1", iterations=6, nodes=3, lost=3)
    page = page_of(run_dir)
    assert not re.search(r"""(src|href)=["'](?!#|data:)|url\((?!#)|@import|https?:""", page)
    for name in ("curves", "timeline", "time", "waiting", "faults", "samples", "settings"):
        assert section(page, name) and f'href="#{name}"' in page
    assert "6 of 6" in page and "--rank-weights 2" in page
    assert "rank 2 (node-02) is silent" in section(page, "faults") and "started again" in page
    assert "33.0 s" in section(page, "faults")
    assert "Before: iteration 1" in page and "After: iteration 6" in page
    assert "vllm 0.32.1" in page and "8 x NVIDIA H100" in page
    assert {path.name for path in run_dir.root.glob("report*")} == {"report.html"}


def test_text_of_the_run_is_text_in_the_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "<q>run", iterations=2, nodes=1, state="died")
    events = run_dir.events(0)
    events.write_text(events.read_text().replace("the shared directory is full", HOSTILE))
    people = run_dir.groups("train", 2)
    people.write_text(people.read_text().replace("What is", "\\u0000\\ud800 <img src=x onerror=alert(1)>"))
    page = page_of(run_dir)
    assert page.count("<script") == 1 and "<img" not in page and "<q>" not in page
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in section(page, "samples")
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in section(page, "faults")


@pytest.mark.parametrize(
    ("iterations", "nodes", "state", "timelines"),
    [(1, 1, "finished", 1), (0, 2, "running", 1), (3, 2, "died", 4), (2, 64, "running", 3)],
)
def test_page_of_any_run(tmp_path: Path, iterations: int, nodes: int, state: State, timelines: int) -> None:
    page = page_of(make_run(tmp_path / "run", iterations, nodes, state, tasks=3 * nodes))
    assert page.count('<figure class="timeline">') == timelines
    assert f'class="badge {"stopped" if state == "died" else state}"' in page
    assert ("No space left on device" in page) == (state == "died")
    assert ("going on" in page) == (state == "running")
    assert ("No iteration has been finished yet" in page) == (iterations == 0)
    assert len(page) < 1_000_000


def test_run_without_events_or_trajectories_has_a_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=3, nodes=2, with_events=False)
    shutil.rmtree(run_dir.root / "train_trajectories")
    with run_dir.metrics.open("a") as file:
        file.write('{"iteration": 4, "rew')
    page = page_of(run_dir)
    assert 'class="timeline"' not in page and "this run has no events" in page
    assert "waiting is included" in section(page, "time") and section(page, "waiting").count("<u ") == 2
    assert "not there (any more)" in section(page, "samples")


def test_report_goes_where_it_is_told_and_refuses_what_is_no_run(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=1, nodes=1)
    out = tmp_path / "page.html"
    assert write_report(run_dir.root, out) == out and out.read_text().startswith("<!DOCTYPE html>")
    for wrong in (tmp_path, tmp_path / "no" / "page.html"):
        with pytest.raises(SettingsError, match="--out"):
            write_report(run_dir.root, wrong)
    with pytest.raises(SettingsError, match="no run there"):
        write_report(tmp_path / "nothing")


def test_report_replaces_no_pipe_device_or_directory_and_writes_what_a_link_leads_to(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=1, nodes=1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to_pipe").symlink_to("pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "nowhere").symlink_to("no/page.html")
    for wrong in (tmp_path / "pipe", tmp_path / "to_pipe", tmp_path / "circle", tmp_path / "nowhere"):
        with pytest.raises(SettingsError, match="--out") as told:
            write_report(run_dir.root, wrong)
        assert "\n" not in str(told.value)
    with pytest.raises(SettingsError, match="--out /dev/null"):
        write_report(run_dir.root, Path("/dev/null"))
    assert (tmp_path / "pipe").is_fifo() and Path("/dev/null").is_char_device()
    pages = tmp_path / "pages"
    pages.mkdir()
    with pytest.raises(SettingsError, match="is a directory; give the name of a file in it"):
        write_report(run_dir.root, pages)
    for name in ("new.html", "old.html"):
        (tmp_path / name).symlink_to(f"pages/{name}")
    (pages / "old.html").write_text("old")
    for name in ("new.html", "old.html"):
        write_report(run_dir.root, tmp_path / name)
        assert (tmp_path / name).is_symlink() and (pages / name).read_text().startswith("<!DOCTYPE html>")


def test_hosts_of_ranks_that_a_run_no_longer_has_are_named(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=3, nodes=3)
    epochs = Records(run_dir).newest(whole_board(run_dir).records)
    assert epochs is not None
    fewer = build({"model": "Qwen/Qwen3-4B", "tasks": "sums.jsonl", "cluster.num_nodes": 2})
    claim(run_dir, record(epochs.epoch + 1, members={0: 1, 1: 1}, settings=fewer))
    page = page_of(run_dir)
    assert 'title="rank 2 on node-02"' in page and "<summary>2 nodes" in page


def test_interruptions_are_no_work_of_the_nodes() -> None:
    lines: list[dict[str, Any]] = [
        {"iteration": n, "seconds": seconds, "phase_seconds": {"training": 10.0}, "busy_fraction": busy}
        | {"wait_seconds": {"0": 0.0, "1": 4.0}}
        for n, seconds, busy in ((1, 10.0, 1.0), (2, 1000.0, 0.5))
    ]
    status = {"iterations": 2, "num_nodes": 2}
    found = {tile.label: tile for tile in tiles(status, lines)}
    assert (
        found["Nodes busy"].value == "75 %" and "without 16 min of interruptions" in found["Nodes busy"].note
    )
    assert found["Time"].note == "median 17 min an iteration"
    assert [(node.work_s, node.wait_s) for node in waiting({}, lines, str)] == [(20.0, 0.0), (12.0, 8.0)]


def test_commands_of_the_page_can_be_pasted_whatever_the_path_is(tmp_path: Path) -> None:
    root = tmp_path / "my run; rm"
    nodes = [
        {"rank": rank, "name": f"rank {rank}", "state": "lost", "host": f"node-{rank}"} for rank in range(5)
    ]

    def in_one_crew(**said: Any) -> dict[str, Any]:
        status = {"iteration": 2, "nodes": nodes, "waiting_for": [1, 2, 3, 4], **said}
        return {**status, "crews": [status]}

    for state, count in (("holding", 4), ("stopped", 2), ("finished", 1)):
        found = advice(root, in_one_crew(state=state), [], None, 2)
        assert len(found) == count
        assert all(str(root) in shlex.split(one.command) for one in found)
    again = advice(root, in_one_crew(state="stopped"), [], None, 2)[-1]
    assert again.command.startswith("run --master --log-path ") and "--worker RANK" in again.text
    local = in_one_crew(state="stopped", nodes=[node | {"host": "a"} for node in nodes])
    assert advice(root, local, [], None, 2)[-1].command.startswith("run local --log-path ")
    first, *_, last = advice(root, in_one_crew(state="holding"), [], None, 2)
    assert "rank 1 back, on node-1" in first.text and first.command.startswith("run --worker 1 ")
    assert "1 node more" in last.text
    (alone,) = advice(root, in_one_crew(state="holding", waiting_for=[]), [], None, 2)
    assert alone.command.startswith("run status ")
    write_json(root / "checkpoints/iteration_000002/adapter_config.json", {})
    (done,) = advice(root, in_one_crew(state="finished"), [], None, 2)
    assert done.command.startswith("run export --merge --iteration 2 ")


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        ([{"truncated": 0.5}], "50% of the samples of late are cut"),
        ([{"flat_groups": 0.98}], "98% of the tasks of late score the same"),
        ([{"flat_groups": 0.96, "reward": 0.994}], "tasks are solved (reward 0.994)"),
        ([{"flat_groups": 0.96, "reward": 0.01}], "96% of the tasks of late score the same"),
        ([{"kl_engine": 0.107}], "differ by 0.11"),
        ([{"entropy": 0.8}] * 5 + [{"entropy": 0.001}] * 10, "entropy has fallen to nothing"),
    ],
)
def test_advice_on_learning_follows_from_the_last_iterations(
    tmp_path: Path, measured: list[dict[str, float]], text: str
) -> None:
    lines = [{"iteration": number, **line} for number, line in enumerate(measured, 1)]
    (found,) = advice(tmp_path, {"state": "running"}, lines, None, None)
    assert text in found.text and found.command
    sound = {"truncated": 0.05, "flat_groups": 0.5, "kl_engine": 0.001, "entropy": 0.5}
    assert not advice(tmp_path, {"state": "running"}, [sound | {"iteration": 1}] * 20, None, None)
    sound_kl = build({"trainer.lora.rank": 4, "trainer.lora.base_dtype": "nf4"}).trainer.sound_kl
    assert not advice(
        tmp_path, {"state": "running"}, [{"iteration": 1, "kl_engine": 0.3}], None, None, sound_kl
    )


def test_odd_values_in_the_files_of_a_run_fail_no_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=2, nodes=2)
    odd_events = [
        {"what": "begin", "it": 2, "row": "training"},
        {"what": "engine_ready", "seconds": None},
        {"what": "end", "it": 2, "row": "training", "work_s": 0.0, "then_s": "x"},
        {"what": "end", "it": 2, "row": "training", "work_s": float("inf")},
        {"what": "begin", "it": "2", "row": "training"},
        {"what": "retry", "seconds": "1", "text": None},
        {"what": "lost", "rank": [1], "text": 5},
        {"what": "epoch", "members": ["a", None]},
        {"what": "exit", "code": [1]},
        {"what": "process", "host": None, "gpus": 3, "versions": ["x"]},
    ]
    with run_dir.events(0).open("a") as file:
        file.writelines(json.dumps({"t": 1e9, "n": 1, "e": 1} | line) + "\n" for line in odd_events)
        file.write('{"t": Infinity, "n": 1, "e": 1, "what": "begin", "it": 2, "row": "training"}\n')
    odd_line = {
        "iteration": 3, "kind": "both", "reward": "high", "loss": 1e308, "phase_seconds": {"training": None},
        "wait_seconds": {"x": 1.0, "0": "1"}, "eval_pass_at": {"1": None, "2": 0.5}, "seconds": [1],
    }  # fmt: skip
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps(odd_line) + "\n")
    people = run_dir.groups("train", 2)
    people.write_text(people.read_text().replace('"reward": 1.0', '"reward": {"right": 1}'))
    page = page_of(run_dir)
    assert "After: iteration 2" in page and "no reward" in section(page, "samples")


@pytest.mark.parametrize(
    ("reward", "shown"), [(1, 1.0), ("1", None), (None, None), ([], None), (float("nan"), None)]
)
def test_reward_that_is_no_number_is_no_reward(reward: object, shown: float | None) -> None:
    odd = {"text": 3, "reward": reward, "tokens": "x"}
    group = group_text("best", {"samples": [odd, "no sample", {"reward": 0.5}]}, 0.5)
    assert [one.reward for one in group.samples] == ([shown, 0.5] if shown else [0.5, None])
    assert group_text("best", {"samples": 7}, 0.0).samples == []


def test_conversation_is_shown_turn_by_turn_with_what_is_trained_and_where_it_was_cut(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=1, nodes=1)
    turns = [
        {"role": "assistant", "text": "<<1>>", "tokens": 5, "trained": 5, "finish_reason": "stop"},
        {"role": "environment", "text": "=1<b>"},
        {"role": "assistant", "text": "so", "tokens": 2, "trained": 0, "finish_reason": "stop"},
        {"role": "assistant", "text": "on", "tokens": 4, "trained": 1, "finish_reason": "length"},
        "no turn",
        {"role": 7, "tokens": "x", "trained": None},
    ]
    people = run_dir.groups("train", 1)
    lines = [json.loads(line) for line in people.read_text().splitlines()]
    for line in lines:
        for sample in line["samples"]:
            sample |= {"turns": turns, "metrics": {"calls": 2.0, "odd": "x"}}
    people.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = section(page_of(run_dir), "samples")
    for said in (
        ">assistant: 5 tokens, trained<",
        ">environment<",
        ">=1&lt;b&gt;<",
        ">assistant: 2 tokens, not trained<",
        ">assistant: 4 tokens, 1 of them trained, cut<",
        "tokens, calls 2<",
    ):
        assert said in shown, said


def test_long_conversation_is_shown_without_its_middle() -> None:
    turns = [{"role": "user", "text": f"turn {number}"} for number in range(30)]
    record = {"samples": [{"text": "", "reward": 1.0, "turns": turns}]}
    (sample,) = group_text("best", record, 1.0).samples
    texts = [turn.text for turn in sample.turns]
    assert len(texts) == 13 and texts[5:8] == ["turn 5", "[... 18 turns left out ...]", "turn 24"]
    record["samples"][0]["turns"] = turns[:12]
    assert len(group_text("best", record, 1.0).samples[0].turns) == 12


def test_best_median_and_worst_group_are_read_as_far_as_their_lines_are_whole(tmp_path: Path) -> None:
    assert chosen_slots({"4": 0.5, "1": 1.0, "7": 0.0, "2": 0.25}) == {"best": 1, "median": 2, "worst": 7}
    assert chosen_slots({"3": 0.5}) == {"best": 3} and chosen_slots({}) == {}
    run_dir = make_run(tmp_path / "run", iterations=1, nodes=2)
    path, groups = run_dir.groups("train", 1), reading(run_dir, 1).groups
    assert [group.place for group in groups] == ["best", "median", "worst"]
    lines = path.read_text().splitlines(keepends=True)
    best = next(index for index, line in enumerate(lines) if json.loads(line)["task_id"] == groups[0].task_id)
    path.write_text("".join([*lines[:best], lines[best][:-9] + "\n", *lines[best + 1 :]]))
    assert reading(run_dir, 1).groups == groups[1:]
    path.unlink()
    assert reading(run_dir, 1).groups == []


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    text = shortened("a" * 4000 + "the answer", 300)
    assert text.startswith("aaa") and text.endswith("the answer") and len(text) < 360
    assert "3,710 characters left out" in text and shortened("short", 5) == "short"


def test_weights_that_balance_follow_the_speed_of_the_nodes() -> None:
    found = balance({0: 10.0, 1: 20.0, 2: 20.0}, {0: 20, 1: 20, 2: 20})
    assert found is not None and found.option == "--rank-weights 2,1,1"
    assert found.worth_it and (found.now_s, found.then_s) == (20.0, 15.0)
    uneven = balance({0: 3.0, 1: 3.0, 2: 2.0}, {0: 3, 1: 3, 2: 2})  # 8 groups over equal nodes
    assert uneven is not None and uneven.option == "--rank-weights 1,1,1" and not uneven.worth_it
    assert balance({0: 10.0}, {0: 20}) is None and balance({0: 1.0, 1: 1.0}, {0: 4, 1: 0}) is None


def test_values_that_are_no_numbers_are_not_drawn(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", iterations=3, nodes=1)
    lines = [
        json.loads(line) | {"loss": float("nan"), "length": None}
        for line in run_dir.metrics.read_text().splitlines()
    ]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = page_of(run_dir)
    assert "<h3>Loss</h3>" not in page and "<h3>Length</h3>" not in page and "<h3>Entropy</h3>" in page
