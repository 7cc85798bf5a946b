"""What a node sees of the others and shows of itself: one thread that beats, lists, and judges.

The main thread lists too while it waits; both go through `look`. A verdict sets `stop`, at which actions
end, and `check` turns it into the exception that ends the row.
"""

import contextlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from watchdog.events import FileMovedEvent
from watchdog.observers import Observer

from coordinator import shared_fs
from coordinator.board import Board, parse
from coordinator.epochs import MASTER, EpochRecord, Event, Records, Silence, Verdict, decide, new_token
from coordinator.run_dir import Beat, Flag, RunDir
from coordinator.settings import ClusterSettings
from coordinator.shared_fs import SharedFsError
from coordinator.waker import Waker

log = logging.getLogger(__name__)
T = TypeVar("T")

ENDED = "ended"
"""State in the last heartbeat of a process that ended in order."""
STARTING_BEAT_S = 0.5
SAY_AGAIN_S = 30.0
"""A wait that goes on says so this often."""


class Watch:
    """Beats for one incarnation of one rank, and follows the board.

    `admit` names the epoch that the node has entered; from then on every listing is judged.
    """

    def __init__(
        self,
        run_dir: RunDir,
        rank: int,
        cluster: ClusterSettings,
        describe: Callable[[], dict[str, Any]],
    ) -> None:
        self.run_dir = run_dir
        self.rank = rank
        self.cluster = cluster
        self.records = Records(run_dir)
        self.silence = Silence(cluster.beat_s)
        self.incarnation = 0
        self.current: EpochRecord | None = None
        self.board = parse([])
        """The last listing."""
        self.verdict: Verdict | None = None
        self.trainer_failure_known = False
        """Whether this node has already acted on the training job's failure."""
        self.error: BaseException | None = None
        self.signal: int | None = None
        self.stop = threading.Event()
        """Set when the present row has ended: by a verdict, a signal, or an error of the watch thread."""
        self._describe = describe
        self._token = new_token()
        self._heard: set[Flag] = set()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._looking = threading.RLock()
        self._last_beat: Beat | None = None
        self._thread: threading.Thread | None = None
        self._observer: Any = None

    # ---- itself

    def begin(self, incarnation_floor: int, epoch: int) -> None:
        """Take the next free incarnation by creating its first beat, and start the thread."""
        self.incarnation = incarnation_floor + 1
        while not self._take_incarnation():
            self.incarnation += 1
        self.announce_epoch(epoch)
        self._follow_events()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    def _take_incarnation(self) -> bool:
        """Create the incarnation's first beat; False if another process has this one, or a higher one.

        In epoch 0: two processes that have seen different epochs must not create different names. Who was
        first may have gone on to its next beat and removed this one, so the listing has the last word.
        """
        first = Beat(0, self.rank, self.incarnation, 0)
        path = self.run_dir.protocol / first.name
        if not shared_fs.create_once(path, self._beat_content()):
            return False
        if parse(shared_fs.listing(self.run_dir.protocol)).beats.get(self.rank, first) != first:
            shared_fs.remove(path)
            return False
        self._last_beat = first
        return True

    def close(self) -> None:
        """Beat once more and stop; the last beat stays, so that the incarnation is never used again."""
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            with contextlib.suppress(SharedFsError):
                self.beat()
        if self._observer is not None:
            self._observer.stop()
            self._observer.join(timeout=5.0)

    def interrupt(self, signal: int) -> None:
        """A signal has asked this node to end."""
        self.signal = signal
        self.stop.set()
        self._wake.set()

    # ---- the others

    def know_trainer_failure(self) -> None:
        """The training job's failure is being dealt with; look out for what else happens."""
        with self._looking:
            self.trainer_failure_known, self.verdict = True, None
            if self.signal is None and self.error is None:
                self.stop.clear()

    def admit(self, record: EpochRecord) -> None:
        """This node has entered `record`'s epoch; what came before is settled."""
        with self._looking:
            self.current = record
            self.verdict = None
            self.trainer_failure_known = False
            self.silence.restart(record.members)
            if self.signal is None and self.error is None:
                self.stop.clear()

    def look(self) -> Board:
        """One listing, judged."""
        with self._looking:
            try:
                self.board = board = parse(shared_fs.listing(self.run_dir.protocol))
            except FileNotFoundError as error:  # somebody removed the run, or unmounted it
                raise SharedFsError("list", self.run_dir.protocol, error, 0.0) from error
            if self.current is not None:
                self.silence.observe(board, self.current.members, time.monotonic())
                newest = self.records.newest(board.records) or self.current
                if self.verdict is None or self._is_held(self.verdict):
                    self.verdict = self._judge(board, newest, self.current)
                if self.verdict and not self._is_held(self.verdict):
                    self.stop.set()
                self._repeat_losses(self.current)
            return board

    def _repeat_losses(self, current: EpochRecord) -> None:
        """Say once what the master has said of a node that is lost: this one holds, with its engine warm."""
        for flag in self.board.called(current.epoch, "lost"):
            if flag not in self._heard and self.rank != MASTER:
                self._heard.add(flag)
                data = shared_fs.read(self.run_dir.protocol / flag.name)
                log.warning("holding: %s", json.loads(data)["text"])

    def _judge(self, board: Board, newest: EpochRecord, current: EpochRecord) -> Verdict | None:
        patience_s = None if self.cluster.on_node_failure == "abort" else self.cluster.master_patience_s
        return decide(
            board,
            newest,
            current,
            self.rank,
            self.incarnation,
            self.silence.silent_s,
            self.cluster.node_timeout_s,
            self.trainer_failure_known,
            patience_s,
        )

    def _is_held(self, verdict: Verdict) -> bool:
        """Whether the row's work goes on: under `wait` a loss ends the master's waiting, not its share."""
        lost = verdict.event in {Event.LEFT, Event.SILENT}
        return lost and self.rank == MASTER and self.cluster.on_node_failure == "wait"

    def wait(
        self,
        ready: Callable[[Board], T | None],
        check: Callable[[], None],
        missing: Callable[[Board], str],
        timeout_s: float | None = None,
    ) -> T | None:
        """List until `ready` gives something, and return that; None when `timeout_s` has passed.

        `check` raises what ends the wait early, and is called after each listing; `missing` says who is
        waited for. Pauses are 5 % of the time waited so far, within 1 ms and poll_max_s, with jitter;
        events cut them short.
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
                log.info("waiting for %s for %.0f s", missing(board), waited_s)
                say_s += SAY_AGAIN_S
            pause_s = min(max(0.05 * waited_s, 0.001), self.cluster.poll_max_s)
            self._wake.wait(pause_s * random.uniform(0.8, 1.2))

    def leave(self) -> EpochRecord | None:
        """This node is in no epoch any more; the one it was in."""
        with self._looking:
            left, self.current, self.verdict = self.current, None, None
            if self.signal is None and self.error is None:
                self.stop.clear()
            return left

    def newest_record(self) -> EpochRecord | None:
        """The highest epoch record that parses."""
        return self.records.newest(self.look().records)

    def said(self, rank: int) -> dict[str, Any]:
        """What `rank`'s newest beat says; {} if it has none, or just now none that is whole."""
        for _attempt in range(3):  # the one that was listed may have given way to the next
            beat = self.look().beats.get(rank)
            if beat is None:
                return {}
            if content := read_beat(self.run_dir, beat):
                return content
        return {}

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._pause_s()):
                self.beat()
                self.look()
        except SharedFsError as error:
            self._abort(error)
        except BaseException as error:
            self._abort(error)
            raise

    def _pause_s(self) -> float:
        """Until an epoch is entered nodes look for each other's beats, so they come faster."""
        return self.cluster.beat_s if self.current else min(self.cluster.beat_s, STARTING_BEAT_S)

    def _abort(self, error: BaseException) -> None:
        self.error = error
        self.stop.set()
        self._wake.set()

    def beat(self) -> None:
        """Publish the next heartbeat, then remove the one before."""
        with self._looking:
            last = self._last_beat
            assert last is not None
            epoch = self.current.epoch if self.current else last.epoch
            beat = Beat(epoch, self.rank, self.incarnation, last.counter + 1)
            shared_fs.publish(self.run_dir.protocol / beat.name, self._beat_content(), durable=False)
            shared_fs.remove(self.run_dir.protocol / last.name)
            self._last_beat = beat

    def announce_epoch(self, epoch: int) -> None:
        """From now on beat in `epoch`, beginning at once: so a node that no record lists is seen."""
        with self._looking:
            assert self._last_beat is not None
            previous = self._last_beat
            self._last_beat = previous._replace(epoch=epoch)
            self.beat()
            shared_fs.remove(self.run_dir.protocol / previous.name)

    def _beat_content(self) -> bytes:
        # The token: two processes that describe themselves alike must not both create a first beat.
        content = {**self._describe(), "token": self._token}
        if self.rank == MASTER:
            content["silent_s"] = {rank: round(s, 1) for rank, s in self.silence.silent_s.items()}
        return json.dumps(content).encode()

    def _follow_events(self) -> None:
        """Let file events cut waits short. A hint: another machine's writes never raise one."""
        handler = Waker(self._wake, self.rank)
        observer = Observer()
        try:
            observer.schedule(
                handler,
                str(self.run_dir.protocol),
                event_filter=[FileMovedEvent],
            )
            observer.start()
        except OSError as error:
            log.info("no file events here (%s): waiting by listing alone", error)
            return
        self._observer = observer


def read_beat(run_dir: RunDir, beat: Beat) -> dict[str, Any]:
    """A beat's content; {} if it is gone (a newer one took its place) or torn."""
    try:
        return json.loads(shared_fs.read(run_dir.protocol / beat.name))
    except (FileNotFoundError, ValueError):
        return {}


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 2`, `ranks 1, 2`."""
    listed = sorted(ranks)
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(map(str, listed))}"
