"""Environments: seeds of calls, samples of completions."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.calculator import calculator
from rollout.environments.environment import (
    EnvironmentSettingError,
    check_played,
    resolve_environment,
    single_turn,
)
from rollout.environments.policy import Policy
from rollout.environments.turns import sample_of
from rollout.origin import Sampling


class RecordingClient(EngineClient):
    """Answers with the seeds it was asked to use."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.calls: list[tuple[Any, Sampling]] = []

    async def generate(self, prompt: Any, sampling: Sampling) -> list[Completion]:
        self.calls.append((prompt, sampling))
        assert sampling.seed is not None
        return [Completion([1, 2], [sampling.seed + j], [-0.5], "x", "stop") for j in range(sampling.n)]

    async def tokenize(self, text: Any, **template: Any) -> list[int]:
        return [len(text)]


def seeds(completions: list[Completion]) -> list[int]:
    return [completion.token_ids[0] for completion in completions]


def test_first_call_uses_the_group_seed_and_later_ones_their_own() -> None:
    async def main() -> tuple[list[list[int]], list[list[int]]]:
        runs = []
        for _ in range(2):
            policy = Policy(RecordingClient(), Sampling(), 1000)
            runs.append([seeds(await policy.generate("p", n=2)) for _ in range(3)])
        return runs[0], runs[1]

    first, again = asyncio.run(main())
    assert first == again
    assert first[0] == [1000, 1001]
    assert len({seed for call in first for seed in call}) == 6


def test_policy_of_a_sample_draws_what_one_call_for_all_draws() -> None:
    async def main() -> tuple[list[int], list[int]]:
        policy = Policy(RecordingClient(), Sampling(), 1000)
        each = [seeds(await policy.for_sample(j).generate("p"))[0] for j in range(3)]
        return seeds(await policy.generate("p", n=3)), each

    together, each = asyncio.run(main())
    assert together == each


def test_messages_go_through_the_tokenizer_and_settings_through_to_the_engine() -> None:
    client = RecordingClient()
    sampling = Sampling(n=4, max_tokens=7, temperature=0.5, stop=("\n",))

    async def main() -> None:
        policy = Policy(client, sampling, 5)
        await single_turn({"id": "1", "messages": [{"role": "user", "content": "hi"}]}, policy, sampling)
        await policy.generate([1, 2], max_tokens=3)

    asyncio.run(main())
    assert client.calls[0] == ([1], Sampling(n=4, max_tokens=7, temperature=0.5, stop=("\n",), seed=5))
    assert client.calls[1][0] == [1, 2] and client.calls[1][1].max_tokens == 3 and client.calls[1][1].n == 1


def test_sample_trains_the_completion_and_not_the_prompt() -> None:
    sample = sample_of(Completion([5, 6, 7], [8, 1], [-0.5, -0.25], "8", "stop"))
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 1] and sample.token_ids.dtype == np.int32
    assert sample.loss_mask.tolist() == [0, 0, 0, 1, 1] and sample.loss_mask.dtype == np.uint8
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -0.25] and sample.logprobs.dtype == np.float32
    assert (sample.text, sample.finish_reason, sample.reward) == ("8", "stop", None)


def test_sample_of_several_turns_masks_what_was_observed() -> None:
    first = Completion([5], [8, 1], [-1, -2], "8", "stop")
    second = Completion([5, 8, 1, 30, 31], [9], [-3], "9", "length")
    sample = sample_of(first, second)
    assert sample.token_ids.tolist() == [5, 8, 1, 30, 31, 9]
    assert sample.loss_mask.tolist() == [0, 1, 1, 0, 0, 1]
    assert sample.logprobs.tolist() == [0, -1, -2, 0, 0, -3]
    assert sample.finish_reason == "length"


def test_turns_that_were_tokenised_again_are_refused() -> None:
    first = Completion([5], [8, 1], [-1, -2], "8", "stop")
    with pytest.raises(ValueError, match="turn 0 is not continued"):
        sample_of(first, Completion([5, 8, 2, 30], [9], [-3], "9", "stop"))


def test_environment_is_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "played_elsewhere.py").write_text("async def play(task, policy, sampling): return []\n")
    monkeypatch.chdir(tmp_path)
    assert resolve_environment("single_turn") is single_turn
    assert resolve_environment("calculator") is calculator
    assert resolve_environment("played_elsewhere:play").__name__ == "play"


