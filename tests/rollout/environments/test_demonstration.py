"""The environment `demonstration`: what of a task is trained, and where it ends."""

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment

from rollout import tally
from rollout.engines.client import EngineClient
from rollout.engines.special_tokens import read_special_tokens
from rollout.environments.demonstration import check_demonstrations, demonstration
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.tasks.task_set import Task, TaskError, load_tasks
from rollout.trajectory import Group, Sample
from tests.rollout.collecting import collect
from tests.rollout.rollout_helpers import RunningServer, write_lines

END, OTHER_END = ord("$"), ord("%")
MESSAGES = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+2"}]
SAID = {"role": "assistant", "content": "three"}


class Templated(EngineClient):
    """A token a character; a text begins with `^`, and the chat template is the test's."""

    def __init__(self, turn: str, opened: str) -> None:
        super().__init__("http://127.0.0.1:1")
        self.turn, self.opened = turn, opened

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        if isinstance(text, str):
            return [ord(character) for character in text]
        return [*await self.tokenize_whole(text), *map(ord, self.opened)]

    async def tokenize_whole(self, text: Any, **template: Any) -> list[int]:
        if isinstance(text, str):
            return [ord(character) for character in f"^{text}"]
        return [ord(character) for message in text for character in self.turn.format(**message)]

    async def detokenize(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids))


def demonstrate(task: Task, client: EngineClient, max_tokens: int = 50, **end_ids: Any) -> Sample:
    """The one sample of a task's group."""
    sampling = Sampling(n=8, max_tokens=max_tokens)
    end = {"end_ids": (OTHER_END, END), **end_ids}
    (sample,) = asyncio.run(demonstration({"id": "a", **task}, Policy(client, sampling, 0), sampling, **end))
    return sample


def parts_of(sample: Sample) -> tuple[str, str]:
    """What is not trained, and what is, which lies behind it."""
    mask = sample.loss_mask.astype(bool)
    assert mask.tolist() == sorted(mask.tolist())
    return "".join(map(chr, sample.token_ids[~mask])), "".join(map(chr, sample.token_ids[mask]))


CHAT = Templated("<{role}>{content}$\n", "<assistant>")
ASKED = "<system>Add.$\n<user>1+2$\n<assistant>"


@pytest.mark.parametrize(
    ("task", "client", "prompt", "trained"),
    [
        ({"prompt": "1+2=", "answer": 3}, CHAT, "^1+2=", "3%"),
        ({"messages": MESSAGES, "answer": "3"}, CHAT, ASKED, "3$"),
        ({"messages": [*MESSAGES, SAID], "answer": "3"}, CHAT, ASKED, "three$"),
        # A template that ends no turn, and one that asks for thoughts it does not repeat.
        ({"messages": [*MESSAGES, SAID]}, Templated("{content}", ""), "Add.1+2", "three%"),
        ({"messages": [MESSAGES[1], SAID]}, Templated("<{content}$", "<Think:"), "<1+2$<Think:", "three$"),
        (
            {"messages": [MESSAGES[1], SAID, MESSAGES[1], SAID]},
            CHAT,
            "<user>1+2$\n<assistant>three$\n<user>1+2$\n<assistant>",
            "three$",
        ),
    ],
    ids=["prompt", "messages and answer", "last message", "no end", "thoughts", "several turns"],
)  # fmt: skip
def test_answer_and_end_of_sequence_are_trained(
    task: Task, client: EngineClient, prompt: str, trained: str
) -> None:
    sample = demonstrate(task, client)
    assert parts_of(sample) == (prompt, trained)
    assert sample.token_ids.dtype == np.int32 and sample.loss_mask.dtype == np.uint8
    assert np.isnan(sample.logprobs).tolist() == sample.loss_mask.astype(bool).tolist()
    assert (sample.reward, sample.finish_reason) == (1.0, "stop")
    assert sample.text in {"3", "three"}


