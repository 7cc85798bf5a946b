"""The life of a node from epoch to epoch: which errors it comes back from."""

import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.file_names import Beat
from coordinator.phases import recovery
from coordinator.protocol.exits import NodeLost
from rollout.engines.model_dir import WeightsError

NO_MODEL = WeightsError("/mnt/run/checkpoints/iteration_000002: is not a directory")


def node_of(cut_off: list[bool], seen: list[str]) -> Any:
    """A node whose directory is away at its n-th error if `cut_off` says so."""
    return SimpleNamespace(
        is_master=False,
        position=SimpleNamespace(iteration=2),
        outage=SimpleNamespace(is_cut_off=lambda: cut_off.pop(0)),
        phase_endings=SimpleNamespace(settle=lambda: None),
        come_back=lambda: seen.append("came back"),
    )


def failing(times: int, seen: list[str]) -> Callable[..., None]:
    def run_epoch(*_args: object) -> None:
        seen.append("epoch")
        if seen.count("epoch") <= times:
            raise NO_MODEL

    return run_epoch


def test_any_error_while_the_directory_is_away_is_waited_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(recovery, "_run_epoch", failing(1, seen))
    recovery.run_epochs(node_of([True], seen), lambda _node: None)
    assert seen == ["epoch", "came back", "epoch"]


@pytest.mark.parametrize(("cut_off", "count"), [([False], 1), ([True, False], 2), ([True] * 9, 4)])
def test_error_that_is_there_with_the_directory_as_well_ends_the_node(
    monkeypatch: pytest.MonkeyPatch, cut_off: list[bool], count: int
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(recovery, "_run_epoch", failing(9, seen))
    with pytest.raises(WeightsError):
        recovery.run_epochs(node_of(cut_off, seen), lambda _node: None)
    assert seen.count("epoch") == count


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("said", "text"), [(2, "holding until rank 2 is back"), (None, "rank 2 is lost: silent")]
)
def test_loss_that_was_said_while_the_row_went_on_is_not_said_again(
    said: int | None,
    text: str,
    ended: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("coordinator"), "propagate", True)
    node: Any = SimpleNamespace(
        trainer=SimpleNamespace(leave_epoch=lambda: None),
        watch=SimpleNamespace(board=SimpleNamespace(beats={2: Beat(3, 2, 6, 40)})),
        record=SimpleNamespace(members={2: SimpleNamespace(incarnation=5)}),
        gathering=SimpleNamespace(lost={}),
        flags=SimpleNamespace(tell=lambda *_given, **_more: None),
        phase_endings=SimpleNamespace(forget_loss=lambda: said),
        run_dir=SimpleNamespace(name=lambda rank: f"rank {rank}"),
    )
    recovery._hold(node, NodeLost(2, "rank 2 is lost: silent", ended=ended))
    lost = (5, sys.maxsize) if ended else (6, 40)
    assert node.gathering.lost == {2: lost}, "incarnation 6 has come for the one that ended"
    (record,) = caplog.records
    event = {"what": "lost", "rank": 2, "text": "rank 2 is lost: silent"}
    assert (record.getMessage(), vars(record)["event"]) == (text, event)
