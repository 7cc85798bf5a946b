"""The guests of a run, as its master knows them."""

import logging
from pathlib import Path

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.protocol.heartbeat import read_beats
from coordinator.protocol.watch import ENDED, Watch

log = logging.getLogger(__name__)


class Guests:
    """Knows which guests are there, and says who comes and goes."""

    def __init__(self, run_dir: RunDir, watch: Watch) -> None:
        self._run_dir = run_dir
        self._watch = watch
        self._hosts: dict[int, str] = {}
        """Hosts of the guests that were there last, by rank."""
        self.have_come = False
        """Whether any guest was there."""

    def present(self) -> set[int]:
        """Return the guests that beat and have not said goodbye."""
        board, beating = self._watch.board, self._watch.guests
        contents = read_beats(self._run_dir, {rank: board.beats[rank] for rank in beating})
        hosts = {
            rank: content.get("host", "")
            for rank, content in contents.items()
            if content and content["state"] != ENDED
        }
        # Of a beat that its successor has replaced just now nothing is known: its guest is still there.
        hosts |= {
            rank: self._hosts[rank] for rank in self._hosts.keys() & beating.keys() if not contents[rank]
        }
        for rank in sorted(hosts.keys() ^ self._hosts.keys()):
            verb, host = ("has come", hosts[rank]) if rank in hosts else ("has gone", self._hosts[rank])
            log.info("%s (%s) %s", self._run_dir.name(rank), host, verb)
        self._hosts = hosts
        self.have_come |= bool(hosts)
        return set(hosts)

    def left_behind(self) -> list[Path]:
        """Return the heartbeats of guests that are gone, but for the last of each: that one says which
        incarnation was the last.
        """
        beating, board = self._watch.guests, self._watch.board
        last = {rank: beat for rank, beat in board.beats.items() if rank >= GUESTS and rank not in beating}
        return [
            self._run_dir.entry(entry)
            for entry in board.entries.values()
            if isinstance(entry, Beat) and entry.rank in last and entry != last[entry.rank]
        ]
