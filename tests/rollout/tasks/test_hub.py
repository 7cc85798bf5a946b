"""Data sets of Hugging Face, loaded by their names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.tasks.row_files import load, parquet, pyarrow

REFUSED = {
    "hf:GSM:dev": "Unknown split",
    "hf:GSM:other:train": "BuilderConfig 'other' not found",
    "hf:nobody/nothing": "datasets cannot load it",
    "hf:": "write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT",
}
SOURCES = [
    ("hf:GSM:train", "train"),
    ("hf:GSM:default:test[:1]", "train"),
    ("hf:GSM", "train"),
    ("hf:GSM", "eval"),
    *((source, "train") for source in REFUSED),
]
"""Each with its split."""


@pytest.fixture(scope="module")
def gsm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set with two splits."""
    path = tmp_path_factory.mktemp("hub") / "gsm"
    write_parquet_split(path / "train.parquet", 3)
    write_parquet_split(path / "test.parquet", 2)
    return path


@pytest.fixture(scope="module")
def found(gsm: Path) -> list[Any]:
    """What is loaded of SOURCES, in a process of their own, with its cache below the test's directory:
    `datasets` reads its variables when it is imported.
    """
    script = (
        "import json, sys; from rollout.tasks.task_set import load_tasks, TaskError\n"
        "for source, split in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        found = load_tasks(source, seed=0, split=split, columns={'prompt': 'question'})\n"
        "        about = found.digest, found.place(0), 'torch' in sys.modules\n"
        "        print(json.dumps([*found.tasks, *about]))\n"
        "    except TaskError as error: print(json.dumps(str(error)))\n"
        "from logging import getLogger\n"  # what they say is in the log of the process: not twice
        "assert not getLogger('datasets').handlers + getLogger('huggingface_hub').handlers"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(SOURCES).replace("GSM", str(gsm))],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[3],
        env={**os.environ, "HF_HOME": str(gsm.parent / "cache"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return [each if isinstance(each, str) else (each[:-3], *each[-3:]) for each in said]


def write_parquet_split(path: Path, size: int) -> None:
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(
        pyarrow.table({"question": [f"{path.stem} {n}" for n in range(size)], "answer": ["1"] * size}), path
    )


def test_data_set_is_loaded_by_name_and_split_with_the_digest_of_its_tasks(
    found: list[Any], gsm: Path
) -> None:
    (tasks, digest, place, has_torch), (first, *_) = found[:2]
    assert tasks == [{"prompt": f"train {n}", "answer": "1", "id": str(n + 1)} for n in range(3)]
    assert place == f"hf:{gsm}:train, row 1" and not has_torch
    assert digest == load(gsm / "train.parquet", {"prompt": "question"}).digest
    assert [task["prompt"] for task in first] == ["test 0"]


def test_data_set_without_a_split_trains_on_train_and_evaluates_on_test(found: list[Any]) -> None:
    assert [tasks[0]["prompt"] for tasks, *_ in found[2:4]] == ["train 0", "test 0"]


def test_data_set_that_cannot_be_loaded_is_an_error_in_one_line(found: list[Any]) -> None:
    for said, reason in zip(found[4:], REFUSED.values(), strict=True):
        assert isinstance(said, str) and reason in said and "\n" not in said, said
