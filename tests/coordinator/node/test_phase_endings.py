"""What a verdict does to a node, a pure decision, and what is said of a loss while the phase goes on."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory.file_names import Flag
from coordinator.node.phase_endings import CODES, PhaseEndings, ending
from coordinator.protocol.exits import EpochChanged, Exit, NodeEnded, NodeLost, TrainerFailed
from coordinator.protocol.verdict import LOSSES, Event, Verdict

TEXT = "rank 2 (node-c) is lost"


def end_of(event: Event, is_master: bool = False, on_node_failure: str = "wait") -> Exception:
    return ending(Verdict(event, 2, Flag(3, 7, 10, 2, "left")), TEXT, is_master, on_node_failure)


@pytest.mark.parametrize("event", [Event.NEW_EPOCH, Event.RETURNED])
def test_newer_epoch_is_entered(event: Event) -> None:
    assert isinstance(end_of(event), EpochChanged)


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (Event.FINISHED, Exit.DONE),
        (Event.FAILED, Exit.FAILED),
        (Event.GAVE_UP, Exit.LOST),
        (Event.STOPPED, Exit.INTERRUPTED),
        (Event.SUPERSEDED, Exit.SUPERSEDED),
    ],
)
@pytest.mark.parametrize("is_master", [False, True])
def test_end_of_the_run_is_said_by_the_exit_code_and_the_master_tells_the_workers(
    event: Event, code: Exit, is_master: bool
) -> None:
    end = end_of(event, is_master)
    told = event.name.lower() if is_master and event in CODES else None
    assert isinstance(end, NodeEnded) and (end.code, end.tell) == (code, told)
    assert end.text == (TEXT if event is not Event.FINISHED else "the run is finished")


def test_failure_of_the_trainer_elsewhere_ends_the_job_here() -> None:
    end = end_of(Event.TRAINER_FAILED)
    assert isinstance(end, TrainerFailed) and str(end).endswith(TEXT)


@pytest.mark.parametrize("event", [event for event in Event if event in LOSSES])
@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_master_holds_for_a_lost_node_or_goes_on_without_it(event: Event, policy: str) -> None:
    end = end_of(event, is_master=True, on_node_failure=policy)
    assert isinstance(end, NodeLost) and (end.rank, str(end)) == (2, TEXT)
    assert end.stalled is (event is Event.STALLED) and end.ended is (event is Event.LEFT)


@pytest.mark.parametrize(
    ("is_master", "policy", "told"),
    [(True, "abort", "gave_up"), (False, "abort", "left"), (False, "wait", "left")],
)
def test_others_end_at_a_loss_and_say_so(is_master: bool, policy: str, told: str) -> None:
    end = end_of(Event.SILENT, is_master, policy)
    assert isinstance(end, NodeEnded) and (end.code, end.tell) == (Exit.LOST, told)


def test_every_event_has_an_end() -> None:
    for event in Event:
        assert isinstance(end_of(event), Exception)


@pytest.mark.parametrize("is_master", [True, False])
def test_who_is_lost_is_said_at_once_and_that_they_are_back(
    is_master: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may take hours: what is said only when the phase has ended is said too late."""
    monkeypatch.setattr(logging.getLogger("coordinator"), "propagate", True)
    caplog.set_level(logging.INFO, "coordinator")
    cluster = SimpleNamespace(node_timeout_s=4.0)
    me = SimpleNamespace(
        is_master=is_master,
        settings=SimpleNamespace(cluster=cluster),
        run_dir=SimpleNamespace(name=lambda rank: f"rank {rank}"),
    )
    flags = list[Flag]()
    board = SimpleNamespace(called=lambda epoch, kind: flags if (epoch, kind) == (3, "left") else [])
    watch = SimpleNamespace(
        heeded_later=None, lost=set[int](), silence=SimpleNamespace(silent_s={}),
        current=SimpleNamespace(epoch=3, members={}), board=board,
    )  # fmt: skip
    messages = SimpleNamespace(of_verdict=lambda _: TEXT, master_is_lost=lambda: "holding")
    phase = PhaseEndings(cast(Any, me), cast(Any, None), cast(Any, watch), cast(Any, messages))
    assert phase.say_who_is_lost() == set() and not caplog.messages
    if is_master:
        watch.heeded_later = Verdict(Event.SILENT, 2)
    watch.silence.silent_s, watch.lost = {2 if is_master else 0: 5.0}, {2 if is_master else 0}
    assert phase.say_who_is_lost() == phase.say_who_is_lost() == watch.lost
    watch.silence.silent_s, watch.lost, watch.heeded_later = {}, set(), None
    assert phase.say_who_is_lost() == set()
    first, rank = (TEXT, 2) if is_master else ("holding", 0)
    assert caplog.messages == [first, f"rank {rank} is back"]
    watch.heeded_later, watch.silence.silent_s = Verdict(Event.SILENT, rank), {rank: 5.0}
    phase.say_who_is_lost()
    assert (phase.forget_loss(), phase.forget_loss()) == (rank, None)
    watch.heeded_later, watch.silence.silent_s = None, {}
    phase.say_who_is_lost()
    assert f"rank {rank} is back" not in caplog.messages[2:], "the phase was over, and it was not back"
    flags.append(Flag(3, 0, 0, 0, "left"))
    caplog.clear()
    phase.say_who_is_lost()
    assert caplog.messages == ([] if is_master else ["holding"]), "the master's process has died"
