"""Raise, await, read and remove flags: files by which nodes say that a phase is done, or call each other."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.directory.file_names import DOCUMENT, ENTER, OK, Flag, Record
from coordinator.directory.layout import MASTER, RunDir
from coordinator.node.identity import Identity
from coordinator.node.position import Position
from coordinator.protocol.failed_starts import report_failed_start
from coordinator.protocol.phase import Phase
from coordinator.protocol.snapshot import Board
from coordinator.protocol.watch import Watch
from rollout.storage import files, once

Payload = dict[str, Any]
"""The content of a flag; an empty one stands for none."""

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is gone after so long raises it again: flags are not fsynced. It looks again after
twice as long, and so on."""
KEPT_RECORDS = 2
"""Records before the present one that stay."""
DIED = "its process died without a word: by a second Ctrl+C, kill -9, a crash, or for lack of memory (dmesg)"
PATIENCE_S = 5.0
"""How long a flag that was listed may be missing or unreadable when it is read."""


def read_flag(run_dir: RunDir, flag: Flag) -> Payload:
    """Return the payload of a listed flag; a mount may show its content a moment later."""
    if flag.kind in {OK, ENTER}:
        return {}
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return json.loads(files.read(run_dir.entry(flag)))
        except (FileNotFoundError, ValueError):
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def call_document(run_dir: RunDir, flag: Flag) -> Payload:
    """Return the document of a call; its `text` only says that it was raised if nobody can read it."""
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
        sweep: Callable[[Iterable[Path]], None],
        left_behind: Iterable[Path] = (),
    ) -> None:
        """`check` raises what ends a wait; `missing` says who is waited for; `sweep` removes files in the
        background; `left_behind`: what earlier processes of this rank have left in protocol/.
        """
        self._identity = identity
        self._position = position
        self._watch = watch
        self._check = check
        self._missing = missing
        self._sweep = sweep
        self._raised: dict[Flag, Payload] = {}
        self._over = list(left_behind)
        """What nobody reads any more, once the present epoch has opened an iteration."""

    def forget(self) -> None:
        """Raise no flag of the epoch before again."""
        self._over += map(self._identity.run_dir.entry, self._raised)
        self._raised.clear()

    def leave(self, paths: Iterable[Path]) -> None:
        """Take files that nobody reads any more once the present phase is over: they are removed later."""
        self._over += paths

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch.
        A worker in no epoch complains instead; a guest tells nobody.
        """
        if self._identity.is_guest:
            return
        current = self._watch.current or self._watch.newest_record()
        if current is None:
            return
        if self._watch.current is None and not self._identity.is_master:
            me = self._identity
            report_failed_start(me.run_dir, current.epoch, me.rank, me.host, text)
            return
        phase = self._position.phase or Phase.ITERATION_START
        flag = Flag(current.epoch, self._position.iteration, phase, self._identity.rank, kind)
        self.raise_flag(flag, {"text": text, "host": self._identity.host, **more})

    def last_word(self) -> tuple[Path, bytes]:
        """Return the path and the content of the flag by which the others hear that this node has died."""
        me = self._identity
        flag = Flag(self._watch.record.epoch, 0, Phase.ITERATION_START, me.rank, "left")
        return me.run_dir.entry(flag), json.dumps({"text": DIED, "host": me.host}).encode()

    def enter(self, payload: Payload) -> None:
        """Say that this node has entered the epoch."""
        self._raise(0, 0, ENTER, payload)

    def raise_done(self, iteration: int, phase: Phase, payload: Payload) -> None:
        """Say that this node has done its part of a phase."""
        self._raise(iteration, phase, OK, payload)

    def _raise(self, iteration: int, phase: int, kind: str, payload: Payload) -> None:
        kind += DOCUMENT if payload else ""
        self.raise_flag(Flag(self._watch.record.epoch, iteration, phase, self._identity.rank, kind), payload)

    def raise_flag(self, flag: Flag, payload: Payload) -> None:
        """Show a flag to the others; it is raised again if it is lost while this node waits."""
        path = self._identity.run_dir.entry(flag)
        if payload:
            files.publish(path, json.dumps(payload).encode(), durable=False)
        else:
            files.mark(path)
        self._raised[flag] = payload

    def wait_until(self, ready: Callable[[Board], Any]) -> Any:
        """Return the value of `ready`, once it is not None; `check` raises what ends the wait. What has been
        listed is not listed again: a flag that is up stays up until nobody needs it.
        """
        if (result := ready(self._watch.board)) is not None:
            return result
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
        board = self._watch.look(own_too=True)
        self._check()
        for flag in self._raised.keys() - board.flags:
            if files.content(self._identity.run_dir.entry(flag)) is None:
                self.raise_flag(flag, self._raised[flag])

    def wait_members(self, iteration: int, phase: int) -> dict[int, Flag]:
        """Wait until all other members have done a phase (of iteration 0: entered the epoch); returns their
        flags by rank. Then they have passed all phases before, and nobody needs this node's flags of these.
        """
        record = self._watch.record
        members = set(record.members) - {MASTER}

        def all_up(board: Board) -> dict[int, Flag] | None:
            done = board.done(record.epoch, iteration, phase)
            missing = sorted(members - done.keys())
            self._position.wait_for(missing)
            return None if missing else {rank: done[rank] for rank in sorted(members)}

        flags = self.wait_until(all_up)
        self._lower(lambda raised: raised.is_done and raised[1:3] < (iteration, phase))
        return flags

    def wait_master(self, iteration: int, phase: Phase) -> Payload:
        """Wait for the master's flag; returns its document. Then nobody needs this node's flag."""
        epoch = self._watch.record.epoch
        self._position.wait_for([MASTER])
        flag = self.wait_until(lambda board: board.done(epoch, iteration, phase).get(MASTER))
        self._lower(lambda raised: raised.is_done and raised[1:3] == (iteration, phase))
        return read_flag(self._identity.run_dir, flag)

    def _lower(self, is_over: Callable[[Flag], bool]) -> None:
        ended_flags = [flag for flag in self._raised if is_over(flag)]
        for flag in ended_flags:
            del self._raised[flag]
        self._sweep([self._identity.run_dir.entry(flag) for flag in ended_flags])

    def payloads(self, flags: Mapping[int, Flag], master_payload: Payload) -> dict[int, Payload]:
        """Return, by rank, what the members' `flags` say; `master_payload` is the master's part."""
        documents = files.side_by_side(partial(read_flag, self._identity.run_dir), list(flags.values()))
        return {MASTER: master_payload, **dict(zip(flags, documents, strict=True))}

    def wait_opened(self, after: int) -> int:
        """Wait until the master opens an iteration later than `after` in this epoch; returns its number."""
        opening = (self._watch.record.epoch, Phase.ITERATION_START, MASTER)

        def opened(board: Board) -> int | None:
            later = [
                flag.iteration
                for flag in board.flags
                if (flag.epoch, flag.phase, flag.rank) == opening and flag.is_done and flag.iteration > after
            ]
            return min(later, default=None)

        return self.wait_until(opened)

    def clear(self) -> None:
        """Remove what nobody reads any more, now that this epoch has opened an iteration.

        That is, of this node: its flags of ended epochs. The master also removes old records, and the flags
        of nodes that are not in this epoch.
        """
        self._lower(lambda raised: not raised.is_done and not raised.is_call)
        run_dir, board, record = self._identity.run_dir, self._watch.board, self._watch.record
        if self._identity.is_master:
            older = [epoch for epoch in board.records if epoch < record.epoch]  # numbers may have gaps
            for epoch in sorted(older)[:-KEPT_RECORDS]:
                once.remove(run_dir.entry(Record(epoch)))
            old_flags = {flag for flag in board.flags if flag.epoch < record.epoch}
            # A member removes its own flags; those of others would stay for ever.
            self._over += [run_dir.entry(flag) for flag in old_flags if flag.rank not in record.members]
        self._sweep(self._over)
        self._over = []
