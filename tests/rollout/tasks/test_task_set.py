"""Task files, the built-in tasks, and the pure functions that say which task a slot is."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.tasks.task_set import EVAL_TASKS, TaskError, group_seed, load_tasks, task_order


def load(path: Path):
    return load_tasks(str(path), seed=0, split="train")


def test_file_is_read_with_its_fields_and_line_numbers_as_ids(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(
        '{"prompt": "1+2=", "answer": "3", "level": {"n": 1}}\n\n'
        + json.dumps({"id": 7, "messages": messages})
        + '\n{"id": "x", "prompt": "ü", "answer": 4.5}'
    )
    loaded = load(file)
    tasks = loaded.tasks
    assert [loaded.place(index) for index in range(3)] == [f"{file}:{line}" for line in (1, 3, 4)]
    assert tasks[0] == {"id": "1", "prompt": "1+2=", "answer": "3", "level": {"n": 1}}
    assert tasks[1] == {"id": "7", "messages": messages}
    assert tasks[2] == {"id": "x", "prompt": "ü", "answer": 4.5}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("{'prompt': 'a'}", "JSON has double quotes, as Python's json.dumps writes them"),
        ("# harder ones", "JSON has no comments: remove it"),
        ('{"prompt": NaN}', "NaN is not a JSON number; write null, or leave the field out"),
        ('{"prompt": "a"}{"prompt": "b"}', "Extra data at column 16; give each object one"),
        ('{\n"prompt": "a"\n}', "give each object one line (jq -c . FILE does)"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' is twice in one object"),
        ("[" * 100_000, "nested too deeply"),
        ("[1]", "expected a JSON object, got an array"),
        ("3", "expected a JSON object, got a number"),
        ('{"answer": "3"}', "give either `prompt` or `messages`; neither is there"),
        ('{"prompt": "a", "messages": []}', "both are there"),
        (
            '{"prompt": 3, "text": "a"}',
            "got a number; name another, columns.prompt=COLUMN (there is prompt, text)",
        ),
        ('{"prompt": 3}', "`prompt` must be a non-empty string, or an array of messages, got a number"),
        ('{"prompt": ""}', "got an empty string"),
        ('{"messages": []}', "`messages` must be a non-empty array of messages, or the text of one, got an"),
        ('{"messages": ""}', "got an empty string"),
        ('{"messages": 3}', "got a number"),
        ('{"messages": [{"role": "user"}]}', "0.content: a message of the user must have words; leave"),
        ('{"messages": ["hi"]}', "messages that each hold"),
        ('{"prompt": "a", "id": null}', "`id` must be a non-empty string or an integer, got null"),
        ('{"prompt": "a", "id": true}', "got a boolean"),
        ('{"prompt": "a", "answer": ["3"]}', "`answer` must be a string or a number"),
        ('{"prompt": "a", "id": "1"}', "id '1' was used in line 1 already"),
    ],
)
def test_bad_line_is_an_error_that_names_file_line_and_reason(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(TaskError) as raised:
        load(file)
    message = str(raised.value)
    assert message.startswith(f"{file}:2: ") and reason in message and "\n" not in message


def test_pipe_and_a_file_in_a_directory_that_is_not_there_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match=r"is a pipe, which can be read once alone; write it to a file"):
        load(tmp_path / "pipe")
    with pytest.raises(TaskError, match=rf"no such file \(there is no {tmp_path}/nfs\)"):
        load(tmp_path / "nfs" / "data" / "tasks.jsonl")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(TaskError, match=r"give several files as a pattern"):
        load(Path(f"{tmp_path}/a.jsonl b.jsonl"))


def test_column_of_another_field_does_not_hide_that_the_prompt_has_none(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"question": "a"}\n')
    with pytest.raises(TaskError, match=r"neither is there; name its column, .*\(there is "):
        load_tasks(str(file), seed=0, split="train", columns={"topic": "question"})
    with pytest.raises(TaskError, match=r"neither is there; did you mean columns.messages=question\?"):
        load_tasks(str(file), seed=0, split="train", columns={"message": "question"})


def test_bytes_that_are_not_utf8_are_an_error_with_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(TaskError, match=r":1: not UTF-8 at byte 12"):
        load(file)


def test_half_of_a_character_is_an_error_with_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"id": "\\ud83d\\ude00", "prompt": "x"}\n{"id": "a", "prompt": "say \\ud83d"}\n')
    with pytest.raises(TaskError, match=r":2: not text: \\ud83d is half of a character"):
        load(file)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(content)
    with pytest.raises(TaskError, match="holds no task"):
        load(file)


def test_missing_file_directory_and_unknown_built_in_are_errors(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no such file"):
        load(tmp_path / "none.jsonl")
    with pytest.raises(TaskError, match=r"holds no .jsonl, .csv, .parquet, .arrow file"):
        load(tmp_path)
    with pytest.raises(TaskError, match="there is builtin:arithmetic and builtin:products"):
        load_tasks("builtin:algebra", seed=0, split="train")


def test_digest_follows_content_and_not_layout(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    one.write_text('{"prompt": "a", "id": "x"}\n')
    two.write_text('\n{"id":   "x", "prompt": "a"}')
    three.write_text('{"prompt": "b", "id": "x"}\n')
    assert load(one).digest == load(two).digest != load(three).digest


def test_arithmetic_answers_are_reversed_sums_of_two_digit_numbers() -> None:
    for task in load_tasks("builtin:arithmetic", seed=3, split="train").tasks:
        a, b = (int(operand) for operand in task["prompt"].rstrip("=").split("+"))
        assert 10 <= a <= 99 and 10 <= b <= 99
        assert task["answer"] == str(a + b)[::-1]
    assert task["id"] + "=" == task["prompt"]


def test_products_are_of_two_digit_numbers() -> None:
    for task in load_tasks("builtin:products", seed=3, split="train").tasks:
        a, b = (int(operand) for operand in task["prompt"].rstrip("=").split("*"))
        assert 10 <= a <= 99 and 10 <= b <= 99 and task["answer"] == str(a * b)
    assert task["id"] + "=" == task["prompt"]


@pytest.mark.parametrize(("name", "sign"), [("arithmetic", "+"), ("products", "*")])
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_built_in_sets_hold_out_512_pairs_in_either_order(seed: int, name: str, sign: str) -> None:
    train, evaluation = (load_tasks(f"builtin:{name}", seed=seed, split=s) for s in ("train", "eval"))

    def pairs(tasks) -> set[frozenset[str]]:
        return {frozenset(task["id"].split(sign)) for task in tasks}

    assert len(evaluation.tasks) == EVAL_TASKS == 512
    assert len({task["id"] for task in [*train.tasks, *evaluation.tasks]}) == 90 * 90
    assert not pairs(train.tasks) & pairs(evaluation.tasks)


def test_arithmetic_is_a_function_of_the_seed() -> None:
    first, again, other = (load_tasks("builtin:arithmetic", seed=s, split="eval") for s in (0, 0, 1))
    assert first == again and first.digest != other.digest


@given(st.integers(1, 60), st.integers(0, 2**40), st.integers(0, 5))
def test_every_task_comes_once_per_pass(size: int, seed: int, passes: int) -> None:
    order = task_order(size, seed, passes * size, 2 * size)
    assert sorted(order[:size]) == sorted(order[size:]) == list(range(size))


@given(st.integers(1, 50), st.integers(0, 9), st.integers(0, 200), st.integers(0, 200), st.integers(0, 200))
def test_order_does_not_depend_on_where_it_is_cut(size: int, seed: int, start: int, n: int, m: int) -> None:
    whole = task_order(size, seed, start, n + m)
    assert whole == task_order(size, seed, start, n) + task_order(size, seed, start + n, m)


def test_order_differs_between_passes_and_seeds() -> None:
    assert task_order(100, 0, 0, 100) != task_order(100, 0, 100, 100) != task_order(100, 1, 100, 100)


def test_streams_have_orders_of_their_own() -> None:
    orders = [task_order(50, 0, 0, 50, stream=stream) for stream in ("", "easy", "hard")]
    assert orders[0] == task_order(50, 0, 0, 50)
    assert orders[0] != orders[1] != orders[2] and all(sorted(order) == [*range(50)] for order in orders)


def test_order_and_seeds_are_the_same_on_every_machine() -> None:
    assert task_order(10, 0, 0, 10) == ORDER
    assert group_seed(0, "train", 1, 0) == SEED


@given(
    st.integers(0, 2**63), st.sampled_from(["train", "eval"]), st.integers(1, 10**6), st.integers(0, 10**6)
)
def test_group_seed_is_in_range(run_seed: int, kind, iteration: int, slot: int) -> None:
    assert 0 <= group_seed(run_seed, kind, iteration, slot) < 2**62


def test_group_seeds_do_not_collide() -> None:
    seeds = {
        group_seed(run, kind, iteration, slot)
        for run in range(3)
        for kind in ("train", "eval")
        for iteration in range(20)
        for slot in range(50)
    }
    assert len(seeds) == 3 * 2 * 20 * 50


ORDER = [5, 0, 2, 8, 7, 9, 6, 3, 1, 4]
SEED = 3581773145252902923
