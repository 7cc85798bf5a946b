"""Claims: who makes which chunk of a rollout, while it goes on.

    claims/e0002.i000005.p02.c000017      chunk 17 of phase 2 of iteration 5, in epoch 2
    claims/e0002.i000005.p02.g001000      guest 1000 claims chunks of this phase
    claims/e0002.i000005.p02.m000017      a guest has made all of chunk 17; says in which parts
    claims/e0002.i000005.p02.b000017      chunk 17 is back: the guest that had claimed it is gone

A claim is made once, so a chunk has one owner, whom its content names. Nothing rests on it but the balance: a
chunk whose claim nobody knows to be theirs is planned anew with what else is missing.

Nothing is removed to give a chunk back: it is claimed by another number then. Of 20 chunks, chunk 17 is back
when b000017 is there, and is claimed as c000037, and if that comes back as c000057.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coordinator.directory.file_names import Claim, ClaimKind, parse_claim_name
from coordinator.directory.layout import RunDir
from rollout.storage import files, once

TRIES = 2
"""How many chunks one call tries, so that it costs a bounded number of operations, however many want them."""
LINKS = 16
"""How many claims are links to one file. After 35, GlusterFS on ext4 says that its disk is full."""


class ClaimListing(NamedTuple):
    """What a listing shows of a phase, by number."""

    claimed: set[int]
    finished: set[int]
    """Chunks that guests have claimed and made."""
    back: set[int]
    guests: set[int]
    """The ranks of the guests that take part."""

    def number(self, chunk: int, count: int) -> int:
        """Return the number by which a chunk, of `count` that there are, was claimed last or can be."""
        while chunk in self.back:
            chunk += count
        return chunk


class Owner(NamedTuple):
    """Who has claimed a chunk: a rank, and of a guest the incarnation."""

    rank: int
    incarnation: int


class Claims:
    """The claims of one phase, as one rank makes them.

    The claims of a rank are hard links to a file of its own: a claim costs a listing and a link. Where
    there are no hard links a claim is a file of its own, created exclusively.
    """

    def __init__(
        self,
        run_dir: RunDir,
        epoch: int,
        iteration: int,
        phase: int,
        rank: int,
        on_file: Callable[[Path], None] = lambda _path: None,
        incarnation: int = 0,
    ) -> None:
        """`on_file` is told each file that is made here, which has to be removed when the phase is over.
        `incarnation`: of a guest.
        """
        self._directory = run_dir.claims
        self._phase = (epoch, iteration, phase)
        self._owner = json.dumps(Owner(rank, incarnation)._asdict()).encode()
        self._file: Path | None = None
        self._links = 0
        self._has_links = True
        self._is_fsynced = False
        self._refused: set[int] = set()
        """Chunks that others had when this rank wanted them: a listing may show that much later."""
        self._on_file = on_file

    def look(self) -> ClaimListing:
        """List what all have said of this phase."""
        numbers: dict[ClaimKind, set[int]] = {"c": set(), "m": set(), "b": set(), "g": set()}
        for claim in map(parse_claim_name, files.listing(self._directory)):
            if claim is not None and claim[:3] == self._phase:
                numbers[claim.kind].add(claim.number)
        return ClaimListing(numbers["c"] | self._refused, numbers["m"], numbers["b"], numbers["g"])

    def take(self, numbers: Sequence[int]) -> int | None:
        """Claim the first of `numbers` that nobody has claimed meanwhile, of the first TRIES; returns it."""
        for number in numbers[:TRIES]:
            path = self._path(number, "c")
            if self._make(path):
                self._on_file(path)
                return number
            self._refused.add(number)
        return None

    def take_part(self, rank: int) -> None:
        """Say that a guest takes part, before its first claim."""
        self._mark(rank, "g")

    def give_back(self, number: int) -> None:
        """Say that a chunk is to be claimed again."""
        self._mark(number, "b")

    def say_made(self, number: int, document: Mapping[str, Any]) -> None:
        """Say that all of a chunk is made and durable."""
        path = self._path(number, "m")
        self._on_file(path)
        files.publish(path, json.dumps(document).encode(), durable=False)

    def read_made(self, number: int) -> dict[str, Any] | None:
        """Return the document of the guest that has made a chunk; None while that cannot be read."""
        return _read(self._path(number, "m"))

    def owner(self, number: int) -> Owner | None:
        """Return who has claimed a chunk; None while that cannot be read."""
        document = _read(self._path(number, "c"))
        return Owner(**document) if document else None

    def leave(self, names: Iterable[tuple[ClaimKind, int]]) -> None:
        """Have what guests have said removed when the phase is over: they may be gone by then."""
        for kind, number in names:
            self._on_file(self._path(number, kind))

    def _path(self, number: int, kind: ClaimKind) -> Path:
        return self._directory / Claim(*self._phase, number, kind).name

    def _mark(self, number: int, kind: ClaimKind) -> None:
        path = self._path(number, kind)
        self._on_file(path)
        files.mark(path)

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


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(files.content(path) or b"")
    except ValueError:
        return None


def left_over(run_dir: RunDir, epoch: int, iteration: int = 0) -> list[Path]:
    """Return the claims of epochs before `epoch`, and of iterations before `iteration` in it, and what was
    left unfinished beside them.
    """
    paths: list[Path] = []
    for name in files.listing(run_dir.claims):
        claim = parse_claim_name(files.published_name(name))
        if claim is not None and claim[:2] < (epoch, iteration):
            paths.append(run_dir.claims / name)
    return paths
