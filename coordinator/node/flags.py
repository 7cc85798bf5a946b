"""What nodes say to each other: flags that are raised, waited for and read."""

import json
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER, Flag, Record, RunDir
from coordinator.node.identity import Identity
from coordinator.node.position import Position
from coordinator.protocol.complaints import complain
from coordinator.protocol.phases import Phase
from coordinator.protocol.snapshot import Board
from coordinator.protocol.watch import Watch
from rollout.storage import files, once

Payload = dict[str, Any]
"""The content of a flag."""

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is gone after so long raises it again: flags are not fsynced. It looks again after
twice as long, and so on."""
KEPT_RECORDS = 2
"""Records before the present one that stay."""
PATIENCE_S = 5.0
"""How long a flag that was listed may be missing or unreadable when it is read."""


def read_flag(run_dir: RunDir, flag: Flag) -> Payload:
    """Return the payload of a listed flag; a mount may show its content a moment later."""
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return json.loads(files.read(run_dir.entry(flag)))
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
        return {"text": f"{run_dir.name(flag.rank)} said {flag.kind}"}


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
        left_behind: Collection[Path] = (),
    ) -> None:
        """`check` raises what ends a wait; `missing` says who is waited for; `left_behind`: what earlier
        processes of this rank have left in protocol/.
        """
        self._identity = identity
        self._position = position
        self._watch = watch
        self._check = check
        self._missing = missing
        self._raised: dict[Flag, Payload] = {}
        self._over = list(left_behind)
        """What nobody reads any more, once the present epoch has opened an iteration."""

    def forget(self) -> None:
        """Raise no flag of the epoch before again."""
        self._over += map(self._identity.run_dir.entry, self._raised)
        self._raised.clear()

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch.
        A worker in no epoch complains instead.
        """
        current = self._watch.current or self._watch.newest_record()
        if current is None:
            return
        if self._watch.current is None and not self._identity.is_master:
            me = self._identity
            complain(me.run_dir, current.epoch, me.rank, me.host, text)
            return
        phase = self._position.phase or Phase.ITERATION_START
        flag = Flag(current.epoch, self._position.iteration, phase, self._identity.rank, kind)
        self.raise_flag(flag, {"text": text, "host": self._identity.host, **more})

    def raise_flag(self, flag: Flag, payload: Payload) -> None:
        """Show a flag to the others; it is raised again if it is lost while this node waits."""
        path = self._identity.run_dir.entry(flag)
        files.publish(path, json.dumps(payload).encode(), durable=False)
        self._raised[flag] = payload

    def wait_until(self, ready: Callable[[Board], Any]) -> Any:
        """Return what `ready` gives, once it is not None; `check` raises what ends the wait."""
        started_s = self._position.begin_to_wait()
        again_s = RAISE_AGAIN_S

        def check_and_raise_again() -> None:
            nonlocal again_s
            self._check()
            waited_s = time.monotonic() - started_s
            if waited_s > again_s:
                again_s = 2 * waited_s
                self._raise_again()

        return self._watch.wait(ready, check_and_raise_again, self._missing)

    def _raise_again(self) -> None:
        """Raise the flags that are gone, unless this node was replaced: its successor has removed them."""
        board = self._watch.look(whole=True)
        self._check()
        for flag in self._raised.keys() - board.flags:
            if files.content(self._identity.run_dir.entry(flag)) is None:
                self.raise_flag(flag, self._raised[flag])

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
        """Wait for the master's flag; returns its document. Then nobody needs this node's flag of the row."""
        flag = Flag(self._watch.record.epoch, iteration, phase, MASTER, "ok")
        self._position.wait_for([MASTER])
        self.wait_until(lambda board: True if flag in board.flags else None)
        document = read_flag(self._identity.run_dir, flag)
        self._lower(lambda own: own == flag._replace(rank=self._identity.rank))
        return document

    def _lower(self, is_over: Callable[[Flag], bool]) -> None:
        for flag in [flag for flag in self._raised if is_over(flag)]:
            files.remove(self._identity.run_dir.entry(flag))
            del self._raised[flag]

    def payloads(self, iteration: int, phase: Phase, own: Payload) -> dict[int, Payload]:
        """Return, by rank, what the members' flags of a row say; `own` is the master's part."""
        record, run_dir = self._watch.record, self._identity.run_dir
        others = sorted(set(record.members) - {MASTER})
        flags = [Flag(record.epoch, iteration, phase, rank, "ok") for rank in others]
        said = files.side_by_side(partial(read_flag, run_dir), flags)
        return {MASTER: own, **dict(zip(others, said, strict=True))}

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

    def clear(self, iteration: int) -> None:
        """Remove what nobody reads any more, now that `iteration` is open.

        That is, of this node: its flags up to the iteration before the last, and all of ended epochs. A
        worker may still be reading the master's last flag of the iteration before. It has passed all older
        ones, or the master had not come here. The master also removes old records, and the flags of nodes
        that are not in this epoch.
        """
        self._lower(
            lambda flag: flag.kind == "enter" or (flag.kind == "ok" and flag.iteration < iteration - 1)
        )
        run_dir, board, record = self._identity.run_dir, self._watch.board, self._watch.record
        if self._identity.is_master:
            older = [epoch for epoch in board.records if epoch < record.epoch]  # numbers may have gaps
            for epoch in sorted(older)[:-KEPT_RECORDS]:
                once.remove(run_dir.entry(Record(epoch)))
            over = {flag for flag in board.flags if flag.epoch < record.epoch}
            self._over += [run_dir.entry(flag) for flag in over if flag.rank not in record.members]
        while self._over:
            path = self._over.pop()
            (files.remove_any if files.is_temporary(path.name) else files.remove)(path)
