"""Text environments with Gymnasium's interface: their tasks, and how the policy plays them."""

import asyncio
import base64
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout.engines.answers import RequestRefused
from rollout.environments.environment import (
    Environment,
    EnvironmentSettingError,
    check_played,
    resolve_environment,
)
from rollout.environments.policy import Policy
from rollout.environments.text_gym import TextGym
from rollout.loaded_code import code_of
from rollout.origin import Sampling
from rollout.pictures import open_picture
from rollout.tasks.task_set import Task, TaskError, load_tasks
from rollout.tasks.text_gym import TextEnvironment
from rollout.trajectory import unfit
from tests.rollout.environments.outside import MODULES, Saying, played
from tests.rollout.rollout_helpers import wait_until
from tests.rollout.scripted import text_of

GUESS = '''
import random
import time

class Guess:
    """Guess the number; `trouble` is what step does."""

    def __init__(self, most=9, trouble=""):
        self.most, self.trouble = most, trouble

    def reset(self, *, seed=None, options=None):
        if self.trouble == "reset":
            return [0.5], {}
        self.number = random.Random(seed).randint(0, self.most)
        self.tries = 0
        return f"0 to {self.most}, not {(self.number + 1) % (self.most + 1)}?", {}

    def step(self, action):
        self.tries += 1
        if self.trouble == "hang":
            while True:
                try:
                    time.sleep(100)
                except Exception:
                    pass
        if self.trouble == "slow":
            time.sleep(100)
        if self.trouble == "raise":
            raise RuntimeError("the die is lost")
        if self.trouble == "nonsense":
            return "more"
        if self.trouble == "nan":
            return "more", float("nan"), False, False, {}
        right = action == str(self.number)
        return "no", right - 0.25, right, self.tries >= 3, {"metrics": {"tries": self.tries}}
'''
NAME = "gym:guess_game:Guess"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("installed")
    (place / "guess_game.py").write_text(GUESS)
    (place / "digit_game.py").write_text(MODULES["digit_game.py"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(place), *sys.path])
        yield place
    sys.modules.pop("guess_game", None)
    sys.modules.pop("digit_game", None)


@pytest.fixture(scope="module")
def guess(installed: Path) -> Iterator[TextGym]:
    environment = TextGym("guess_game:Guess")
    yield environment
    environment._pool.close()


def load(text: str, split: Any = "train", seed: int = 0) -> list[Task]:
    return list(load_tasks(text, seed=seed, split=split).tasks)


def task_of(trouble: str = "", step_timeout_s: float = 60.0) -> Task:
    parameters = {"most": 9, **({"trouble": trouble} if trouble else {})}
    made = {"name": "guess_game:Guess", "parameters": parameters, "step_timeout_s": step_timeout_s}
    return {"id": "1", "seed": 7, "prompt": "", "gym": made}


def test_tasks_are_first_observations_by_seed() -> None:
    train, evaluation = load(NAME + ",size=20,most=5"), load(NAME + ",size=20,most=5", "eval")
    assert (len(train), len(evaluation)) == (18, 2)
    assert not {task["seed"] for task in train} & {task["seed"] for task in evaluation}
    assert train[0]["messages"][0]["content"].startswith("0 to 5, not ")
    assert load(NAME + ",size=20,most=5") == train != load(NAME + ",size=20,most=5", seed=1)


class Painting:
    """Observes what it is given; `render` returns a picture."""

    def __init__(self, observation: Any, render_mode: str | None) -> None:
        self.observation, self.render_mode = observation, render_mode

    def reset(self, **_: Any) -> Any:
        return self.observation, {}

    def render(self) -> Any:
        return RED


RED, BLUE = (np.full((4, 8, 3), colour, np.uint8) for colour in ((255, 0, 0), (0, 0, 255)))


