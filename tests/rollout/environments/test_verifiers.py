"""Environments of the library `verifiers`: their tasks, and how the policy plays them."""

import asyncio
import base64
import io
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rollout.environments.environment import Environment, EnvironmentSettingError, resolve_environment
from rollout.environments.policy import Policy
from rollout.environments.verifiers import VerifiersEnvironment
from rollout.loaded_code import code_of
from rollout.origin import Sampling
from rollout.pictures import digest_of
from rollout.processes.pool import ProcessPool
from rollout.tasks import verifiers
from rollout.tasks.task_set import Task, TaskError, load_tasks
from rollout.trajectory import unfit
from tests.rollout.environments.outside import Saying, played
from tests.rollout.rollout_helpers import wait_until
from tests.rollout.scripted import text_of
from tests.rollout.templated import QWEN3, TemplatedClient

pytest.importorskip("verifiers", reason="the extra `verifiers` is not installed")

GAME = """
import time
import verifiers.v1 as vf

class Data(vf.TaskData):
    word: str

class Word(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def said(self, task: Data, trace: vf.Trace) -> float:
        if task.word == "raise":
            raise RuntimeError("no reward today")
        if task.word == "hang":
            time.sleep(1000)
        return float(task.word in trace.last_reply)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return trace.num_turns

class GameConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()

class Game(vf.Env[GameConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and len(interaction.trace.assistant_messages) < 3:
                segment = await interaction.turn("again")

class WordsConfig(vf.TasksetConfig):
    words: list[str] = ["two", "raise", "hang"]

class Words(vf.Taskset[Word, WordsConfig]):
    def load(self):
        for word in self.config.words:
            yield Word(Data(prompt=f"say {word}", system_prompt="play", word=word), self.config.task)

__all__ = ["Game", "Words"]
"""
TOOLS = """
import verifiers.v1 as vf

class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> int:
        if a == 13:
            raise ValueError("unlucky")
        return a + b

class Sum(vf.Task[vf.TaskData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == "85")

class Sums(vf.Taskset[Sum]):
    def load(self):
        yield Sum(vf.TaskData(prompt="27+58?"), self.config.task)

    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]

__all__ = ["Sums"]
if __name__ == "__main__":
    Adding.run()
"""
SEEING = """
import verifiers.v1 as vf

URL = "data:image/png;base64,PICTURE"

class Looks(vf.Taskset[vf.Task[vf.TaskData]]):
    def load(self):
        content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": URL}}]
        yield vf.Task(vf.TaskData(prompt=[vf.UserMessage(content=content)]), self.config.task)

__all__ = ["Looks"]
"""
SPLITS = """
import itertools
import verifiers.v1 as vf

class Config(vf.TasksetConfig):
    split: str = "train"

class Rows(vf.Taskset[vf.Task[vf.TaskData], Config]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield vf.Task(vf.TaskData(prompt=f"{self.config.split} {number}"))

__all__ = ["Rows"]
"""
DIGITS = '''
"""The more of a reply are digits, the better."""

from collections.abc import Iterable

import verifiers.v1 as vf


class WriteDigits(vf.Task[vf.TaskData]):
    @vf.reward
    async def digits(self, trace: vf.Trace) -> float:
        return sum(one.isdigit() for one in trace.last_reply) / max(1, len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return len(trace.last_reply)


class Prompts(vf.Taskset[WriteDigits]):
    def load(self) -> Iterable[WriteDigits]:
        for number in range(200):
            yield WriteDigits(vf.TaskData(prompt=f"Number {number}: "), self.config.task)


__all__ = ["Prompts"]
'''
"""An environment as one writes it for the library: the more digits, the better."""
ALL = "verifiers:word-game"


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two environments, and one process that loads the tasks: importing the library takes 3 s."""
    place = tmp_path_factory.mktemp("installed")
    (place / "word_game.py").write_text(GAME)
    (place / "digits_wanted.py").write_text(DIGITS)
    (place / "has_splits.py").write_text(SPLITS)
    (place / "tool_game.py").write_text(TOOLS)
    (place / "seeing_game.py").write_text(SEEING.replace("PICTURE", base64.b64encode(png()).decode()))
    (place / "docker").write_text("#!/bin/sh\necho 'Cannot connect to\nthe Docker daemon' >&2; exit 1")
    (place / "docker").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        patch.setenv("PYTHONPATH", str(place))  # for the server of the tools
        patch.setattr(sys, "path", [str(place), *sys.path])
        pool = ProcessPool("rollout.tasks.verifiers:make_loader", size=1)
        lasting = SimpleNamespace(call=pool.call, close=lambda: None)
        patch.setattr(verifiers, "ProcessPool", lambda *_args, **_more: lasting)
        yield
        pool.close()


@pytest.fixture(scope="module")
def game(installed: None) -> Iterator[VerifiersEnvironment]:
    environment = VerifiersEnvironment("word-game")
    environment._pool.size = 1
    yield environment
    environment._pool.close()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def load(source: str, split: Any = "train") -> Sequence[Task]:
    return load_tasks(source, seed=0, split=split).tasks


def task_of(word: str) -> Task:
    rows, _ = verifiers._loaded("word-game", f'{{"taskset.words": ["{word}"]}}', "train")
    return verifiers._task("word-game", {"taskset.words": [word]}, 0, rows[0])


def test_rows_become_tasks_of_which_one_in_ten_is_held_out() -> None:
    source = f"{ALL},taskset.words={[str(n) for n in range(60)]}".replace("'", '"')
    train, evaluation = load(source), load(source, "eval")
    assert len(train) + len(evaluation) == 60 and len(train) > 40 and evaluation
    assert not {task["id"] for task in train} & {task["id"] for task in evaluation}
    said = [message["role"] + ": " + message["content"] for message in train[0]["messages"]]
    assert said == ["system: play", f"user: say {train[0]['verifiers']['data']['word']}"]


def test_task_that_shows_a_picture_names_it() -> None:
    tasks = load_tasks("verifiers:seeing-game,size=1", seed=0, split="train")
    assert tasks.tasks[0]["messages"][0]["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "image", "image": digest_of(png())},
    ]
    assert tasks.pictures is not None and tasks.pictures.read(digest_of(png())) == png()


def test_rows_too_few_to_hold_one_out_say_what_needs_none() -> None:
    with pytest.raises(TaskError, match=r"no eval task out of 1 rows; .*eval.interval=0 needs none"):
        load(f'{ALL},taskset.words=["two"]', "eval")


def test_harness_that_is_called_null_can_be_named() -> None:
    (task,) = load(f"{ALL},player.harness.id=null,size=1")
    assert task["verifiers"]["config"] == {"player.harness.id": None, "size": 1}


def test_environment_with_splits_gives_its_own() -> None:
    train, evaluation = load("verifiers:has-splits,size=3"), load("verifiers:has-splits,size=3", "eval")
    assert [task["messages"][0]["content"] for task in train] == ["train 0", "train 1", "train 2"]
    assert [task["messages"][0]["content"] for task in evaluation] == ["test 0", "test 1", "test 2"]
    given = load("verifiers:has-splits,size=1,taskset.split=hard", "eval")
    assert [task["messages"][0]["content"] for task in given] == ["hard 0"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "no-such-env",
            f"there is no module no_such_env in {sys.prefix}, on PYTHONPATH or in {Path.cwd()}; install",
        ),
        ("a b", "is not of the form NAME,PARAMETER=VALUE"),
        ("word-game,size=0", "size=0: give a number above 0"),
        ("word-game,taskset.word=1", "taskset.word: Extra inputs are not permitted"),
        ("word-game,player.max_turns=many", "player.max_turns: Input should be a valid integer"),
        ("word-game,player.harness.id=bash", "its player runs what the model writes (harness bash)"),
        (
            "word-game,player.runtime.type=docker",
            "its player runs in docker, which does not work here: Cannot connect to the Docker daemon",
        ),
        ("has-splits", "the tasks of has-splits never end; give size=NUMBER"),
    ],
)
def test_wrong_source_is_one_line(text: str, reason: str) -> None:
    with pytest.raises(TaskError) as caught:
        load("verifiers:" + text)
    message = str(caught.value)
    assert message.startswith(f"verifiers:{text}: ") and reason in message and "\n" not in message


def test_wrong_environment_is_one_line() -> None:
    with pytest.raises(EnvironmentSettingError, match="there is no module absent in"):
        resolve_environment("verifiers:absent")
    with pytest.raises(EnvironmentSettingError, match="give its parameters behind --tasks verifiers:NAME"):
        resolve_environment("verifiers:word-game,player.max_turns=3")


def test_digest_covers_the_files_of_the_environment(game: Environment) -> None:
    before = code_of(ALL, game)
    assert code_of(ALL, resolve_environment(ALL)) == before
    file = next(Path(place) for place in sys.path if (Path(place) / "word_game.py").exists()) / "word_game.py"
    file.write_text(GAME + "\n# another version\n")
    assert code_of(ALL, resolve_environment(ALL)) != before
    file.write_text(GAME)


def test_what_is_trained_is_what_was_sampled_over_several_turns(game: Environment) -> None:
    samples = played(game, task_of("two"), lambda said, seed: "two." if seed % 2 else "x.", n=4)
    assert len(samples) == 4
    for sample in samples:
        assert unfit(sample, demonstrated=False) is None
        assert text_of(sample).startswith("splay.usay two.a") and text_of(sample).count("uagain.a") == 2
        assert len(text_of(sample, trained=True)) == sum(sample.loss_mask)
        assert sample.metrics == {"turns": 3.0, "said": float("two" in sample.text)}
        assert sample.reward == 2.0 * sample.metrics["said"]


def test_budget_of_tokens_ends_the_episode(game: Environment) -> None:
    (sample,) = played(game, task_of("two"), lambda *_: "twotwo", n=1, max_tokens=8)
    assert text_of(sample, trained=True) == "twotwotw" and sample.finish_reason == "length"


def test_error_of_the_environment_costs_the_samples_and_is_said(game: Environment) -> None:
    samples = played(game, task_of("raise"), lambda *_: "no.")
    assert [unfit(sample, demonstrated=False) for sample in samples] == [samples[0].fault] * 2
    assert "no reward today" in str(samples[0].fault)


def test_task_of_another_environment_is_refused(game: Environment) -> None:
    with pytest.raises(ValueError, match="it is not of word-game; give --tasks verifiers:word-game"):
        played(game, {"id": "1", "prompt": "1+1="}, lambda *_: "2.")


def test_tools_of_the_environment_are_called(
    game: VerifiersEnvironment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(a: int) -> str:
        given = {"name": "adding_add", "arguments": {"a": a, "b": 58}}
        return f"<tool_call>\n{json.dumps(given)}\n</tool_call><|im_end|>"

    rows, _ = verifiers._loaded("tool-game", "{}", "train")
    client = TemplatedClient(tmp_path, QWEN3, call(27), call(13), "85<|im_end|>")

    async def main() -> Any:
        sampling = Sampling(n=1, max_tokens=2000)
        task = verifiers._task("tool-game", {}, 0, rows[0])
        async with asyncio.timeout(240):
            return await game(task, Policy(client, sampling, 7), sampling)

    monkeypatch.setattr(game, "_name", "tool-game")
    (sample,) = asyncio.run(main())
    assert (sample.fault, sample.reward) == (None, 1.0)
    told = str(client.tokenizer.decode(sample.token_ids)).split("<tool_response>\n")
    assert told[1].startswith("85\n") and told[2].startswith("Error executing tool add: unlucky")


def test_environment_of_the_page_plays(game: VerifiersEnvironment, monkeypatch: pytest.MonkeyPatch) -> None:
    task, *others = load("verifiers:digits-wanted")
    assert len(others) > 160
    monkeypatch.setattr(game, "_name", "digits-wanted")  # its process plays any: starting one takes seconds
    (sample,) = played(game, task, lambda *_: "12ab.", n=1)
    assert (sample.reward, sample.metrics) == (0.5, {"characters": 4.0, "digits": 0.5})
    assert text_of(sample) == f"u{task['messages'][0]['content']}.a12ab."


def test_group_that_hangs_is_ended_when_it_is_cancelled(game: VerifiersEnvironment) -> None:
    async def main() -> None:
        sampling, client = Sampling(n=2, max_tokens=50), Saying(lambda *_: "x.")
        group = asyncio.create_task(game(task_of("hang"), Policy(client, sampling, 3), sampling))
        while len(client.prompts) < 3:  # of the first; then its reward holds the whole process
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        group.cancel()
        with pytest.raises(asyncio.CancelledError):
            await group

    asyncio.run(main())
    wait_until(lambda: not game._pool._running)


def test_package_that_fails_or_is_of_an_older_library_is_not_called_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    why, error = verifiers.why_no_taskset, ModuleNotFoundError("taskset 'old' not found")
    error.__cause__ = ModuleNotFoundError("No module named 'needed'", name="needed")
    assert why("old", error).startswith("old cannot be imported: No module named 'needed'; install")
    monkeypatch.setitem(sys.modules, "old", SimpleNamespace(load_environment=print))
    reason = why("old", AttributeError("defines no `__all__`"))
    assert "load_environment and no Taskset" in reason and reason.endswith("docs/environments.md#verifiers")
    assert why("new", TypeError("two of them")) == "TypeError: two of them"
