"""Rewards that take lists get the samples of a group in one call, so they can compare them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout.processes import killable_rewards
from rollout.rewards.resolve import check_task, resolve_reward
from rollout.rewards.reward import score
from rollout.settings import RolloutSettings
from rollout.trajectory import Sample
from tests.rollout.rewards.scoring import make_sample

USER_CODE = """
import time
import numpy as np
def rank(completions, **columns):
    ordered = sorted(completions, key=len)
    return [ordered.index(completion) / (len(ordered) - 1) for completion in completions]
async def rank_later(completions, **columns): return rank(completions)
def array(completions, **columns): return np.array(rank(completions))
def lazily(completions, **columns): return map(float, rank(completions))
def rows(queries, prompts, labels):
    rewards = np.array(rank(queries))[:, None]
    return {"rewards": rewards, "extra_logs": {"mean": rewards.mean(), "each": rewards}}
def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos):
    pairs = zip(rank(solution_strs), solution_strs, ground_truths)
    return [{"score": score, "acc": text == truth, "pred": text} for score, text, truth in pairs]
def logs(completions, log_metric, log_extra, trainer_state=None, **columns):
    log_metric("longest", max(map(len, completions)))
    log_extra("text", completions)
    return rank(completions)
async def logs_later(completions, **columns):
    columns["log_metric"]("longest", 3)
    return rank(completions)
def reasoned(completions, reasoning, **columns):
    return [float(len(thought) > len(text)) for text, thought in zip(completions, reasoning)]
def one_is_wrong(completions, **columns):
    return [float("nan") if text == "wrong" else len(completions) for text in completions]
def by_text(completions, **columns): return {text: 1.0 for text in completions}
def too_few(completions, **columns): return [1.0]
def breaks(completions, **columns): raise KeyError("answer")
def slow(completions, **columns):
    time.sleep(0.5 * len(completions))
    return [1.0 for _ in completions]
"""
TEXTS = ("abc", "a", "ab")


class Scored:
    """Scores a group by a function of USER_CODE."""

    def __init__(self, directory: Path) -> None:
        self.module = f"lists_{directory.name}"
        (directory / f"{self.module}.py").write_text(USER_CODE)

    def name(self, function: str) -> str:
        return f"{self.module}:{function}"

    def __call__(
        self, reward: str, *texts: str, end: str | None = None, **settings: Any
    ) -> tuple[list[Sample], list[str]]:
        samples = [make_sample(text) for text in texts]
        task = {"id": "t1", "prompt": "p", "answer": "ab"}
        errors = asyncio.run(score(resolve_reward(reward), task, samples, RolloutSettings(**settings), end))
        return samples, [str(error) for error in errors]


@pytest.fixture
def scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scored]:
    monkeypatch.chdir(tmp_path)
    scored = Scored(tmp_path)
    yield scored
    for name in [name for name in killable_rewards._pools if name.startswith(scored.module)]:
        killable_rewards._pools.pop(name).close()


@pytest.mark.parametrize("function", ["rank", "rank_later", "array", "lazily", "rows", "compute_score_batch"])
def test_samples_of_a_group_are_compared(scored: Scored, function: str) -> None:
    samples, errors = scored(scored.name(function), *TEXTS)
    assert ([sample.reward for sample in samples], errors) == ([1.0, 0.0, 0.5], [])
    if function == "rows":
        assert [sample.metrics for sample in samples] == [{"mean": 0.5, "each": r} for r in (1.0, 0.0, 0.5)]
    if function == "compute_score_batch":
        assert [sample.metrics for sample in samples] == [{"acc": float(text == "ab")} for text in TEXTS]


@pytest.mark.parametrize("function", ["logs", "logs_later"])
def test_what_a_function_of_trl_logs_is_a_metric(scored: Scored, function: str) -> None:
    for _ in range(2):
        samples, _ = scored(scored.name(function), *TEXTS)
        assert [(sample.reward, sample.metrics) for sample in samples] == [
            (reward, {"longest": 3.0}) for reward in (1.0, 0.0, 0.5)
        ]
    check_task(scored.name(function), {"id": "t1", "prompt": "p"})


def test_a_reward_of_lists_is_added_to_one_of_a_sample(scored: Scored) -> None:
    samples, _ = scored(f"{scored.name('rank')}=1 + exact=0.5", *TEXTS)
    assert [sample.reward for sample in samples] == [1.0, 0.0, 1.0]
    assert [sample.metrics[scored.name("rank")] for sample in samples] == [1.0, 0.0, 0.5]


def test_each_sample_of_the_lists_has_its_own_reasoning(scored: Scored) -> None:
    samples, _ = scored(scored.name("reasoned"), "long thought</think>a", "</think>answer", end="</think>")
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_a_sample_without_a_number_is_lost_alone(scored: Scored) -> None:
    samples, errors = scored(scored.name("one_is_wrong"), "a", "wrong", "b")
    assert [sample.reward for sample in samples] == [3.0, None, 3.0]
    assert len(errors) == 1 and "returned reward = nan" in errors[0]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("too_few", r"must return a list with one reward for each; it returned [1.0] for 3"),
        ("by_text", "it returned {'abc': 1.0"),
        ("breaks", "KeyError"),
    ],
)
def test_a_call_that_fails_loses_its_group(scored: Scored, function: str, reason: str) -> None:
    samples, errors = scored(scored.name(function), *TEXTS)
    assert [sample.reward for sample in samples] == [None] * 3
    assert len(errors) == 3 and all(reason in error and "task 't1'" in error for error in errors)


def test_a_list_of_another_length_shows_no_traceback_of_ours(scored: Scored) -> None:
    reward = resolve_reward(scored.name("too_few"))
    group = [make_sample(text) for text in TEXTS]
    failures = asyncio.run(score(reward, {"id": "t1"}, group, RolloutSettings(), None))
    assert [getattr(failure.__cause__, "__notes__", []) for failure in failures] == [[]] * 3


def test_the_call_may_take_what_its_samples_may_take_together(scored: Scored) -> None:
    assert scored(scored.name("slow"), *TEXTS, reward_timeout_s=0.7)[1] == []
    lost = scored(scored.name("slow"), *TEXTS, reward_timeout_s=0.3)[1]
    assert len(lost) == 3 and "no answer within 0.9 s (rollout.reward_timeout_s" in lost[0]
