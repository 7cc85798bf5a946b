"""Read the rows of tasks, one after the other: of JSON lines, CSV, Parquet and Arrow files, and of data
sets of Hugging Face. No file is held in memory.
"""

import csv
import functools
import glob
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rollout.processes.reward import missing
from rollout.storage import files

log = logging.getLogger(__name__)

HUB = "hf:"
"""A source that begins so is a data set that the library `datasets` loads: hf:NAME:CONFIG:SPLIT."""
_BATCH = 1000
_BOM = b"\xef\xbb\xbf"
_WRAPPERS = {"data", "rows", "train", "test", "examples", "instances", "items", "tasks"}
"""What an object in one line calls the array of its rows."""
_SHORT = {"float": np.float32, "halffloat": np.float16}
"""Numbers of less than 64 bits, by what Arrow calls them."""
_JSON = "extension<arrow.json>"
"""What Arrow calls a text of JSON: `datasets` writes values of several kinds so."""
_LONGEST_CELL = 2**31 - 1
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
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")
"""How the files of a split are named, one of which should not be trained on."""
_OUTSIDE_BRACKETS = r":(?![^\[]*\])"


class Row(NamedTuple):
    """One row of a source, not checked yet."""

    file: str
    number: int
    """Of the line in a file of JSON lines, else of the row. Counted from 1; a CSV's header is not counted."""
    fields: Any
    """By column; an object only if the file is right."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return place(self.file, self.number)

    @property
    def is_text(self) -> bool:
        """Whether all its values are texts."""
        return _kind(self.file) == ".csv"


class RowError(ValueError):
    """A source cannot be read; the message is the place and the reason."""


def place(file: str, number: int) -> str:
    """Return where a row is: `FILE:LINE`, or `FILE, row N`."""
    return f"{file}, row {number}" if _kind(file) or file.endswith(".json") else f"{file}:{number}"


def is_there(source: str) -> bool:
    """Return whether `source` is a file or a directory, or a pattern that fits a file."""
    return files.exists(Path(source)) or ("*" in source and bool(glob.glob(source, recursive=True)))


def rows(source: str, *, default_split: str = "train", images: str = "images") -> Iterator[Row]:
    """Yield the rows of a file, of all files of a directory or of a pattern with `*` in the order of their
    names, or of a data set. The column `images` may hold bytes. Raises RowError.
    """
    if source.startswith(HUB):
        yield from _of_hub(source, default_split, images)
        return
    for file in _files(source):
        try:
            yield from _READERS.get(_kind(file), _json_lines)(file, images)
        except FileNotFoundError:
            by_name = "" if Path(file).suffix else f" (a data set of Hugging Face: {HUB}NAME)"
            raise RowError(
                f"{file}: no such file{by_name}; give a file of JSON lines, CSV, Parquet or Arrow, "
                "builtin:arithmetic, builtin:products or reasoning_gym:NAME"
            ) from None
        except OSError as error:
            raise RowError(f"{file}: {error}") from error


def _kind(file: str) -> str:
    """Return the suffix of a file that has rows; empty for JSON lines, which have any other name."""
    if file.startswith(HUB):
        return HUB
    suffix = Path(file).suffix.lower()
    return suffix if suffix in _READERS else ""


def _files(source: str) -> list[str]:
    if files.exists(Path(source)) and files.is_directory(Path(source)):
        names = [name for name in files.file_names(Path(source)) if not name.startswith((".", "_"))]
        paths = [
            str(Path(source) / name) for name in names if Path(name).suffix.lower() in (".jsonl", *_READERS)
        ]
        if not paths:
            below = ", ".join(files.folder_names(Path(source)))
            way_out = f"one of its folders ({below}), " if below else ""
            raise RowError(
                f"{source}: holds no .jsonl, {', '.join(_READERS)} file; give {way_out}a file or a pattern"
            )
    elif "*" in source and not files.exists(Path(source)):
        paths = sorted(glob.glob(source, recursive=True))
        if not paths:
            raise RowError(f"{source}: no file fits this pattern")
    else:
        return [source]
    splits = {match[0]: file for file in paths if (match := _SPLIT.match(Path(file).name))}
    if len(splits) > 1:
        first = next((name for name in splits if name == "train"), min(splits))
        where = source if "*" not in source else str(Path(source).parent)
        pattern = f"{where}/{first}*{Path(splits[first]).suffix}"
        raise RowError(
            f"{source}: has files of {' and '.join(sorted(splits))}; give a pattern, e.g. '{pattern}'"
        )
    kinds = sorted({Path(file).suffix.lower() for file in paths})
    if len(kinds) > 1:
        raise RowError(f"{source}: has {' and '.join(kinds)} files; give a pattern, e.g. '*{kinds[0]}'")
    return paths


# ---- text


def _lines(file: str) -> Iterator[bytes]:
    """Yield the lines of a file, without the line feed."""
    rest = b""
    for piece in files.pieces(Path(file)):
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    yield rest


def _json_lines(file: str, _images: str) -> Iterator[Row]:
    first = next((line for line in _lines(file) if line.strip()), b"").removeprefix(_BOM).strip()
    if first and (document := _document(file, first)) is not None:
        for number, content in enumerate(document, start=1):
            _check_text(content)
            yield Row(file, number, content)
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
            yield Row(file, number, content)
        except UnicodeDecodeError as error:
            way_out = _way_out(file) or "; save the file as UTF-8"
            raise RowError(f"{file}:{number}: not UTF-8 at byte {error.start}{way_out}") from error
        except json.JSONDecodeError as error:
            where = f"{file}:{number}: not JSON: {error.msg} at column {error.colno}"
            raise RowError(f"{where}{_way_out(file)}") from error
        except RecursionError as error:
            raise RowError(f"{file}:{number}: not usable JSON: nested too deeply") from error
        except ValueError as error:
            raise RowError(f"{file}:{number}: {error}") from error


def _way_out(file: str) -> str:
    """Return what to do with a file that holds no JSON lines, as which it is read."""
    suffix = Path(file).suffix.lower()
    if suffix in (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar"):
        return "; it is packed: unpack it first"
    if suffix in (".jsonl", ".json", ".ndjson", ""):
        return _by_beginning(file)
    return f"; a file of the kind {suffix} is not known: make it .jsonl, .csv, .parquet or .arrow"


def _by_beginning(file: str) -> str:
    """Return what to do with a file by its first bytes, if they are those of another kind of file."""
    begin = next(files.pieces(Path(file)), b"")
    return next((f"; {way_out}" for first, way_out in _BEGINNINGS.items() if begin.startswith(first)), "")


def _document(file: str, first: bytes) -> list[Any] | None:
    """Return the rows of a file that is one JSON document: an array, an object around one, or an object of
    columns. None if it is JSON lines, as its `first` line tells, or no JSON. Such a file is read whole.
    """
    try:
        line = json.loads(first)
        if not isinstance(line, list) and not (isinstance(line, dict) and line.keys() & _WRAPPERS):
            return None
    except ValueError:
        if first[:1] not in (b"[", b"{"):
            return None
    try:
        whole = b"".join(files.pieces(Path(file))).removeprefix(_BOM)
        content = json.loads(whole, parse_constant=_no_constant, object_pairs_hook=_once)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        return None
    except ValueError as error:
        raise RowError(f"{file}: {error}") from error
    if isinstance(content, list):
        return content if content and _is_rows(content) else None
    if not isinstance(content, dict) or (
        content.keys() & {"prompt", "messages"} and not _is_columns(content)
    ):
        return [content]
    if _is_columns(content):
        columns = {
            name: list(value.values()) if isinstance(value, dict) else value
            for name, value in content.items()
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    lists = {
        name: value
        for name, value in content.items()
        if isinstance(value, list) and value and _is_rows(value)
    }
    if len(lists) == 1:
        return next(iter(lists.values()))
    there = f"rows in each of {', '.join(lists)}" if lists else "no rows"
    raise RowError(
        f"{file}: is one JSON object, with {there}; write one JSON object a line, or an array of them"
    )


def _is_rows(values: list[Any]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _is_columns(content: dict[str, Any]) -> bool:
    """Return whether an object has a list, or an object by row, for each column, as pandas writes tables."""
    kinds, sizes = {type(value) for value in content.values()}, set[int]()
    if kinds not in ({list}, {dict}):
        return False
    sizes = {len(value) for value in content.values()}
    of_rows = kinds == {list} and any(_is_rows(value) for value in content.values())
    return len(sizes) == 1 and 0 not in sizes and len(content) > 1 and not of_rows


def _check_text(content: Any) -> None:
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(f"not text: {half} is half of a character; write the other half behind it") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is no JSON number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; ValueError if it has a name twice, of which JSON readers forget the first."""
    if len(fields := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"not usable JSON: {twice!r} is twice in one object; rename one of them")
    return fields


