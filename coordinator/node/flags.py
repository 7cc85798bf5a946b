"""What nodes say to each other: flags that are raised, waited for and read."""

import json
import time
from collections.abc import Callable
from typing import Any

from coordinator.directory.layout import Flag, RunDir
from coordinator.node.identity import Identity
from coordinator.node.position import Position
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import MASTER
from coordinator.protocol.snapshot import Board
from coordinator.protocol.watch import Watch
from rollout.storage import files

Payload = dict[str, Any]
"""The content of a flag."""

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is not listed for this long raises it again: flags are not fsynced."""
PATIENCE_S = 5.0
"""How long a flag that was listed may be missing or unreadable when it is read."""


def read_flag(run_dir: RunDir, flag: Flag) -> Payload:
    """Return the payload of a listed flag; a mount may show its content a moment later."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return json.loads(files.read(run_dir.protocol / flag.name))
        except (FileNotFoundError, ValueError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def call_document(run_dir: RunDir, flag: Flag) -> Payload:
    """Return what a call says; its `text` only says that it was raised if nobody can read it."""
    try:
        document = read_flag(run_dir, flag)
        return {**document, "text": str(document["text"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return {"text": f"rank {flag.rank} said {flag.kind}"}


def read_call(run_dir: RunDir, flag: Flag) -> str:
    """Return the text of a call."""
    return call_document(run_dir, flag)["text"]


class Flags:
    """A node's own flags, and its waiting for the flags of others."""

    def __init__(
        self,
        identity: Identity,
        position: Position,
        watch: Watch,
        check: Callable[[], None],
        missing: Callable[[], str],
    ) -> None:
        """`check` raises what ends a wait; `missing` says who is waited for."""
        self._identity = identity
        self._position = position
        self._watch = watch
        self._check = check
        self._missing = missing
        self._raised: dict[Flag, Payload] = {}

    def forget(self) -> None:
        """Raise no flag of the epoch before again."""
        self._raised.clear()

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch."""
        current = self._watch.current
        if current is None and self._identity.is_master:
            current = self._watch.newest_record()
        if current is None:
            return
        phase = self._position.phase or Phase.ITERATION_START
        flag = Flag(current.epoch, self._position.iteration, phase, self._identity.rank, kind)
        self.raise_flag(flag, {"text": text, "host": self._identity.host, **more})

    def raise_flag(self, flag: Flag, payload: Payload) -> None:
        """Show a flag to the others; it is raised again if it is lost while this node waits."""
        path = self._identity.run_dir.protocol / flag.name
        files.publish(path, json.dumps(payload).encode(), durable=False)
        self._raised[flag] = payload

    def wait_until(self, ready: Callable[[Board], Any]) -> Any:
        """Return what `ready` gives, once it is not None; `check` raises what ends the wait."""
        started_s = self._position.begin_to_wait()

        def ready_or_raise_again(board: Board) -> Any:
            result = ready(board)
            if result is None and time.monotonic() - started_s > RAISE_AGAIN_S:
                for flag in self._raised.keys() - board.flags:
                    self.raise_flag(flag, self._raised[flag])
            return result

        return self._watch.wait(ready_or_raise_again, self._check, self._missing)

    def wait_members(self, iteration: int, phase: int, kind: str = "ok") -> None:
        """Wait until all other members have raised this flag."""
        record = self._watch.record
        members = set(record.members) - {MASTER}

        def all_up(board: Board) -> bool | None:
            missing = sorted(members - board.flagged(record.epoch, iteration, phase, kind))
            self._position.wait_for(missing)
            return None if missing else True

        self.wait_until(all_up)

    def wait_master(self, iteration: int, phase: Phase) -> Payload:
        """Wait for the master's flag; returns its document."""
        flag = Flag(self._watch.record.epoch, iteration, phase, MASTER, "ok")
        self._position.wait_for([MASTER])
        self.wait_until(lambda board: True if flag in board.flags else None)
        return read_flag(self._identity.run_dir, flag)

    def payloads(self, iteration: int, phase: Phase, own: Payload) -> dict[int, Payload]:
        """Return, by rank, what the members' flags of a row say; `own` is the master's part."""
        record, run_dir = self._watch.record, self._identity.run_dir
        others = sorted(set(record.members) - {MASTER})
        said = {rank: read_flag(run_dir, Flag(record.epoch, iteration, phase, rank, "ok")) for rank in others}
        return {MASTER: own, **said}

    def wait_opened(self, after: int) -> int:
        """Wait until the master opens an iteration later than `after` in this epoch; returns its number."""
        opening = (self._watch.record.epoch, Phase.ITERATION_START, MASTER, "ok")

        def opened(board: Board) -> int | None:
            later = [
                flag.iteration
                for flag in board.flags
                if (flag.epoch, flag.phase, flag.rank, flag.kind) == opening and flag.iteration > after
            ]
            return min(later, default=None)

        return self.wait_until(opened)

    def remove_before(self, iteration: int) -> None:
        """Remove this node's flags of earlier iterations, up to the one before the last.

        A worker may still be reading the master's last flag of the iteration before. It has passed all older
        ones, or the master had not come here.
        """
        for flag in [flag for flag in self._raised if 0 < flag.iteration < iteration - 1]:
            files.remove(self._identity.run_dir.protocol / flag.name)
            del self._raised[flag]
