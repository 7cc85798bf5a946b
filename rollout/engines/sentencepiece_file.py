"""Tokens of a tokenizer.model of SentencePiece, read without its library: a file of protobuf."""

from collections.abc import Iterator
from typing import NamedTuple

CONTROL, USER_DEFINED = 3, 4
"""Kinds of pieces that are marks."""
_BEGIN = b"\x0a"
"""First byte of a file whose first field is a piece; other programs have files of this name too."""


class VocabularyPiece(NamedTuple):
    text: str
    kind: int


def read_pieces(data: bytes) -> list[VocabularyPiece]:
    """Return the tokens, by their ids; none if the file is no model of SentencePiece."""
    if not data.startswith(_BEGIN):
        return []
    try:
        return [_piece(value) for number, value in _fields(data) if number == 1 and isinstance(value, bytes)]
    except (IndexError, ValueError):
        return []


def _piece(data: bytes) -> VocabularyPiece:
    fields = dict(_fields(data))
    text, kind = fields.get(1, b""), fields.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(kind, int):
        raise ValueError("no piece")
    return VocabularyPiece(text.decode(), kind)


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield the number and the value of each field of a message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = _varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
