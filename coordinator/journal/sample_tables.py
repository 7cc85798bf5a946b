"""Samples as the rows of a table, for trackers that show tables."""

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.directory.layout import GROUPS, Kind, RunDir
from rollout.pictures import PictureError, side_by_side
from rollout.storage import files

COLUMNS = ("iteration", "task", "prompt", "sample", "reward", "tokens", "finish_reason")
PICTURES = "pictures"
"""The column behind these, if a prompt shows some: a picture of PIL, or None."""
SHOWN, SIDE = 4, 256
"""How many pictures of a prompt are shown, and their longest side in pixels."""
LONGEST = 4000
"""Characters of a prompt or a sample; a longer one is cut in the middle."""


def rows(run_root: Path, kind: Kind, iteration: int, groups: int) -> list[list[Any]]:
    """Return the samples of the first `groups` groups of an iteration's groups.jsonl, a row of COLUMNS for
    each, and PICTURES if there are some; none if the file is not there.
    """
    run_dir = RunDir(run_root)
    path = run_dir.manifest(kind, iteration).with_name(GROUPS)
    if not files.exists(path):
        return []
    table: list[list[Any]] = []
    lines = [json.loads(line) for line in files.read(path).splitlines()[:groups]]
    shows = any(group.get("images") for group in lines)
    for group in lines:
        pictures = [_pictures(run_dir.images, group.get("images", ()))] if shows else []
        table += [
            [
                iteration,
                group["task_id"],
                _cut(group["prompt"]),
                _cut(sample["text"]),
                sample["reward"],
                sample["tokens"],
                sample["finish_reason"],
                *pictures,
            ]
            for sample in group["samples"]
        ]
    return table


def columns(rows: Sequence[Sequence[Any]]) -> list[str]:
    """Return the names of what `rows` have."""
    return [*COLUMNS, PICTURES][: len(rows[0])]


def _pictures(directory: Path, digests: Sequence[str]) -> Any:
    with contextlib.suppress(OSError, ImportError, PictureError):
        if digests:
            return side_by_side([files.read(directory / name) for name in digests[:SHOWN]], SIDE)
    return None


def _cut(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"