def _csv(file: str, _images: str) -> Iterator[Row]:
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
            yield Row(file, number, {name: cell for name, cell in zip(header, cells, strict=True) if cell})
    except UnicodeDecodeError as error:
        raise RowError(f"{file}, row {number + 1}: not UTF-8; save the file as UTF-8") from error
    except csv.Error as error:
        raise RowError(f"{file}, row {number + 1}: not CSV: {error}") from error


# ---- Arrow


def _parquet(file: str, images: str) -> Iterator[Row]:
    _need("pyarrow", file)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=_BATCH)

    return _of_batches(file, batches, images)


def _arrow(file: str, images: str) -> Iterator[Row]:
    _need("pyarrow", file)
    import pyarrow

    def batches() -> Iterator[Any]:
        with pyarrow.memory_map(file) as opened:
            try:
                reader = pyarrow.ipc.open_file(opened)
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
            except pyarrow.ArrowInvalid:  # the other form, which `datasets` writes
                opened.seek(0)
                yield from pyarrow.ipc.open_stream(opened)

    return _of_batches(file, batches, images)


def _of_hub(source: str, default_split: str, images: str) -> Iterator[Row]:
    _need("datasets", source)
    import datasets

    name, *more = re.split(_OUTSIDE_BRACKETS, source.removeprefix(HUB))
    if not name or len(more) > 2:
        raise RowError(f"{source}: write {HUB}NAME, {HUB}NAME:SPLIT or {HUB}NAME:CONFIG:SPLIT")
    config, split = ([None, default_split], [None, *more], more)[len(more)]
    datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the library, of the network, of the files: all are the user's to repair
        error_text = " ".join(str(error).split())
        raise RowError(
            f"{source}: datasets cannot load it: {type(error).__name__}: {error_text:.400}"
        ) from error
    tables: Any = loaded.with_format("arrow")

    def batches() -> Iterator[Any]:
        for table in tables.iter(batch_size=_BATCH):
            yield from table.to_batches()

    return (yield from _of_batches(source, batches, images))


