"""A row of tasks, as its file has it, and the kinds of files that have rows."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from rollout.storage import hashing

HUB = "hf:"
"""A source that begins so is a data set that the library `datasets` loads: hf:NAME:CONFIG:SPLIT."""
TABLES = (".csv", ".parquet", ".arrow")
"""Suffixes of files whose rows are counted; any other file is JSON lines, or one JSON document."""
_BEGINNINGS = {
    **dict.fromkeys(
        (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PK"), "it is packed: unpack it first"
    ),
    b"PAR1": "it is Parquet: name it .parquet",
    b"ARROW1": "it is Arrow: name it .arrow",
    b"version https://git-lfs": "it is a pointer of Git LFS; run `git lfs pull` there to get the file",
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff", b"{\0"), "it is UTF-16; save the file as UTF-8"),
    **dict.fromkeys((b"<!DOCTYPE", b"<html"), "it is a web page: download the file itself"),
}
"""What to do with a file that is no JSON lines, by its first bytes."""
_OUTSIDE_BRACKETS = re.compile(r":(?![^\[]*\])")


class TaskRow(NamedTuple):
    """One row of a source, not checked yet."""

    file: str
    number: int
    """Number of the line in a file of JSON lines, else of the row, from 1; a CSV's header is not counted."""
    fields: Any
    """By column; an object only if the file is right."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return place(self.file, self.number)

    @property
    def is_text(self) -> bool:
        """Whether all its values are texts."""
        return kind(self.file) == ".csv"


class RowError(ValueError):
    """A source cannot be read; the message is the place and the reason."""


class NoRowsError(RowError):
    """A file names its columns, and has no rows."""


def place(file: str, number: int) -> str:
    """Return where a row is: `FILE:LINE`, or `FILE, row N`."""
    return f"{file}, row {number}" if kind(file) or file.endswith(".json") else f"{file}:{number}"


def kind(file: str) -> str:
    """Return the suffix of a file that has a table; empty for JSON, which has any other name."""
    if file.startswith(HUB):
        return HUB
    suffix = Path(file).suffix.lower()
    return suffix if suffix in TABLES else ""


def hub_parts(source: str) -> tuple[str, list[str]]:
    """Return the name of a data set of HUB, and what is given behind it: SPLIT, or CONFIG and SPLIT. Raises
    RowError.
    """
    name, *more = re.split(_OUTSIDE_BRACKETS, source.removeprefix(HUB))
    if not name or len(more) > 2:
        raise RowError(f"{source}: write {HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT")
    return name, more


def hint_by_beginning(file: str) -> str:
    """Return a hint what to do with a file whose first bytes are those of another kind of file, or none."""
    begin = next(hashing.pieces(Path(file)), b"")
    return next((f"; {way_out}" for first, way_out in _BEGINNINGS.items() if begin.startswith(first)), "")
