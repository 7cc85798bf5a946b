"""What tasks become as tokens, looked at before a run: what the model cannot take, and what nobody means."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.environments.try_tasks import longer_prompts, try_tasks, why_no_tools
from rollout.origin import Sampling
from rollout.tasks.task_set import TaskError, load_tasks
from tests.rollout.rollout_helpers import write_lines

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def model_of(directory: Path, *, adds: str = "$A", template: str | None = CHATML, rows: int = 400) -> Path:
    """A directory with a tokenizer and a configuration, without weights."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    marks = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(
        ["a b"],
        trainers.BpeTrainer(
            special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    raw.add_special_tokens(["<late>"])
    raw.add_tokens(["<think>"])
    ids = [(mark, raw.token_to_id(mark)) for mark in marks]
    raw.post_processor = processors.TemplateProcessing(single=adds, special_tokens=ids)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<s>",
        eos_token="<|im_end|>" if template else "</s>",
        chat_template=template,
    )
    tokenizer.save_pretrained(directory)
    config = {"eos_token_id": 3 if template else 1, "vocab_size": rows, "max_position_embeddings": 200}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def tried(tmp_path: Path, task: dict[str, Any], environment: str = "single_turn", **model: Any) -> list[str]:
    """The warnings about a task."""
    path = write_lines(tmp_path / "tasks.jsonl", {"id": "odd", **task})
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model", **model)
    return try_tasks(tasks, environment, directory, Sampling(), LocalTokenizer(directory))


@pytest.mark.parametrize(
    ("task", "model", "warning"),
    [
        ({"prompt": "<s>hi"}, {"adds": "<s> $A"}, "its prompt has <s> twice"),
        ({"messages": [{"role": "user", "content": "hi"}]}, {"template": "<s><s>" + CHATML}, "<s> twice"),
        ({"prompt": "hi"}, {"adds": "$A </s>", "template": None}, "its prompt ends with </s>"),
        ({"prompt": "a</s>b"}, {"template": None}, "its prompt holds </s>, the end of a sequence"),
        ({"messages": [{"role": "user", "content": "a<|im_end|>b"}]}, {}, "its words hold <|im_end|>"),
        ({"prompt": "hi", "answer": "<s>7</s>"}, {"template": None}, "its words hold <s>"),
    ],
)
@pytest.mark.parametrize("environment", ["single_turn", "demonstration"])
def test_special_token_that_nobody_meant_is_a_warning(
    tmp_path: Path, task: dict[str, Any], model: dict[str, Any], warning: str, environment: str
) -> None:
    (text,) = tried(tmp_path, {"answer": "7", **task}, environment, **model)
    assert text.startswith(f"{tmp_path / 'tasks.jsonl'}:1: ") and warning in text


@pytest.mark.parametrize(
    "task",
    [{"prompt": RENDERED}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}],
    ids=["rendered", "messages", "text"],
)
@pytest.mark.parametrize("environment", ["single_turn", "demonstration", "calculator"])
def test_what_a_template_writes_is_no_warning(tmp_path: Path, task: dict[str, Any], environment: str) -> None:
    assert tried(tmp_path, {"answer": "7", **task}, environment) == []


LONG = "x y " * 100
ASK = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("task", "environment", "model", "reason"),
    [
        ({"prompt": "hi", "answer": LONG}, "demonstration", {}, "beyond 200 this model"),
        ({**ASK, "answer": LONG}, "demonstration", {}, "beyond 200 this model"),
        ({**ASK, "chosen": "7", "rejected": LONG}, "preference", {}, "beyond 200 this model"),
        ({"prompt": "hi", "answer": "<late>"}, "demonstration", {"rows": 261}, "it has the token 261"),
        ({**ASK, "chosen": "<late>", "rejected": "7"}, "preference", {"rows": 261}, "it has the token 261"),
        ({"prompt": "<late>"}, "single_turn", {"rows": 261}, "it has the token 261"),
        ({**ASK, "answer": "<think>"}, "demonstration", {"rows": 261}, "it has the token 262"),
        ({"prompt": "<think>"}, "single_turn", {"rows": 261}, "it has the token 262"),
        ({"prompt": "hi", "answer": "z"}, "demonstration", {"rows": 90}, "it has the token"),
        ({"prompt": "z"}, "single_turn", {"rows": 90}, "it has the token"),
        ({**ASK, "tools": [{"name": "add"}]}, "single_turn", {}, "leaves out tools"),
    ],
)
def test_what_the_model_cannot_take_is_an_error_that_names_the_task(
    tmp_path: Path, task: dict[str, Any], environment: str, model: dict[str, Any], reason: str
) -> None:
    with pytest.raises(TaskError, match=rf"tasks\.jsonl:1: task 'odd': .*{reason}"):
        tried(tmp_path, task, environment, **model)


