"""Read rows of tables: Parquet and Arrow files, and data sets of Hugging Face."""

import functools
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from rollout.hub_reach import why_unreachable
from rollout.processes.killable_rewards import missing
from rollout.tasks.file_kinds import HUB, RowError, TaskRow, hint_by_beginning, hub_parts

log = logging.getLogger(__name__)

_BATCH = 1000
_SHORT = {"float": np.float32, "halffloat": np.float16}
"""Numbers of less than 64 bits, by what Arrow calls them."""
_JSON = "extension<arrow.json>"
"""What Arrow calls a text of JSON: `datasets` writes values of several kinds so."""


def read_parquet(file: str, images: str) -> Iterator[TaskRow]:
    _need("pyarrow", file)
    import pyarrow.parquet as parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(file) as opened:
            yield from opened.iter_batches(batch_size=_BATCH)

    return _of_batches(file, batches, images)


def read_arrow(file: str, images: str) -> Iterator[TaskRow]:
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


def read_hub(source: str, default_split: str, images: str) -> Iterator[TaskRow]:
    _need("datasets", source)
    import datasets
    import huggingface_hub.constants

    name, more = hub_parts(source)
    config, split = ([None, default_split], [None, *more], more)[len(more)]
    datasets.disable_progress_bars()
    for library in ("datasets", "huggingface_hub"):  # the log of the process has what they say: not twice
        logging.getLogger(library).handlers.clear()
    requests = logging.getLogger("huggingface_hub")
    level = requests.level
    requests.setLevel(logging.ERROR)  # the error says what its retries came to
    unreachable = None if Path(name).exists() else why_unreachable()
    if unreachable:  # it may have the data set from an earlier time, and asks nobody else for it
        huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # of the library, of the network, of the files: all are the user's to repair
        error_text = " ".join(str(error).split())
        reason = unreachable or f"{type(error).__name__}: {error_text:.400}"
        raise RowError(f"{source}: datasets cannot load it: {reason}") from error
    finally:
        requests.setLevel(level)
    tables: Any = loaded.with_format("arrow")

    def batches() -> Iterator[Any]:
        for table in tables.iter(batch_size=_BATCH):
            yield from table.to_batches()

    return (yield from _of_batches(source, batches, images))


def _of_batches(file: str, batches: Callable[[], Iterable[Any]], images: str) -> Iterator[TaskRow]:
    import pyarrow

    number = 0
    try:
        for batch in batches():
            if not number:
                _warn_of_left_out(file, [field for field in batch.schema if field.name != images])
                _warn_of_classes(file, batch.schema)
            columns = [field.name for field in batch.schema if field.name == images or _is_json(field.type)]
            kinds = {name: batch.schema.field(name).type for name in columns}
            for begin in range(0, batch.num_rows, _BATCH):
                for values in batch.select(columns).slice(begin, _BATCH).to_pylist():
                    number += 1
                    shown = {} if values.get(images) is None else {images: values.pop(images)}
                    yield TaskRow(file, number, {**_fields(values, kinds), **shown})
    except (pyarrow.ArrowException, ValueError, KeyError) as error:
        way_out = "" if file.startswith(HUB) else hint_by_beginning(file)
        raise RowError(
            f"{file}: damaged, or not of this kind: {' '.join(str(error).split()):.300}{way_out}"
        ) from error


def _warn_of_left_out(file: str, schema: Iterable[Any]) -> None:
    """Say which columns are no part of the tasks."""
    if left_out := [text for field in schema for text in _left_out(field.name, field.type)]:
        log.warning(
            "%s: JSON has no such values, so these columns are left out: %s", file, ", ".join(left_out)
        )


def _warn_of_classes(file: str, schema: Any) -> None:
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
