"""Environment servers of OpenEnv: their tasks, and how the policy plays them."""

import asyncio
import json
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rollout import tally
from rollout.engines.answers import RequestRefused
from rollout.environments.environment import EnvironmentSettingError, check_played, resolve_environment
from rollout.environments.openenv import OpenEnv
from rollout.environments.policy import Policy
from rollout.loaded_code import code_of
from rollout.origin import Sampling
from rollout.pictures import open_picture, size_of
from rollout.tasks import openenv, openenv_client
from rollout.tasks.openenv_client import EXCERPT, read
from rollout.tasks.pictures import publish_picture
from rollout.tasks.task_set import Task, TaskError, load_tasks
from rollout.trajectory import unfit
from tests.rollout.environments.openenv_server import Action, Observation, Server
from tests.rollout.environments.outside import Saying, played
from tests.rollout.rollout_helpers import wait_until
from tests.rollout.scripted import text_of


class Answer(Action):
    message: str
    thought: str | None = None


class Seen(Observation):
    prompt: str = ""
    hint: str | None = None
    left: int = 3


class Guess:
    """Guess the number within three steps; `trouble` is what they say."""

    def reset(self, seed: int = 0, most: int = 9, trouble: str = "") -> Any:
        self.trouble, self.tries = trouble, 0
        self.number = random.Random(seed).randint(0, most)
        if trouble == "unseeded":
            self.number = random.randint(0, 10**9)
        hint = None if trouble == "no hint" else "guess"
        return Seen(prompt=f"0 to {most}, not {self.number + 1}?", hint=hint, done=trouble == "done")

    def step(self, action: Answer) -> Any:
        self.tries += 1
        if self.trouble in ANSWERS:
            return ANSWERS[self.trouble]
        if self.trouble == "raise":
            raise RuntimeError("the die\nis lost")
        right = action.message == str(self.number)
        reward = None if self.trouble == "null" or self.tries == 2 else right - 0.25
        prompt = "no " * 350_000 if self.trouble == "long" and self.tries == 1 else "no"
        told = {"tries": self.tries, "word": "x", "endless": float("inf")}
        return Seen(prompt=prompt, reward=reward, done=right or self.tries >= 3, metadata=told)


def said(**data: Any) -> str:
    given = {"observation": {"prompt": "p"}, "reward": 1.0, "done": False, **data}
    return json.dumps({"type": "observation", "data": given})


