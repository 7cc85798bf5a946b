"""Sync rewards run in processes: whatever they do costs their sample, and the node goes on."""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.processes import killable_rewards as module
from rollout.rewards.resolve import resolve_reward
from rollout.rewards.reward import Reward, RewardError
from rollout.settings import RolloutSettings
from tests.processes import is_schedulable
from tests.rollout.rewards.scoring import make_sample, score_one
from tests.rollout.rollout_helpers import wait_until

NASTY = """
import os, subprocess, sys, time

def sleeps(task, completion): time.sleep(1e9)
def ends(task, completion): sys.exit(2)
def interrupts(task, completion): raise KeyboardInterrupt
def starts(task, completion):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print("started", started.pid, flush=True)
    time.sleep(1e9)
def forks(task, completion):
    os.fork()
    return float(completion)
def prints(task, completion):
    print("one line")
    sys.stdout.write("noise\\n" * 100_000)
    return 1
def pid(task, completion): return os.getpid()
def fails(task, completion): return {}["no such key"]
"""

PATIENT = RolloutSettings(reward_timeout_s=60.0, reward_processes=1)
QUICK = PATIENT.model_copy(update={"reward_timeout_s": 2.0})
Scored = Callable[..., list[Any]]


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scored]:
    """Scores texts with a function of NASTY; each text's reward, or its error."""
    monkeypatch.chdir(tmp_path)
    file = f"nasty_{tmp_path.name}"
    (tmp_path / f"{file}.py").write_text(NASTY)

    def all_of(function: str, *texts: str, settings: RolloutSettings = PATIENT, **task: Any) -> list[Any]:
        name = function if function == "regex" else f"{file}:{function}"
        reward = resolve_reward(name)

        async def main() -> list[Any]:
            samples = [make_sample(text) for text in texts]
            calls = (score_one(reward, {"id": "t1", **task}, sample, settings) for sample in samples)
            errors = await asyncio.gather(*calls, return_exceptions=True)
            return [error or sample.reward for error, sample in zip(errors, samples, strict=True)]

        return asyncio.run(main())

    yield all_of
    for name in [name for name in module._pools if name.startswith(file)]:
        module._pools.pop(name).close()


def test_reward_that_does_not_return_loses_its_sample(scored: Scored) -> None:
    (error,) = scored("sleeps", "x", settings=QUICK)
    assert isinstance(error, RewardError)
    assert str(error).endswith("task 't1': no answer within 2 s (rollout.reward_timeout_s)")


def test_regex_that_does_not_return_loses_its_sample(scored: Scored) -> None:
    good, bad, other = scored("regex", "a", "a" * 40 + "b", "aa", settings=QUICK, pattern=r"\A(a+)+\Z")
    assert (good, other) == (1.0, 1.0) and "no answer within 2 s" in str(bad)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("ends", "it raised SystemExit(2)"),
        ("interrupts", "it raised KeyboardInterrupt()"),
    ],
)
def test_reward_that_ends_its_process_loses_its_sample(scored: Scored, function: str, reason: str) -> None:
    errors = scored(function, "x", "y")
    assert all(reason in str(error) for error in errors), errors


def test_what_a_reward_has_started_ends_with_it(scored: Scored, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scored("starts", "x", settings=QUICK)
    wait_until(lambda: "started" in caplog.text)
    started = int(caplog.messages[0].split()[-1])
    wait_until(lambda: not is_schedulable(started))


def test_reward_that_forks_answers_once(scored: Scored) -> None:
    assert scored("forks", *map(str, range(20))) == list(range(20))


def test_what_a_reward_prints_is_in_the_log_but_does_not_fill_it(
    scored: Scored, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert scored("prints", "x") == [1.0]
    next(pool for name, pool in module._pools.items() if name.endswith(":prints")).close()
    wait_until(lambda: "lines of output were left out" in caplog.text)
    assert caplog.messages[0].endswith(":prints: one line") and len(caplog.messages) < 500


def test_traceback_of_the_process_is_shown(scored: Scored) -> None:
    (error,) = scored("fails", "x")
    (note,) = error.__cause__.__notes__
    assert str(error).endswith("KeyError: 'no such key'") and 'return {}["no such key"]' in note
    assert note.count('File "') == 1, "none of ours"


def test_processes_are_as_many_as_the_setting_says(scored: Scored) -> None:
    assert len(set(scored("pid", *"abcdefgh"))) == 1
    more = PATIENT.model_copy(update={"reward_processes": 3})
    assert os.getpid() not in scored("pid", "x") and len(set(scored("pid", *"abcdefgh", settings=more))) <= 3


def test_call_that_nobody_waits_for_any_more_is_not_made(scored: Scored) -> None:
    (first,) = scored("pid", "x")

    async def main() -> None:
        reward = resolve_reward(next(name for name in module._pools if name.endswith(":pid")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                slow = resolve_reward(reward.name.replace(":pid", ":sleeps"))
                await asyncio.gather(
                    *(score_one(slow, {"id": "t"}, make_sample("x"), QUICK) for _ in range(50))
                )

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 30 and scored("pid", "x") == [first]
    pool = next(pool for name, pool in module._pools.items() if name.endswith(":sleeps"))
    wait_until(lambda: pool._calls.empty())  # within a second, not fifty


def value(reward: Reward) -> float | None:
    sample = make_sample("x")
    asyncio.run(score_one(reward, {"id": "t"}, sample))
    return sample.reward


def test_process_that_starts_later_runs_what_the_node_has_loaded(scored: Scored, tmp_path: Path) -> None:
    name = f"later_{tmp_path.name}"
    path = tmp_path / f"{name}.py"
    path.write_text("def score(task, completion): return 1\n")
    reward = resolve_reward(f"{name}:score")
    path.write_text("def score(task, completion): return 2\n")
    assert value(reward) == 1
    module._pools.pop(f"{name}:score").close()


def test_reward_of_a_package_may_import_from_beside_it(scored: Scored, tmp_path: Path) -> None:
    package = tmp_path / f"package_{tmp_path.name}"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "helper.py").write_text("VALUE = 3\n")
    (package / "rewards.py").write_text("from .helper import VALUE\ndef score(task, text): return VALUE\n")
    reward = resolve_reward(f"{package.name}.rewards:score")
    assert value(reward) == 3
    module._pools.pop(f"{package.name}.rewards:score").close()
