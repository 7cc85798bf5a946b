"""A node's own heartbeat: one incarnation of its rank, shown by files whose names count up."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import MASTER, RunDir
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.records import new_token
from coordinator.protocol.snapshot import Board, parse
from rollout.storage import files, once

TAKES = 100
"""How many incarnations a process tries to take, one after the other."""
KEPT_S = 10.0
"""A beat stays until its successor is older than this: a mount may show a new file a few seconds late."""


class Heart:
    """Beats for one incarnation of one rank; for any thread."""

    def __init__(self, run_dir: RunDir, rank: int, content: Callable[[], dict[str, Any]]) -> None:
        """`content`: what a beat says."""
        self.incarnation = 0
        self._run_dir = run_dir
        self._directory = run_dir.protocol_of(rank)
        self._rank = rank
        self._content = content
        self._token = new_token()
        self._lock = threading.RLock()
        self._last: Beat | None = None
        self._seen = -1
        self._kept: deque[tuple[float, Beat]] = deque()
        """Beats that are followed by others, and when they were."""

    def begin(self, floor: int, epoch: int) -> None:
        """Take the first free incarnation above `floor` by creating its first beat."""
        for incarnation in range(floor + 1, floor + 1 + TAKES):
            if self._take(incarnation):
                self.beat(epoch)
                return
        shown = f"{self._directory} lets no process of rank {self._rank} show its first heartbeat"
        raise NodeEnded(
            Exit.FAILED, f"{shown}, in {TAKES} attempts; run doctor there says what it does not do"
        )

    def remove(self) -> None:
        """Remove all beats: another process has published a later one."""
        assert self._last is not None
        for beat in [*(beat for _, beat in self._kept), self._last]:
            files.drop(self._run_dir.entry(beat))

    @property
    def was_seen(self) -> bool:
        """Whether a listing has ever shown a beat of this incarnation."""
        return self._seen >= 0

    def renew(self) -> bool:
        """Become the next incarnation; False if another process of this rank has come in between."""
        with self._lock:
            old = self._last
            assert old is not None
            if self.is_replaced():
                return False
            if not self._take(self.incarnation + 1):
                return False
            self._follow(old)
            self.beat(old.epoch)
            return True

    def is_replaced(self) -> bool:
        """Return whether a newer process of this rank has beaten."""
        return parse(files.listing(self._directory)).highest_incarnation(self._rank) > self.incarnation

    def _take(self, incarnation: int) -> bool:
        """Create an incarnation's first beat; False if another process has this one, or a higher one.

        In epoch 0: two processes that have seen different epochs must not create different names. Who was
        first may have gone on to its next beat and removed this one, so the listing has the last word.
        """
        first = Beat(0, self._rank, incarnation, 0)
        path = self._run_dir.entry(first)
        if not once.create_once(path, self._data()):
            return False
        if parse(files.listing(self._directory)).beats.get(self._rank, first) != first:
            files.remove(path)
            return False
        self.incarnation, self._last, self._seen = incarnation, first, -1
        return True

    def beat(self, epoch: int | None) -> None:
        """Show the next heartbeat, in `epoch` (None: as the last one), and remove what is long followed by
        others. A node that no record lists shows by the epoch which record it has seen.
        """
        with self._lock:
            last = self._last
            assert last is not None
            epoch = last.epoch if epoch is None else epoch
            beat = Beat(epoch, self._rank, self.incarnation, last.counter + 1)
            files.show(self._run_dir.entry(beat), self._data())
            self._last = beat
            self._follow(last)

    def end(self) -> None:
        """Remove all but the last two beats: this process has ended."""
        with self._lock:
            while len(self._kept) > 1:
                self._drop_oldest()

    def _follow(self, beat: Beat) -> None:
        now_s = time.monotonic()
        self._kept.append((now_s, beat))
        while now_s - self._kept[0][0] > KEPT_S:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        files.drop(self._run_dir.entry(self._kept.popleft()[1]))

    def is_back(self, board: Board) -> bool:
        """Return whether the directory answers, now that `board` was listed: it has taken another beat.

        The master, who lists its own, must see that beat, or that of a newer process.
        """
        if self._rank != MASTER:
            counter = self._last.counter if self._last else -1
            new, self._seen = counter > self._seen, max(counter, self._seen)
            return new
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
        return json.loads(files.read(run_dir.entry(beat), fleeting=True))
    except (FileNotFoundError, ValueError):
        return {}


def read_beats(run_dir: RunDir, beats: Mapping[int, Beat]) -> dict[int, dict[str, Any]]:
    """Return the content of beats, by rank, as `read_beat`."""
    contents = files.side_by_side(partial(read_beat, run_dir), list(beats.values()))
    return dict(zip(beats, contents, strict=True))