@pytest.mark.parametrize(
    ("observation", "render_mode", "shown"),
    [
        (BLUE, None, [BLUE]),
        ({"goal": "a", "screen": BLUE, "text": "b", "more": "c"}, None, ["a", BLUE, "b\nc"]),
        ({"goal": "a", "text": "b"}, "ansi", ["a\nb"]),
        ("a", "rgb_array", ["a", RED]),
        (np.zeros(4), "rgb_array", [RED]),
    ],
)
def test_observation_may_be_a_picture_or_have_some(
    observation: Any, render_mode: Any, shown: list[Any]
) -> None:
    content = painted(observation, render_mode).reset(0, None)
    parts: list[Any] = [{"text": content}] if isinstance(content, str) else content
    assert len(parts) == len(shown)
    for part, expected in zip(parts, shown, strict=True):
        if isinstance(expected, str):
            assert part["text"] == expected
        else:
            data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
            assert (np.asarray(open_picture(data)) == expected).all()


def test_observation_that_is_no_picture_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"reset returned .* not a picture: an array \(4,\) of float64; it must"
    ):
        painted(np.zeros(4), None).reset(0, None)
    with pytest.raises(
        ValueError, match="reset returned an observation of type int; it must be a string, or a"
    ):
        painted({"text": "a", "number": 3}, None).reset(0, None)


def painted(observation: Any, render_mode: str | None) -> TextEnvironment:
    environment = TextEnvironment.__new__(TextEnvironment)
    environment._limit_s, environment._environment = 60.0, Painting(observation, render_mode)
    return environment


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Guess-v0", "'Guess-v0': give gym:MODULE:CLASS, or a function"),
        ("guess_game:Gess", "guess_game.py; did you mean Guess?"),
        ("no_such_game:Guess", "module 'no_such_game' cannot be imported"),
        ("guess_game:Guess,least=1", "): got an unexpected keyword argument 'least'"),
        ("guess_game:Guess,trouble=reset", "reset returned an observation of type list; it must be a string"),
        ("guess_game:Guess,step_timeout_s=0", "step_timeout_s=0: give a number of seconds above 0"),
        ("guess_game:Guess,size=none", "size=none: give a number above 0"),
    ],
)
def test_wrong_source_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(TaskError) as caught:
        load("gym:" + text)
    message = str(caught.value)
    assert message.startswith(f"gym:{text}: ") and reason in message and "\n" not in message


def test_wrong_environment_is_one_line() -> None:
    with pytest.raises(EnvironmentSettingError, match=r"no such name in .*; did you mean Guess\?"):
        resolve_environment("gym:guess_game:Gess")
    with pytest.raises(EnvironmentSettingError, match="'CartPole-v1': give gym:MODULE:CLASS"):
        resolve_environment("gym:CartPole-v1")
    with pytest.raises(EnvironmentSettingError, match="give its parameters behind --tasks gym:NAME"):
        resolve_environment(NAME + ",most=3")


def test_digest_covers_the_package(installed: Path, guess: Environment) -> None:
    before = code_of(NAME, guess)
    (installed / "guess_game.py").write_text(GUESS + "\n# another version\n")
    assert code_of(NAME, resolve_environment(NAME)) != before
    (installed / "guess_game.py").write_text(GUESS)
    assert code_of(NAME, resolve_environment(NAME)) == before


def test_each_turn_is_an_action_and_the_rewards_are_added_up(guess: Environment) -> None:
    number = next(
        n for n in range(10) if n != 4 and played(guess, task_of(), saying(n), n=1)[0].reward == 0.75
    )
    asked = f"u0 to 9, not {(number + 1) % 10}?.a"
    (right,) = played(guess, task_of(), saying(number), n=1)
    assert (text_of(right), right.metrics) == (f"{asked}{number}.", {"turns": 1.0, "tries": 1.0})
    (wrong,) = played(guess, task_of(), lambda *_: "x.", n=1)
    assert text_of(wrong) == f"{asked}x.uno.ax.uno.ax." and text_of(wrong, trained=True) == "x.x.x."
    assert (wrong.reward, wrong.metrics) == (-0.75, {"turns": 3.0, "tries": 3.0})
    assert [turn.reward for turn in wrong.generated_turns] == [-0.25, -0.25, -0.25]
    first, second, third = (turn.state for turn in wrong.generated_turns)
    assert first == right.generated_turns[0].state != second == third, "a state is the observation"


def saying(number: int) -> Any:
    return lambda *_: f"{number}."