# Templates of thinking models, as far as they matter here. All open a thought when they ask.
QWEN_THINKING = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<e>{% else %}"
    "{% set c = m.content %}{% set r = '' %}"
    "{% if '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<a><think>\n{{ r }}\n</think>\n\n{{ c }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
NEMOTRON = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}<e>{% else %}"
    "<a><think></think>{{ m.content }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a><think>\n{% endif %}"
)
DEEPSEEK_R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% else %}"
    "<a>{{ m.content.split('</think>')[-1] }}<e>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<a><think>\n{% endif %}"
)


class Rendered(Templated):
    """A token a character, a real template, and two newlines are one token, as in most vocabularies."""

    def __init__(self, template: str) -> None:
        super().__init__("", "")
        self.template = Environment().from_string(template)

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        return self._ids(text if isinstance(text, str) else self._rendered(text, True))

    async def tokenize_whole(self, text: Any, **template: Any) -> list[int]:
        return self._ids(text if isinstance(text, str) else self._rendered(text, False))

    def _rendered(self, messages: Any, asks: bool) -> str:
        return self.template.render(messages=messages, add_generation_prompt=asks)

    def _ids(self, text: str) -> list[int]:
        return [ord(c) for c in text.replace("<e>", "$").replace("\n\n", "¶")]

    async def detokenize(self, token_ids: Any) -> str:
        return "".join(map(chr, token_ids)).replace("¶", "\n\n")


@pytest.mark.parametrize(
    ("template", "answer", "trained"),
    [
        (QWEN_THINKING, "<think>\nadd\n</think>¶46", "add\n</think>¶46"),
        (QWEN_THINKING, "add\n</think>¶46", "add\n</think>¶46"),
        (QWEN_THINKING, "46", "\n</think>¶46"),
        (NEMOTRON, "46", "</think>46"),
        (DEEPSEEK_R1, "<think>\nadd\n</think>¶46", "add\n</think>¶46"),
        (DEEPSEEK_R1, "add\n</think>¶46", "add\n</think>¶46"),
        (DEEPSEEK_R1, "46", "46"),
    ],
)
def test_demonstration_follows_the_prompt_that_sampling_would_have(
    template: str, answer: str, trained: str, caplog: pytest.LogCaptureFixture
) -> None:
    tally._warned.clear()
    client = Rendered(template)
    messages = [{"role": "user", "content": "12+34"}]
    said = {"role": "assistant", "content": answer.replace("¶", "\n\n")}
    sample = demonstrate({"messages": [*messages, said]}, client)
    prompt = "".join(map(chr, asyncio.run(client.tokenize(messages))))
    assert prompt.endswith("<a><think>\n")
    assert parts_of(sample) == (prompt, f"{trained}$")
    assert ("opens <think> before an answer" in caplog.text) == ("</think>" not in trained)


CALL = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
THOUGHT = {"role": "assistant", "content": "46", "reasoning_content": "add", "tool_calls": [CALL]}
WRITES_ALL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_all_that_the_answer_says_is_trained() -> None:
    client = Rendered(WRITES_ALL)
    sample = demonstrate({"messages": [MESSAGES[1], THOUGHT]}, client)
    assert parts_of(sample) == ("<user>1+2$<assistant>", "(add)46[add]$")
    weighed = demonstrate({"messages": [MESSAGES[1], THOUGHT | {"weight": 1}]}, client)
    assert parts_of(weighed) == parts_of(sample)
    alone = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert parts_of(demonstrate({"messages": [MESSAGES[1], alone]}, client))[1] == "[add]$"


