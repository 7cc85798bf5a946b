"""Samples as the rows of a table, for trackers that show tables."""

import json
from pathlib import Path
from typing import Any

from coordinator.directory.layout import GROUPS, Kind, RunDir
from rollout.storage import files

COLUMNS = ("iteration", "task", "prompt", "sample", "reward", "tokens", "finish_reason")
LONGEST = 4000
"""Characters of a prompt or a sample; a longer one is cut in the middle."""


def rows(run_root: Path, kind: Kind, iteration: int, groups: int) -> list[list[Any]]:
    """Return the samples of the first `groups` groups of an iteration's groups.jsonl, a row of COLUMNS for
    each; none if the file is not there.
    """
    path = RunDir(run_root).manifest(kind, iteration).with_name(GROUPS)
    if not files.exists(path):
        return []
    table: list[list[Any]] = []
    for line in files.read(path).splitlines()[:groups]:
        group = json.loads(line)
        table += [
            [
                iteration,
                group["task_id"],
                _cut(group["prompt"]),
                _cut(sample["text"]),
                sample["reward"],
                sample["tokens"],
                sample["finish_reason"],
            ]
            for sample in group["samples"]
        ]
    return table


def _cut(text: str) -> str:
    half = LONGEST // 2
    return text if len(text) <= LONGEST else f"{text[:half]} [...] {text[-half:]}"
