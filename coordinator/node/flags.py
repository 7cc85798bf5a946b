"""What nodes say to each other: flags that are raised, waited for and read."""

import json
import time
from collections.abc import Callable
from typing import Any

from coordinator.directory.layout import Flag
from coordinator.node.start import Start
from coordinator.node.verdicts import Payload, Standing
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import MASTER
from coordinator.protocol.snapshot import Board
from rollout.storage import files

RAISE_AGAIN_S = 5.0
"""A waiter whose own flag is not listed for so long raises it again: flags are not fsynced."""


class Flagging(Standing):
    """A node's flags, and its waiting for those of the others."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._raised: dict[Flag, Payload] = {}

    def forget_flags(self) -> None:
        """A new epoch: what was raised in the one before is not raised again."""
        self._raised.clear()

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Raise a call (failed, left, stopped, gave_up ...) where the others look: in the present epoch."""
        current = self.watch.current or self.watch.newest_record()
        if current is None or (self.watch.current is None and not self.is_master):
            return
        phase = Phase[self.position.phase.upper()] if self.position.phase else Phase.ITERATION_START
        flag = Flag(current.epoch, self.position.iteration, phase, self.rank, kind)
        self.raise_flag(flag, {"text": text, "host": self.host, **more})

    def raise_flag(self, flag: Flag, payload: Payload) -> None:
        """Show a flag to the others; it is raised again if it is lost while this node waits."""
        files.publish(self.run_dir.protocol / flag.name, json.dumps(payload).encode(), durable=False)
        self._raised[flag] = payload

    def wait_until(self, ready: Callable[[Board], Any]) -> Any:
        """What `ready` gives, once it is not None; `check` raises what ends the wait."""
        started_s = self.position.waiting_since_s = time.monotonic()

        def ready_or_raise_again(board: Board) -> Any:
            result = ready(board)
            if result is None and time.monotonic() - started_s > RAISE_AGAIN_S:
                for flag in self._raised.keys() - board.flags:
                    self.raise_flag(flag, self._raised[flag])
            return result

        return self.watch.wait(ready_or_raise_again, self.check, self.say_missing)

    def wait_flags(self, iteration: int, phase: int, kind: str = "ok") -> None:
        """Until all other members have raised this flag."""
        members = set(self.record.members) - {MASTER}

        def all_up(board: Board) -> bool | None:
            self.position.waiting_for = sorted(
                members - board.flagged(self.record.epoch, iteration, phase, kind)
            )
            return None if self.position.waiting_for else True

        self.wait_until(all_up)

    def payloads(self, iteration: int, phase: Phase, own: Payload) -> dict[int, Payload]:
        """By rank, what the members' flags of a row say."""
        others = sorted(set(self.record.members) - {MASTER})
        said = {rank: self.read(Flag(self.record.epoch, iteration, phase, rank, "ok")) for rank in others}
        return {MASTER: own, **said}

    def wait_master(self, iteration: int, phase: Phase) -> Payload:
        """The document of the master's flag."""
        flag = Flag(self.record.epoch, iteration, phase, MASTER, "ok")
        self.position.waiting_for = [MASTER]
        self.wait_until(lambda board: True if flag in board.flags else None)
        return self.read(flag)

    def opened(self, board: Board, after: int) -> int | None:
        """The lowest iteration later than `after` that the master has opened in this epoch."""
        opening = (self.record.epoch, Phase.ITERATION_START, MASTER, "ok")
        opened = [
            flag.iteration
            for flag in board.flags
            if (flag.epoch, flag.phase, flag.rank, flag.kind) == opening and flag.iteration > after
        ]
        return min(opened, default=None)

    def remove_flags_before(self, iteration: int) -> None:
        """Remove this node's flags of earlier iterations, up to the one before the last.

        A worker may still be reading the master's last flag of the iteration before; it has passed all
        older ones, or the master had not come here.
        """
        for flag in [flag for flag in self._raised if 0 < flag.iteration < iteration - 1]:
            files.remove(self.run_dir.protocol / flag.name)
            del self._raised[flag]
