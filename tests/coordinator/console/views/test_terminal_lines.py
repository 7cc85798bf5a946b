"""The lines of the live view: what they say in how much room."""

import re
from typing import Any

import pytest

from coordinator.console.views.terminal_lines import ASCII, UNICODE, rows_of, sparkline, view
from tests.coordinator.console.views.example_status import ROOT, node, status

GPU = {"name": "H100", "used_bytes": 61 * 2**30, "total_bytes": 80 * 2**30, "busy": 0.97}


def text(found: dict[str, Any], width: int = 100, height: int = 24, **more: Any) -> list[str]:
    lines = view(found, more.pop("lines", []), ROOT, width=width, height=height, **more)
    return [line.plain.rstrip() for line in lines]


def test_there_is_a_line_a_node_with_its_progress() -> None:
    lines = text(status(node(0, tokens_per_s=1234.5), node(1, waiting_s=34.0, tasks_done=64)), width=90)
    assert lines[0] == "exp1: running, iteration 5 of 16, train_rollout for 12 s, cluster epoch 2"
    assert lines[2].split() == ["rank", "host", "state", "phase", "tasks", "tokens/s"]
    assert re.fullmatch(r"   0  node-0  alive        train_rollout  ━{7}─{23} 16/64     1,234", lines[3])
    assert re.fullmatch(r"   1  node-1  waits 34 s   train_rollout  ━{30} 64/64", lines[4])


def test_samples_of_tasks_that_are_not_done_show_too() -> None:
    begun = node(0, tasks_done=0, samples_assigned=512, samples_done=128)
    lines = text(status(begun, node(1, tasks_done=0, samples_assigned=512)), width=90)
    assert lines[2].split() == ["rank", "host", "state", "phase", "tasks", "samples"]
    assert re.fullmatch(r"   0  node-0  alive        train_rollout  ━{7}─{23} +0/64  128/512", lines[3])
    assert "0/64    0/512" in lines[4]


def test_columns_are_there_where_there_is_something_to_show() -> None:
    bare = status(node(0, tasks_assigned=0, host="a"), node(1, tasks_assigned=0, host="a"))
    assert text(bare)[2].split() == ["rank", "state", "phase"]
    full = status(node(0), node(1, gpus=[GPU] * 8, tokens_per_s=1.0, silent_s=12.0))
    assert text(full)[2].split() == ["rank", "host", "state", "phase", "tasks", "tokens/s", "GPUs"]
    assert "8 x 61/80 GiB 97 %" in text(full, width=120)[4]
    assert text(bare, shown={"tasks"})[2].split() == ["rank", "state", "phase", "tasks"]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"silent_s": 4.0}, "alive"),
        ({"silent_s": 12.0}, "silent 12 s"),
        ({"state": "silent", "silent_s": 130.0}, "silent 2 min"),
        ({"state": "silent"}, "silent"),
        ({"state": "silent", "silent_s": 4.0}, "silent 4 s"),
        ({"state": "left", "silent_s": 130.0}, "left"),
        ({"state": "never_seen"}, "never seen"),
    ],
)
def test_state_says_for_how_long_a_node_is_silent(said: dict[str, Any], shown: str) -> None:
    line = text(status(node(0, **said)))[3]
    assert line[6:19].rstrip() == shown


def test_nodes_of_a_finished_run_left_and_need_no_attention() -> None:
    nodes = [node(rank, state="left") for rank in range(2)]
    for state in ("finished", "stopped"):
        lines = view(status(*nodes, state=state), [], ROOT, width=80, height=24)
        assert [span.style for line in lines[3:5] for span in line.spans if span.style == "red"] == []
    colours = {span.style for span in view(status(*nodes), [], ROOT, width=80, height=24)[3].spans}
    assert "red" in colours
    finished = text(status(*nodes, state="finished"), shown={"tasks", "phase"})
    assert finished[0] == "exp1: finished, iteration 5 of 16, cluster epoch 2"
    assert finished[2].split() == ["rank", "host", "state"]


def test_host_that_is_not_known_yet_makes_no_column() -> None:
    nodes = [node(0, host="a"), node(1, host="", state="never_seen")]
    assert "host" not in text(status(*nodes))[2]


def test_what_was_read_of_files_is_in_megabytes() -> None:
    line = text(status(node(0, phase="iteration_end", tasks_done=5, tasks_assigned=8)))[3]
    assert line.endswith("5/8 MB") and UNICODE.done in line


