"""Conversations: exact tokens over several turns, the budget, seeds; and a real engine at the other end."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from rollout import tally
from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.environments.policy import Episode, Policy
from rollout.origin import Sampling
from rollout.trajectory import Sample
from tests.models import CONTEXT, EOS
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import ScriptedClient, ids, text_of, user

T = TypeVar("T")


def play(client: EngineClient, play: Callable[[Episode], Awaitable[T]], **sampling: Any) -> T:
    policy = Policy(client, Sampling(**{"max_tokens": 20, **sampling}), 1000)

    async def main() -> T:
        return await play(policy.episode(3))

    return asyncio.run(main())


def shown(sample: Sample) -> list[str]:
    """The conversation for people; in brackets the tokens of what is generated."""
    tokens = [
        "" if turn.begin is None else f" ({''.join(map(chr, sample.token_ids[turn.begin : turn.end]))})"
        for turn in sample.turns
    ]
    return [f"{turn.role}{ids}: {turn.text}" for turn, ids in zip(sample.turns, tokens, strict=True)]


def test_each_turn_continues_the_tokens_so_far_and_only_what_was_generated_is_trained() -> None:
    async def three_turns(episode: Episode) -> Sample:
        await episode.generate(user("2+2"))
        await episode.generate(user("sure?"))
        await episode.generate(" so")
        await episode.generate(ids("[ok]"))
        return episode.sample(metrics={"turns": float(len(episode.turns))})

    client = ScriptedClient("5.", "yes.", "no", "end.")
    sample = play(client, three_turns)
    assert text_of(sample) == "u2+2.a5.usure?.ayes. sono[ok]end."
    assert text_of(sample, trained=True) == "5.yes.noend."
    assert sample.logprobs.tolist() == [-0.5 * m for m in sample.loss_mask]
    assert (sample.text, sample.finish_reason, sample.reward) == ("end", "stop", None)
    assert sample.metrics == {"turns": 4.0}
    assert shown(sample) == [
        "user: 2+2",
        "assistant (5.): 5",
        "user: sure?",
        "assistant (yes.): yes",
        "environment:  so",
        "assistant (no): no",
        "environment: [4 token ids]",
        "assistant (end.): end",
    ]
    assert [asked if isinstance(asked, str) else "".join(map(chr, asked)) for asked, _ in client.asked][
        1:
    ] == [
        "u2+2.a5.usure?.a",
        "u2+2.a5.usure?.ayes. so",
        "u2+2.a5.usure?.ayes. sono[ok]",
    ]


@pytest.mark.parametrize("is_repeated", [True, False])
def test_the_models_own_turn_as_a_new_message_is_warned_of(
    is_repeated: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tally, "_warned", set[str]())

    async def two_turns(episode: Episode) -> None:
        turn = await episode.generate(user("2+2"))
        before = [*user("2+2"), {"role": "assistant", "content": turn.text}] if is_repeated else []
        await episode.generate([*before, *user("sure?")])

    play(ScriptedClient("5.", "yes."), two_turns)
    assert ("given the model's own last turn" in caplog.text) == is_repeated


def test_conversation_for_people_has_tool_results_and_is_not_changed_afterwards() -> None:
    async def with_tool(episode: Episode) -> Sample:
        message = {"role": "user", "content": "2+2"}
        await episode.generate([message])
        message["content"] = "changed"
        tool = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": None}
        await episode.generate([tool, *user("so?")])
        return episode.sample()

    sample = play(ScriptedClient("add.", "4."), with_tool)
    said = ["user: 2+2", "assistant (add.): add", 'tool: 4\n{"tool_call_id": "c1"}', "user: so?"]
    assert shown(sample) == [*said, "assistant (4.): 4"]


def test_turn_that_was_cut_is_closed_by_the_template() -> None:
    async def cut(episode: Episode) -> Sample:
        await episode.generate(user("2+2"), max_tokens=3)
        await episode.generate(user("sure?"))
        return episode.sample(reward=0.25)

    sample = play(ScriptedClient("five", "yes."), cut)
    assert text_of(sample) == "u2+2.afiv.usure?.ayes."
    assert text_of(sample, trained=True) == "fivyes."
    assert sample.reward == 0.25


def test_budget_is_of_all_turns_and_an_empty_turn_says_that_it_is_used_up() -> None:
    async def talk(episode: Episode) -> Sample:
        new = user("go")
        while (await episode.generate(new)).finish_reason != "length":
            new = user("on")
        return episode.sample()

    client = ScriptedClient("one.", "two.", "three.", "four.")
    sample = play(client, talk, max_tokens=8)
    assert text_of(sample) == "ugo.aone.uon.atwo."  # the next message is not appended
    assert (sample.finish_reason, sample.text) == ("length", "")
    assert shown(sample)[-2:] == ["assistant (two.): two", "assistant (): "]
    assert [turn.finish_reason for turn in sample.turns] == [None, "stop", None, "stop", "length"]
    assert [sampling.max_tokens for _, sampling in client.asked] == [8, 4]
    sample = play(ScriptedClient("one.", "two.", "three."), talk, max_tokens=10)
    assert text_of(sample) == "ugo.aone.uon.atwo.uon.ath" and sample.text == "th"


def test_loop_that_never_looks_whether_there_are_tokens_left_lets_others_go_on_and_ends() -> None:
    others: list[int] = []

    async def goes_on() -> None:
        while True:
            await asyncio.sleep(0)
            others.append(1)

    async def never_looks(episode: Episode) -> None:
        other = asyncio.create_task(goes_on())
        try:
            while True:
                await episode.generate(user("on"))
        finally:
            other.cancel()

    message = "the last 100 turns are empty, as no tokens are left: stop when turn.finish_reason is 'length'"
    with pytest.raises(RuntimeError, match=message):
        play(ScriptedClient("one.", "two."), never_looks, max_tokens=8)
    assert len(others) >= 100


def test_conversation_that_outgrows_the_context_ends_at_length(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "_warned", set())

    async def talk(episode: Episode) -> Sample:
        for message in ("go", "on", "on"):
            turn = await episode.generate(user(message))
        assert (turn.finish_reason, turn.token_ids) == ("length", [])
        return episode.sample()

    async def talk_once_more(episode: Episode) -> None:
        await episode.generate("go")
        assert (await episode.generate("on")).finish_reason == "length"

    sample = play(ScriptedClient("one.", "two.", RequestRefused("too long")), talk)
    assert text_of(sample) == "ugo.aone.uon.atwo." and sample.finish_reason == "length"
    play(ScriptedClient("one.", RequestRefused("too long")), talk_once_more)
    assert "ends after 2 turns: too long" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("error", [RequestRefused("too long"), EngineError("gone")])
def test_refused_prompt_and_failed_engine_are_errors(error: EngineError) -> None:
    async def ask(episode: Episode) -> None:
        await episode.generate(user("go"))

    with pytest.raises(type(error), match=str(error)):
        play(ScriptedClient(error), ask)


def test_engine_that_fails_in_a_later_turn_is_an_error() -> None:
    async def ask(episode: Episode) -> None:
        await episode.generate("go")
        await episode.generate("on")

    with pytest.raises(EngineError, match="gone"):
        play(ScriptedClient("one.", EngineError("gone")), ask)


def test_episode_without_a_turn_is_no_sample() -> None:
    async def nothing(episode: Episode) -> Sample:
        return episode.sample()

    with pytest.raises(ValueError, match="without a turn"):
        play(ScriptedClient(), nothing)


def test_seeds_follow_from_sample_and_turn() -> None:
    async def seeds(j: int) -> list[int | None]:
        client = ScriptedClient("a.", "b.", "c.")
        episode = Policy(client, Sampling(), 1000).episode(j)
        for _ in range(3):
            await episode.generate("x")
        return [sampling.seed for _, sampling in client.asked]

    first, again, other = (asyncio.run(seeds(j)) for j in (3, 3, 4))
    assert first == again and first[0] == 1003 and other[0] == 1004
    assert len({*first, *other}) == 6


def test_stop_strings_add_to_the_settings_and_max_tokens_does_not_exceed_it() -> None:
    client = ScriptedClient("a.")

    async def main() -> None:
        policy = Policy(client, Sampling(max_tokens=5, stop=("\n", "#")), 0)
        await policy.generate("x", max_tokens=50, stop=["]", "#"])

    asyncio.run(main())
    (_, sampling), *_ = client.asked
    assert (sampling.max_tokens, sampling.stop) == (5, ("\n", "#", "]"))


def serve(server: RunningServer, play: Callable[[Policy], Awaitable[T]], **sampling: Any) -> T:
    async def main() -> T:
        async with EngineClient(server.url) as client:
            return await play(Policy(client, Sampling(**sampling), 77))

    return asyncio.run(main())


async def two_messages_and_a_text(episode: Episode) -> Sample:
    await episode.generate(user("27+58="), max_tokens=7)
    await episode.generate(user("are you sure"), max_tokens=7)
    await episode.generate("=85\n", max_tokens=7)
    return episode.sample()


def test_engine_gets_exactly_the_tokens_so_far_and_what_is_new(server: RunningServer) -> None:
    async def both(policy: Policy) -> None:
        episode = policy.episode(0)
        await two_messages_and_a_text(episode)
        first, second, third = episode.turns
        assert first.prompt_ids == await policy.tokenize(user("27+58="))
        said = first.prompt_ids + first.token_ids
        appended = second.prompt_ids[len(said) :]
        assert second.prompt_ids[: len(said)] == said
        # the end of a turn is a newline in this model's template
        assert appended == await policy.tokenize("\nuser are you sure\na ")
        assert third.prompt_ids == second.prompt_ids + second.token_ids + await policy.tokenize("=85\n")

    serve(server, both, max_tokens=64)


def test_trained_logprobs_are_the_models_own_on_the_whole_sequence(
    server: RunningServer, model_dir: Path
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    async def all_samples(policy: Policy) -> list[Sample]:
        return list(await asyncio.gather(*(two_messages_and_a_text(policy.episode(j)) for j in range(8))))

    samples = serve(server, all_samples, max_tokens=64, temperature=0.8)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for sample in samples:
        tokens = torch.from_numpy(sample.token_ids).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, :-1] / 0.8
        expected = torch.log_softmax(logits, -1).gather(-1, tokens[1:, None])[:, 0].numpy()
        mask = sample.loss_mask[1:].astype(bool)
        assert mask.any()
        np.testing.assert_allclose(sample.logprobs[1:][mask], expected[mask], atol=1e-4)
        assert not sample.logprobs[1:][~mask].any()
    assert any(EOS in sample.token_ids for sample in samples)


def test_conversation_goes_on_to_the_end_of_the_context_though_its_budget_is_larger(
    server: RunningServer,
) -> None:
    async def long(policy: Policy) -> Sample:
        episode = policy.episode(0)
        while (await episode.generate("1+" if episode.turns else "1", stop=["1"])).finish_reason != "length":
            pass
        return episode.sample()

    sample = serve(server, long, max_tokens=2 * CONTEXT)
    assert CONTEXT - 2 <= len(sample.token_ids) <= CONTEXT
