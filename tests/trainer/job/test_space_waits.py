"""What a trainer that waits for space says to its node."""

import errno
from pathlib import Path

from rollout.storage.retry import SharedFsError
from trainer.job import space_waits


def full(path: Path) -> SharedFsError:
    return SharedFsError("write", path, OSError(errno.ENOSPC, "No space left on device"), 0.0)


def test_wait_is_told_once_and_that_of_another_request_is_not(tmp_path: Path) -> None:
    space_waits.report(tmp_path, 7, 1, 300.0, full(tmp_path / "state"))
    assert space_waits.take(tmp_path, 8) == ""
    text = space_waits.take(tmp_path, 7)
    assert text.startswith("waiting for free space on /") and "it gives up after 300 s" in text
    assert space_waits.take(tmp_path, 7) == ""


def test_spool_that_takes_nothing_does_not_end_the_wait(tmp_path: Path) -> None:
    space_waits.report(tmp_path / "gone", 7, 1, 300.0, full(tmp_path / "state"))  # as one on the full disk
    assert not (tmp_path / "gone").exists()
