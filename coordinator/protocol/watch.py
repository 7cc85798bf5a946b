"""Watch the other nodes, and show this one: one thread beats, lists the directory, and judges.

The main thread lists it too while it waits; both go through `look`. A verdict sets `stop`, at which actions
end; the node turns the verdict into the exception that ends its phase.
"""

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from coordinator.directory.layout import MASTER, RunDir
from coordinator.protocol import file_events
from coordinator.protocol.exits import NodeEnded
from coordinator.protocol.fence import Fence, is_away
from coordinator.protocol.fresh_listing import FreshListing
from coordinator.protocol.heartbeat import Heart, read_beat
from coordinator.protocol.judge import Judge
from coordinator.protocol.late_mounts import LateNames
from coordinator.protocol.records import EpochRecord, Records
from coordinator.protocol.snapshot import Board, parse
from coordinator.protocol.verdict import Verdict
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.tree import RunSettings
from rollout.storage import files
from rollout.storage.files import SharedFsError

log = logging.getLogger(__name__)
T = TypeVar("T")

ENDED = "ended"
"""State in the last heartbeat of a process that ended in order."""
STARTING_BEAT_S = 0.5
SAY_AGAIN_S = 30.0
"""A wait that goes on says so this often."""


class Watch:
    """Beats for one incarnation of one rank, and follows what the others show in protocol/.

    A worker listens to the master alone, so what it lists does not grow with the number of nodes. From
    `admit`, which names the epoch that the node has entered, to `leave` every listing is judged.
    """

    def __init__(
        self,
        run_dir: RunDir,
        rank: int,
        settings: RunSettings,
        describe: Callable[[], dict[str, Any]],
        end_training: Callable[[], None],
        run_id: str | None = None,
    ) -> None:
        """`describe`: what a beat says; `end_training`: ends this node's part of the training job at once,
        without a call on the shared directory; `run_id`: the run that this node works for.
        """
        self.run_dir = run_dir
        self.rank = rank
        self._settings = settings
        cluster = settings.cluster
        self.records = Records(run_dir, run_id)
        self.judge = Judge(run_dir, rank, settings)
        self.silence = self.judge.silence
        self.fence = Fence(cluster.beat_interval_s, cluster.node_timeout_s, self._be_fenced)
        self.heart = Heart(run_dir, rank, self._beat_content)
        self.listings = FreshListing(rank)
        self._late_names = LateNames(lambda beat: read_beat(run_dir, beat).get("state") == "running")
        self.current: EpochRecord | None = None
        self.board = parse([])
        """What was listed last."""
        self.verdict: Verdict | None = None
        self.error: BaseException | None = None
        self.signal: int | None = None
        self.stop = threading.Event()
        """Set when the present phase has ended: by a verdict, a signal, or an error of the watch thread."""
        self.hear_others: Callable[[], None] = lambda: None
        """Called at each heartbeat; an Ended that it raises ends this node, whatever it does."""
        self.look_for_run: Callable[[], None] = lambda: None
        """Called after each heartbeat that the directory did not take; as `hear_others`."""
        self._describe = describe
        self._end_training = end_training
        self.refusal: str | None = None
        """What the directory said to the last heartbeat, if it did not take it."""
        self._own_names: list[str] = []
        """What the master shows itself, when it was last listed."""
        self._own_s = self._look_began_s = self._looked_s = float("-inf")
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._looking = threading.RLock()
        self._thread: threading.Thread | None = None
        self._observer: Any = None

    @property
    def _cluster(self) -> ClusterSettings:
        return self._settings.cluster

    @property
    def record(self) -> EpochRecord:
        """The record of the epoch that this node is in."""
        assert self.current is not None, "this node is in no epoch"
        return self.current

    @property
    def _others(self) -> Path:
        """The directory of those for whom this node waits."""
        return self.run_dir.workers if self.rank == MASTER else self.run_dir.master

    # ---- itself

    def begin(self, incarnation_floor: int, epoch: int) -> None:
        """Take the next free incarnation, beat, and watch."""
        self.heart.begin(incarnation_floor, epoch)
        self._observer = file_events.follow(self._others, self._wake)
        self.fence.begin()
        thread = threading.Thread(target=self._run, name="watch", daemon=True)
        thread.start()
        self._thread = thread

    @property
    def incarnation(self) -> int:
        """Which process of its rank this one is."""
        return self.heart.incarnation

    def close(self) -> None:
        """Beat once more and stop; the last beat stays, so that the incarnation is never used again. In the
        directory of another run none stays.
        """
        self._closed.set()
        self._wake.set()
        self.fence.close()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            if not self._thread.is_alive():  # else the thread waits for a hung mount, and so would this one
                with contextlib.suppress(SharedFsError, FileNotFoundError):
                    if self.records.is_replaced:
                        self.heart.remove()
                    else:
                        self.beat()
                        self.heart.end()
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(timeout=5.0)

    def _be_fenced(self, why: str) -> None:
        """End the work; called in the guard thread, which may not touch the shared directory."""
        self._end_training()
        self.stop.set()
        self._wake.set()
        # Said last: the output may go to that mount too.
        why += f" ({self.refusal})" if self.refusal else ""
        log.error("%s: it leaves the epoch, its engine stays warm, and it comes back by itself", why)

    def interrupt(self, signal: int) -> None:
        """Take in that a signal asks this node to end."""
        self.signal = signal
        self.stop.set()
        self._wake.set()

    # ---- the others

    def know_trainer_failure(self) -> None:
        """Take the training job's failure as known; look out for what else happens."""
        with self._looking:
            self.judge.trainer_failure_known = True
            self._go_on()

    def admit(self, record: EpochRecord, settings: RunSettings) -> None:
        """Judge for a node in `record`'s epoch, under its `settings`; what came before is settled."""
        with self._looking:
            self.current, self._settings = record, settings
            self.judge.admit(record, settings)
            self.fence.limit_s = settings.cluster.node_timeout_s
            self._go_on()

    def look(self, own_too: bool = False) -> Board:
        """List what the others show, and judge it. The master lists what it shows itself once a beat, or if
        `own_too`, at any time.
        """
        with self._looking:
            before, before_s = self.board, self._look_began_s
            began_s = time.monotonic()
            try:
                names = self.listings.names(self._others)
                self._looked_s = time.monotonic()
                if self.rank == MASTER:
                    names += self._list_own(own_too)
            except FileNotFoundError as error:  # somebody removed the run, or unmounted it
                raise SharedFsError("list", self._others, error, 0.0) from error
            self.board = board = parse(names, self.board)
            self._look_began_s = began_s  # of the board: what fails shows nothing
            if self.heart.is_back(board):
                self.fence.beat_is_back()
            self.judge.observe(board, self.current, self._looked_s)
            newest = self.records.newest(board.records, wait=False)
            if self.current is not None:
                if not self.listings.may_help:
                    times = (self._cluster.beat_interval_s, self._looked_s - before_s)
                    self._late_names.observe(before, board, self.current.epoch, *times)
                    self._late_names.say(self._others)
                if self.verdict is None or self.heeded_later:
                    self.verdict = self.judge.decide(
                        board, newest or self.current, self.current, self.incarnation
                    )
                if self.verdict and not self.heeded_later:
                    self.stop.set()
                if self.signal is None:  # one that ends may hear that it is lost
                    self.judge.repeat_losses(board, self.current, self.fence.trip)
            return board

    def _list_own(self, at_any_time: bool) -> list[str]:
        if at_any_time or self._looked_s - self._own_s >= self._beat_interval_s():
            self._own_names, self._own_s = files.listing(self.run_dir.master), self._looked_s
        return self._own_names

    @property
    def lost(self) -> set[int]:
        """The ranks that this node judges to be lost, whether or not the phase goes on."""
        return self.judge.lost(self.verdict, self.board, self.current)

    @property
    def guests(self) -> dict[int, int]:
        """The guests that beat and get on, as the master sees them, and the incarnation of each."""
        return self.judge.guests(self.board)

    @property
    def heeded_later(self) -> Verdict | None:
        """The loss that the master heeds once its share of the phase is made."""
        verdict = self.verdict
        return verdict if verdict is not None and self.judge.is_held(verdict) else None

    def wait(
        self,
        ready: Callable[[Board], T | None],
        check: Callable[[], None],
        missing: Callable[[], str],
        timeout_s: float | None = None,
    ) -> T | None:
        """List until `ready` gives something, and return that; None when `timeout_s` has passed.

        `check` raises what ends the wait early, and is called after each listing; `missing` says who is
        waited for. Pauses are 5 % of the time waited so far, within `pause_bounds_s`, with jitter; events cut
        them short.
        """
        started_s = time.monotonic()
        say_s = SAY_AGAIN_S
        while True:
            self._wake.clear()
            board = self.look()
            if (result := ready(board)) is not None:
                return result
            check()
            waited_s = time.monotonic() - started_s
            if timeout_s is not None and waited_s > timeout_s:
                return None
            if waited_s > say_s:
                log.info("waited %.0f s for %s", waited_s, missing())
                say_s += SAY_AGAIN_S
            least_s, most_s = self._cluster.pause_bounds_s
            self._wake.wait(min(max(0.05 * waited_s, least_s), most_s) * random.uniform(1.0, 1.4))

    def leave(self) -> EpochRecord | None:
        """Leave the epoch; returns its record."""
        with self._looking:
            record, self.current = self.current, None
            self._go_on()
            return record

    def _go_on(self) -> None:
        """Let actions work again, unless this node itself has to end."""
        self.verdict = None
        if self.signal is None and self.error is None:
            self.stop.clear()

    def newest_record(self) -> EpochRecord | None:
        """Return the highest epoch record that parses."""
        return self.records.newest(self.look(own_too=True).records)

    def heartbeat(self, rank: int) -> dict[str, Any]:
        """Return the content of `rank`'s newest beat; {} if it has none, or just now none that is whole."""
        for _attempt in range(3):  # the beat that was listed may have given way to the next
            beat = self.look().beats.get(rank)
            if beat is None:
                return {}
            if content := read_beat(self.run_dir, beat):
                return content
        return {}

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._beat_interval_s()):
                try:
                    self.beat()
                    if time.monotonic() - self._looked_s > self._beat_interval_s() / 2:
                        self.look()  # else the main thread looks often enough while it waits
                    if self.error is None:
                        self.hear_others()
                    self.refusal = None
                except NodeEnded as error:
                    self.error = error
                    self.stop.set()
                    self._wake.set()
                except (SharedFsError, FileNotFoundError) as error:  # the latter: nothing is mounted there
                    if not is_away(error):
                        raise
                    self.refusal = str(error)
                    self.look_for_run()
        except BaseException as error:
            self.error = error
            self.stop.set()
            self._wake.set()
            if not isinstance(error, SharedFsError | NodeEnded):
                raise

    def _beat_interval_s(self) -> float:
        """Until an epoch is entered nodes look for each other's beats, so they come faster."""
        usual_s = self._cluster.beat_interval_s
        return usual_s if self.current else min(usual_s, max(STARTING_BEAT_S, usual_s / 4))

    def beat(self) -> None:
        """Show the next heartbeat."""
        self.heart.beat(self.current.epoch if self.current else None)

    def _beat_content(self) -> dict[str, Any]:
        observed = {rank: round(s, 1) for rank, s in self.silence.so_far(time.monotonic()).items()}
        listings = {"listings": facts} if (facts := self.listings.facts()) else {}
        return {**self._describe(), **listings, **({"silent_s": observed} if self.rank == MASTER else {})}
