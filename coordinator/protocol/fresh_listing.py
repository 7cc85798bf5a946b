"""Listings of a directory in which others make names, on a client that believes an old listing of its own.

FUSE clients with a cache of directories (sshfs, 20 s by default; rclone, BlobFuse) show another's name only
when that time is over, unless they themselves have made or removed a name there. Whether this helps is found
out where it matters, in a wait: a listing that has not changed for a while is made again after a name of our
own, and if that shows other names three times, with no change in between that the client has shown by itself,
each listing from then on begins so.
"""

import logging
import time
from dataclasses import dataclass
from pathlib import Path

from rollout.storage import files

log = logging.getLogger(__name__)

FIRST_LOOK_S = 2.0
"""A listing that has not changed for so long is doubted; again after twice as long, and so on."""
EVIDENCE = 3
"""So many differences in a row; any of them may be a name that was made between the two listings."""


@dataclass
class _Shown:
    """What a directory showed last, since when, and for how long that is believed."""

    names: frozenset[str]
    since_s: float
    look_s: float


class FreshListing:
    """Lists as one rank, which makes and removes a hidden name where that helps."""

    def __init__(self, rank: int) -> None:
        self._name = f".look.r{rank:04d}.tmp"
        self._last: dict[Path, _Shown] = {}
        self._evidence = 0
        self.unchanged_s = 0.0
        """For how long, at most, a listing that hid names had not changed."""
        self.refreshed = 0
        """How many listings were made fresh."""

    @property
    def is_doubted(self) -> bool:
        """Whether the client is known to believe old listings, and fresh ones can be had."""
        return self._evidence >= EVIDENCE

    @property
    def may_help(self) -> bool:
        """Whether a fresh listing has shown names that were hidden, without a change by itself since."""
        return self._evidence > 0

    def facts(self) -> dict[str, float]:
        """Return the heartbeat's fields about it; none where listings are true."""
        return (
            {"unchanged_s": round(self.unchanged_s, 1), "refreshed": self.refreshed}
            if self.is_doubted
            else {}
        )

    def names(self, directory: Path) -> list[str]:
        """Return the names in `directory`; raises as `files.listing`."""
        if self.is_doubted:
            return self.list_anew(directory)
        names = files.listing(directory)
        shown, now_s = _published(names), time.monotonic()
        last = self._last.get(directory)
        if last is None or shown != last.names:
            self._last[directory] = _Shown(shown, now_s, FIRST_LOOK_S)
            self._evidence = 0 if last is not None else self._evidence
        elif now_s - last.since_s > last.look_s:
            last.look_s *= 2
            names = self.list_anew(directory)
            if (fresh := _published(names)) != shown:
                self._last[directory] = _Shown(fresh, now_s, FIRST_LOOK_S)
                self._learn(directory, now_s - last.since_s)
        return names

    def forget(self) -> None:
        """Hear that this client itself has made a name there: the next listing proves nothing."""
        self._last.clear()

    def _learn(self, directory: Path, unchanged_s: float) -> None:
        self._evidence += 1
        self.unchanged_s = max(self.unchanged_s, unchanged_s)
        if self.is_doubted:
            log.info(
                "%s: listings here hid the names of others, unchanged for up to %.1f s; a name that is made "
                "and removed before each shows them (run doctor --peers N says how to mount it)",
                directory,
                self.unchanged_s,
            )

    def list_anew(self, directory: Path) -> list[str]:
        """Return the names in `directory` after one was made and removed there; raises as `files.listing`."""
        self.refreshed += 1
        path = directory / self._name
        try:
            files.mark(path)
        except (
            OSError
        ) as error:  # a full disk, or one that may only be read: the listing is worth it all the same
            log.debug("%s cannot be made: %s", path, error)
        else:
            files.remove(path)
        return files.listing(directory)


def _published(names: list[str]) -> frozenset[str]:
    """Leave out what others have made hidden, for the same purpose or as temporary files."""
    return frozenset(name for name in names if not name.startswith("."))
