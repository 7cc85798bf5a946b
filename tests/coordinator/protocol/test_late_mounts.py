"""Names that a mount shows late, whatever a node does, are noticed by the pace of the heartbeats."""

import itertools
from pathlib import Path

import pytest

from coordinator.directory.file_names import Beat
from coordinator.protocol.late_mounts import LateNames
from coordinator.protocol.snapshot import Board, parse

EPOCH, BEAT_S = 2, 2.0
LEFT = 99
"""An incarnation that has left the epoch."""


def shown(counter: int, incarnation: int = 1, epoch: int = EPOCH) -> Board:
    return parse([Beat(epoch, 1, incarnation, counter).name])


@pytest.mark.parametrize(
    ("listings", "passed_s", "late"),
    [
        ([shown(k) for k in (1, 1, 4, 4, 7, 7, 10)], 0.5, "3.5 s late"),
        ([shown(k) for k in range(1, 8)], 2.0, None),
        ([shown(k) for k in (1, 4, 7, 10, 13)], 6.0, None),  # this process looked as rarely
        ([shown(k) for k in (1, 4, 7, 7, 8)], 0.5, None),  # twice is an accident
        ([shown(k, incarnation=k) for k in (1, 4, 7, 10, 13)], 0.5, None),  # each time another process
        (
            [shown(k, incarnation=LEFT) for k in (1, 4, 7, 10, 13)],
            0.5,
            None,
        ),  # a node that gathers beats faster
        ([shown(k, epoch=1) for k in (1, 4, 7, 10, 13)], 0.5, None),  # before the epoch nodes beat faster
    ],
    ids=[
        "a cache of 6 s",
        "as they come",
        "rare looks",
        "an accident",
        "restarts",
        "a gathering",
        "another epoch",
    ],
)
def test_listing_that_shows_several_beats_at_once_has_hidden_them(
    caplog: pytest.LogCaptureFixture, listings: list[Board], passed_s: float, late: str | None
) -> None:
    names = LateNames(lambda beat: beat.incarnation < LEFT)
    for before, after in itertools.pairwise(listings):
        names.observe(before, after, EPOCH, BEAT_S, passed_s)
        names.say(Path("/shared/exp1"))
    assert len(caplog.messages) == (late is not None)
    assert late is None or late in caplog.text
