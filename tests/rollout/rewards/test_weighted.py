"""Several rewards with weights: what is added up, what is logged, who is named, and which digests change."""

from pathlib import Path
from typing import Any

import pytest

from rollout.rewards.parts import Part, parts_of
from rollout.rewards.resolve import RewardSettingError, check_task, resolve_reward, weights_by_title
from rollout.rewards.reward import RewardError
from rollout.settings import RolloutSettings
from tests.rollout.rewards.scoring import scored

TASK: dict[str, Any] = {"id": "t1", "prompt": "p", "answer": "58", "target_length": 10}
OWN = """
import asyncio

def words(task, completion): return {"reward": len(completion.split()), "letters": len(completion)}
async def slow(task, completion):
    await asyncio.sleep(0)
    return 0.5
def raises(task, completion): raise KeyError("level")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"weighted_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def test_setting_is_read_as_names_with_weights() -> None:
    assert parts_of("math") == [Part("math", None)]
    assert parts_of("math=1 + length=-0.1 + own:f=1e-3") == [
        Part("math", 1.0), Part("length", -0.1), Part("own:f", 1e-3),
    ]  # fmt: skip
    assert parts_of("exact + length=2") == [Part("exact", None), Part("length", 2.0)]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("math=high", "the weight 'high' of math is not a finite number; write e.g. math=0.5"),
        ("exact=1 + math=inf", "the weight 'inf' of math"),
        ("exact=", "the weight '' of exact"),
        ("=1", "'=1' names no reward"),
        ("exact=1 + exact=2", "exact is there twice"),
        ("exact=1 + exakt=2", "reward 'exakt': did you mean exact? There is exact"),
    ],
)
def test_setting_that_is_wrong_is_an_error_that_names_the_part(setting: str, reason: str) -> None:
    with pytest.raises(RewardSettingError) as raised:
        resolve_reward(setting)
    assert reason in str(raised.value)


def test_rewards_are_added_up_by_weight_and_each_is_a_metric_by_its_name(own: str) -> None:
    sample = scored(f"exact=2 + length=-0.1 + {own}:words=0.25 + {own}:slow", "58", **TASK)
    assert sample.reward == pytest.approx(2 * 1 - 0.1 * 0.2 + 0.25 * 1 + 0.5)
    assert sample.metrics == {
        "exact": 1.0, "length": pytest.approx(0.2), f"{own}:words": 1.0, f"{own}:words.letters": 2.0,
        f"{own}:slow": 0.5,
    }  # fmt: skip


def test_weights_are_named_as_the_metrics_are(own: str) -> None:
    setting = f"exact=2 + code,name=sandbox=0.5 + {own}:slow + http://127.0.0.1:9/r,name=far=-1"
    assert weights_by_title(setting) == {"exact": 2.0, "sandbox": 0.5, f"{own}:slow": 1.0, "far": -1.0}
    assert weights_by_title("exact") is None
    sample = scored(f"exact=2 + {own}:slow", "58", **TASK)
    assert [*(weights_by_title(f"exact=2 + {own}:slow") or {})] == [*sample.metrics]


def test_one_reward_without_a_weight_is_what_it_was_and_logs_nothing_more() -> None:
    sample = scored("exact", "58", **TASK)
    assert (sample.reward, sample.metrics) == (1.0, {})
    plain, weighted = resolve_reward("exact"), resolve_reward("exact=0.5")
    assert plain.code.name == "exact" and type(plain) is not type(weighted)
    assert scored("exact=0.5", "58", **TASK).metrics == {"exact": 1.0}


def test_weight_of_zero_only_logs() -> None:
    sample = scored("exact=1 + length=0", "58", **TASK)
    assert (sample.reward, sample.metrics["length"]) == (1.0, pytest.approx(0.2))


def test_part_that_fails_is_named_with_the_task(own: str) -> None:
    with pytest.raises(RewardError, match=rf"^reward '{own}:raises', task 't1': KeyError: 'level'"):
        scored(f"exact=1 + {own}:raises=1 + {own}:slow", "58", **TASK)


def test_sum_that_is_no_reward_is_named_with_the_task() -> None:
    with pytest.raises(RewardError, match=r"^reward 'exact=1e308', task 't1': returned reward = 1e.308, "):
        scored("exact=1e308", "58", **TASK)


def test_digest_follows_each_part_and_each_weight() -> None:
    settings = ("exact", "exact=1", "exact=1 + length=0.1", "exact=1 + length=0.2", "exact=1 + numeric=0.1")
    digests = [resolve_reward(setting).code.digest for setting in settings]
    assert len(set(digests)) == len(settings)
    assert resolve_reward(settings[2]).code.digest == digests[2]


def test_rewards_that_wait_for_nothing_together_wait_for_nothing(own: str) -> None:
    assert resolve_reward("exact=1 + length=1").is_instant
    assert not resolve_reward(f"exact=1 + {own}:slow=1").is_instant


def test_task_that_one_part_cannot_score_names_the_part() -> None:
    check_task("exact=1 + length=1", TASK)
    with pytest.raises(ValueError, match=r"^length: its `target_length`"):
        check_task("exact=1 + length=1", {"id": "1", "prompt": "p", "answer": "3"})


def test_list_of_rewards_is_one_setting() -> None:
    several: Any = ["math=1", "length=-0.1"]
    assert RolloutSettings(reward=several).reward == "math=1 + length=-0.1"
    alone: Any = ["exact"]
    assert RolloutSettings(reward=alone).reward == "exact" == RolloutSettings().reward


BOTH = RolloutSettings.model_validate(
    {"reward": "length", "rewards": {"math": ["numeric=1", "regex=0.5"], "code/a": "exact"}}
)


def test_task_of_a_source_is_scored_by_the_rewards_of_the_source_alone() -> None:
    assert BOTH.scoring == "length | source=code/a: exact | source=math: numeric=1 + regex=0.5"
    task = {**TASK, "pattern": "5."}
    sample = scored(BOTH.scoring, "it is 58", **task, source="math")
    assert (sample.reward, sample.metrics) == (1.5, {"numeric": 1.0, "regex": 1.0})
    assert scored(BOTH.scoring, "58", **task, source="code/a").reward == 1.0
    assert scored(BOTH.scoring, "5" * 10, **task, source="other").reward == 1.0
    assert scored(BOTH.scoring, "5" * 10, **task).reward == 1.0
    assert resolve_reward(BOTH.scoring).code.digest != resolve_reward("length").code.digest


def test_rewards_of_sources_are_checked_and_refused_by_the_name_of_the_source() -> None:
    check_task(BOTH.scoring, {"id": "a", "source": "code/a", "answer": "x"})
    with pytest.raises(ValueError, match="numeric: its answer 'x' holds no number"):
        check_task(BOTH.scoring, {"id": "a", "source": "math", "answer": "x"})
    wrong = RolloutSettings.model_validate({"rewards": {"math": "mth"}})
    with pytest.raises(
        RewardSettingError, match=r"rollout.rewards.math=mth: reward 'mth': did you mean math\?"
    ):
        resolve_reward(wrong.scoring)
    with pytest.raises(ValueError, match=r"rollout.rewards.a: b: a source has no ': '"):
        RolloutSettings.model_validate({"rewards": {"a: b": "math"}})
    with pytest.raises(
        ValueError, match=r"rollout.ratio_field=a=b with rollout.rewards.math: a field has no =,"
    ):
        RolloutSettings.model_validate({"rewards": {"math": "math"}, "ratio_field": "a=b"})
    assert weights_by_title(BOTH.scoring) == {"numeric": 1.0, "regex": 0.5}
    assert weights_by_title("exact | source=math: numeric") is None


def test_rewards_of_sources_wait_and_close_as_their_own_do(own: str) -> None:
    settings = RolloutSettings.model_validate({"rewards": {"math": f"{own}:slow"}})
    reward = resolve_reward(settings.scoring)
    assert not reward.is_instant and own in "".join(reward.sources())
    assert resolve_reward("exact | source=math: numeric").is_instant