@pytest.mark.parametrize(("environment", "tokens"), [("single_turn", 401), ("demonstration", 402)])
def test_task_that_something_has_no_room_for_is_an_error_that_names_the_task(
    tmp_path: Path, environment: str, tokens: int
) -> None:
    path = write_lines(
        tmp_path / "tasks.jsonl", {"prompt": "a", "answer": "7"}, {"prompt": LONG, "answer": "7"}
    )
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model")
    (directory / "config.json").write_text(json.dumps({"vocab_size": 400, "eos_token_id": 3}))
    reader = LocalTokenizer(directory)
    assert try_tasks(tasks, environment, directory, Sampling(), reader, {"x=1": tokens, "y=2": 900}) == []
    with pytest.raises(TaskError, match=rf"jsonl:2: task '2': .* {tokens} tokens or more, and x=1 has room"):
        try_tasks(tasks, environment, directory, Sampling(), reader, {"y=2": 900, "x=1": tokens - 1})


def test_reasoning_that_a_template_leaves_out_counts_for_nothing(tmp_path: Path) -> None:
    directory = model_of(tmp_path / "model")
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    thought = {"role": "assistant", "content": f"<think>{LONG * 50}</think>Four."}
    asked = {"role": "user", "content": "And now?"}
    path = write_lines(tmp_path / "tasks.jsonl", {"messages": [asked, thought, asked]})
    tasks = load_tasks(str(path), seed=0, split="train")
    assert not longer_prompts(tasks, "single_turn", directory, Sampling(), LocalTokenizer(directory), 60)


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_text_far_beyond_the_room_a_beginning_is_tokenised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    directory, bodies, post = model_of(tmp_path / "model"), list[str](), LocalTokenizer._post

    async def recorded(self: LocalTokenizer, path: str, body: dict[str, Any]) -> dict[str, Any]:
        bodies.append(json.dumps(body))
        return await post(self, path, body)

    monkeypatch.setattr(LocalTokenizer, "_post", recorded)
    text = LONG * 50
    task = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    tasks = load_tasks(str(write_lines(tmp_path / "tasks.jsonl", task)), seed=0, split="train")
    with pytest.raises(
        TaskError, match=r"task '1': its samples have \d+ tokens or more, and x has room for 9"
    ):
        try_tasks(tasks, "single_turn", directory, Sampling(), LocalTokenizer(directory), {"x": 9})
    reader = LocalTokenizer(directory)
    (count,) = longer_prompts(tasks, "single_turn", directory, Sampling(), reader, 9).values()
    assert 9 < count < len(text) / 8 and max(map(len, bodies)) < len(text) / 8
    assert not longer_prompts(tasks, "single_turn", directory, Sampling(), reader, 2 * len(text))


@pytest.mark.parametrize(
    ("task", "environment"),
    [
        ({"prompt": "What is in <late>?"}, "single_turn"),
        ({"messages": [{"role": "user", "content": "What is in <late>?"}]}, "single_turn"),
        ({"messages": [{"role": "user", "content": "hi"}], "answer": "see <late>"}, "demonstration"),
    ],
)
def test_place_of_a_picture_in_words_is_an_error_that_names_the_task(
    tmp_path: Path, task: dict[str, Any], environment: str
) -> None:
    path = write_lines(tmp_path / "tasks.jsonl", {**task, "id": "odd"})
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())

    def look(token: int) -> list[str]:
        seeing = {**config, "image_token_index": token, "vision_config": {}}
        (directory / "config.json").write_text(json.dumps(seeing))
        return try_tasks(tasks, environment, directory, Sampling(), LocalTokenizer(directory))

    look(262)
    with pytest.raises(TaskError, match=r"jsonl:1: its words hold <late>, which stands for a picture"):
        look(261)


CALL = {"function": {"name": "add", "arguments": "{}"}}
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi", "name": "eve"},
    {"role": "assistant", "content": "well", "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "user", "content": "so"},
]
NO_SYSTEM = CHATML.replace("messages %}", "messages if m.role != 'system' %}", 1)
READS_ALL = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{{ m.name }}{{ m.reasoning_content }}{{ m.tool_calls }}"
)


