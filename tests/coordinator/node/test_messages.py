"""Sentences for a person: who, where, since when, and the command that repairs it."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory.layout import RunDir
from coordinator.node.identity import Identity
from coordinator.node.messages import Messages
from coordinator.node.position import Position
from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import parse
from coordinator.protocol.verdict import Event, Verdict
from coordinator.protocol.watch import Watch
from coordinator.settings.loading import build
from coordinator.settings.placement import Crew
from rollout.collect import AllGivenUp
from rollout.storage.retry import DirectoryCall, under_way
from tests.coordinator.examples import record

SAID = {
    "host": "node-c",
    "phase": "train_rollout",
    "state": "running",
    "iteration": 7,
    "done": 37,
    "total": 128,
}


def messages(
    silent_s: float = 0.0,
    policy: str = "wait",
    rank: int = 0,
    nodes: int = 3,
    crew: Crew = "main",
    machines: tuple[int, ...] = (),
    **more: str,
) -> Messages:
    """The words of a rank in training of iteration 7, which sees rank 2 so."""
    position = Position()
    position.move("running", 7, Phase.TRAINING.label, [1, 2])
    run_dir = RunDir(Path("/shared/my runs"), crew, machines)
    settings = build({"cluster.num_nodes": nodes, "cluster.on_node_failure": policy, **more})
    identity = SimpleNamespace(
        rank=rank, host="node-a", root=run_dir.root, run_dir=run_dir, name=run_dir.name(rank),
        is_master=rank == 0, is_guest=False, settings=settings, of_run=settings,
    )  # fmt: skip
    watch = SimpleNamespace(
        heartbeat=lambda rank: SAID if rank == 2 else {},
        current=record(),
        board=parse([]),
        silence=SimpleNamespace(silent_s={2: silent_s}),
        judge=SimpleNamespace(standstill=SimpleNamespace(still_s={2: 1900.0})),
    )
    return Messages(cast(Identity, identity), position, cast(Watch, watch))


def test_rank_is_named_with_its_host_and_where_it_was_last_seen() -> None:
    assert messages().of_rank(2) == "rank 2 (node-c; last seen in train_rollout, iteration 7, 37/128)"
    assert "silent for 94 s)" in messages(silent_s=94.0).of_rank(2)
    assert messages().of_rank(1) == "rank 1 (node)", "the record knows its host"
    assert messages().of_rank(9) == "rank 9 (never seen)"
    assert messages().missing() == f"{messages().of_rank(1)}; {messages().of_rank(2)}"


@pytest.mark.parametrize(
    ("masters", "named"),
    [
        ([2], "rank 2 (silent for 28 s)"),
        ([1, 2], "rank 0 (vm; last seen in"),
        ([], "rank 0 (vm; last seen in"),
    ],
)
def test_worker_names_those_for_whom_its_master_waits(
    masters: list[int], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = messages(rank=1)
    heartbeat = {**SAID, "host": "vm", "waiting_for": masters, "silent_s": {"2": 28.0}}
    watch: Any = worker._watch
    watch.heartbeat, watch.fence = (lambda _rank: heartbeat), SimpleNamespace(tripped=False)
    worker._position.wait_for([0])
    assert worker.missing().startswith(named)
    assert worker.elsewhere() == (f" (rank 0 waits for {named})" if masters == [2] else "")
    current, watch.current = watch.current, None  # the node is not taken in yet
    assert worker.elsewhere() == (f" (rank 0 waits for {named})" if masters == [2] else "")
    watch.current = current
    heartbeat.update(waiting_for=[], work="waiting for free space on /shared (0 of 12 MB free)")
    assert worker.elsewhere() == " (rank 0: waiting for free space on /shared (0 of 12 MB free))"
    monkeypatch.setitem(under_way, -1, DirectoryCall("list", Path("/shared"), time.monotonic() - 10.0))
    assert worker.elsewhere() == ""  # nothing is asked of a directory that hangs


def test_node_of_a_crew_is_named_by_its_crew_and_its_machine() -> None:
    said = messages(crew="train", machines=(1, 3, 4))
    assert said.of_rank(2) == "train rank 4 (node-c; last seen in train_rollout, iteration 7, 37/128)"
    assert said.failure(ValueError("x")).startswith("train rank 1 (node-a) failed in training, iteration 7: ")
    assert said.repair(0) == "To bring it back, on that machine: run --worker 1 --log-path '/shared/my runs'"
    assert messages(crew="train", machines=(0, 3)).repair(0).startswith("To resume: run --master ")
    assert "--worker 1" in said.master_is_lost()


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (Event.SILENT, "no heartbeat for 94 s"),
        (Event.STALLED, "it beats, but has made no progress for 1900 s"),
    ],
)
def test_loss_says_who_where_why_and_the_command_that_repairs_it(event: Event, why: str) -> None:
    text = messages(silent_s=94.0).of_verdict(Verdict(event, 2))
    assert text == (
        "rank 2 (node-c; last seen in train_rollout, iteration 7, 37/128, silent for 94 s) is lost: "
        f"{why}. To bring it back, on that machine: "
        "run --worker 2 --log-path '/shared/my runs'"
    )


def test_where_all_end_the_repair_is_to_start_all_again() -> None:
    said = messages(policy="abort").repair(2)
    assert said == (
        "To resume: run --master --log-path '/shared/my runs', and "
        "run --worker RANK --log-path '/shared/my runs' on each other machine"
    )
    assert messages().failure(ValueError("bad")) == "rank 0 (node-a) failed in training, iteration 7: bad"


def test_failure_of_the_users_code_says_to_mend_it_before_resuming() -> None:
    text = messages().failure(AllGivenUp("all 4 groups were given up, e.g. KeyError: 'solution'"))
    assert text.endswith("'solution'. Mend the environment, the reward or the tasks first, or it fails again")


@pytest.mark.parametrize(
    ("nodes", "typed", "command"),
    [
        (1, "", "run --master --log-path '/shared/my runs' --iterations 8"),
        (3, "run local --log-path x", "run local --log-path x --iterations 8"),
    ],
)
def test_finished_run_says_how_it_can_go_on(
    monkeypatch: pytest.MonkeyPatch, nodes: int, typed: str, command: str
) -> None:
    monkeypatch.setenv("FLAGPOST_STARTED_BY", typed)
    said = messages(nodes=nodes).finished(4)
    assert said == f"the run is finished after 4 iterations; to continue it, for example: {command}"
    assert "after 1 iteration;" in messages(nodes=nodes).finished(1)


def test_evaluation_does_not_say_how_it_can_go_on() -> None:
    said = messages(nodes=1, rl_phase="rollout", rollout_split="eval-only").finished(1)
    assert said == "the evaluation is finished"


def test_interrupted_worker_says_how_to_bring_it_back_and_the_master_how_to_resume() -> None:
    assert messages().interrupted("SIGINT").endswith("To resume: " + messages().resume_command())
    alone = messages(rank=2).interrupted("SIGTERM")
    assert alone.endswith("To bring it back, on that machine: run --worker 2 --log-path '/shared/my runs'")
