"""Read rows of text: JSON lines, one JSON document, CSV."""

import csv
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout.storage import hashing
from rollout.tasks.file_kinds import NoRowsError, RowError, TaskRow, hint_by_beginning

_BOM = b"\xef\xbb\xbf"
_WRAPPERS = {"data", "rows", "train", "test", "examples", "instances", "items", "tasks"}
"""What an object in one line calls the array of its rows."""
_NO_JSON = {
    "{'": "; JSON has double quotes, as Python's json.dumps writes them",
    **dict.fromkeys(("//", "#"), "; JSON has no comments: remove it"),
}
"""What to do with a line of JSON lines that begins so."""
_LONGEST_CELL = 2**31 - 1
_AROUND = 64
"""So many bytes may stand around a document of one line: a mark of its encoding, and line ends."""


def _lines(file: str) -> Iterator[bytes]:
    """Yield the lines of a file, without the line feed."""
    partial_line = b""
    for piece in hashing.pieces(Path(file)):
        *lines, partial_line = (partial_line + piece).split(b"\n")
        yield from lines
    yield partial_line


def read_json(file: str, _images: str) -> Iterator[TaskRow]:
    first = next((line for line in _lines(file) if line.strip()), b"").removeprefix(_BOM).strip()
    is_alone = Path(file).stat().st_size <= len(first) + _AROUND
    if first and (document := _document(file, first, is_alone)) is not None:
        for number, content in enumerate(document, start=1):
            _check_text(content)
            yield TaskRow(file, number, content)
        return
    for number, line in enumerate(_lines(file), start=1):
        if not line.strip():
            continue
        try:
            text = line.decode("utf-8").lstrip("\ufeff").rstrip()
            text = text[:-1] if text.endswith("},") else text  # as copied out of an array
            content = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
            if b"\\u" in line:
                _check_text(content)
            yield TaskRow(file, number, content)
        except UnicodeDecodeError as error:
            way_out = _way_out(file) or "; save the file as UTF-8"
            raise RowError(f"{file}:{number}: not UTF-8 at byte {error.start}{way_out}") from error
        except json.JSONDecodeError as error:
            where = f"{file}:{number}: not JSON: {error.msg.removesuffix(' at')} at column {error.colno}"
            is_spread = error.msg == "Extra data" or text.strip() == "{"
            advice = "; give each object one line (jq -c . FILE does)" if is_spread else ""
            advice = next((way for begin, way in _NO_JSON.items() if text.lstrip().startswith(begin)), advice)
            raise RowError(f"{where}{_way_out(file) or advice}") from error
        except RecursionError as error:
            raise RowError(f"{file}:{number}: not usable JSON: nested too deeply") from error
        except ValueError as error:
            raise RowError(f"{file}:{number}: {error}") from error


def _way_out(file: str) -> str:
    """Return the advice for a file that is read as JSON lines, and holds none."""
    suffix = Path(file).suffix.lower()
    if suffix in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"):
        return "; it is packed: unpack it first"
    if suffix in (".jsonl", ".json", ".ndjson", ""):
        return hint_by_beginning(file)
    return f"; a file of the kind {suffix} is not known: make it .jsonl, .csv, .parquet or .arrow"


