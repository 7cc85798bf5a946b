"""A rank's progress while it works: the parts it has done, and a state that it could not save. Torch-free."""

import threading
from collections.abc import Callable

NOT_SAVED = "TRAINER STATE NOT SAVED"
"""A line with these words is shown by the node at once."""

PART_BYTES = 1 << 28
"""So many bytes that were read, written or hashed are one part: what moves is no stall, however slow."""


class Progress:
    """Counts the parts of a training phase that this rank has done, and reports them."""

    def __init__(self, say: Callable[[int, int], None] = lambda done, total: None) -> None:
        """`say` gets the parts done and expected, whenever one of them has grown."""
        self._say = say
        self._done = 0
        self._total = 0
        self._bytes = 0
        self._lock = threading.Lock()

    def expect(self, parts: int) -> None:
        """There are `parts` more to do."""
        self._total += parts
        self._say(self._done, self._total)

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        self._say(self._done, self._total)

    def count_bytes(self, size: int) -> None:
        """So many bytes more were read, written or hashed, in any thread."""
        with self._lock:
            before, self._bytes = self._bytes, self._bytes + size
            parts = self._bytes // PART_BYTES - before // PART_BYTES
            if parts:
                self._total += parts
                self._done += parts
                self._say(self._done, self._total)


SILENT = Progress()
"""For those who need not say anything."""