def test_samples_of_a_group_are_played_at_the_same_time_with_seeds_of_their_own(guess: Environment) -> None:
    first = played(guess, task_of(), lambda _, seed: f"{seed % 10}.", n=4)
    again = played(guess, task_of(), lambda _, seed: f"{seed % 10}.", n=4)
    assert [text_of(sample) for sample in first] == [text_of(sample) for sample in again]
    assert all(unfit(sample, demonstrated=False) is None for sample in first)


def test_budget_of_tokens_ends_the_episode(guess: Environment) -> None:
    (sample,) = played(guess, task_of(), lambda *_: "xx.", n=1, max_tokens=5)
    assert (text_of(sample, trained=True), sample.finish_reason) == ("xx.xx", "length")
    assert (sample.reward, sample.metrics["turns"]) == (-0.5, 2.0)


@pytest.mark.parametrize(
    ("trouble", "fault"),
    [
        ("raise", "RuntimeError: the die is lost"),
        ("nonsense", "step returned 'more'; it must return observation, reward, terminated"),
        ("nan", "step returned the reward nan; it must be finite"),
    ],
)
def test_trouble_costs_the_sample_and_is_said(trouble: str, fault: str, guess: Environment) -> None:
    (sample,) = played(guess, task_of(trouble), lambda *_: "1.", n=1)
    assert fault in str(unfit(sample, demonstrated=False))
    assert played(guess, task_of(), lambda *_: "x.", n=1)[0].reward == -0.75


def test_step_that_hangs_loses_its_process_and_nothing_else(guess: Environment) -> None:
    (sample,) = played(guess, task_of("hang", step_timeout_s=3), lambda *_: "1.", n=1)
    assert "it crashed its process (SIGALRM)" in str(sample.fault)
    (sample,) = played(guess, task_of("slow", step_timeout_s=3), lambda *_: "1.", n=1)
    assert sample.fault == "TimeoutError: step takes longer than step_timeout_s=3"
    assert played(guess, task_of(), lambda *_: "x.", n=1)[0].reward == -0.75


def test_group_that_is_cancelled_ends_its_processes(guess: TextGym) -> None:
    async def main() -> None:
        sampling, client = Sampling(n=2, max_tokens=50), Saying(lambda *_: "x.")
        group = asyncio.create_task(guess(task_of("hang"), Policy(client, sampling, 3), sampling))
        while len(client.prompts) < 2:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.3)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        wait_until(lambda: not guess._pool._running)

    asyncio.run(main())


def test_prompt_that_the_engine_refuses_costs_the_sample(guess: Environment) -> None:
    def refuse(*_: Any) -> str:
        raise RequestRefused("too long")

    (sample,) = played(guess, task_of(), refuse, n=1)
    assert "the policy answers 400" in str(sample.fault) and "too long" in str(sample.fault)


def test_environment_of_the_page_plays_its_rounds() -> None:
    environment, (task, *others) = TextGym("digit_game:Digits"), load("gym:digit_game:Digits,size=4")
    assert len(others) == 2
    (sample,) = played(environment, task, lambda *_: "12ab.", n=1)
    assert (sample.reward, sample.metrics) == (1.5, {"turns": 3.0, "digits": 0.5})
    assert text_of(sample) == f"u{task['messages'][0]['content']}.a12ab." + "uMore: .a12ab." * 2
    environment._pool.close()
    (other,) = load("gym:digit_game:Digits,noise=true,size=4", "eval")
    assert other["gym"]["parameters"] == {"noise": True}


def test_task_of_a_file_may_have_a_seed_and_options(guess: Environment) -> None:
    (sample,) = played(guess, {"id": "1", "seed": 7, "prompt": ""}, lambda *_: "x.", n=1)
    assert text_of(sample).startswith(text_of(played(guess, task_of(), lambda *_: "x.", n=1)[0])[:20])


def test_task_that_tells_the_environment_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="would be ignored; give --tasks gym:guess_game:Guess as well"):
        check_played(NAME, {"id": "1", "prompt": "1+1=", "answer": "2"})
    check_played(NAME, {"id": "1", "prompt": "", "options": {"most": 3}})
