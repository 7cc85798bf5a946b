"""Describe a file by another one of the same size, of which most numbers are the same.

A delta lists the words of two bytes in which the files differ: numbers in bfloat16, halves of those in
float32. No value is rounded: `apply` gives the second file byte for byte. Format: one zlib stream. For each
block of the files it has the number of listed words (4 bytes, little endian), how many unlisted words come
before each one (a byte), and the exclusive or of both files there (all low bytes, then all high bytes).
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import zip_longest
from typing import IO

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 20
STRIDE = 256
"""Every so many words one is listed, whether it differs or not: so the numbers between fit in a byte."""
SAMPLE_BYTES = 16 * BLOCK_BYTES
"""After so much of the files it is certain enough whether a delta is going to be small."""

Piece = bytes | memoryview
Words = NDArray[np.uint16]


class DamagedDelta(ValueError):
    """The bytes are no delta, or one of a shorter file."""


def delta_name(name: str) -> str:
    """Return the name of a file's delta, beside it. It begins with a dot: it is no file of the model."""
    return f".{name}.delta"


def encode(before: Iterable[Piece], after: Iterable[Piece], worth: float) -> bytes | None:
    """Return the delta that makes `after` of `before`, two files in pieces of any size.

    None if the files differ in size, or if the delta has more than `worth` of the bytes of a file; it is
    given up as soon as that shows.
    """
    # There is nothing to find but runs of one byte and the frequencies of bytes, and these are found fast.
    packer = zlib.compressobj(1, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    packed: list[bytes] = []
    size = done = 0
    for old, new in zip_longest(_blocks(before), _blocks(after), fillvalue=b""):
        if len(old) != len(new):
            return None
        packed.append(packer.compress(_list(_words(old) ^ _words(new))))
        size += len(packed[-1])
        done += len(new)
        if size > worth * max(done, SAMPLE_BYTES):
            return None
    packed.append(packer.flush())
    return b"".join(packed) if size + len(packed[-1]) <= worth * done else None


def apply(before: IO[bytes], delta: Iterable[bytes], write: Callable[[bytes], object]) -> None:
    """Give `write` the file that `delta`, in pieces, makes of `before`. Raises DamagedDelta.

    A delta of other files gives other bytes, so compare the checksum.
    """
    listed = _DeltaReader(delta)
    while data := before.read(BLOCK_BYTES):
        words = _words(data).copy()
        count = int.from_bytes(listed.read(4), "little")
        if count > words.size:
            raise DamagedDelta(f"it lists {count} words of {words.size}")
        gaps, low, high = np.frombuffer(listed.read(3 * count), np.uint8).astype(np.uint16).reshape(3, -1)
        at = np.cumsum(gaps + np.int64(1)) - 1
        if count and at[-1] >= words.size:
            raise DamagedDelta(f"it lists word {at[-1]} of {words.size}")
        words[at] ^= low | high << 8
        write(words.astype("<u2").tobytes()[: len(data)])


def _list(differences: Words) -> bytes:
    is_listed = differences != 0
    is_listed[::STRIDE] = True
    at = np.flatnonzero(is_listed)
    gaps = np.diff(at, prepend=-1) - 1
    listed = differences[at]
    columns = (gaps, listed & 0xFF, listed >> 8)
    return b"".join(
        [at.size.to_bytes(4, "little"), *(column.astype(np.uint8).tobytes() for column in columns)]
    )


def _words(data: bytes) -> Words:
    return np.frombuffer(data + bytes(len(data) % 2), "<u2").astype(np.uint16, copy=False)


def _blocks(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield the bytes of `pieces` in blocks of BLOCK_BYTES; the last one may be shorter."""
    begun = bytearray()
    for piece in pieces:
        for begin in range(0, len(piece), BLOCK_BYTES):
            begun += piece[begin : begin + BLOCK_BYTES]
            if len(begun) >= BLOCK_BYTES:
                yield bytes(begun[:BLOCK_BYTES])
                del begun[:BLOCK_BYTES]
    if begun:
        yield bytes(begun)


class _DeltaReader:
    """Reads what was packed, without ever holding much more of it than was asked for."""

    def __init__(self, packed: Iterable[bytes]) -> None:
        self._pieces = iter(packed)
        self._unpacker = zlib.decompressobj()

    def read(self, size: int) -> bytes:
        unpacked = bytearray()
        packed = self._unpacker.unconsumed_tail
        while len(unpacked) < size:
            try:
                data = self._unpacker.decompress(packed, size - len(unpacked))
            except zlib.error as error:
                raise DamagedDelta(f"it cannot be unpacked: {error}") from None
            packed = self._unpacker.unconsumed_tail
            unpacked += data
            if not data and not packed:
                packed = next(self._pieces, b"")
                if not packed:
                    raise DamagedDelta("it ends too early")
        return bytes(unpacked)
