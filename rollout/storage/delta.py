"""Describe a file by another one of the same size, of which most numbers are the same.

The delta of two files is the exclusive or of their bytes, packed: where they agree it is zero. Within a block
all first bytes of the four-byte words come first, then all second ones and so on, since in numbers of two or
four bytes the low ones change most. No value is rounded: `apply` gives the second file byte for byte.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import IO

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
WORD_BYTES = 4
"""A multiple of the size of the numbers in weights that are served."""

Piece = bytes | memoryview
Bytes = NDArray[np.uint8]


class DamagedDelta(ValueError):
    """The bytes are no delta, or one of a shorter file."""


def delta_name(name: str) -> str:
    """Return the name of a file's delta, beside it. It begins with a dot: it is no file of the model."""
    return f".{name}.delta"


def encode(before: Iterable[Piece], after: Iterable[Piece], limit: int) -> bytes | None:
    """Return the delta that makes `after` of `before`, two files in pieces of any size.

    None if the files differ in size, or if the delta has more than `limit` bytes.
    """
    # Runs of zeros and the frequencies of bytes are all that there is to find, and are found fast.
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    packed: list[bytes] = []
    size = 0
    for old, new in zip_longest(_blocks(before), _blocks(after)):
        if old is None or new is None or old.size != new.size:
            return None
        packed.append(packer.compress(_by_place(old ^ new)))
        size += len(packed[-1])
        if size > limit:
            return None
    packed.append(packer.flush())
    return b"".join(packed) if size + len(packed[-1]) <= limit else None


def apply(before: IO[bytes], delta: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Give `write` the file that `delta`, in pieces, makes of `before`. Raises DamagedDelta.

    A delta of other files gives other bytes, so compare the checksum.
    """
    changes = _Unpacked(delta)
    while data := before.read(BLOCK_BYTES):
        old = np.frombuffer(data, np.uint8)
        write((old ^ _in_order(changes.read(old.size))).tobytes())


def _blocks(pieces: Iterable[Piece]) -> Iterator[Bytes]:
    """Yield the same bytes in blocks of BLOCK_BYTES; the last one may be shorter."""
    begun = bytearray()
    for piece in pieces:
        for begin in range(0, len(piece), BLOCK_BYTES):
            begun += piece[begin : begin + BLOCK_BYTES]
            if len(begun) >= BLOCK_BYTES:
                yield np.frombuffer(bytes(begun[:BLOCK_BYTES]), np.uint8)
                del begun[:BLOCK_BYTES]
    if begun:
        yield np.frombuffer(bytes(begun), np.uint8)


def _by_place(data: Bytes) -> bytes:
    """Sort the bytes of whole words by their place in the word."""
    whole = data.size - data.size % WORD_BYTES
    return data[:whole].reshape(-1, WORD_BYTES).T.tobytes() + data[whole:].tobytes()


def _in_order(data: bytes) -> Bytes:
    """Undo `_by_place`."""
    sorted_bytes = np.frombuffer(data, np.uint8)
    whole = sorted_bytes.size - sorted_bytes.size % WORD_BYTES
    words = sorted_bytes[:whole].reshape(WORD_BYTES, -1).T.reshape(-1)
    return np.concatenate([words, sorted_bytes[whole:]])


class _Unpacked:
    """Reads what was packed, without ever holding much more of it than was asked for."""

    def __init__(self, packed: Iterable[bytes]) -> None:
        self._pieces = iter(packed)
        self._unpacker = zlib.decompressobj()

    def read(self, size: int) -> bytes:
        found = bytearray()
        packed = self._unpacker.unconsumed_tail
        while len(found) < size:
            try:
                data = self._unpacker.decompress(packed, size - len(found))
            except zlib.error as error:
                raise DamagedDelta(f"it cannot be unpacked: {error}") from None
            packed = self._unpacker.unconsumed_tail
            found += data
            if not data and not packed:
                packed = next(self._pieces, b"")
                if not packed:
                    raise DamagedDelta("it ends too early")
        return bytes(found)
