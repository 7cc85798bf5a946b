"""Files of rows, as users have them."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout.tasks.task_set import TaskSet, load_tasks

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for row in rows:
            writer.writerow({k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()})


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    parquet.write_table(table, path, row_group_size=2)


def write_arrow_file(path: Path, rows: list[dict[str, Any]]) -> None:
    _write_arrow(path, rows, pyarrow.ipc.new_file)


def write_arrow_stream(path: Path, rows: list[dict[str, Any]]) -> None:
    _write_arrow(path, rows, pyarrow.ipc.new_stream)


def _write_arrow(path: Path, rows: list[dict[str, Any]], new: Callable[..., Any]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=3)


def load(source: Path | str, columns: dict[str, str] | None = None) -> TaskSet:
    return load_tasks(str(source), seed=0, split="train", columns=columns)
