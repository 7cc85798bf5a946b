"""What a verdict does to a node: a pure decision."""

import pytest

from coordinator.directory.layout import Flag
from coordinator.node.row_endings import CODES, ending
from coordinator.protocol.exits import Ended, EpochChanged, Exit, NodeLost, TrainerFailed
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
    assert isinstance(end, Ended) and (end.code, end.tell) == (code, told)
    assert end.text == (TEXT if event is not Event.FINISHED else "the run is finished")


def test_failure_of_the_trainer_elsewhere_ends_the_job_here() -> None:
    end = end_of(Event.TRAINER_FAILED)
    assert isinstance(end, TrainerFailed) and str(end).endswith(TEXT)


@pytest.mark.parametrize("event", [event for event in Event if event in LOSSES])
@pytest.mark.parametrize("policy", ["wait", "shrink"])
def test_master_holds_for_a_lost_node_or_goes_on_without_it(event: Event, policy: str) -> None:
    end = end_of(event, is_master=True, on_node_failure=policy)
    assert isinstance(end, NodeLost) and (end.rank, str(end)) == (2, TEXT)
    assert end.stalled is (event is Event.STALLED)


@pytest.mark.parametrize(
    ("is_master", "policy", "told"),
    [(True, "abort", "gave_up"), (False, "abort", "left"), (False, "wait", "left")],
)
def test_others_end_at_a_loss_and_say_so(is_master: bool, policy: str, told: str) -> None:
    end = end_of(Event.SILENT, is_master, policy)
    assert isinstance(end, Ended) and (end.code, end.tell) == (Exit.LOST, told)


def test_every_event_has_an_end() -> None:
    for event in Event:
        assert isinstance(end_of(event), Exception)
