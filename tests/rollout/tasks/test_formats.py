"""Tasks in other formats than JSON lines: the same tasks, mapped columns, and errors that name the row."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.settings import RolloutSettings
from rollout.tasks import stored
from rollout.tasks.sampling import draw
from rollout.tasks.task_set import TaskError, load_tasks
from tests.rollout.tasks.row_files import (
    load,
    parquet,
    pyarrow,
    write_arrow_file,
    write_arrow_stream,
    write_csv,
    write_jsonl,
    write_parquet,
)

ROWS: list[dict[str, Any]] = [
    {"prompt": "1+2=", "answer": "3", "source": "easy"},
    {"prompt": 'She said "what, 7?"\nü', "answer": "7"},
    {"messages": [{"role": "user", "content": "hi, you"}], "answer": "#### 1,200", "source": "hard"},
    {"id": "own", "prompt": "9-9=", "answer": "0", "source": "easy"},
]


FORMATS = [
    ("tasks.csv", write_csv),
    ("tasks.parquet", write_parquet),
    ("tasks.arrow", write_arrow_file),
    ("tasks.arrow", write_arrow_stream),
]


@pytest.fixture(params=[0, stored.KEEP_BYTES], ids=["in a file", "in memory"])
def kept_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(stored, "KEEP_BYTES", request.param)
    return request.param


@pytest.mark.parametrize(("name", "write"), FORMATS)
def test_same_tasks_have_the_same_content_order_and_digest_in_every_format(
    tmp_path: Path, kept_bytes: int, name: str, write: Callable[..., None]
) -> None:
    write_jsonl(tmp_path / "tasks.jsonl", ROWS)
    write(tmp_path / name, ROWS)
    lines, other = load(tmp_path / "tasks.jsonl"), load(tmp_path / name)
    assert list(other.tasks) == list(lines.tasks)
    assert [task["id"] for task in other.tasks] == ["1", "2", "3", "own"]
    assert other.digest == lines.digest
    assert lines.tasks[2] == {"id": "3", **ROWS[2]}
    assert (lines.place(1), other.place(1)) == (f"{tmp_path}/tasks.jsonl:2", f"{tmp_path / name}, row 2")
    settings = RolloutSettings(task_sampling="uniform", seed=5)
    drawn = [
        draw(each, settings, 9, state={}, deferred=[], success={}, iteration=1) for each in (lines, other)
    ]
    assert drawn[0] == drawn[1]


def test_digest_of_json_lines_is_the_one_that_runs_have_recorded(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "tasks.jsonl", [{"id": "x", "prompt": "a", "n": {"b": 1, "a": [1.5, None]}}])
    recorded = "d11c5f968d1d34fd47a0a2997438f74f92d2ba9836442dc4ef2c899293cd5994"
    assert load(tmp_path / "tasks.jsonl").digest == recorded


@pytest.mark.parametrize(("name", "write"), [("tasks.jsonl", write_jsonl), *FORMATS])
def test_columns_are_mapped_to_fields(tmp_path: Path, name: str, write: Callable[..., None]) -> None:
    write(tmp_path / name, [{"question": "1+2=", "answer": "long: 3", "final": "3", "level": "a"}])
    mapped = load(tmp_path / name, {"prompt": "question", "answer": "final"})
    assert list(mapped.tasks) == [{"id": "1", "prompt": "1+2=", "answer": "3", "level": "a"}]


@pytest.mark.parametrize(
    ("rows", "columns", "reason"),
    [
        ([{"prompt": "a"}, {"answer": "3"}], {}, "row 2: give either `prompt` or `messages`; neither is"),
        ([{"question": "a"}], {}, "name its column, e.g. columns.messages=question (there is question)"),
        (
            [{"text": "a"}],
            {"prompt": "q"},
            "nothing in the column 'q' (columns.prompt); there is text",
        ),
        ([{"prompt": "a", "id": "x"}] * 2, {}, "row 2: id 'x' was used in row 1 already"),
    ],
)
@pytest.mark.parametrize(("name", "write"), FORMATS[:2])
def test_bad_row_is_an_error_that_names_file_row_and_column(
    tmp_path: Path,
    rows: list[dict[str, Any]],
    columns: dict[str, str],
    reason: str,
    name: str,
    write: Callable[..., None],
) -> None:
    write(tmp_path / name, rows)
    with pytest.raises(TaskError) as raised:
        load(tmp_path / name, columns)
    said = str(raised.value)
    assert said.startswith(f"{tmp_path / name}, row ") and reason in said and "\n" not in said


def test_messages_that_are_a_text_are_one_message_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text("question,answer\nWhat is 1+2?,3\n")
    (tmp_path / "tasks.jsonl").write_text('{"question": "What is 1+2?", "answer": "3"}\n')
    for name in ("tasks.csv", "tasks.jsonl"):
        (task,) = load(tmp_path / name, {"messages": "question"}).tasks
        assert task["messages"] == [{"role": "user", "content": "What is 1+2?"}]


@pytest.mark.parametrize("name", ["tasks.parquet", "tasks.arrow"])
def test_damaged_table_is_an_error_in_one_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 and nothing that it should have")
    with pytest.raises(TaskError, match=r"damaged, or not of this kind") as raised:
        load(tmp_path / name)
    assert "\n" not in str(raised.value)


def test_column_that_json_cannot_hold_is_left_out_and_nan_is_nothing(tmp_path: Path) -> None:
    table = pyarrow.table(
        {
            "prompt": ["a", "b"],
            "image": [b"\x00", b"\x01"],
            "parts": [[{"bytes": b"x"}], []],
            "target_length": [3.5, float("nan")],
        }
    )
    parquet.write_table(table, tmp_path / "tasks.parquet")
    tasks = list(load(tmp_path / "tasks.parquet").tasks)
    assert tasks == [{"prompt": "a", "target_length": 3.5, "id": "1"}, {"prompt": "b", "id": "2"}]


def test_lists_of_a_fixed_length_are_kept_and_what_is_left_out_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    choices = pyarrow.array([["a", "b"]], pyarrow.list_(pyarrow.string(), 2))
    when = pyarrow.array([0], pyarrow.timestamp("s"))
    table = pyarrow.table({"prompt": ["1+2="], "choices": choices, "when": when})
    parquet.write_table(table, tmp_path / "TASKS.PARQUET")
    (task,) = load(tmp_path).tasks
    assert task == {"id": "1", "prompt": "1+2=", "choices": ["a", "b"]}
    assert "left out: when (timestamp" in caplog.text


def test_decimals_are_numbers_whole_ones_without_a_fraction(tmp_path: Path) -> None:
    texts = ["3.00", "0.1", "12345678901234567890.10"]
    answers = pyarrow.array([Decimal(text) for text in texts], pyarrow.decimal128(30, 2))
    parquet.write_table(pyarrow.table({"prompt": ["a", "b", "c"], "answer": answers}), tmp_path / "t.parquet")
    tasks = load(tmp_path / "t.parquet").tasks
    assert [task["answer"] for task in tasks] == [3, 0.1, "12345678901234567890.10"]


def test_directory_of_splits_names_them(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    with pytest.raises(TaskError, match=r"; give one of its folders \(test, train\), a file or a pattern"):
        load(tmp_path)


def test_pattern_may_reach_into_directories(tmp_path: Path) -> None:
    for place in ("c.jsonl", "s1/a.jsonl", "s1/deep/b.jsonl"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(json.dumps({"id": place, "prompt": "1"}))
    assert len(load(f"{tmp_path}/**/*.jsonl").tasks) == 3


def test_text_that_is_not_utf8_in_a_table_is_an_error_in_one_line(tmp_path: Path) -> None:
    text = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"prompt": text}), tmp_path / "tasks.parquet")
    with pytest.raises(TaskError, match=r"tasks\.parquet: damaged, or not of this kind"):
        load(tmp_path / "tasks.parquet")


def test_number_that_is_not_finite_is_an_error_with_its_row(tmp_path: Path) -> None:
    table = pyarrow.table({"prompt": ["a", "b"], "level": [1.0, float("inf")]})
    parquet.write_table(table, tmp_path / "tasks.parquet")
    with pytest.raises(TaskError, match=r"tasks\.parquet, row 2: a number that is not finite"):
        load(tmp_path / "tasks.parquet")


def test_directory_and_pattern_are_their_files_in_the_order_of_names(tmp_path: Path) -> None:
    write_csv(tmp_path / "b-train.csv", [{"prompt": "3"}, {"prompt": "4"}])
    write_csv(tmp_path / "a-train.csv", [{"prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "README.md").write_text("no tasks")
    whole = load(tmp_path)
    assert [(task["id"], task["prompt"]) for task in whole.tasks] == [(n, n) for n in "1234"]
    assert whole.place(3) == f"{tmp_path}/b-train.csv, row 2"
    write_csv(tmp_path / "test.csv", [{"prompt": "5"}])
    assert load(f"{tmp_path}/*-train.csv").digest == whole.digest != load(tmp_path).digest
    with pytest.raises(TaskError, match="no file fits this pattern"):
        load(f"{tmp_path}/*.parquet")
    write_jsonl(tmp_path / "more.jsonl", [{"prompt": "6"}])
    with pytest.raises(TaskError, match=r"has .csv and .jsonl files; give a pattern, e.g. '\*.csv'"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "write"), [("jsonl", write_jsonl), ("csv", write_csv), ("parquet", write_parquet)]
)
def test_file_without_rows_among_others_is_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, write: Callable[..., Any]
) -> None:
    write(tmp_path / f"a.{name}", [{"prompt": "1"}])
    if name == "csv":
        (tmp_path / "b.csv").write_text("prompt,answer\n")
    if name != "parquet":
        (tmp_path / f"c.{name}").touch()
    else:
        empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
        parquet.write_table(empty, tmp_path / "c.parquet")
    assert [task["prompt"] for task in load(tmp_path).tasks] == ["1"]
    assert caplog.messages[-1] == f"{tmp_path}/c.{name}: holds no task, and is left out"
    if name == "csv":
        assert caplog.messages[0].startswith(f"{tmp_path}/b.csv: has a first row alone")
        with pytest.raises(TaskError, match="has a first row alone, which names the columns"):
            load(tmp_path / "b.csv")


def test_ids_of_several_files_are_unique_also_beside_empty_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n\n{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "c"}\n')
    assert [task["id"] for task in load(tmp_path).tasks] == ["1", "2", "3"]
    assert [task["id"] for task in load(tmp_path / "a.jsonl").tasks] == ["3", "4"]


def test_large_set_is_read_from_a_private_copy_whatever_becomes_of_its_file(
    tmp_path: Path, kept_bytes: int
) -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "source": "ab"[n % 2]} for n in range(5000)]
    write_jsonl(tmp_path / "tasks.jsonl", rows)
    loaded = load(tmp_path / "tasks.jsonl")
    (tmp_path / "tasks.jsonl").write_text("changed")
    assert loaded.tasks[4999] == {**rows[4999], "id": "5000"} and loaded.tasks[-1]["id"] == "5000"
    assert [task["prompt"] for task in loaded.tasks[10:12]] == ["10+1=", "11+1="]
    settings = RolloutSettings(task_sampling="ratio", ratio={"a": 1, "b": 3})
    drawn = draw(loaded, settings, 8, state={}, deferred=[1], success={}, iteration=1)
    assert sum(task % 2 for task in drawn.tasks) == 6 and drawn.tasks[0] == 1
    assert isinstance(loaded.tasks, stored.StoredTasks)


def test_memory_of_a_large_set_is_its_index_and_not_its_text(tmp_path: Path) -> None:
    script = (
        "import sys, tracemalloc; from rollout.tasks import stored\n"
        "from rollout.tasks.task_set import load_tasks\n"
        "from rollout.storage import hashing\n"
        "stored.KEEP_BYTES = 0; hashing.CHUNK_BYTES = 2**20; tracemalloc.start();"
        "tasks = load_tasks(sys.argv[1], seed=0, split='train'); print(*tracemalloc.get_traced_memory());"
        "assert tasks.tasks[4999]['prompt'].startswith('4999')"
    )
    with open(tmp_path / "tasks.jsonl", "w") as file:
        for n in range(5_000):
            file.write(json.dumps({"prompt": f"{n} " + "x" * 8000}) + "\n")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "tasks.jsonl")],
        capture_output=True, text=True, check=True, timeout=120, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    held, peak = map(int, done.stdout.split())
    text = os.path.getsize(tmp_path / "tasks.jsonl")
    assert text > 40e6 and held < 0.1 * text and peak < 0.3 * text


def test_temporary_copy_is_where_it_is_told_and_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    real = tempfile.TemporaryFile
    monkeypatch.setattr(stored, "KEEP_BYTES", 0)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **how: asked.append(how["dir"]) or real(**how))
    (tmp_path / "local").mkdir()
    write_jsonl(tmp_path / "tasks.jsonl", ROWS)
    local = str(tmp_path / "local")
    loaded = load_tasks(str(tmp_path / "tasks.jsonl"), seed=0, split="train", directory=local)
    assert asked == [local] and os.listdir(local) == [] and loaded.tasks[3]["id"] == "own"


def test_format_of_an_extra_that_is_not_there_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parquet(tmp_path / "tasks.parquet", ROWS)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for source in (str(tmp_path / "tasks.parquet"), "hf:openai/gsm8k:main:train"):
        with pytest.raises(TaskError, match=r"is not installed; it is the extra 'data': pip install"):
            load(source)
    write_csv(tmp_path / "tasks.csv", ROWS)
    assert len(load(tmp_path / "tasks.csv").tasks) == 4


# ---- hf:


@pytest.mark.parametrize("kind", [pyarrow.float32(), pyarrow.float16()])
def test_answer_of_few_bits_is_the_number_that_was_written(tmp_path: Path, kind: Any) -> None:
    answers = pyarrow.array(np.array([0.1, 3.0], kind.to_pandas_dtype()), kind)
    nested = pyarrow.StructArray.from_arrays([answers], ["level"])
    table = pyarrow.table({"prompt": ["a", "b"], "answer": answers, "extra": nested})
    parquet.write_table(table, tmp_path / "tasks.parquet")
    found = [(task["answer"], task["extra"]) for task in load(tmp_path / "tasks.parquet").tasks]
    assert found == [(0.1, {"level": 0.1}), (3, {"level": 3.0})]


def test_messages_with_dates_are_read_without_the_dates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    message = {"role": "user", "content": "a", "at": datetime(2026, 1, 1)}
    parquet.write_table(pyarrow.Table.from_pylist([{"messages": [message]}]), tmp_path / "tasks.parquet")
    (task,) = load(tmp_path / "tasks.parquet").tasks
    assert task["messages"] == [{"role": "user", "content": "a"}]
    assert "left out: messages.at (timestamp" in caplog.text


def test_directory_with_files_of_several_splits_is_refused(tmp_path: Path) -> None:
    for name in ("train-00000.jsonl", "train-00001.jsonl", "test-00000.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name}))
    with pytest.raises(
        TaskError, match=r"has files of test and train; give a pattern, e\.g\. .*/train\*\.jsonl"
    ):
        load(tmp_path)
    assert len(load(f"{tmp_path}/train*.jsonl").tasks) == 2


def test_column_of_classes_holds_their_numbers_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    features = {"answer": {"names": ["no", "yes"], "_type": "ClassLabel"}, "prompt": {"_type": "Value"}}
    about = json.dumps({"info": {"features": features}})
    table = pyarrow.table({"prompt": ["a"], "answer": [1]}).replace_schema_metadata({"huggingface": about})
    parquet.write_table(table, tmp_path / "tasks.parquet")
    assert load(tmp_path / "tasks.parquet").tasks[0]["answer"] == 1
    assert "the column answer holds numbers (0 is no, 1 is yes), and rewards see these" in caplog.text