@pytest.mark.parametrize(
    ("template", "left_out"),
    [
        (WRITES_ALL.replace("({{ m.reasoning_content }})", ""), "reasoning_content"),
        (WRITES_ALL.replace("[{{ c.function.name }}]", ""), "tool_calls"),
        (
            WRITES_ALL.replace("{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
            "content",
        ),
    ],
)
def test_what_the_template_leaves_out_of_an_answer_is_an_error(template: str, left_out: str) -> None:
    with pytest.raises(TaskError, match=f"task 'a': .* leaves out `{left_out}` of its answer"):
        demonstrate({"messages": [MESSAGES[1], THOUGHT]}, Rendered(template))


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"messages": [MESSAGES[1]], "answer": "3$4"}, "its answer holds a mark that ends a sequence"),
        ({"prompt": "1+2=", "answer_message": THOUGHT}, "has `reasoning_content`, which no text can say"),
        ({"prompt": "1+2=", "answer": "3", "tools": [CALL]}, "without the task's `tools`"),
        ({"prompt": "1+2="}, "task 'a' has no answer to demonstrate"),
        ({"prompt": "1+2=", "answer": ""}, "task 'a' has no answer to demonstrate"),
        ({"messages": MESSAGES}, "task 'a' has no answer to demonstrate"),
        ({"messages": [SAID]}, "task 'a': its one message is the answer"),
        ({"messages": [*MESSAGES, SAID | {"weight": 0}]}, "its last message, .* has `weight` 0, not 1"),
        ({"messages": [*MESSAGES, SAID | {"train": False}]}, "its last message, .* has `train` False, not 1"),
        ({"prompt": "1+2=", "answer": "x" * 50}, r"task 'a': .* 51 tokens.*rollout\.max_tokens=50"),
    ],
)  # fmt: skip
def test_task_that_demonstrates_nothing_is_an_error_that_names_it(task: Task, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        demonstrate(task, CHAT)


def test_demonstration_beyond_steady_positions_is_an_error() -> None:
    task = {"prompt": "1+2=", "answer": "3"}
    whole = len(demonstrate(task, CHAT).token_ids)
    assert len(demonstrate(task, CHAT, context=whole).token_ids) == whole
    with pytest.raises(TaskError, match=f"it has {whole} tokens with its answer, and beyond {whole - 1}"):
        demonstrate(task, CHAT, context=whole - 1)


def test_model_without_an_end_of_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        demonstrate({"prompt": "1+2=", "answer": "3"}, CHAT, end_ids=())


def test_tasks_are_checked_before_a_run_begins(tmp_path: Path) -> None:
    good, bad = {"prompt": "1+2=", "answer": "3"}, {"id": "b7", "prompt": "1+3="}
    path = write_lines(tmp_path / "tasks.jsonl", good, {"messages": [*MESSAGES, SAID]})
    check_demonstrations(load_tasks(str(path), seed=0, split="train"))
    write_lines(path, good, bad)
    with pytest.raises(TaskError, match=rf"^{path}:2: task 'b7' has no answer"):
        check_demonstrations(load_tasks(str(path), seed=0, split="train"))


def test_engine_only_tokenises(server: RunningServer, model_dir: Path) -> None:
    groups: dict[int, Group] = {}
    tasks = [
        {"id": "a", "prompt": "1+2=", "answer": 3},
        {"id": "b", "messages": [{"role": "user", "content": "1+2="}], "answer": "3"},
        {"id": "c", "prompt": "1+2="},
    ]

    async def main() -> None:
        async with EngineClient(server.url) as client:
            await collect(
                [Slot(k, task, seed=7) for k, task in enumerate(tasks)],
                client=client,
                environment=partial(demonstration, end_ids=read_special_tokens(model_dir).end_ids),
                reward=resolve_reward("exact"),
                sampling=Sampling(n=1, max_tokens=20),
                settings=RolloutSettings(),
                on_group=lambda group: groups.update({group.slot: group}),
                stop=threading.Event(),
            )
            ids = [await client.tokenize(text) for text in ("1+2=", "3", "user 1+2=\na ")]
        prompt, three, chat = ids
        assert groups[0].samples[0].token_ids.tolist() == [*prompt, *three, 1]
        # This template asks with another beginning of a turn than it writes, and ends none.
        said = groups[1].samples[0]
        assert said.token_ids.tolist() == [*chat, *three, 1]

    asyncio.run(main())
    assert [groups[k].given_up for k in range(2)] == [None, None]
    assert "TaskError: task 'c' has no answer" in str(groups[2].given_up)
