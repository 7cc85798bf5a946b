"""Rows of text: JSON lines, one JSON document, CSV."""

import json
from pathlib import Path

import pytest

from rollout.tasks.task_set import TaskError, load_tasks
from tests.rollout.tasks.row_files import load

DOCUMENTS = {
    "array": [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}],
    "array in an object": {
        "version": 1,
        "data": [{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}],
    },
    "columns": {"prompt": ["a", "c"], "answer": ["b", "d"]},
    "columns of pandas": {"prompt": {"0": "a", "1": "c"}, "answer": {"0": "b", "1": "d"}},
    "rows of pandas": {"0": {"prompt": "a", "answer": "b"}, "1": {"prompt": "c", "answer": "d"}},
    "rows of pandas by name": {"r1": {"prompt": "a", "answer": "b"}, "r2": {"prompt": "c", "answer": "d"}},
    "split by pandas": {"columns": ["prompt", "answer"], "index": [0, 1], "data": [["a", "b"], ["c", "d"]]},
    "split by pandas without an index": {
        "columns": ["prompt", "answer"],
        "data": [["a", "b"], ["c", "d"]],
    },
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"prompt,answer\na,3\nb, 4, 5\n", ", row 2: has 3 cells, but the header has 2; put quotes around"),
        (b"prompt,prompt\na,b\n", ": the header has the column 'prompt' twice"),
        (b"prompt\n\xff\n", ", row 1: not UTF-8; save the file as UTF-8"),
        (b'prompt\n"a\n', ", row 1: not CSV: unexpected end of data"),
        (b"messages\n[{\n", ", row 1: `messages` is not JSON"),
        (b"", ": holds no task"),
        (b"1+2=,3\n", ": has a first row alone, which names the columns"),
    ],
)
def test_bad_csv_is_an_error_in_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "tasks.csv").write_bytes(content)
    with pytest.raises(TaskError) as raised:
        load(tmp_path / "tasks.csv")
    assert str(raised.value).startswith(f"{tmp_path}/tasks.csv{reason}") and "\n" not in str(raised.value)


def test_task_whose_fields_are_messages_is_no_table(tmp_path: Path) -> None:
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    row = {name: {"role": role, "content": name} for name, role in roles.items()}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    (task,) = load(tmp_path / "tasks.jsonl").tasks
    assert "user" not in task.values() and "assistant" not in task.values()


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize("indent", [None, 1])
def test_json_document_has_the_rows_of_its_array(tmp_path: Path, document: str, indent: int | None) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(DOCUMENTS[document], indent=indent), encoding="utf-8-sig")
    tasks = load_tasks(str(path), seed=0, split="train").tasks
    found = [(task["id"], task["prompt"], task["answer"]) for task in tasks]
    assert found == [("1", "a", "b"), ("2", "c", "d")]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            '{"a": [{}],\n "b": [{}]}',
            "is one JSON object, with rows in each of a, b; write one JSON object a line",
        ),
        ('{"a": 1,\n "b": 2}', "is one JSON object, with no rows; write one JSON object a line"),
        ('[\n{"prompt": "a"},\n{}]', "tasks.json, row 2: give either"),
        ('[\n{"prompt": "a"},', "not JSON"),
    ],
)
def test_json_document_without_rows_says_what_is_wanted(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(text)
    with pytest.raises(TaskError, match=reason):
        load_tasks(str(path), seed=0, split="train")


def test_object_over_lines_that_is_a_task_is_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    message = {"role": "user", "content": "a"}
    for task in ({"prompt": "a"}, {"messages": [message]}, {"messages": [message], "tools": [{"name": "a"}]}):
        for indent in (None, 1):
            path.write_text(json.dumps(task, indent=indent))
            assert len(load_tasks(str(path), seed=0, split="train").tasks) == 1


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.tsv", b"prompt\tanswer\n1\t2\n", "a file of the kind .tsv is not known: make it .jsonl, .csv"),
        ("t.pkl", b"\x80\x04", "a file of the kind .pkl is not known"),
        ("t.jsonl.gz", b"\x1f\x8b", "it is packed: unpack it first"),
        ("t.jsonl", b"\x28\xb5\x2f\xfd", "it is packed: unpack it first"),
        ("t.json", b"PAR1\x15", "it is Parquet: name it .parquet"),
        ("t.jsonl", b"version https://git-lfs.github.com/spec/v1", "run `git lfs pull` there"),
        ("t.parquet", b"version https://git-lfs.github.com/spec/v1", "run `git lfs pull` there"),
        ("t.jsonl", b"<!DOCTYPE html>", "it is a web page"),
        (
            "t.jsonl",
            '{"prompt": "1"}'.encode("utf-16"),
            "not UTF-8 at byte 0; it is UTF-16; save the file as",
        ),
    ],
)
def test_file_of_another_kind_says_what_to_make_of_it(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TaskError, match=reason):
        load_tasks(str(tmp_path / name), seed=0, split="train")


def test_lines_that_were_copied_out_of_an_array_are_read(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a"},\r\n{"prompt": "b"},\n')
    assert [task["prompt"] for task in load(tmp_path / "tasks.jsonl").tasks] == ["a", "b"]


def test_spaces_behind_the_commas_of_a_csv_are_no_part_of_names_and_cells(tmp_path: Path) -> None:
    (tmp_path / "tasks.csv").write_text('prompt, answer\n"a, b", "3"\n')
    assert list(load(tmp_path / "tasks.csv").tasks) == [{"id": "1", "prompt": "a, b", "answer": "3"}]


@pytest.mark.parametrize("sign", [";", "\t"])
def test_csv_with_other_signs_than_commas_is_refused(tmp_path: Path, sign: str) -> None:
    (tmp_path / "tasks.csv").write_text(f"prompt{sign}answer\na, b{sign}3\n")
    with pytest.raises(TaskError, match="between its columns; save it with commas"):
        load(tmp_path / "tasks.csv")