def _document(file: str, first: bytes, is_alone: bool) -> list[Any] | None:
    """Return the rows of a file that is one JSON document: an array, an object around one, or a table, which
    `is_alone`. None if it is JSON lines, as its `first` line tells, or no JSON. Such a file is read whole.
    """
    try:
        line = json.loads(first)
        is_line = not isinstance(line, dict) or not (line.keys() & _WRAPPERS or (is_alone and _table(line)))
        if is_line and not isinstance(line, list):
            return None
    except ValueError:
        if first[:1] not in (b"[", b"{"):
            return None
    try:
        data = b"".join(hashing.pieces(Path(file))).removeprefix(_BOM)
        content = json.loads(data, parse_constant=_no_constant, object_pairs_hook=_once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    except ValueError as error:
        raise RowError(f"{file}: {error}") from error
    if isinstance(content, list):
        return content if content and _is_rows(content) else None
    if isinstance(content, dict) and (table := _table(content)):
        return table
    if not isinstance(content, dict) or content.keys() & {"prompt", "messages"}:
        return [content]
    lists = {
        name: value
        for name, value in content.items()
        if isinstance(value, list) and value and _is_rows(value)
    }
    if len(lists) == 1:
        return next(iter(lists.values()))
    content_text = f"rows in each of {', '.join(lists)}" if lists else "no rows"
    raise RowError(
        f"{file}: is one JSON object, with {content_text}; write one JSON object a line, or an array of them"
    )


def _is_rows(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _table(content: dict[str, Any]) -> list[Any]:
    """Return the rows of an object that is a table as pandas writes it: a list, or an object by row, for each
    column; an object for each row; or names of columns and lists of values. None are in another object.
    """
    values = list(content.values())
    if {*content} - {"index"} == {"columns", "data"}:
        names, rows = content["columns"], content["data"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            return []
        if not isinstance(rows, list) or any(
            not isinstance(row, list) or len(row) != len(names) for row in rows
        ):
            return []
        return [dict(zip(names, row, strict=True)) for row in rows]
    if not values or {type(value) for value in values} not in ({list}, {dict}):
        return []
    if isinstance(values[0], dict):
        if all(name.isdecimal() for name in content):
            return values
        row_names = {tuple(value) for value in values}
        names = {*row_names.pop()} if len(row_names) == 1 else set[str]()
        if names & {"prompt", "messages"}:
            return values
        if names & {"role", "from", "content"}:
            return []  # a task of messages
        row_names = {tuple(value) for value in values}
        if len(row_names) > 1 or (len(values) == 1 and not all(map(str.isdecimal, row_names.pop()))):
            return []  # as `messages` that are an object of lists
        values = [list(value.values()) for value in values]
    elif len(values) == 1 or any(_is_rows(value) for value in values):
        return []  # an object around an array, or a task of lists of messages
    if len({len(value) for value in values}) > 1:
        return []
    return [dict(zip(content, row, strict=True)) for row in zip(*values, strict=True)]


def _check_text(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"not text: {half} is half of a character; write the other half behind it") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is not a JSON number; write null, or leave the field out")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; ValueError if it has a name twice, of which JSON readers forget the first."""
    if len(fields := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"not usable JSON: {twice!r} is twice in one object; rename one of them")
    return fields


def read_csv(file: str, _images: str) -> Iterator[TaskRow]:
    csv.field_size_limit(_LONGEST_CELL)
    lines = _lines(file)
    first = next(lines).removeprefix(b"\xef\xbb\xbf")  # spreadsheets begin a file so
    number = 0
    try:
        texts = (line.decode("utf-8") + "\n" for line in itertools.chain([first], lines))
        table = csv.reader(texts, strict=True, skipinitialspace=b", " in first)
        header = [name.strip() for name in next(table, [])]
        if len(header) == 1 and (sign := next((sign for sign in ";\t|" if sign in header[0]), None)):
            raise RowError(f"{file}: has {sign!r} between its columns; save it with commas")
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise RowError(f"{file}: the header has the column {twice!r} twice; rename one of them")
        for cells in table:
            if not cells:
                continue
            number += 1
            if len(cells) != len(header):
                raise RowError(
                    f"{file}, row {number}: has {len(cells)} cells, but the header has {len(header)}; put "
                    "quotes around a text with commas"
                )
            yield TaskRow(
                file, number, {name: cell for name, cell in zip(header, cells, strict=True) if cell}
            )
        if header and not number:
            raise NoRowsError(f"{file}: has a first row alone, which names the columns, e.g. prompt,answer")
    except UnicodeDecodeError as error:
        raise RowError(f"{file}, row {number + 1}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise RowError(f"{file}, row {number + 1}: not CSV: {error}") from error
