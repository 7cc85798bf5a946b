"""Chat templates as the makers of models ship them, in TRL's package: tasks, tools, thinking, and answers
to train on. Those of Mistral and Phi 4 are in no package; `tests/rollout/templated.py` has Mistral's calls.
"""

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import ToolCall
from rollout.engines.embedded.text import TextTokenizer
from rollout.environments.demonstration import demonstration
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.tasks.task_set import TaskError
from rollout.trajectory import Sample
from tests.rollout.templated import TemplatedClient, make_tokenizer

SPEC = find_spec("trl")
assert SPEC is not None and SPEC.origin is not None
TEMPLATES = Path(SPEC.origin).parent / "chat_templates"
MARK = re.compile(r"<[|｜][^<>{}'\"]+?[|｜]>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<\|?turn\|?>")  # noqa: RUF001
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '{"name": "add", "KEY": {"a": 27, "b": 58}}'
HERMES = f"<tool_call>\n{CALL.replace('KEY', 'arguments')}\n</tool_call>"
XML = "<parameter=a>\n27\n</parameter>\n<parameter=b>\n58\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>27</arg_value>\n<arg_key>b</arg_key>\n"
HARMONY = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 27, "b": 58}'
ASKED = [{"role": "user", "content": "27+58="}]
ANSWER = {"role": "assistant", "content": "It is 85."}
THOUGHT = {**ANSWER, "reasoning_content": "Seven and eight."}


class Family(NamedTuple):
    end: str
    call: str = ""
    """A call as the model writes it; empty where the template shows no tools."""
    call_end: str = ""
    keeps_thoughts: bool = False
    """Whether the template writes an answer's `reasoning_content`."""
    thinks: bool = False
    """Whether `enable_thinking` changes its prompts."""


FAMILIES = {
    "qwen2_5": Family("<|im_end|>", HERMES),
    "qwen3": Family("<|im_end|>", HERMES, keeps_thoughts=True, thinks=True),
    "qwen3_instruct_2507": Family("<|im_end|>", HERMES),
    "qwen3_5_think": Family(
        "<|im_end|>", "<tool_call>\n<function=add>\n" + XML, keeps_thoughts=True, thinks=True
    ),
    "llama3_1": Family("<|eot_id|>", CALL.replace("KEY", "parameters")),
    "llama3_2": Family("<|eot_id|>", "I add. " + CALL.replace("KEY", "parameters")),
    "gemma3": Family("<end_of_turn>"),
    "phi3_5": Family("<|end|>"),
    "gptoss": Family("<|return|>", HARMONY, "<|call|>", keeps_thoughts=True),
    "glm4moe": Family(
        "<|user|>",
        GLM + "<arg_value>58</arg_value>\n</tool_call>",
        "<|observation|>",
        keeps_thoughts=True,
        thinks=True,
    ),
    "deepseek_r1_distill": Family("<｜end▁of▁sentence｜>"),  # noqa: RUF001
}
WITH_TOOLS = [name for name, family in FAMILIES.items() if family.call]


class Client(TemplatedClient):
    """Says lines in a template of the package."""

    def __init__(self, directory: Path, name: str, *lines: str) -> None:
        EngineClient.__init__(self, "http://127.0.0.1:1")
        template, end = (TEMPLATES / f"{name}.jinja").read_text(), FAMILIES[name].end
        marks = sorted({*MARK.findall(template), end, "<bos>"})
        self.tokenizer = make_tokenizer(template)
        self.tokenizer.add_special_tokens(
            {"bos_token": "<bos>", "eos_token": end, "additional_special_tokens": marks}
        )
        self.tokenizer.save_pretrained(directory)
        self.texts, self.lines = TextTokenizer(directory), list(lines)

    def text(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(token_ids))

    def end_id(self, name: str) -> int:
        return self.tokenizer.encode(FAMILIES[name].end, add_special_tokens=False)[0]


def demonstrated(client: Client, name: str, answer: dict[str, Any]) -> Sample:
    sampling = Sampling(max_tokens=400)
    task = {"id": "a", "messages": [*ASKED, answer]}
    (sample,) = asyncio.run(
        demonstration(task, Policy(client, sampling, 0), sampling, end_ids=(client.end_id(name),))
    )
    return sample


def trained(sample: Sample, client: Client) -> tuple[str, str]:
    """What is not trained, and what is."""
    begin = int(sample.loss_mask.argmax())
    assert sample.loss_mask[begin:].all()
    return client.text(sample.token_ids[:begin]), client.text(sample.token_ids[begin:])


@pytest.mark.parametrize("name", FAMILIES)
def test_answer_is_trained_behind_the_prompt_that_sampling_has(name: str, tmp_path: Path) -> None:
    client = Client(tmp_path, name)
    asked = client.tokenizer.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    prompt, answer = trained(demonstrated(client, name, ANSWER), client)
    assert prompt == asked and "27+58=" in prompt and "85" not in prompt
    assert answer.endswith(f"It is 85.{FAMILIES[name].end}") and answer.count(FAMILIES[name].end) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_of_an_answer_is_trained_or_refused(name: str, tmp_path: Path) -> None:
    client = Client(tmp_path, name)
    if FAMILIES[name].keeps_thoughts:
        assert "Seven and eight." in trained(demonstrated(client, name, THOUGHT), client)[1]
    else:
        with pytest.raises(TaskError, match="leaves out `reasoning_content` of its answer"):
            demonstrated(client, name, THOUGHT)


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_is_switched_off_where_the_template_can(name: str, tmp_path: Path) -> None:
    client = Client(tmp_path, name)
    quiet = Policy(client, Sampling(chat_template={"enable_thinking": False}), 0)
    asked, quietly = [asyncio.run(each.tokenize(ASKED)) for each in (Policy(client, Sampling(), 0), quiet)]
    assert (asked != quietly) == FAMILIES[name].thinks
    assert not FAMILIES[name].thinks or "</think>" in client.text(quietly)


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_call_is_read_and_its_result_continues_in_the_sampled_tokens(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    call_end = family.call_end or family.end
    client = Client(tmp_path, name, family.call + call_end, f"It is 85.{family.end}")

    async def play() -> tuple[ToolCall, Sample]:
        episode = Policy(client, Sampling(max_tokens=400), 7).with_tools([ADD]).episode()
        (call,) = (await episode.generate(ASKED)).calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "85"}
        assert not (await episode.generate([result])).calls
        return call, episode.sample()

    call, sample = asyncio.run(play())
    assert (call.name, call.arguments) == ("add", {"a": 27, "b": 58})
    text = client.text(sample.token_ids)
    before, _, behind = text.partition(family.call + call_end)
    assert "Add two numbers." in before and "85" in behind.removesuffix(f"It is 85.{family.end}")
    said = [int(t) for t, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask]
    assert client.text(said) == f"{family.call}{call_end}It is 85.{family.end}"


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - set(WITH_TOOLS)))
def test_template_without_tools_is_refused_with_the_way_out(name: str, tmp_path: Path) -> None:
    policy = Policy(Client(tmp_path, name), Sampling(), 7).with_tools([ADD])
    with pytest.raises(RequestRefused, match="chat template leaves out tools: describe them in the messages"):
        asyncio.run(policy.generate(ASKED))
