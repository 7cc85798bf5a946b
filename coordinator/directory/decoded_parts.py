"""Parts that this process has decoded in this iteration, several of whose phases read the same ones."""

import threading
from collections import OrderedDict
from collections.abc import Callable

from rollout.part_file import PartHeader, decode_part
from rollout.trajectory import Group

Decode = Callable[[bytes, str], tuple[PartHeader, list[Group]]]
"""Returns what a part's bytes, which have this sha256, hold; raises DamagedPart."""

KEPT_BYTES = 1 << 28


class DecodedParts:
    """Decodes parts, and returns again what the same bytes have given before. For any thread.

    It is asked for bytes that were just read, not for a file, so a file that has changed is never mistaken
    for what it was. Nobody may change what it returns.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        """At most `kept_bytes` of parts are kept, those that were asked for last."""
        self._kept_bytes = kept_bytes
        self._parts: OrderedDict[str, tuple[int, PartHeader, list[Group]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, data: bytes, sha256: str) -> tuple[PartHeader, list[Group]]:
        """Return header and groups of a part; raises DamagedPart."""
        with self._lock:
            if entry := self._parts.get(sha256):
                self._parts.move_to_end(sha256)
                return entry[1:]
        header, groups = decode_part(data)
        with self._lock:
            if sha256 not in self._parts:
                self._parts[sha256] = len(data), header, groups
                self._bytes += len(data)
            while self._bytes > self._kept_bytes:
                self._bytes -= self._parts.popitem(last=False)[1][0]
        return header, groups

    def forget(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._parts.clear()
            self._bytes = 0


decoded = DecodedParts()
"""The decoded parts of this process."""