def _of_batches(file: str, batches: Callable[[], Iterable[Any]], images: str) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch in batches():
            if not number:
                _say_left_out(file, [field for field in batch.schema if field.name != images])
                _say_classes(file, batch.schema)
            kept = [field.name for field in batch.schema if field.name == images or _is_json(field.type)]
            kinds = {name: batch.schema.field(name).type for name in kept}
            for begin in range(0, batch.num_rows, _BATCH):
                for values in batch.select(kept).slice(begin, _BATCH).to_pylist():
                    number += 1
                    shown = {} if values.get(images) is None else {images: values.pop(images)}
                    yield Row(file, number, {**_fields(values, kinds), **shown})
    except (pyarrow.ArrowException, ValueError, KeyError) as error:
        way_out = "" if file.startswith(HUB) else _by_beginning(file)
        raise RowError(
            f"{file}: damaged, or not of this kind: {' '.join(str(error).split()):.300}{way_out}"
        ) from error


def _say_left_out(file: str, schema: Iterable[Any]) -> None:
    """Say which columns are no part of the tasks."""
    if left := [text for field in schema for text in _left_out(field.name, field.type)]:
        log.warning("%s: JSON has no such values, so these columns are left out: %s", file, ", ".join(left))


def _say_classes(file: str, schema: Any) -> None:
    """Say which columns have the numbers of classes, whose names only `datasets` keeps, beside the table."""
    try:
        info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        classes = {
            name: feature["names"]
            for name, feature in info.get("info", {}).get("features", {}).items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel"
        }
    except (ValueError, AttributeError, KeyError):
        return
    for name, names in classes.items():
        shown = ", ".join(f"{number} is {text}" for number, text in enumerate(names[:4]))
        log.warning(
            "%s: the column %s holds numbers (%s%s), and rewards see these, not the names",
            file, name, shown, " ..." if names[4:] else "",
        )  # fmt: skip


def _left_out(name: str, kind: Any) -> Iterator[str]:
    """Yield the columns, and the fields of structs, that are no part of the tasks."""
    from pyarrow import types

    if not _is_json(kind):
        yield f"{name} ({kind})"
    elif types.is_struct(kind):
        for field in kind:
            yield from _left_out(f"{name}.{field.name}", field.type)
    elif _is_list(kind):
        yield from _left_out(name, kind.value_type)


def _need(library: str, source: str) -> None:
    if reason := missing(library, "data"):
        raise RowError(f"{source}: {reason}")


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    lists = (types.is_list, types.is_large_list, types.is_fixed_size_list, types.is_list_view)
    return any(test(kind) for test in lists)


@functools.cache
def _is_json(kind: Any) -> bool:
    """Return whether JSON has values of an Arrow type, or of fields in it. It has no dates, images or
    sounds; decimals become numbers.
    """
    from pyarrow import types

    if types.is_struct(kind):
        return not kind.num_fields or any(_is_json(field.type) for field in kind)
    if types.is_dictionary(kind) or _is_list(kind):
        return _is_json(kind.value_type)
    simple = (types.is_boolean, types.is_integer, types.is_floating, types.is_decimal, types.is_null)
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    return any(test(kind) for test in (*simple, *texts)) or str(kind) == _JSON


def _fields(values: dict[str, Any], kinds: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a row of a table does not have, as a JSON line does, and what JSON has no values for.
    NaN is pandas' word for nothing.
    """
    return {
        name: _value(value, kinds[name])
        for name, value in values.items()
        if value is not None and value == value and _is_json(kinds[name])
    }


def _value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type as JSON has it: of a number of 32 bits its shortest text, 0.1, and not
    the 0.10000000149011612 that it is in 64.
    """
    if isinstance(value, dict):
        return _fields(value, {field.name: field.type for field in kind})
    if isinstance(value, list):
        return [_value(item, kind.value_type) for item in value]
    if isinstance(value, str) and str(kind) == _JSON:
        return json.loads(value)
    if isinstance(value, float) and (short := _SHORT.get(str(kind))):
        return float(str(short(value)))
    if isinstance(value, Decimal):
        if value == int(value):
            return int(value)
        return number if Decimal(repr(number := float(value))) == value else str(value)
    return value


_READERS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    ".csv": _csv,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
