"""Conversations in task files: in every form that people and APIs write them, and never with the answer."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rollout.rewards.builtin import answer_text
from rollout.tasks.messages import ANSWER, answer_of, checked_tools, with_system_prompt
from rollout.tasks.task_set import Task, TaskError, load_tasks
from tests.rollout.rollout_helpers import write_lines

ASK = {"role": "user", "content": "Add 3."}
SAY = {"role": "assistant", "content": "7"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3}'}}
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def loaded(tmp_path: Path, *rows: dict[str, Any], **columns: str) -> Task:
    """The first task of a file of JSON lines."""
    path = write_lines(tmp_path / "tasks.jsonl", *rows)
    return load_tasks(str(path), seed=0, split="train", columns=columns).tasks[0]


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Add."}]])
def test_what_the_assistant_says_last_is_no_part_of_the_messages(
    tmp_path: Path, system: list[dict[str, Any]]
) -> None:
    task = loaded(tmp_path, {"messages": [*system, ASK, SAY, ASK, {**SAY, "reasoning_content": "3 + 4"}]})
    assert task["messages"] == [*system, ASK, SAY, ASK]
    assert task[ANSWER] == {**SAY, "reasoning_content": "3 + 4"}


def test_message_that_answers_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="its one message is the answer"):
        loaded(tmp_path, {"messages": [SAY]})


@pytest.mark.parametrize(
    "words",
    [{"content": None}, {"content": ""}, {}, {"content": []}, {"content": [{"type": "text", "text": ""}]}],
    ids=["null", "empty", "absent", "no parts", "empty part"],
)
@pytest.mark.parametrize("arguments", ['{"a": 3}', {"a": 3}])
def test_call_without_words_is_a_message_in_each_form(
    tmp_path: Path, words: dict[str, Any], arguments: Any
) -> None:
    call = {**CALL, "function": {"name": "add", "arguments": arguments}}
    task = loaded(tmp_path, {"messages": [ASK, {"role": "assistant", "tool_calls": [call], **words}]})
    assert task[ANSWER] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_parts_of_text_are_one_text_and_empty_fields_are_none(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "Add "}, {"type": "text", "text": "3."}]
    asked = {"role": "user", "content": parts, "name": "Ann", "tool_calls": None, "refusal": None}
    assert loaded(tmp_path, {"messages": [asked]})["messages"] == [{**ASK, "name": "Ann"}]
    with pytest.raises(TaskError, match=r"`messages`: 0\.content: only parts of the type text"):
        loaded(tmp_path, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]})


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": {}}])
def test_call_without_arguments_has_none(tmp_path: Path, arguments: dict[str, Any]) -> None:
    call = {"function": {"name": "now", **arguments}}
    task = loaded(tmp_path, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert task[ANSWER]["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    ]


def test_answer_that_is_begun_or_has_two_messages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="its `messages` end with two of the assistant"):
        loaded(tmp_path, {"messages": [ASK, SAY, SAY]})
    with pytest.raises(TaskError, match=r"`messages`: 1\.prefix: no answer is begun here"):
        loaded(tmp_path, {"messages": [ASK, SAY | {"prefix": True}]})


def test_conversation_that_ends_with_its_answer_needs_no_other_one(tmp_path: Path) -> None:
    task = loaded(tmp_path, {"messages": [ASK, SAY]})
    assert answer_text(task) == "7"
    assert answer_of({**task, "answer": "8"}) == "8"
    assert answer_of(loaded(tmp_path, {"messages": [ASK]})) is None


def test_column_of_the_messages_that_is_named_as_another_is_said(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": [ASK, SAY]}))
    taken = "neither is there, as columns.answer=messages has taken the column 'messages'; leave that out"
    with pytest.raises(TaskError, match=taken):
        load_tasks(str(tmp_path / "t.jsonl"), seed=0, split="train", columns={"answer": "messages"})


@pytest.mark.parametrize("name", ["parameters", "input", "args"])
def test_arguments_of_a_call_have_the_names_that_people_give_them(tmp_path: Path, name: str) -> None:
    call = {"id": "c1", "name": "add", name: {"a": 3}}
    task = loaded(tmp_path, {"messages": [ASK, {"role": "assistant", "tool_calls": [call]}]})
    assert task[ANSWER]["tool_calls"] == [CALL]


def test_reasoning_among_the_parts_of_a_message_is_none_of_its_words(tmp_path: Path) -> None:
    parts = [{"type": "thinking", "text": "3 + 4"}, {"type": "text", "text": "7"}]
    with pytest.raises(TaskError, match="reasoning is the field `reasoning_content`"):
        loaded(tmp_path, {"messages": [ASK, {"role": "assistant", "content": parts}]})
    said = {"role": "model", "parts": parts[1:]}
    assert loaded(tmp_path, {"messages": [ASK, said]})[ANSWER] == SAY


def test_columns_of_json_are_what_they_say(tmp_path: Path) -> None:
    answer, tool = (pyarrow.array([json.dumps(value)], pyarrow.json_()) for value in ("7", FUNCTION))
    tools = pyarrow.ListArray.from_arrays([0, 1], tool)
    table = pyarrow.table({"messages": [[ASK]], "answer": answer, "tools": tools})
    pyarrow.parquet.write_table(table, tmp_path / "tasks.parquet")
    task = load_tasks(str(tmp_path / "tasks.parquet"), seed=0, split="train").tasks[0]
    assert (task["answer"], task["tools"][0]["function"]) == ("7", FUNCTION)


def test_call_that_is_none_is_refused(tmp_path: Path) -> None:
    bad = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "3"}}]}
    with pytest.raises(TaskError, match=r"`messages`: 1\.tool_calls: must be a list of calls"):
        loaded(tmp_path, {"messages": [ASK, bad]})


@pytest.mark.parametrize("written", [json.dumps, str], ids=["JSON", "Python"])
@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_messages_as_a_text_are_messages(tmp_path: Path, field: str, written: Any) -> None:
    task = loaded(tmp_path, {field: written([ASK, SAY])})
    assert (task["messages"], task[ANSWER]) == ([ASK], SAY)
    assert loaded(tmp_path, {"messages": "[1, 2] + [3]?"})["messages"][0]["content"] == "[1, 2] + [3]?"
    with pytest.raises(TaskError, match=r"`messages` is not JSON: looks like messages"):
        loaded(tmp_path, {"messages": "[{'role': 'user'}\n {'role': 'user'}]"})


@pytest.mark.parametrize("written", [json.dumps, lambda tools: tools], ids=["text", "list"])
@pytest.mark.parametrize("tool", [{"type": "function", "function": FUNCTION}, FUNCTION])
def test_tools_are_functions_in_each_form(tmp_path: Path, tool: Any, written: Any) -> None:
    task = loaded(tmp_path, {"messages": [ASK], "tools": written([tool])})
    assert task["tools"] == [{"type": "function", "function": FUNCTION}]


@pytest.mark.parametrize("tools", [[{"type": "web_search"}], [FUNCTION, {}], "no JSON", 3])
def test_tools_that_are_no_functions_are_refused(tools: Any) -> None:
    with pytest.raises(ValueError, match="must be a list of functions, each with a `name`"):
        checked_tools(tools)


def test_fields_that_a_table_fills_with_nothing_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}], "tools": [FUNCTION]},
        {"messages": [ASK, {**SAY, "reasoning_content": "3 + 4"}]},
    ]
    path = tmp_path / "tasks.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    first, second = load_tasks(str(path), seed=0, split="train").tasks
    assert first[ANSWER] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert second == {"id": "2", "messages": [ASK], ANSWER: {**SAY, "reasoning_content": "3 + 4"}}


def test_whole_conversations_beside_their_question_are_a_preference(tmp_path: Path) -> None:
    worse = {"role": "assistant", "content": "8"}
    row = {"prompt": "Add 3.", "chosen": [ASK, SAY], "rejected": [ASK, worse], "messages": [ASK, SAY]}
    for left_out in ((), ("messages",)):
        task = loaded(tmp_path, {name: value for name, value in row.items() if name not in left_out})
        assert "prompt" not in task and task["messages"] == [ASK]
    other = {**row, "prompt": "Another question"}
    with pytest.raises(TaskError, match="both are there"):
        loaded(tmp_path, other)
    assert loaded(tmp_path, other, messages="messages")["messages"] == [ASK]


def test_conversations_of_share_gpt_are_messages(tmp_path: Path) -> None:
    row = {"conversations": [{"from": "human", "value": "Add 3."}, {"from": "gpt", "value": "7"}]}
    task = loaded(tmp_path, row, messages="conversations")
    assert (task["messages"], task[ANSWER]) == ([ASK], SAY)
    with pytest.raises(TaskError, match=r"columns\.messages=conversations"):
        loaded(tmp_path, row)


def test_whole_numbers_that_a_table_holds_as_floats_are_whole(tmp_path: Path) -> None:
    row = {"id": 7.0, "prompt": "72?", "answer": 72.0}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    found = [
        loaded(tmp_path, row),
        load_tasks(str(tmp_path / "tasks.parquet"), seed=0, split="train").tasks[0],
    ]
    assert found == [{"id": "7", "prompt": "72?", "answer": 72}] * 2
    assert [type(task["answer"]) for task in found] == [int, int]
    assert loaded(tmp_path, {"prompt": "a", "answer": 7.25})["answer"] == 7.25


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "human", "content": "Add 3."}, {"role": "gpt", "content": "7"}],
        [{"role": "User", "content": "Add 3."}, {"role": "Assistant", "content": "7"}],
        [{"role": "user", "content": "Add 3."}, {"role": "model", "content": "7"}],
        [{"role": "user", "value": "Add 3."}, {"role": "assistant", "text": "7"}],
        [{"from": "user", "value": "Add 3."}, {"from": "Assistant", "value": "7"}],
    ],
)
def test_answer_is_no_part_of_the_messages_whatever_its_role_is_called(
    tmp_path: Path, messages: list[dict[str, Any]]
) -> None:
    task = loaded(tmp_path, {"messages": messages, "answer": "7"})
    assert (task["messages"], task[ANSWER]) == ([ASK], SAY)


def test_calls_of_share_gpt_and_of_older_apis_are_calls(tmp_path: Path) -> None:
    function, wire = {"name": "add", "arguments": {"a": 3}}, {key: CALL[key] for key in ("type", "function")}
    share_gpt = [
        {"from": "human", "value": "Add 3."},
        {"from": "function_call", "value": json.dumps(function)},
        {"from": "observation", "value": "7"},
    ]
    older = [
        ASK,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "content": "7"},
    ]
    calls = {"role": "assistant", "content": "", "tool_calls": [wire]}
    for messages in (share_gpt, older):
        found = loaded(tmp_path, {"messages": messages})["messages"]
        assert found == [ASK, calls, {"role": "tool", "content": "7"}]
    with pytest.raises(TaskError, match=r"`messages`: 0\.from: must be .*, got 'critic'"):
        loaded(tmp_path, {"messages": [{"from": "critic", "value": "no"}]})


def test_question_without_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"0\.content: a message of the user must have words"):
        loaded(tmp_path, {"messages": [{"role": "user", "content": None}], "answer": "7"})


def test_column_for_system_comes_before_the_messages(tmp_path: Path) -> None:
    row = {"system": "Be short.", "messages": [ASK, SAY]}
    assert loaded(tmp_path, row)["messages"] == [ASK]
    system = {"role": "system", "content": "Be short."}
    assert loaded(tmp_path, row, system="system")["messages"] == [system, ASK]
    with pytest.raises(TaskError, match="leave out one of them"):
        loaded(tmp_path, {**row, "messages": [system, ASK]}, system="system")
    with pytest.raises(TaskError, match="no `messages` to put it before"):
        loaded(tmp_path, {"system": "Be short.", "prompt": "3"}, system="system")


@pytest.mark.parametrize("completion", [[SAY], "7"])
@pytest.mark.parametrize("prompt", [[ASK], "Add 3."])
def test_completion_is_what_the_prompt_is_answered_with(tmp_path: Path, completion: Any, prompt: Any) -> None:
    row = {"prompt": prompt, "completion": completion}
    assert loaded(tmp_path, row)[ANSWER] == SAY
    for more in ({"answer": "8"}, {"label": False}):
        assert ANSWER not in loaded(tmp_path, {**row, **more})
    with pytest.raises(TaskError, match="`completion` must be one message of the assistant, got 2"):
        loaded(tmp_path, {"prompt": prompt, "completion": [SAY, SAY]})


def test_one_message_stands_for_a_list_of_it(tmp_path: Path) -> None:
    task = loaded(tmp_path, {"prompt": ASK, "chosen": {"from": "gpt", "value": "7"}, "rejected": SAY})
    assert (task["messages"], task["chosen"], task["rejected"]) == ([ASK], [SAY], [SAY])


def test_column_may_lie_within_another_one(tmp_path: Path) -> None:
    row = {"prompt": [ASK], "reward_model": {"style": "rule", "ground_truth": "7"}}
    assert loaded(tmp_path, row, answer="reward_model.ground_truth")["answer"] == "7"
    with pytest.raises(TaskError, match=r"there is prompt, reward_model\.style, reward_model\.ground_truth"):
        loaded(tmp_path, row, answer="reward_model.truth")


def test_null_is_no_value_of_a_field(tmp_path: Path) -> None:
    row = {"prompt": "3?", "messages": None, "answer": None, "tools": None, "level": None}
    assert loaded(tmp_path, row) == {"id": "1", "prompt": "3?", "level": None}


def test_answers_that_are_whole_conversations_begin_with_the_system_prompt_too() -> None:
    alone = [{**SAY, "content": "8"}]
    task = with_system_prompt({"messages": [ASK], "chosen": [ASK, SAY], "rejected": alone}, "be kind")
    system = {"role": "system", "content": "be kind"}
    assert task == {"messages": [system, ASK], "chosen": [system, ASK, SAY], "rejected": alone}


@pytest.mark.parametrize("earlier", ["", "\n\nHuman: Hi\n\nAssistant: Hello"])
def test_answers_that_are_conversations_in_one_text_begin_with_the_prompt(
    earlier: str, tmp_path: Path
) -> None:
    asked = f"{earlier}\n\nHuman: 3+4?\n\nAssistant:"
    task = loaded(tmp_path, {"chosen": f"{asked} 7", "rejected": f"{asked} 7 or 8"})
    assert (task["prompt"], task["chosen"], task["rejected"]) == (asked, " 7", " 7 or 8")
    with pytest.raises(TaskError, match="neither is there"):
        loaded(tmp_path, {"chosen": "7", "rejected": "8"})


def test_messages_as_an_object_of_lists_are_read(tmp_path: Path) -> None:
    task = loaded(tmp_path, {"messages": {"role": ["user", "assistant"], "content": ["Add 3.", "7"]}})
    assert (task["messages"], task[ANSWER]) == ([ASK], SAY)


@pytest.mark.parametrize("schema", ["input_schema", "inputSchema", "parameters"])
def test_tools_of_other_interfaces_and_from_tables_have_their_parameters(schema: str) -> None:
    padded = {"type": "object", "properties": {"a": {"type": "integer", "enum": None}, "b": None}}
    tool = {"name": "add", "description": None, schema: padded}
    for tools in ([tool], [json.dumps(tool)]):
        assert checked_tools(tools) == [{"type": "function", "function": FUNCTION}]
