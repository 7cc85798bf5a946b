"""Several choices for one request: which of them become samples, and by which draws."""

import json

from rollout.engines.answers import RequestRefused
from rollout.trajectory import Sample
from tests.rollout.scripted import Agent, Messages, ScriptedClient, run_session, text_of, user


async def choices(agent: Agent, messages: Messages, n: int) -> list[Messages]:
    """The conversations that each of `n` choices makes."""
    status, text = await agent.post({"messages": messages, "n": n})
    assert status == 200, text
    return [[*messages, choice["message"]] for choice in json.loads(text)["choices"]]


def trained(samples: list[Sample]) -> list[str]:
    return [text_of(sample, trained=True) for sample in samples]


def test_each_choice_that_an_agent_ends_with_is_a_sample() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("a"))
        await choices(agent, [*so_far, *user("b")], 3)

    client = ScriptedClient("1.", "2.", "3.", "3.")
    _, samples = run_session(client, play)
    assert [text_of(sample) for sample in samples] == ["ua.a1.ub.a2.", "ua.a1.ub.a3.", "ua.a1.ub.a3."]
    assert trained(samples) == ["1.2.", "3.", "3."], "the beginning is trained once"
    assert len({sampling.seed for _, sampling in client.asked}) == 4


def test_choices_draw_as_separate_requests_do() -> None:
    async def together(agent: Agent) -> None:
        await choices(agent, user("a"), 2)

    async def apart(agent: Agent) -> None:
        for _ in range(2):
            await agent.ask(user("a"))

    clients = [ScriptedClient("1.", "2.") for _ in range(2)]
    for client, play in zip(clients, (together, apart), strict=True):
        run_session(client, play)
    assert clients[0].asked == clients[1].asked


def test_choices_that_an_agent_passes_over_are_left_out_unless_it_wants_them() -> None:
    async def play(agent: Agent) -> list[list[str]]:
        _, second, third, _ = await choices(agent, user("a"), 4)
        await agent.ask([*second, *user("b")])
        last = await choices(agent, [*third, *user("c")], 2)
        await agent.ask([*last[1], *user("d")])
        return [trained(agent.session.samples(passed_over=over)) for over in (False, True)]

    client = ScriptedClient("1.", "2.", "3.", "4.", "5.", "6.", "7.", "8.")
    (kept, whole), samples = run_session(client, play)
    assert kept == trained(samples) == ["2.5.", "3.7.8."]
    assert whole == ["1.", "4.", "2.5.", "3.6.", "7.8."]


def test_choice_whose_history_is_rewritten_is_not_passed_over() -> None:
    async def play(agent: Agent) -> None:
        first, _ = await choices(agent, user("a"), 2)
        first[-1]["content"] = first[-1]["content"].strip()
        await agent.ask([*first, *user("b")])

    _, samples = run_session(ScriptedClient("1 .", "2 .", "3."), play, history="template")
    assert trained(samples) == ["1 .", "3."]


def test_choice_is_not_passed_over_if_the_request_that_went_on_with_another_has_failed() -> None:
    async def play(agent: Agent) -> int:
        first, _ = await choices(agent, user("a"), 2)
        return (await agent.post({"messages": [*first, *user("b")], "logprobs": True}))[0]

    status, samples = run_session(ScriptedClient("1.", "2.", RequestRefused("no logprobs")), play)
    assert status == 400 and trained(samples) == ["1.", "2."]


def test_choices_of_which_one_fails_are_no_samples() -> None:
    async def play(agent: Agent) -> int:
        return (await agent.post({"messages": user("a"), "n": 3}))[0]

    client = ScriptedClient("1.", RequestRefused("too long"), "3.")
    status, samples = run_session(client, play)
    assert (status, samples, client.lines) == (400, [], [])


def test_equal_choices_are_gone_on_with_each_for_itself() -> None:
    async def play(agent: Agent) -> None:
        one, other = await choices(agent, user("a"), 2)
        await agent.ask([*one, *user("b")])
        await agent.ask([*other, *user("b")])

    _, samples = run_session(ScriptedClient("1.", "1.", "2.", "3."), play)
    assert trained(samples) == ["1.2.", "1.3."]


def test_choices_share_nothing_of_the_budget_but_their_beginning() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("a"))
        for one in await choices(agent, [*so_far, *user("b")], 2):
            await choices(agent, [*one, *user("c")], 2)

    client = ScriptedClient("1.", "2.", "3.", *["4567"] * 4)
    _, samples = run_session(client, play, max_tokens=6)
    assert trained(samples) == ["1.2.45", "45", "3.45", "45"]
    assert [sample.finish_reason for sample in samples] == ["length"] * 4


def test_choices_without_room_train_their_beginning_once() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("a"))
        await choices(agent, [*so_far, *user("b")], 2)

    _, samples = run_session(ScriptedClient("1."), play, max_tokens=2)
    assert trained(samples) == ["1."]
