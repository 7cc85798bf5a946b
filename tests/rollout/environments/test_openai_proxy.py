"""The policy behind an OpenAI-compatible base_url: conversations, branches, the wire, and what is left."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import serve
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.trajectory import Group, Sample, line_for_people
from tests.rollout.rollout_helpers import RunningServer
from tests.rollout.scripted import Agent, ScriptedClient, run_session, text_of, user


class Answering(ScriptedClient):
    """Answers with `say(prompt)`, whatever the order of the requests."""

    def __init__(self, say: Callable[[str], str], delay_s: float = 0.0) -> None:
        super().__init__()
        self.say, self.delay_s = say, delay_s
        self.asking: list[Any] = []
        self.cancelled = 0

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        self.asking.append(prompt)
        try:
            await asyncio.sleep(self.delay_s)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.lines.insert(0, self.say("".join(map(chr, prompt))))
        return await super().generate(prompt, sampling)


def test_messages_that_repeat_the_conversation_continue_it_in_its_tokens() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("2+2"))
        so_far[-1] |= {"tool_calls": None, "refusal": None}  # as clients dump it
        so_far[-1]["content"] = [{"type": "text", "text": so_far[-1]["content"] + "\n"}]
        so_far = await agent.ask([*so_far, *user("sure?"), *user("really?")])
        await agent.ask([*so_far, *user("ok")])

    client = ScriptedClient("5.", "yes.", "end.")
    _, (sample,) = run_session(client, play)
    assert text_of(sample) == "u2+2.a5.usure?.ureally?.ayes.uok.aend."
    assert text_of(sample, trained=True) == "5.yes.end."
    assert (sample.text, sample.finish_reason, sample.reward) == ("end", "stop", None)


def test_anything_else_begins_a_conversation_of_its_own() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("a"))
        await agent.ask(user("b"))
        changed = {**so_far[-1], "content": "changed"}
        await agent.ask([*user("a"), changed, *user("c")])

    _, samples = run_session(ScriptedClient("1.", "2.", "3."), play)
    assert [text_of(sample) for sample in samples] == ["ua.a1.", "ub.a2.", "ua.achanged.uc.a3."]
    assert [text_of(sample, trained=True) for sample in samples] == ["1.", "2.", "3."]


def test_branches_share_their_beginning_and_train_it_once() -> None:
    async def play(agent: Agent) -> None:
        so_far = await agent.ask(user("a"))
        await agent.ask([*so_far, *user("b")])
        await agent.ask([*so_far, *user("c")])
        await agent.ask([*so_far, *user("c")])

    client = ScriptedClient("1.", "2.", "3.", "4.")
    _, samples = run_session(client, play)
    assert [text_of(sample) for sample in samples] == ["ua.a1.ub.a2.", "ua.a1.uc.a3.", "ua.a1.uc.a4."]
    assert [text_of(sample, trained=True) for sample in samples] == ["1.2.", "3.", "4."]
    assert [[turn.text for turn in sample.turns] for sample in samples] == [
        ["a", "1", "b", "2"],
        ["a", "1", "c", "3"],
        ["a", "1", "c", "4"],
    ]
    line = json.loads(line_for_people(Group(0, "t", "a", samples), rank=0, model_version="p"))
    trained = [[turn["trained"] for turn in one["turns"] if "trained" in turn] for one in line["samples"]]
    assert trained == [[2, 2], [0, 2], [0, 2]]
    assert samples[1].logprobs.tolist() == [-0.5 * m for m in samples[1].loss_mask]
    assert len({sampling.seed for _, sampling in client.asked}) == 4


def test_equal_answers_to_equal_questions_are_continued_each_for_itself() -> None:
    async def play(agent: Agent) -> None:
        one, other = await agent.ask(user("a")), await agent.ask(user("a"))
        await agent.ask([*one, *user("b")])
        await agent.ask([*other, *user("b")])

    _, samples = run_session(ScriptedClient("1.", "1.", "2.", "3."), play)
    assert [text_of(sample, trained=True) for sample in samples] == ["1.2.", "1.3."]


def test_conversations_do_not_depend_on_which_request_is_faster() -> None:
    async def chain(agent: Agent, name: str) -> None:
        so_far = await agent.ask(user(name))
        await asyncio.gather(agent.ask([*so_far, *user("x")]), agent.ask([*so_far, *user("y")]))

    def seeds(names: str, delay_s: float) -> set[tuple[str, int | None]]:
        client = Answering(lambda prompt: f"{len(prompt)}.", delay_s)

        async def play(agent: Agent) -> None:
            await asyncio.gather(*(chain(agent, name) for name in names))

        _, samples = run_session(client, play)
        assert len(samples) == 2 * len(names)
        return {("".join(map(chr, prompt)), sampling.seed) for prompt, sampling in client.asked}

    assert seeds("abc", 0.0) == seeds("cab", 0.01)


def test_request_may_lower_the_budget_and_add_stop_strings() -> None:
    async def play(agent: Agent) -> list[Any]:
        first = await agent.post({"messages": user("a"), "max_tokens": 3, "stop": "#"})
        so_far = [*user("a"), {"role": "assistant", "content": "1"}]
        await agent.post(
            {"messages": [*so_far, *user("b")], "max_completion_tokens": 900, "stop": ["$", "#"]}
        )
        last = await agent.ask([*so_far, *user("b"), {"role": "assistant", "content": "2"}, *user("c")])
        return [json.loads(first[1]), last]

    client = ScriptedClient("1.", "2.", "345")
    (first, last), (sample,) = run_session(client, play, max_tokens=6, stop=("\n",))
    limits = [(sampling.max_tokens, sampling.stop) for _, sampling in client.asked]
    assert limits == [(3, ("\n", "#")), (4, ("\n", "$", "#")), (2, ("\n",))]
    assert first["usage"] == {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    assert last[-1]["content"] == "34" and sample.finish_reason == "length"


def test_refused_request_is_the_agents_error_and_leaves_the_conversation() -> None:
    async def play(agent: Agent) -> tuple[int, str]:
        await agent.ask(user("a"))
        return await agent.post({"messages": user("b" * 100)})

    client = ScriptedClient("1.", RequestRefused("too long"))
    ((status, text), samples) = run_session(client, play)
    assert status == 400 and json.loads(text)["error"]["message"] == "too long"
    assert [text_of(sample) for sample in samples] == ["ua.a1."]


def test_failed_engine_ends_the_session_with_its_own_error() -> None:
    async def play(agent: Agent) -> None:
        status, text = await agent.post({"messages": user("a")})
        raise KeyError(f"{status} {text}")  # the agent's own way to fail

    with pytest.raises(EngineError, match="gone"):
        run_session(ScriptedClient(EngineError("gone")), play)


def test_session_that_ends_cancels_its_requests_and_leaves_neither_task_nor_socket() -> None:
    client = Answering(lambda _: "1.", delay_s=60)

    async def main() -> list[Sample]:
        policy = Policy(client, Sampling(), 1)
        async with aiohttp.ClientSession() as http:
            async with serve(policy) as session:
                agent = Agent(session, http)
                asked = [asyncio.create_task(agent.post({"messages": user(name)})) for name in "abc"]
                async with asyncio.timeout(30):
                    while len(client.asking) < 3:
                        await asyncio.sleep(0.01)
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(outcome, aiohttp.ClientConnectionError) for outcome in outcomes)
            with pytest.raises(aiohttp.ClientConnectionError):
                await http.get(session.base_url + "/models")
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return session.samples()

    assert asyncio.run(main()) == []
    assert client.cancelled == 3


def test_agent_that_keeps_asking_does_not_hold_the_session_open() -> None:
    client = Answering(lambda _: "1.", delay_s=0.001)

    async def ask_for_ever(agent: Agent) -> None:
        while True:
            await agent.post({"messages": user("a")})

    async def main() -> None:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(30), serve(Policy(client, Sampling(), 1)) as session:
                agents = [asyncio.create_task(ask_for_ever(Agent(session, http))) for _ in range(4)]
                while len(client.asking) < 40:
                    await asyncio.sleep(0.01)
            outcomes = await asyncio.gather(*agents, return_exceptions=True)
        assert all(isinstance(outcome, aiohttp.ClientConnectionError) for outcome in outcomes)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_cancelled_environment_closes_its_session() -> None:
    client = Answering(lambda _: "1.", delay_s=60)

    async def main() -> None:
        async def environment() -> None:
            async with aiohttp.ClientSession() as http, serve(Policy(client, Sampling(), 1)) as session:
                await Agent(session, http).ask(user("a"))

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await environment()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert client.cancelled == 1


def test_parallel_sessions_on_a_real_engine_are_what_each_is_alone(server: RunningServer) -> None:
    async def play(policy: Policy, j: int) -> list[list[int]]:
        async with aiohttp.ClientSession() as http, serve(policy, j) as session:
            agent = Agent(session, http)
            so_far = await agent.ask(user("27+58="), max_tokens=8)
            await agent.ask([*so_far, *user("sure")], max_tokens=8)
            (sample,) = session.samples()
        assert sample.loss_mask.sum() <= 16
        return [sample.token_ids.tolist(), sample.loss_mask.tolist()]

    async def main(at_once: bool) -> list[list[list[int]]]:
        async with EngineClient(server.url) as client:
            policy = Policy(client, Sampling(max_tokens=32), 9)
            if at_once:
                return list(await asyncio.gather(*(play(policy, j) for j in range(12))))
            return [await play(policy, j) for j in range(12)]

    together, alone = asyncio.run(main(True)), asyncio.run(main(False))
    assert together == alone and len({str(sample) for sample in together}) == 12
