"""Where nodes are, by flags that are newer than their heartbeats."""

from typing import Any

from coordinator.console.views.run import Run
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from coordinator.machine.network import pid_space
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import claim
from coordinator.settings.loading import build
from tests.coordinator.console.views.beating_run import GONE, SETTINGS, beat, running
from tests.coordinator.examples import record


def up(run_dir: RunDir, rank: int, row: Phase, iteration: int = 5, epoch: int = 2) -> None:
    (run_dir.entry(Flag(epoch, iteration, row, rank, "ok"))).write_text("{}")


def places(status: dict[str, Any]) -> list[tuple[int, str]]:
    return [(node["iteration"], node["phase"]) for node in status["nodes"]]


def test_flags_show_rows_that_heartbeats_do_not_tell_of_yet(run_dir: RunDir) -> None:
    running(run_dir, waiting_for=[2], total=64, done=9)
    up(run_dir, 0, Phase.TRAIN_AGGREGATE)
    status = Run(run_dir.root).status()
    assert places(status) == [(5, "eval_decision")] * 3
    assert (status["phase"], status["waiting_for"]) == ("eval_decision", [])
    assert [node["tasks_assigned"] for node in status["nodes"]] == [0, 0, 0]
    up(run_dir, 0, Phase.ITERATION_END)
    status = Run(run_dir.root).status()
    assert (status["iteration"], places(status)) == (6, [(6, "iteration_start")] * 3)
    up(run_dir, 0, Phase.ITERATION_END, iteration=8)
    assert places(Run(run_dir.root).status()) == [(8, "iteration_end")] * 3


def test_heartbeats_that_are_further_than_flags_count(run_dir: RunDir) -> None:
    running(run_dir)
    up(run_dir, 0, Phase.TRAIN_PLAN)
    status = Run(run_dir.root).status()
    assert places(status) == [(5, "train_rollout")] * 3
    assert status["nodes"][1]["tasks_done"] == 3


def test_rows_that_a_run_does_not_have_are_not_shown(run_dir: RunDir) -> None:
    rollouts = build({"cluster.num_nodes": 3, "rl_phase": "rollout"})
    running(run_dir, record(2, settings=rollouts))
    up(run_dir, 0, Phase.EVAL_ROLLOUT)
    assert places(Run(run_dir.root).status())[0] == (5, "iteration_end")


def test_lost_node_stays_where_it_was_seen_last(run_dir: RunDir) -> None:
    running(run_dir)
    beat(run_dir, 2, counter=6, phase="train_plan", pid=GONE, pid_space=pid_space())
    up(run_dir, 0, Phase.TRAIN_ROLLOUT)
    up(run_dir, 2, Phase.TRAIN_ROLLOUT)
    assert places(Run(run_dir.root).status())[1:] == [(5, "train_files_ready"), (5, "train_rollout")]


def test_flags_of_an_ended_epoch_move_no_node_that_gathers(run_dir: RunDir) -> None:
    running(run_dir, state="gathering", phase="", iteration=5)
    up(run_dir, 0, Phase.TRAINING)
    assert Run(run_dir.root).status()["phase"] == "gathering"
    claim(run_dir, record(3, settings=SETTINGS))
    assert Run(run_dir.root).status()["phase"] == "gathering"
    up(run_dir, 0, Phase.ITERATION_START, epoch=3)
    assert Run(run_dir.root).status()["phase"] == "train_plan"


def test_new_master_that_holds_is_in_the_iteration_that_was_begun(run_dir: RunDir) -> None:
    run_dir.metrics.write_text('{"iteration": 3, "kind": "both", "reward": 0.5}\n')
    claim(run_dir, record(2, settings=SETTINGS))
    claim(run_dir, record(3, "lobby", {}, settings=SETTINGS))
    up(run_dir, 0, Phase.ITERATION_START, iteration=4)
    beat(run_dir, 0, state="gathering", phase="", iteration=0, waiting_for=[1, 2])
    status = Run(run_dir.root).status()
    assert (status["state"], status["iteration"], status["phase"]) == ("holding", 4, "gathering")
