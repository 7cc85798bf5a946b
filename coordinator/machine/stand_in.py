"""Beat in place of a node whose interpreter is held, and end the node if it has to end.

    python -m coordinator.machine.stand_in SPOOL        started by the node's keeper

User code that computes in C has stopped every thread of the node. It is alive, so this process publishes its
last heartbeat again and again, under the next numbers: its progress stands still, and the others judge that.
If the node has to end (a signal, a call of another node, a newer epoch, a newer process of its rank) and does
not for `react_s`, its children are killed, the others are told, and then it is killed. Once the node has a
pulse again, this process leaves.
"""

import contextlib
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from coordinator.directory.layout import MASTER, Flag, RunDir
from coordinator.machine import keeper, pulse
from coordinator.machine.signals import NUMBERS
from coordinator.protocol.heartbeat import Heart, read_beat
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import Records
from coordinator.protocol.snapshot import Board, whole_board
from coordinator.protocol.verdict import LOSSES, decide
from rollout.storage import files

TELL_S = 5.0
"""How long the end of the node waits for the shared directory."""


class StandIn:
    """Stands in for one node from the moment at which its pulse stands still."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._written_ns, self._node = self._pulse()
        self._process = os.pidfd_open(self._node["pid"])  # so that no other process is ever killed
        self._run_dir = RunDir(Path(self._node["root"]), self._node["crew"])
        self._records = Records(self._run_dir)
        self._heart = Heart(self._run_dir, self._node["rank"], lambda: self._said)
        self._said: dict[str, Any] = {}

    def run(self) -> None:
        """Beat until the node has a pulse again, or is stopped, or gone, or killed here."""
        held_since_s = time.monotonic() - self._node["patience_s"]
        ends_since_s: float | None = None
        while self._is_held():
            has_to_end, signals, now_s = False, self._signals(), time.monotonic()
            with contextlib.suppress(OSError):  # the mount is in trouble: nobody would see a beat
                board = self._look()
                if board.highest_incarnation(self._node["rank"]) > self._node["incarnation"]:
                    has_to_end = True
                elif self._said and self._heart.is_overtaken(board):
                    break
                elif self._said or self._adopt(board):
                    has_to_end = self._has_to_end(board)
                    self._heart.beat(None)
            if has_to_end or signals:
                ends_since_s = ends_since_s or now_s
            if ends_since_s is not None and (now_s - ends_since_s >= self._node["react_s"] or signals[1:]):
                self._end(signals, now_s - held_since_s)
                return
            time.sleep(self._node["beat_s"])
        self._leave()

    def _pulse(self) -> tuple[int, pulse.Shown]:
        path = self._spool / keeper.PULSE
        return path.stat().st_mtime_ns, json.loads(path.read_text())

    def _is_held(self) -> bool:
        try:
            return self._pulse()[0] == self._written_ns and keeper.is_schedulable(self._node["pid"])
        except OSError:
            return False

    def _signals(self) -> list[int]:
        """Return the numbers of the signals that asked the node to end."""
        try:
            return [number for number in (self._spool / pulse.SIGNALS).read_bytes() if number in NUMBERS]
        except OSError:
            return []

    def _look(self) -> Board:
        return whole_board(self._run_dir)

    def _adopt(self, board: Board) -> bool:
        """Go on from the node's last beat; False if nobody can read it."""
        last = board.beats.get(self._node["rank"])
        if last is None:
            return False
        self._said = read_beat(self._run_dir, last)
        self._heart.go_on(last)
        return bool(self._said)

    def _has_to_end(self, board: Board) -> bool:
        """Return whether `board` shows what ends the node's row. This process has not observed the others, so
        it takes none of them for lost.
        """
        rank, incarnation = self._node["rank"], self._node["incarnation"]
        newest, current = self._records.newest(board.records), self._records.newest([self._heart.epoch])
        if newest is None or current is None:
            return False
        never_s = float("inf")
        verdict = decide(board, newest, current, rank, incarnation, {}, never_s, True, never_s)
        return verdict is not None and verdict.event not in LOSSES

    def _leave(self) -> None:
        """Remove the last beat here once the node, if it goes on, has published a later one."""
        for _beat in range(4):
            with contextlib.suppress(OSError):
                if self._said and self._heart.is_overtaken(self._look()):
                    self._heart.remove()
                    return
            time.sleep(self._node["beat_s"])

    def _end(self, signals: list[int], held_s: float) -> None:
        for directory in keeper.pgid_directories(str(self._spool)):
            keeper.sweep(directory)
        place = f"{self._said.get('phase')}, iteration {self._said.get('iteration')}"
        text = (
            f"rank {self._node['rank']} ({self._said.get('host')}) has to end in {place}, but user code has "
            f"held its interpreter for {held_s:.0f} s. It is killed. Let what computes be a sync reward, or "
            "run it in a process; then start the node again"
        )
        stops = self._node["rank"] == MASTER and signal.SIGINT in signals
        arguments = ("stopped" if stops else "left", text)
        telling = threading.Thread(target=self._tell, args=arguments, daemon=True)
        telling.start()
        telling.join(TELL_S)
        with contextlib.suppress(OSError):  # the node cannot write that itself
            stderr = os.open(f"/proc/{self._node['pid']}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
            os.write(stderr, f"error: {text}\n".encode())
        signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def _tell(self, kind: str, text: str) -> None:
        """Raise the call that the node would raise, where the others look: in its epoch."""
        if not self._said:
            return
        phase = Phase[self._said["phase"].upper()] if self._said["phase"] else Phase.ITERATION_START
        flag = Flag(self._heart.epoch, self._said["iteration"], phase, self._node["rank"], kind)
        content = json.dumps({"text": text, "host": self._said["host"]}).encode()
        with contextlib.suppress(OSError):
            files.publish(self._run_dir.entry(flag), content, durable=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    StandIn(Path(sys.argv[1])).run()
