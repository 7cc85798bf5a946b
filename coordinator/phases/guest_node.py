"""A guest: a node that is in no epoch. It makes chunks of each rollout that is open; nobody waits for it."""

import signal
import threading
from functools import partial
from pathlib import Path

from coordinator.collector.listener import Stop
from coordinator.directory.claims import Claims
from coordinator.directory.file_names import parse_claim_name
from coordinator.directory.layout import MASTER
from coordinator.node.node import Node
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.snapshot import Board
from coordinator.start.start import NodeStart

LEAVE_S = 20.0
"""How long groups in flight have when the guest is asked to leave (SIGTERM)."""
PARTS = 100_000
"""Each incarnation of a guest numbers its parts from another multiple of this."""
ALL = {"completion_threshold": 1.0, "over_sample": 1.0}
"""What a guest has claimed it makes: no late group is left out."""


class GuestNode(Node):
    """A node that follows the master's epochs without being a member of any."""

    def __init__(self, start: NodeStart) -> None:
        super().__init__(start)
        self._files: list[Path] = []
        """What this guest has said of its chunks in the present phase."""
        self.visited: set[tuple[int, int, Phase]] = set()
        """Epoch, iteration and phase of what is done."""
        self.leaves = threading.Event()
        """Set when the guest is to leave as soon as its groups in flight have ended."""

    def enter(self, record: EpochRecord) -> None:
        """Follow an epoch: its settings, its inputs, its master."""
        me = self.identity
        me.adopt(record.settings)
        me.settings = me.settings.model_copy(update={"rollout": me.settings.rollout.model_copy(update=ALL)})
        self.watch.admit(record, self.settings)
        self.flags.forget()
        self.flags.clear()
        self.position.move("running")
        self.take_over_inputs(record)
        self.hold_rank()

    def newest_phase(self, board: Board) -> tuple[int, Phase]:
        """Return the iteration and the phase of the master's newest flag in this epoch; 0 for none. It
        removes older ones as soon as no member needs them.
        """
        epoch = self.record.epoch
        places = [
            flag[1:3] for flag in board.flags
            if flag.epoch == epoch and flag.rank == MASTER and flag.is_done
        ]  # fmt: skip
        number, phase = max(places, default=(0, 0))
        return number, Phase(phase)

    def is_over(self, iteration: int, phase: Phase) -> bool:
        """Return whether the master has said that a phase is over."""
        return self.newest_phase(self.watch.board) >= (iteration, phase)

    def phase_stop(self, iteration: int, phase: Phase) -> Stop:
        """Return the Stop that is set when a phase has ended: nobody waits for this guest to be done."""
        return _PhaseStop(self, iteration, phase)

    def first_part(self) -> int:
        """Return the number behind which this process numbers its parts: the epoch may be the one in which
        the process before it has written some.
        """
        return PARTS * (self.watch.incarnation - 1)

    def leave_claim(self, path: Path) -> None:
        """Take a file of a phase's claims: it is removed when the phase is over."""
        super().leave_claim(path)
        self._files.append(path)

    def give_back(self) -> None:
        """Give back the chunks that were claimed and are not made: others claim them at once."""
        claims = [claim for path in self._files if (claim := parse_claim_name(path.name))]
        finished = {claim.number for claim in claims if claim.kind == "m"}
        for claim in claims:
            if claim.kind == "c" and claim.number not in finished:
                Claims(self.run_dir, *claim[:3], self.rank).give_back(claim.number)
        self._files = []

    def _interrupt(self, number: int) -> None:
        """Leave at SIGTERM: what ends within LEAVE_S is finished. End at another signal, or a second one."""
        if number != signal.SIGTERM or self.leaves.is_set() or not self._files:
            super()._interrupt(number)
            return
        self.leaves.set()
        self.collector.leave()
        timer = threading.Timer(LEAVE_S, partial(super()._interrupt, number))
        timer.daemon = True
        timer.start()


class _PhaseStop:
    """Is set once a phase has ended for a guest."""

    def __init__(self, guest: GuestNode, iteration: int, phase: Phase) -> None:
        self._guest = guest
        self._phase = (iteration, phase)

    def is_set(self) -> bool:
        return self._guest.watch.stop.is_set() or self._guest.is_over(*self._phase)
