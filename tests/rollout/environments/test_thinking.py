"""Models that think before they answer: variables of the chat template, a budget, and what is scored."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.demonstration import demonstration
from rollout.environments.environment import resolve_environment
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import Group
from tests.rollout.collecting import collect
from tests.rollout.scripted import Agent, run_session, user
from tests.rollout.templated import QWEN3, TemplatedClient

NO_THINKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
SILENT: dict[str, Any] = {"chat_template": {"enable_thinking": False}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_variables_reach_the_template_in_every_turn(tools: list[Any], tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3, "85<|im_end|>", "Yes.<|im_end|>")

    async def main() -> str:
        policy = Policy(client, Sampling(max_tokens=50, **SILENT), 7)
        episode = (policy.with_tools(tools) if tools else policy).for_sample(1).derived("a").episode()
        await episode.generate(user("27+58="))
        await episode.generate(user("Sure?"))
        return str(client.tokenizer.decode(episode.token_ids))

    text = asyncio.run(main())
    assert text.count(NO_THINKING) == 2 and text.count("<|im_start|>assistant") == 2


def test_demonstrations_are_rendered_with_them_too(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3)
    sampling = Sampling(max_tokens=50, **SILENT)
    task = {"id": "a", "messages": user("27+58="), "answer": "85"}
    end: Any = client.tokenizer.convert_tokens_to_ids("<|im_end|>")
    policy = Policy(client, sampling, 0)
    (sample,) = asyncio.run(demonstration(task, policy, sampling, end_ids=[end]))
    assert str(client.tokenizer.decode(sample.token_ids)).endswith(f"{NO_THINKING}85<|im_end|>")
    trained = [int(t) for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert client.tokenizer.decode(trained) == "85<|im_end|>"


@pytest.mark.parametrize("name", ["tools", "tokenize", "add_generation_prompt", "return_dict", "a b"])
def test_what_engines_set_themselves_is_no_variable(name: str) -> None:
    with pytest.raises(ValueError, match=rf"rollout.chat_template.{name}: is set by the engine"):
        RolloutSettings(chat_template={name: True})


THINKING: dict[str, Any] = {"reasoning_end": "</think>"}


def group_of(client: Any, reward: str, **sampling: Any) -> Group:
    groups: list[Group] = []
    asyncio.run(
        collect(
            [Slot(0, {"id": "a", "messages": user("27+58="), "answer": "85"}, seed=7)],
            client=client,
            environment=resolve_environment("single_turn"),
            reward=resolve_reward(reward),
            sampling=Sampling(**{"max_tokens": 60, **THINKING, **sampling}),
            settings=RolloutSettings(),
            on_group=groups.append,
            stop=threading.Event(),
        )
    )
    assert groups[0].given_up is None
    return groups[0]


@pytest.mark.parametrize(
    ("said", "reward", "answered"),
    [
        ("<think>\n27+58=86?\n</think>\n\n85", 1, 1),
        ("85</think>\n\n85", 1, 1),  # the template has opened the reasoning
        ("<think>\n</think> 86 </think>\n85", 1, 1),
        ("<think>\n85\n</think>\n\n86", 0, 1),
        ("<think>\n85", 0, 0),
        ("85", 0, 0),
        ("<think>85</think>", 0, 1),
    ],
)
def test_reward_gets_the_answer_without_the_reasoning(
    said: str, reward: float, answered: float, tmp_path: Path
) -> None:
    client = TemplatedClient(tmp_path, QWEN3, f"{said}<|im_end|>")
    (sample,) = group_of(client, "exact").samples
    assert (sample.reward, sample.metrics, sample.text) == (reward, {"answered": answered}, said)


def test_reward_function_gets_the_reasoning_as_a_field_of_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_thoughts.py").write_text(
        "async def score(task, completion):\n"
        "    return {'reward': float(completion == '85'), 'doubts': task['reasoning'].count('?')}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    client = TemplatedClient(tmp_path, QWEN3, "<think>84? 86?</think>85<|im_end|>")
    (sample,) = group_of(client, "my_thoughts:score").samples
    assert sample.reward == 1 and sample.metrics == {"answered": 1.0, "doubts": 2.0}


@pytest.mark.parametrize(
    ("lines", "text", "trained", "cut"),
    [
        (["a b c d e f g h i j k l</think>", "85<|im_end|>"], "{0}\n</think>\n\n85", "{0}85<|im_end|>", 1),
        (["</think>a b c d e f g h i j", "k 85<|im_end|>"], "{0}k 85", "{0}k 85<|im_end|>", 0),
        (["</think>85<|im_end|>"], "</think>85", "</think>85<|im_end|>", 0),
    ],
)
def test_reasoning_beyond_its_budget_is_ended_and_the_end_is_not_trained(
    lines: list[str], text: str, trained: str, cut: float, tmp_path: Path
) -> None:
    client = TemplatedClient(tmp_path, QWEN3, *lines)
    (sample,) = group_of(client, "numeric", thinking_tokens=12).samples
    ids = client.tokenizer.encode(lines[0], add_special_tokens=False)
    first = str(client.tokenizer.decode(ids[:12]))
    assert sample.text == text.format(first)
    said = [int(t) for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert client.tokenizer.decode(said) == trained.format(first)
    assert sample.metrics == {"answered": 1.0, "reasoning_cut": cut} and sample.reward == 1


@pytest.mark.parametrize("history", ["sampled", "template"])
def test_history_that_the_template_rewrites_begins_a_new_sample_if_it_shall(
    history: str, tmp_path: Path
) -> None:
    lines = ["<think>\n27+58\n</think>\n\n85<|im_end|>", "Yes.<|im_end|>", "Bye.<|im_end|>"]
    client = TemplatedClient(tmp_path, QWEN3, *lines)

    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("27+58="))
        so_far = await agent.ask([*so_far, *user("Sure?")])
        await agent.ask([*so_far, *user("Bye")])

    _, samples = run_session(client, play, max_tokens=90, history=history)
    texts = [str(client.tokenizer.decode(sample.token_ids)) for sample in samples]
    trained = [int(sample.loss_mask.sum()) for sample in samples]
    sizes = [len(client.tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    if history == "sampled":
        assert len(texts) == 1 and "27+58\n</think>" in texts[0] and trained == [sum(sizes)]
        return
    assert ["27+58\n</think>" in text for text in texts] == [True, False]
    assert trained == [sizes[0], sizes[1] + sizes[2]]  # what is not rewritten goes on
    assert texts[1].count("<|im_start|>assistant\n85<|im_end|>") == 1


def test_agent_that_drops_the_reasoning_begins_a_new_sample(tmp_path: Path) -> None:
    client = TemplatedClient(tmp_path, QWEN3, "<think>\n2\n</think>\n\n85<|im_end|>", "Yes.<|im_end|>")

    async def play(agent: Agent) -> None:
        await agent.ask(user("27+58="))
        said = {"role": "assistant", "content": "85"}
        await agent.ask([*user("27+58="), said, *user("Sure?")])

    _, samples = run_session(client, play, max_tokens=90)
    assert [sample.text for sample in samples] == ["<think>\n2\n</think>\n\n85", "Yes."]
