"""Claims: who makes which chunk of a rollout, while it goes on.

    claims/e0002.i000005.p02.c000017      chunk 17 of row 2 of iteration 5, in epoch 2

A claim is made once, so a chunk has one owner; its content, which only people need, names the owner. Nothing
rests on it but the balance: a chunk whose claim nobody knows to be theirs is planned anew with what else is
missing.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from coordinator.directory.layout import Claim, RunDir, parse_claim_name
from rollout.storage import files, once

TRIES = 2
"""How many chunks one call tries, so that it costs a bounded number of operations, however many want them."""
LINKS = 16
"""How many claims are links to one file. After 35, GlusterFS on ext4 says that its disk is full."""


class Claims:
    """The claims of one row, as one rank makes them.

    The claims of a rank are hard links to a file of its own: a claim costs a listing and a link. Where
    there are no hard links a claim is a file of its own, created exclusively.
    """

    def __init__(
        self,
        run_dir: RunDir,
        epoch: int,
        iteration: int,
        row: int,
        rank: int,
        on_file: Callable[[Path], None] = lambda _path: None,
    ) -> None:
        """`on_file` is told each file that is made here, which has to be removed when the row is over."""
        self._directory = run_dir.claims
        self._row = (epoch, iteration, row)
        self._owner = json.dumps({"rank": rank}).encode()
        self._file: Path | None = None
        self._links = 0
        self._has_links = True
        self._is_fsynced = False
        self._refused: set[int] = set()
        """Chunks that others had when this rank wanted them: a listing may show that much later."""
        self._on_file = on_file

    def taken(self) -> set[int]:
        """Return the chunks that are claimed."""
        claims = map(parse_claim_name, files.listing(self._directory))
        listed = {claim.chunk for claim in claims if claim is not None and claim[:3] == self._row}
        return listed | self._refused

    def take(self, chunks: Sequence[int]) -> int | None:
        """Claim the first of `chunks` that nobody has claimed meanwhile, of the first TRIES; returns it."""
        for chunk in chunks[:TRIES]:
            path = self._directory / Claim(*self._row, chunk).name
            if self._make(path):
                self._on_file(path)
                return chunk
            self._refused.add(chunk)
        return None

    def _make(self, path: Path) -> bool:
        """Return whether a claim is this rank's now."""
        while self._has_links:
            if self._file is None or self._links == LINKS:
                self._file, self._links = files.write_temporary(path, self._owner, self._is_fsynced), 0
                self._on_file(self._file)
            self._links += 1
            try:
                is_ours = once.link(self._file, path, self._owner)
            except FileNotFoundError:  # removed by a newer epoch, of which this process will hear, or a mount
                self._has_links = not self._is_fsynced  # that has a file only some time after its close
                self._file, self._is_fsynced = None, True
                continue
            if is_ours is not None:
                return is_ours
            self._has_links = False
        return once.create_exclusively(path, self._owner)


def left_over(run_dir: RunDir, epoch: int) -> list[Path]:
    """Return the claims of epochs before `epoch`, and what was left unfinished beside them."""
    paths: list[Path] = []
    for name in files.listing(run_dir.claims):
        claim = parse_claim_name(files.published_name(name))
        if claim is not None and claim.epoch < epoch:
            paths.append(run_dir.claims / name)
    return paths
