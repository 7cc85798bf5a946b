"""The reward `math`: which completions are the answer, and what one costs that cannot be computed."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout.processes import killable_rewards as reward_module
from rollout.rewards.math import make_verifier
from rollout.rewards.resolve import resolve_reward
from rollout.rewards.reward import Reward, RewardError
from rollout.settings import RolloutSettings
from rollout.trajectory import Sample
from tests.rollout.rewards.scoring import score_one

HUGE = "$9^{9^{9^{9}}}$"


@pytest.fixture(scope="module")
def verifier() -> Callable[[str, str], float]:
    return make_verifier()


@pytest.fixture
def reward() -> Reward:
    return resolve_reward("math")


def scored(reward: Reward, text: str, **task: Any) -> float | None:
    empty = np.zeros(0)
    sample = Sample(
        empty.astype(np.int32),
        empty.astype(np.uint8),
        empty.astype(np.float32),
        finish_reason="stop",
        text=text,
    )
    asyncio.run(score_one(reward, {"id": "t1", "prompt": "p", **task}, sample))
    return sample.reward


@pytest.mark.filterwarnings("ignore")  # sympy's own
@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("42", "The answer is 42.", 1),
        ("42", "First 42, then 41.", 0),
        ("42", r"First 41, then \boxed{42}, which is not 41.", 1),
        ("1,200", "1200", 1),
        ("-5", "x = -5", 1),
        (r"\frac{1}{2}", "so it is 0.5", 1),
        (r"\frac{1}{2}", r"\boxed{1/2}", 1),
        (r"\frac{1}{2}", "2", 0),
        (r"\sqrt{8}", r"$2\sqrt{2}$", 1),
        (r"(x+1)^2", r"$x^2 + 2x + 1$", 1),
        (r"(1, 2)", r"$(1, 2)$", 1),
        (r"(1, 2)", r"$(2, 1)$", 0),
        (r"\left[0,\frac{\pi}{2}\right)", r"$[0, \pi/2)$", 1),
        ("12\\%", "0.12", 1),
        ("We add, and get $x=3$. So \\boxed{7}.", "7", 1),
        ("#### 42", "42", 1),
        (r"\text{(B)}", r"\boxed{B}", 1),
        ("1.5e3", "It is 1500.", 1),
        ("0.0000001", "It is 1e-07", 1),
        ("2e^3", r"\boxed{2e^3}", 1),
        ("12345.5", r"\boxed{12\,345.5}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"$\begin{pmatrix} 1 \\ 2 \end{pmatrix}$", 1),
        ("42", "", 0),
        ("42", "I do not know.", 0),
    ],
)
def test_completion_is_right_if_its_last_formula_equals_the_answer(
    verifier: Callable[[str, str], float], answer: str, completion: str, expected: float
) -> None:
    assert verifier(answer, completion) == expected


def test_samples_are_scored_in_processes(reward: Reward) -> None:
    assert scored(reward, "so 0.5", answer=r"\frac{1}{2}") == 1.0
    assert scored(reward, "so 0.6", answer=0.5) == 0.0
    assert (
        "sympy"
        not in subprocess.run(
            [
                sys.executable,
                "-c",
                "import sys, rollout.rewards.resolve as r; r.resolve_reward('math'); print(*sys.modules)",
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout.split()
    )


def test_completion_that_takes_too_long_earns_nothing_and_is_said(
    reward: Reward, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert scored(reward, "1", answer="1") == 1.0
    monkeypatch.setattr(reward_module, "DEADLINE_S", 0.5)
    with caplog.at_level(logging.WARNING, "rollout.processes.killable_rewards"):
        assert scored(reward, HUGE, answer="1") == 0.0
    assert "task 't1': no answer within 0.5 s; reward 0" in caplog.text and HUGE in caplog.text
    monkeypatch.undo()
    assert scored(reward, "1", answer="1") == 1.0


def test_answer_is_what_stands_behind_its_mark(reward: Reward) -> None:
    for text, expected in (("it is 1042", 1.0), ("it is 2", 0.0)):
        assert scored(reward, text, answer="1 + 1 = <<1+1=2>>2, so\n#### 1042") == expected


@pytest.mark.parametrize(
    ("task", "reason"),
    [({}, "it has no `answer`"), ({"answer": ""}, "its answer '' holds no mathematics")],
)
def test_task_without_a_usable_answer_is_an_error(reward: Reward, task: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewardError) as raised:
        scored(reward, "1", **task)
    assert "reward 'math', task 't1'" in str(raised.value) and reason in str(raised.value)


def test_many_samples_at_once_are_all_scored(reward: Reward) -> None:
    async def main() -> list[Any]:
        tasks = [{"id": str(i), "answer": str(i)} for i in range(200)]
        return await reward.values(tasks, [str(i % 50) for i in range(200)], RolloutSettings())

    assert asyncio.run(main()) == [{"reward": float(i < 50)} for i in range(200)]
