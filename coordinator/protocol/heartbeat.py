"""A node's own heartbeat: one incarnation of its rank, shown by files whose names count up."""

import json
import threading
from collections.abc import Callable
from typing import Any

from coordinator.directory.layout import Beat, RunDir
from coordinator.protocol.records import new_token
from coordinator.protocol.snapshot import Board, parse
from rollout.storage import files, once


class Heart:
    """Beats for one incarnation of one rank; for any thread."""

    def __init__(self, run_dir: RunDir, rank: int, content: Callable[[], dict[str, Any]]) -> None:
        """`content`: what a beat says."""
        self.incarnation = 0
        self._protocol = run_dir.protocol
        self._rank = rank
        self._content = content
        self._token = new_token()
        self._lock = threading.RLock()
        self._last: Beat | None = None
        self._seen = -1

    def begin(self, floor: int, epoch: int) -> None:
        """Take the first free incarnation above `floor` by creating its first beat."""
        incarnation = floor + 1
        while not self._take(incarnation):
            incarnation += 1
        self.beat(epoch)

    def go_on(self, last: Beat) -> None:
        """Beat on in place of the process whose last beat this is."""
        self.incarnation, self._last, self._seen = last.incarnation, last, last.counter

    def is_overtaken(self, board: Board) -> bool:
        """Return whether `board` shows a later beat of this rank than this object has published."""
        newest, last = board.beats.get(self._rank), self._last
        return newest is not None and last is not None and newest[2:] > last[2:]

    def remove(self) -> None:
        """Remove the last beat: another process has published a later one."""
        assert self._last is not None
        files.drop(self._protocol / self._last.name)

    @property
    def epoch(self) -> int:
        """The epoch of the last beat."""
        return self._last.epoch if self._last is not None else 0

    def renew(self) -> bool:
        """Become the next incarnation; False if another process of this rank has come in between."""
        with self._lock:
            old = self._last
            assert old is not None
            if parse(files.listing(self._protocol)).highest_incarnation(self._rank) > self.incarnation:
                return False
            if not self._take(self.incarnation + 1):
                return False
            files.drop(self._protocol / old.name)
            self.beat(old.epoch)
            return True

    def _take(self, incarnation: int) -> bool:
        """Create an incarnation's first beat; False if another process has this one, or a higher one.

        In epoch 0: two processes that have seen different epochs must not create different names. Who was
        first may have gone on to its next beat and removed this one, so the listing has the last word.
        """
        first = Beat(0, self._rank, incarnation, 0)
        path = self._protocol / first.name
        if not once.create_once(path, self._data()):
            return False
        if parse(files.listing(self._protocol)).beats.get(self._rank, first) != first:
            files.remove(path)
            return False
        self.incarnation, self._last, self._seen = incarnation, first, -1
        return True

    def beat(self, epoch: int | None) -> None:
        """Publish the next heartbeat, in `epoch` (None: as the last one), then remove the one before.

        A node that no record lists shows by the epoch which record it has seen.
        """
        with self._lock:
            last = self._last
            assert last is not None
            epoch = last.epoch if epoch is None else epoch
            counter = max(last.counter, self._seen) + 1  # another process may have beaten in this one's place
            beat = Beat(epoch, self._rank, self.incarnation, counter)
            files.publish(self._protocol / beat.name, self._data(), durable=False)
            self._last = beat
            files.drop(self._protocol / last.name)

    def is_back(self, board: Board) -> bool:
        """Return whether `board` shows that the directory answers: a new beat of this process, or a newer
        process.

        A snapshot has the beats of the highest incarnation alone.
        """
        beat = board.beats.get(self._rank)
        if beat is None or beat.incarnation < self.incarnation:
            return False
        if beat.incarnation > self.incarnation:
            return True
        new, self._seen = beat.counter > self._seen, max(beat.counter, self._seen)
        return new

    def _data(self) -> bytes:
        # The token: two processes that describe themselves alike must not both create a first beat.
        return json.dumps({**self._content(), "token": self._token}).encode()


def read_beat(run_dir: RunDir, beat: Beat) -> dict[str, Any]:
    """Return a beat's content; {} if it is gone (a newer one took its place) or torn."""
    try:
        return json.loads(files.read(run_dir.protocol / beat.name, fleeting=True))
    except (FileNotFoundError, ValueError):
        return {}
