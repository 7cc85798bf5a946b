"""The places of a new policy's files: into the checkpoint, and into a copy on each node for its engine."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollout.storage.hashing import FileFacts
from rollout.storage.retry import waiting_for_space
from rollout.storage.writer import Produce, Writer
from trainer.checkpoint.rank_files import gather_json, local_rank_and_world, rank_and_world

logger = logging.getLogger(__name__)


class Outputs:
    """Takes the files of a policy. Each is written into the checkpoint by the rank that owns it, and into its
    node's copy, if the node wants one, by one of the node's ranks.
    """

    def __init__(self, checkpoint: Writer, copy: Writer | None = None) -> None:
        self._checkpoint = checkpoint
        self._copy = copy
        self._rank, _ = rank_and_world()
        self._local_rank, self._local_world = local_rank_and_world()

    def keeps(self, owner: int) -> bool:
        """Return whether this rank writes the files of the rank `owner` anywhere."""
        return owner == self._rank or self._copies(owner)

    def _copies(self, owner: int) -> bool:
        return self._copy is not None and owner % self._local_world == self._local_rank

    def add(self, name: str, content: bytes | Produce, owner: int = 0) -> None:
        """Begin to write a file of the rank `owner`, wherever this rank has to."""
        if owner == self._rank:
            _add(self._checkpoint, name, content)
        if self._copy is not None and self._copies(owner):
            with waiting_for_space(0.0):  # the run does not depend on this disk
                _add(self._copy, name, content)

    def link(self, name: str, source: Path, facts: FileFacts) -> None:
        """Begin to link a file that is at `source` already, with these facts, as one of rank 0."""
        if self._rank == 0:
            self._checkpoint.link(name, source, facts)
        if self._copy is not None and self._copies(0):
            with waiting_for_space(0.0):
                self._copy.link(name, source, facts)


def _add(writer: Writer, name: str, content: bytes | Produce) -> None:
    if "/" in name:
        writer.add_folder(name.rpartition("/")[0])
    writer.add(name, content)


def finish_copy(copy: Writer | None) -> dict[str, FileFacts] | None:
    """Wait until the copies of all nodes are there; returns the files of this node's.

    Collective. None: this node has none, or it differs from that of the first node that has one, as replicas
    on unlike GPUs may in their last bits; its engine then waits for the checkpoint.
    """
    copied: dict[str, FileFacts] | None = None
    if copy is not None:
        try:
            copied = copy.finish()
        except OSError as error:
            copy.give_up()
            logger.warning("the engine of this node waits for the checkpoint: %s", error)
    rank, _ = rank_and_world()
    local_rank, _ = local_rank_and_world()
    shares = gather_json({"node": rank - local_rank, "files": copied}, "copying the new policy to each node")
    copies = [_of_node(shares, node) for node in sorted({share["node"] for share in shares})]
    files_here, first = _of_node(shares, rank - local_rank), next(filter(None, copies), None)
    if files_here is not None and first is not None and files_here != first and not local_rank:
        names = ", ".join(sorted(name for name in first if files_here.get(name) != first[name]))
        logger.warning("the engine of this node waits for the checkpoint: its own %s has other bits", names)
    return files_here if files_here == first else None


def _of_node(shares: Sequence[Any], node: int) -> dict[str, FileFacts] | None:
    """Return the files that the ranks of a node have copied together; None if one of them could not."""
    copied: dict[str, FileFacts] = {}
    for share in shares:
        if share["node"] == node:
            if share["files"] is None:
                return None
            copied |= share["files"]
    return copied
