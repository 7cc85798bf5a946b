"""Log lines of a node: each says which rank, iteration and phase it comes from."""

import logging
import sys

from coordinator.node import Node


class Prefix(logging.Formatter):
    """`[rank 2 it 7 train_rollout] text`."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(message)s")
        self._rank = rank
        self._node: Node | None = None

    def follow(self, node: Node) -> None:
        """Say where `node` is."""
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        place = self._node.position if self._node else None
        where = f" it {place.iteration} {place.phase}" if place and place.phase else ""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        return f"[rank {self._rank}{where}] {level}{super().format(record)}"


def set_up(rank: int) -> Prefix:
    """Log to stderr, each line with the prefix that is returned."""
    prefix = Prefix(rank)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(prefix)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for name in ("asyncio", "aiohttp", "filelock", "httpx"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("watchdog").setLevel(logging.CRITICAL)  # it complains while it is being stopped
    return prefix