USERS = """
import asyncio
import contextlib
import functools


async def play(task, policy, sampling):
    return []

async def play_with(depth, task, policy, sampling):
    return []

partial = functools.partial(play_with, 3)


def unmarked(function):
    def call(*given, **named):
        made = function(*given, **named)
        return made
    return call


def marked(function):
    @functools.wraps(function)
    def call(task, policy, sampling):
        with contextlib.nullcontext():
            return function(task, policy, sampling)
    return call


wrapped, wrapped_well = unmarked(play), marked(play)


@marked
async def fewer(task):  # the wrapper of another decorator might give it what it wants
    return []


class Game:
    def __init__(self, depth=3):
        self.depth = depth

    async def __call__(self, task, policy, sampling):
        return []

    async def method(self, task, policy, sampling):
        return []


made, method = Game(), Game().method


class Awaited:
    def __init__(self, task, policy, sampling):
        pass

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return []


def handed_on(task, policy, sampling):
    return play(task, policy, sampling)


def sync(task, policy, sampling):
    samples = []
    samples.extend(policy.generate(task["prompt"]))
    return samples

def listed(task, policy, sampling):
    return [one for one in policy.generate(task["prompt"])]

async def too_few(task, policy):
    return []

async def too_many(task, policy, sampling, depth):
    return []

async def yields(task, policy, sampling):
    yield []

class Needs:
    def __init__(self, depth):
        pass

    async def __call__(self, task, policy, sampling):
        return []

class Sync:
    def __call__(self, task, policy, sampling):
        return []
"""


@pytest.fixture
def users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Environments as users write them, in the module `users_games`."""
    (tmp_path / "users_games.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("users_games", None)


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    "name",
    [
        "play",
        "partial",
        "wrapped",
        "wrapped_well",
        "Game",
        "made",
        "method",
        "Awaited",
    ],
)
def test_whatever_can_be_called_and_awaited_is_an_environment(name: str) -> None:
    environment = resolve_environment(f"users_games:{name}")
    nothing: Any = None

    async def played() -> Any:
        return await environment(nothing, nothing, nothing)

    assert asyncio.run(played()) == []


@pytest.mark.usefixtures("users")
def test_decorated_environment_is_judged_by_what_its_decorator_takes() -> None:
    assert resolve_environment("users_games:fewer")


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("sync", "it is not async; write `async def`"),
        ("listed", "is not async"),
        ("Sync", "is not async"),
        ("handed_on", "is not async; write `async def`, and `await`"),
        ("too_few", r"takes \(task, policy\), but is called with \(task, policy, sampling\)"),
        ("too_many", r"takes \(task, policy, sampling, depth\), but"),
        ("yields", "yields; it must return"),
        (
            "Needs",
            "class 'users_games:Needs' cannot be made without arguments: TypeError: .*'depth'; make an "
            "object of it in users_games, and name that",
        ),
    ],
)
def test_environment_that_cannot_be_played_is_refused(name: str, reason: str) -> None:
    with pytest.raises(EnvironmentSettingError, match=reason):
        resolve_environment(f"users_games:{name}")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "multi_turn",
            "there is single_turn, .*, python, verifiers:NAME, gym:MODULE:CLASS and openenv:URL, or give",
        ),
        ("nowhere:f", "cannot be imported"),
    ],
)
def test_name_that_is_no_environment_is_an_error(name: str, reason: str) -> None:
    with pytest.raises(EnvironmentSettingError, match=reason):
        resolve_environment(name)


def test_task_of_an_environment_from_elsewhere_names_it_where_none_was_given() -> None:
    task = {"id": "a", "messages": [], "gym": {"name": "games:Maze"}}
    with pytest.raises(ValueError, match=r"give --environment gym:games:Maze$"):
        check_played("single_turn", task)
    check_played("users.py:play", task)
    check_played("single_turn", {"id": "a", "prompt": "?", "gym": "the field of a task"})


def test_names_that_a_file_has_are_those_of_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "guesses.py").write_text("async def game(task, policy, sampling): ...\ndef load(): ...\n")
    with pytest.raises(EnvironmentSettingError, match=r"no such name in .*guesses\.py; it has game$"):
        resolve_environment("guesses:unknown")