@pytest.mark.parametrize("environment", ["single_turn", "demonstration"])
@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (CHATML, ["`name` of user messages (in 2 tasks)", "`tool_calls` of assistant messages (in 1 tasks)",
                  "`reasoning_content` of assistant messages (in 1 tasks)"]),
        (NO_SYSTEM, ["system messages (in 1 tasks)"]),
        (READS_ALL, []),
        (READS_ALL.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}"),
         ["`content` of assistant messages with calls (in 1 tasks)"]),
    ],
)  # fmt: skip
def test_parts_of_messages_that_the_template_leaves_out_are_one_warning(
    tmp_path: Path, template: str, left_out: list[str], environment: str
) -> None:
    named = {"messages": [{"role": "user", "content": "hi", "name": "bob"}], "answer": "1"}
    path = write_lines(tmp_path / "tasks.jsonl", named, {"messages": TALK, "answer": "2"})
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model", template=template)
    said = try_tasks(tasks, environment, directory, Sampling(), LocalTokenizer(directory))
    assert len(said) == bool(left_out) and all(part in said[0] for part in left_out), said


@pytest.mark.parametrize(
    ("task", "warning"),
    [
        ({"system": "Be short."}, "does not see the field `system`; columns.system=system puts it before"),
        ({"available_tools": ["add"]}, "does not see the field `available_tools`; write it into"),
        ({"input": "3 4"}, "does not see the field `input`; write it into the messages"),
        ({"choices": ["3", "4"]}, "does not see the field `choices`"),
        ({"input": ""}, None),
        ({"level": "easy"}, None),
    ],
)
def test_field_that_is_meant_for_the_model_and_does_not_reach_it_is_a_warning(
    tmp_path: Path, task: dict[str, Any], warning: str | None
) -> None:
    found = tried(tmp_path, {"messages": [{"role": "user", "content": "hi"}], **task})
    assert [warning in text for text in found] == [True] if warning else not found


def test_template_without_tools_is_said_before_an_environment_gives_some(tmp_path: Path) -> None:
    def reason(name: str, template: str) -> str | None:
        return why_no_tools(Sampling(), LocalTokenizer(model_of(tmp_path / name, template=template)))

    assert "the model's chat template leaves out tools" in str(reason("without", CHATML))
    assert reason("with", "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML) is None


def test_role_that_hardly_any_template_knows_is_a_warning(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "critic", "content": "7"}]
    assert any(
        "has a message of 'critic', a role that few" in text
        for text in tried(tmp_path, {"messages": messages})
    )


KNOWN_ROLES_ONLY = CHATML.replace("messages %}", "messages if m.role in ('user', 'assistant') %}", 1)


@pytest.mark.parametrize("before", [[], [{"role": "user", "content": "hi"}]])
def test_message_whose_misspelled_role_the_template_drops_is_refused(
    tmp_path: Path, before: list[dict[str, Any]]
) -> None:
    messages = [*before, {"role": "usr", "content": "1+1"}]
    message = "task 'odd': role 'usr': the model's chat template leaves the message out; correct the role"
    with pytest.raises(TaskError, match=message):
        tried(tmp_path, {"messages": messages}, template=KNOWN_ROLES_ONLY)


def test_misspelled_role_behind_many_kinds_of_tasks_is_refused(tmp_path: Path) -> None:
    kinds = [{f"field{n}": 1} for n in range(20)]
    lines = [{"messages": [{"role": "user", "content": "hi", **kind}]} for kind in kinds]
    lines.append({"messages": [{"role": "usr", "content": "1+1"}]})
    path = write_lines(tmp_path / "tasks.jsonl", *lines)
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model", template=KNOWN_ROLES_ONLY)
    with pytest.raises(TaskError, match="role 'usr'"):
        try_tasks(tasks, "single_turn", directory, Sampling(), LocalTokenizer(directory))


@pytest.mark.parametrize(
    ("environment", "way_out"), [("single_turn", "rollout.stop="), ("demonstration", "add its id, 3,")]
)
def test_mark_of_the_template_that_ends_nothing_is_a_warning(
    tmp_path: Path, environment: str, way_out: str
) -> None:
    path = write_lines(tmp_path / "tasks.jsonl", {**ASK, "answer": "7"})
    tasks = load_tasks(str(path), seed=0, split="train")
    directory = model_of(tmp_path / "model")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": "</s>"}))
    (directory / "config.json").write_text(json.dumps({"eos_token_id": 1, "vocab_size": 400}))

    def said(sampling: Sampling) -> list[str]:
        return try_tasks(tasks, environment, directory, sampling, LocalTokenizer(directory))

    (text,) = said(Sampling())
    assert "ends an answer with <|im_end|>, which neither" in text and way_out in text
    assert said(Sampling(stop=("<|im_end|>",))) == []
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    assert said(Sampling()) == []


def test_template_that_takes_arguments_of_calls_as_texts_gets_texts(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ '' + c.function.arguments }}{% endfor %}",
    )
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    assert tried(tmp_path, {"messages": [*ASK["messages"], said]}, "demonstration", template=template) == []