def test_amount_whose_sum_is_not_known_is_no_full_bar() -> None:
    line = text(status(node(0, phase="iteration_end", tasks_done=5, tasks_assigned=5)))[3]
    assert line.endswith(" 5 MB") and UNICODE.done not in line


def test_parts_of_the_training_are_not_taken_for_tasks() -> None:
    assert text(status(node(0, phase="training", tasks_done=2, tasks_assigned=3)))[3].endswith(" 2/3 parts")


def test_who_is_waited_for_is_said_with_host_and_time() -> None:
    waits = status(node(0), node(1), node(2), waiting_for=[2], waiting_s=34.0, left_s=65.0)
    lines = text(waits)
    assert lines[0].endswith("train_rollout for 12 s, about 65 s left, cluster epoch 2")
    assert lines[1] == "waiting for rank 2 (node-2) for 34 s"


def test_command_that_brings_a_node_back_is_whole_in_a_narrow_terminal() -> None:
    held = status(node(0), node(1, state="silent", silent_s=40.0), state="holding", waiting_for=[1])
    lines = text(held, width=40)
    assert lines[2] == "to bring rank 1 back, on node-1: run --worker 1 --log-path /shared/exp1"


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("height", [8, 23])
def test_view_fits_into_the_terminal(width: int, height: int) -> None:
    nodes = [
        node(rank, host=f"ml-{rank:03d}.cluster.example", gpus=[GPU] * 8, tokens_per_s=4e4)
        for rank in range(64)
    ]
    nodes[50] |= {"state": "silent", "silent_s": 4000.0}
    lines = [{"iteration": i, "reward": i / 100, "eval_reward": 0.5} for i in range(1, 100)]
    held = status(*nodes, state="holding", waiting_for=[50, *range(8)], waiting_s=99.0, left_s=9999.0)
    shown = view(held, lines, ROOT, width=width, height=height)
    assert sum(rows_of(line, width) for line in shown) <= height
    assert all(line.cell_len <= width for line in shown if not line.plain.startswith("to bring"))


def test_80_columns_hold_three_nodes_of_a_cluster() -> None:
    nodes = [node(rank, host=f"ml-node-{rank}.cluster", tokens_per_s=4321.0) for rank in range(3)]
    row = r"   0  ml-node-0.cluster  alive        train_rollout  ━+─+ 16/64     4,321"
    assert re.fullmatch(row, text(status(*nodes), width=80)[3])
    for described in nodes:
        described["gpus"] = [GPU]
    row = "   0  ml-node-0.cl…  alive        train_rollout  16/64     4,321  61/80 GiB 97 %"
    assert text(status(*nodes), width=80)[3] == row


def test_where_there_is_no_room_those_that_are_missing_come_first() -> None:
    nodes = [node(rank) for rank in range(64)]
    nodes[50] |= {"state": "silent"}
    lines = text(status(*nodes, waiting_for=[20, 50]), height=10)
    assert [line.split()[0] for line in lines[3:-1]] == ["50", "20", "0", "1", "2", "3"]
    assert lines[-1] == "... and 58 more, all alive"


def test_rewards_are_drawn_with_the_first_and_the_last() -> None:
    lines = [
        {"iteration": 1, "reward": 0.0, "eval_reward": 0.25},
        {"iteration": 2, "reward": 0.5},
        {"iteration": 3, "reward": None},
        {"iteration": 4, "reward": 1.0},
    ]
    assert (
        text(status(node(0)), lines=lines)[-1] == "reward 0.000 ▁▅█ 1.000   evaluation 0.250 in iteration 1"
    )
    assert text(status(node(0)), lines=lines[:1], signs=ASCII)[-1].startswith("reward = 0.000   evaluation")
    assert "reward" not in " ".join(text(status(node(0)), lines=[{"iteration": 1}]))


def test_sparkline_spans_the_values() -> None:
    assert sparkline([3, 1, 2, 8], UNICODE.levels) == "▃▁▂█"
    assert sparkline([2, 2], UNICODE.levels) == "▄▄"
    assert sparkline([0.1], ASCII.levels) == "="


def test_names_of_others_cannot_move_the_cursor() -> None:
    lines = text(status(node(0, host="a\x1b[2J\nb", phase="\x9b2J"), node(1)), note="bad\x1b[2J")
    assert "a^[[2J^Jb" in lines[4] and "\\x9b2J" in lines[4] and lines[1] == "bad^[[2J"