ANSWERS = {
    "never": "never",
    "hang up": "hang up",
    "half": '{"type": "observation", "da',
    "list": "[1]",
    "nan": said(reward=float("nan")),
    "word": said(reward="high"),
    "huge": said(reward=10**400),
    "maybe": said(done="maybe"),
    "number": said(observation={"prompt": 3}),
    "nothing": said(observation=None),
    "surrogate": said(observation={"prompt": "a\ud800"}),
    "too much": "x" * 5_000_000,
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(Guess, Answer, Seen) as server:
        yield server


@pytest.fixture(scope="module")
def guess(server: Server) -> OpenEnv:
    return OpenEnv(server.url)


@contextmanager
def silent(answer: bytes) -> Iterator[str]:
    """The URL of a server that answers every connection so, and then nothing any more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    kept.append(listening.accept()[0])
                except OSError:
                    return
                kept[-1].sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in kept:
            one.close()


def source(server: Server, *parameters: str) -> str:
    return ",".join([f"openenv:{server.url}", "action=message", "observation=prompt", "size=20", *parameters])


def load(text: str, split: Any = "train", seed: int = 0) -> list[Task]:
    return list(load_tasks(text, seed=seed, split=split).tasks)


def task_of(server: Server, trouble: str = "", limit_s: float = 60.0) -> Task:
    made = {"name": server.url, "action": "message", "observation": ["prompt"], "step_timeout_s": limit_s}
    made["reset"] = {"trouble": trouble} if trouble else {}
    return {"id": "1", "seed": 7, "prompt": "", "openenv": made}


def test_tasks_are_first_observations_by_seed(server: Server) -> None:
    text = source(server, "reset.most=5")
    train, evaluation = load(text), load(text, "eval")
    assert (len(train), len(evaluation)) == (18, 2)
    assert not {task["seed"] for task in train} & {task["seed"] for task in evaluation}
    assert train[0]["messages"][0]["content"].startswith("0 to 5, not ")
    assert load(text) == train != load(text, seed=1)
    both = load(source(server, "observation=prompt+hint"))
    assert both[0]["messages"][0]["content"].endswith("?\nguess")
    wait_until(lambda: not server.sessions)


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ("size=0", "size=0: give a number above 0"),
        ("size=1", "size=1 leaves no train task; raise it"),
        ("step_timeout_s=never", "step_timeout_s=never: give a number of seconds above 0"),
        ("noise=true", "noise: there is action, observation, reset.ARGUMENT, size and step_timeout_s"),
        (
            "observation=hint",
            "its action has the texts message, thought, and metadata; give one of the texts",
        ),
        (
            "action=message",
            "its observation has the texts prompt, hint, and done, reward, metadata, left; give",
        ),
        ("action=left", "action=left: its action has the texts message, thought, and metadata; give one"),
        ("action=thought,observation=hint", "an action needs message beside the text in thought"),
        ("action=message,observation=left", "observation=left: its observation has the texts prompt, hint"),
        ("action=message,observation=hint,reset.trouble=no hint", "hint is None; it must be a string"),
        ("action=message,observation=prompt,reset.trouble=done", "is done before the first action"),
        ("action=message,observation=prompt,reset.trouble=unseeded", "reset says something else the second"),
        ("action=message,observation=prompt,reset.more=1", "reset: Guess.reset() got an unexpected keyword"),
    ],
)
def test_wrong_source_is_one_line(parameters: str, reason: str, server: Server) -> None:
    text = f"openenv:{server.url},{parameters}"
    with pytest.raises(TaskError) as caught:
        load(text)
    message = str(caught.value)
    assert message.startswith(f"{text}: ") and reason in message and "\n" not in message


class Screen(Observation):
    goal: str = ""
    text: str = ""
    pixels: list[list[list[int]]] | None = None


class Painted:
    """Shows `rows`, which are no picture."""

    def reset(self, seed: int = 0, rows: Any = None) -> Any:
        return Screen(goal="click", text="a page", pixels=rows)


def test_observation_may_be_rows_of_pixels(tmp_path: Path) -> None:
    red = [[[255, 0, 0]] * 8] * 4
    content = openenv.content_of(
        {"goal": "click", "text": "a page", "pixels": red}, ["goal", "text", "pixels"]
    )
    assert isinstance(content, list)
    assert content[0] == {"type": "text", "text": "click\na page"} and len(content) == 2
    data = (tmp_path / publish_picture(content[1]["image_url"], tmp_path)).read_bytes()
    assert size_of(data) == (8, 4) and open_picture(data).getpixel((7, 3)) == (255, 0, 0)
    with Server(Painted, Answer, Screen) as other:
        for rows, reason in (
            ("[[[0,0,256]]]", "the observation's pixels is not a picture: "),
            ("[[[1,2,3]],[[1]]]", "the observation's pixels is not a picture: "),
            ("null", "the observation's pixels is None; it must be a string, or rows of pixels"),
        ):
            with pytest.raises(TaskError, match=reason):
                load(source(other, f"action=message,observation=goal+pixels,reset.rows={rows}"))


class Call(Action):
    tool_name: str
    arguments: dict[str, Any]


@pytest.mark.parametrize(
    ("action", "observation", "reason"),
    [
        (Call, Seen, "its actions are calls of MCP tools; give them to the model in an environment of"),
        (Action, Seen, "its action has the texts (none), and metadata; give one"),
    ],
)
def test_server_that_takes_no_text_is_refused(action: Any, observation: Any, reason: str) -> None:
    with Server(Guess, action, observation) as other, pytest.raises(TaskError) as caught:
        load(f"openenv:{other.url}")
    assert reason in str(caught.value)


def test_wrong_environment_is_one_line(server: Server) -> None:
    for name, reason in {
        "http://127.0.0.1:9": "no server answers at http://127.0.0.1:9: Cannot connect",
        f"{server.url}/wrong": "/wrong/schema answers 404: ",
        f"{server.url},action=message": "give its parameters behind --tasks openenv:URL",
        "127.0.0.1:8000": "'127.0.0.1:8000' is not a URL of a server, such as http://127.0.0.1:8000",
        "http://me:secret@host:1": "is not a URL of a server",
        "": "'' is not a URL of a server",
    }.items():
        with pytest.raises(EnvironmentSettingError) as caught:
            resolve_environment(f"openenv:{name}")
        assert reason in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "answer", [b"<html>", b"[]", b'{"action": {}}', b'{"action": {"properties": {"a": 3}}}', b""]
)
def test_other_server_is_refused(answer: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer)
    with silent(answer) as url, pytest.raises(EnvironmentSettingError) as caught:
        resolve_environment(f"openenv:{url}")
    assert f"{url}/schema is not that of an OpenEnv server: " in str(caught.value)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"])
def test_server_that_hangs_at_the_start_is_refused(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "SCHEMA_TIMEOUT_S", 0.3)
    with silent(answer) as url, pytest.raises(EnvironmentSettingError, match=r"not answer within 0.3 s"):
        resolve_environment(f"openenv:{url}")


# ---- episodes


def saying(number: int) -> Any:
    return lambda *_: f"{number}."


def test_each_turn_is_an_action_and_the_rewards_are_added_up(server: Server, guess: OpenEnv) -> None:
    number = random.Random(7).randint(0, 9)
    (right,) = played(guess, task_of(server), saying(number), n=1)
    assert text_of(right) == f"u0 to 9, not {number + 1}?.a{number}."
    assert (right.reward, right.metrics) == (0.75, {"turns": 1.0, "tries": 1.0})
    (wrong,) = played(guess, task_of(server), lambda *_: "x.", n=1)
    assert text_of(wrong) == f"u0 to 9, not {number + 1}?.ax.uno.ax.uno.ax."
    assert text_of(wrong, trained=True) == "x.x.x." and unfit(wrong, demonstrated=False) is None
    assert (wrong.reward, wrong.metrics) == (-0.5, {"turns": 3.0, "tries": 3.0})
    assert [turn.reward for turn in wrong.generated_turns] == [-0.25, None, -0.25]
    first, second, third = (turn.state for turn in wrong.generated_turns)
    assert first == right.generated_turns[0].state != second == third, "a state is the observation"
    wait_until(lambda: not server.sessions)


def test_samples_of_a_group_are_played_at_the_same_time_with_seeds_of_their_own(
    server: Server, guess: OpenEnv
) -> None:
    first, again = (played(guess, task_of(server), lambda _, seed: f"{seed % 10}.", n=4) for _ in range(2))
    assert [text_of(sample) for sample in first] == [text_of(sample) for sample in again]
    assert len({text_of(sample) for sample in first}) == 4 and server.most_sessions > 1


def test_budget_of_tokens_ends_the_episode(server: Server, guess: OpenEnv) -> None:
    (sample,) = played(guess, task_of(server), lambda *_: "xx.", n=1, max_tokens=5)
    assert (text_of(sample, trained=True), sample.finish_reason) == ("xx.xx", "length")
    assert (sample.reward, sample.metrics["turns"]) == (-0.25, 2.0)


@pytest.mark.parametrize(
    ("trouble", "fault"),
    [
        ("raise", "step: the die is lost (EXECUTION_ERROR)"),
        ("never", "does not answer step within 2 s"),
        ("hang up", "has ended the connection and not answered step"),
        ("too much", "has ended the connection and not answered step"),
        ("half", """step: it answers '{"type": "observation", "da'; it must be an observation"""),
        ("list", "step: it answers '[1]'; it must be an observation"),
        ("nothing", "it must be an observation"),
        ("nan", "step: the reward is nan; it must be a finite number"),
        ("word", "step: the reward is high; it must be a finite number"),
        ("huge", "step: the reward is 1000"),
        ("maybe", "step: done is maybe; it must be true or false"),
        ("number", "the observation's prompt is 3; it must be a string"),
        ("surrogate", "the observation's prompt has half a character"),
        ("null", "gave no reward in 3 steps"),
    ],
)
def test_trouble_costs_the_sample_and_is_said(
    trouble: str, fault: str, server: Server, guess: OpenEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openenv_client, "MOST_BYTES", 2**22)
    limit_s = 2 if trouble == "never" else 60.0
    (sample,) = played(guess, task_of(server, trouble, limit_s), lambda *_: "1.", n=1)
    message = str(unfit(sample, demonstrated=False))
    assert fault in message and "\n" not in message and len(message) < 2 * EXCERPT
    wait_until(lambda: not server.sessions)
    assert played(guess, task_of(server), lambda *_: "x.", n=1)[0].reward == -0.5


def test_action_that_the_server_refuses_names_the_field(server: Server, guess: OpenEnv) -> None:
    task = task_of(server)
    task["openenv"]["action"] = "words"
    (sample,) = played(guess, task, lambda *_: "1.", n=1)
    assert "step: Invalid message (VALIDATION_ERROR)" in str(sample.fault) and "'words'" in str(sample.fault)


def test_observation_of_a_megabyte_is_read(server: Server, guess: OpenEnv) -> None:
    (sample,) = played(guess, task_of(server, "long"), lambda *_: "x.", n=1)
    assert len(text_of(sample)) > 1_000_000 and sample.reward == -0.5


def test_prompt_that_the_engine_refuses_costs_the_sample(server: Server, guess: OpenEnv) -> None:
    def refuse(*_: Any) -> str:
        raise RequestRefused("too\nlong")

    (sample,) = played(guess, task_of(server), refuse, n=1)
    assert sample.fault == "too long"


def test_session_lasts_while_the_model_thinks(server: Server, guess: OpenEnv) -> None:
    class Thinking(Saying):
        async def generate(self, prompt: Any, sampling: Sampling) -> Any:
            await asyncio.sleep(1.2)  # two pings long
            return await super().generate(prompt, sampling)

    async def main() -> Any:
        sampling = Sampling(n=1, max_tokens=50)
        return await guess(task_of(server), Policy(Thinking(lambda *_: "x."), sampling, 3), sampling)

    (sample,) = asyncio.run(main())
    assert (sample.fault, sample.reward) == (None, -0.5)


def test_group_that_is_cancelled_ends_its_sessions(server: Server, guess: OpenEnv) -> None:
    async def main() -> None:
        sampling, client = Sampling(n=2, max_tokens=50), Saying(lambda *_: "x.")
        group = asyncio.create_task(guess(task_of(server, "never"), Policy(client, sampling, 3), sampling))
        while len(client.prompts) < 2:
            await asyncio.sleep(0.02)
        began_s = time.monotonic()
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group
        assert time.monotonic() - began_s < 30

    asyncio.run(main())
    wait_until(lambda: not server.sessions)


# ---- several sessions, several servers


def test_server_with_one_session_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tally, "_warned", set[str]())
    with Server(Guess, Answer, Seen, most=1) as small:
        (task, *_) = load(source(small))
        samples = played(OpenEnv(small.url), task, lambda *_: "x.", n=4)
        assert [sample.reward for sample in samples] == [-0.5] * 4 and small.most_sessions == 1
    assert f"{small.url}: all its sessions are taken (Server at capacity (CAPACITY_REACHED))" in caplog.text
    assert caplog.text.count("samples wait") == 1


def test_start_does_not_wait_for_ever_for_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv, "BUSY_S", 0.1)
    with (
        Server(Guess, Answer, Seen, most=0) as full,
        pytest.raises(TaskError, match=r"are taken .* for 0.1 s"),
    ):
        load(source(full))


def test_copies_take_turns_and_one_that_dies_is_passed_over(server: Server) -> None:
    with Server(Guess, Answer, Seen) as copy:
        name = f"{server.url},{copy.url}"
        environment, before = OpenEnv(name), server.begun
        task = {**task_of(server), "openenv": {**task_of(server)["openenv"], "name": name}}
        played(environment, task, lambda *_: "x.", n=4)
        assert (server.begun - before, copy.begun) == (2, 2)
    samples = played(environment, task, lambda *_: "x.", n=4)
    assert [sample.reward for sample in samples] == [-0.5] * 4
    resolve_environment(f"openenv:{name}")  # in the next iteration
    openenv.schema_at.cache_clear()  # at the next start
    with pytest.raises(EnvironmentSettingError, match=f"no server answers at {copy.url}"):
        resolve_environment(f"openenv:{name}")


def test_copies_must_be_alike(server: Server) -> None:
    with Server(Guess, Answer, Observation) as other, pytest.raises(EnvironmentSettingError) as caught:
        resolve_environment(f"openenv:{server.url},{other.url}")
    assert f"{other.url} has other actions or observations than {server.url}; give" in str(caught.value)


def test_server_that_is_gone_costs_the_samples() -> None:
    with Server(Guess, Answer, Seen) as mortal:
        environment, task = OpenEnv(mortal.url), task_of(mortal)
    samples = played(environment, task, lambda *_: "x.", n=2)
    assert all(f"no server answers at {mortal.url}: " in str(sample.fault) for sample in samples)


def test_digest_covers_the_fields_of_the_server(server: Server, guess: OpenEnv) -> None:
    name = f"openenv:{server.url}"
    before = code_of(name, guess)
    assert code_of(name, OpenEnv(server.url)) == before
    with Server(Guess, Answer, Observation) as other:
        assert code_of(name, OpenEnv(other.url)) != before


def test_task_of_another_environment_is_refused(server: Server) -> None:
    for task in ({"id": "1", "prompt": "1+1="}, {"openenv": {"name": "http://127.0.0.1:9"}}):
        with pytest.raises(ValueError, match=f"it is not of {server.url}; give --tasks openenv:{server.url}"):
            check_played(f"openenv:{server.url}", task)


def test_metadata_of_older_releases_is_in_the_observation() -> None:
    answer = said(observation={"prompt": "p", "metadata": {"score": 0.5, "right": True, "word": "x"}})
    assert read(answer).metrics == {"score": 0.5, "right": 1.0}
    assert read(said(reward=True)).reward == 1.0 and read(said(reward=None)).reward is None


DIGITS = '''
import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Written(Action):
    text: str


class Asked(Observation):
    text: str


class Digits(Environment):
    """Three rounds of: write digits."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, noise=False, **more):
        self.random, self.rounds, self.noise = random.Random(seed), 0, noise
        return Asked(text=f"Digits, as in {self.random.randint(10, 99)}: ")

    def step(self, action, timeout_s=None, **more):
        self.rounds += 1
        share = sum(one.isdigit() for one in action.text) / max(1, len(action.text))
        reward = random.random() if self.noise else share
        return Asked(text="More: ", reward=reward, done=self.rounds == 3, metadata={"digits": share})

    @property
    def state(self):
        return State(step_count=self.rounds)


app = create_fastapi_app(Digits, Written, Asked, max_concurrent_envs=64)
'''
"""A server as its library has it written."""


def test_environment_written_for_the_library_plays_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(
        Action=Action,
        Environment=object,
        Observation=Observation,
        State=dict,
        create_fastapi_app=lambda make, action, observation, max_concurrent_envs: Server(
            make, action, observation, max_concurrent_envs
        ),
    )
    for name in ("openenv", "openenv.core", "openenv.core.env_server"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    vars(sys.modules["openenv.core.env_server"]).update(vars(library))
    page: dict[str, Any] = {}
    exec(DIGITS, page)
    with page["app"] as server:
        environment, (task, *others) = OpenEnv(server.url), load(f"openenv:{server.url},size=4")
        assert len(others) == 2
        (sample,) = played(environment, task, lambda *_: "12ab.", n=1)
        assert (sample.reward, sample.metrics) == (1.5, {"turns": 3.0, "digits": 0.5})
        assert text_of(sample) == f"u{task['messages'][0]['content']}.a12ab." + "uMore: .a12ab." * 2
        (noisy,) = load(f"openenv:{server.url},size=4,reset.noise=true", "eval")
        assert (played(environment, noisy, lambda *_: "ab.", n=1)[0].reward or 0.0) > 0
