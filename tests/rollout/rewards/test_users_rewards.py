"""What a reward function of the user's may and may not do."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.environments.environment import EnvironmentSettingError, resolve_environment
from rollout.plugins import PluginError, load_function
from rollout.rewards.resolve import RewardSettingError, check_task, resolve_reward
from rollout.rewards.reward import RewardError
from tests.rollout.rewards.scoring import scored

CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+2"}]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "exakt",
            "did you mean exact? There is exact, numeric, regex, length, math, reasoning_gym, code, or give",
        ),
        ("code/mine.py", "did you mean code/mine.py:FUNCTION?"),
        ("math=0.5,length=1", "give each reward for itself: --reward math=1 --reward"),
        ("exact,length", "give each reward for itself"),
        ("localhost:8000/score", "a server is named by its address: http://localhost:8000/score"),
        ("mine.score", "did you mean mine:score?"),
        ("no_such_module:f", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        ("{user}:absent", "no such name in"),
        ("{user}:one_argumet", "did you mean one_argument?"),
        ("{user}:absent", "it has "),
        ("{user}:constant", "of type int, not a function"),
        (
            "{user}:one_argument",
            "it takes (completion), but is called with (task, completion); give it these",
        ),
        ("{user}:three_arguments", "takes (task, completion, info), but is called with"),
        ("{user}:named_only", "takes (*, task, completion), but"),
        ("{user}:yields", "yields; it must return"),
        ("{user}:trl_tokens", "it needs `completion_ids`, and rewards are given completions as texts"),
        (
            "{user}:trl_state",
            "it needs `trainer_state`, and TRL's trainer is not here; take it out of the para",
        ),
        ("{user}:trl_maker", "it makes a reward function, and is none; write into its file, e.g., `my_rew"),
        (":f", "is not of the form module:function"),
        ("code/scores.py:f", "code/scores.py: no such file"),
        ("{user}.py:absent", "no such name in"),
    ],
)
def test_name_that_is_no_reward_is_an_error(user_code: str, name: str, reason: str) -> None:
    with pytest.raises(RewardSettingError) as raised:
        resolve_reward(name.replace("{user}", user_code))
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("exact", {"answer": 3}, {}),
        ("numeric", {"answer": "is 3"}, {"answer": "three"}),
        ("regex", {"pattern": "("}, {"answer": 3}),
        ("length", {"target_length": 3}, {"answer": "3"}),
        ("math", {"answer": "3"}, {}),
        ("users:own", {}, None),
    ],
)
def test_task_that_a_reward_can_score_is_told_from_one_that_it_cannot(
    name: str, good: dict[str, Any], bad: dict[str, Any] | None
) -> None:
    check_task(name, good)
    if bad is not None:
        with pytest.raises(ValueError, match=r"^it"):
            check_task(name, bad)


USER_CODE = """
import asyncio, functools, os, time
from decimal import Decimal
import numpy as np

def half(task, completion): return 0.5
def one(task, completion): return np.float32(1)
def parts(task, completion): return {"reward": 1, "digits": len(completion)}
def exactly(task, completion): return Decimal("0.5")
async def exactly_later(task, completion): return Decimal("0.5")
def array(task, completion): return np.array(0.5)
async def array_later(task, completion): return np.array(0.5)
async def array_of_text(task, completion): return np.array("x")
def flags(task, completion):
    return {"reward": np.bool_(True), "short": len(completion) < 9, "digit": np.bool_(False)}
async def flags_of(task, completion): return flags(task, completion)
async def slow(task, completion):
    await asyncio.sleep(0)
    return 0.25
class Judge:
    async def __call__(self, task, completion): return 0.75
judge = Judge()
def nan(task, completion): return float("nan")
def huge(task, completion): return 10**400
def large_metric(task, completion): return {"reward": 1, "digits": 1e31}
def text(task, completion): return "1"
def nothing(task, completion): return None
def no_reward(task, completion): return {"digits": 1}
def bad_metric(task, completion): return {"reward": 1, "digits": None}
def raises(task, completion): raise KeyError("answer")
def stops(task, completion): raise StopIteration
def exits(task, completion): raise SystemExit(3)
def process(task, completion): return os.getpid() == int(completion)
def later(task, completion): return slow(task, completion)
def one_argument(completion): return 1
def three_arguments(task, completion, info): return 1
def yields(task, completion): yield 1
def named_only(*, task, completion): return 1
def trl(completions, prompts=None, **columns):
    return [len(c) + len(p) + int(a) for c, p, a in zip(completions, prompts, columns["answer"])]
def trl_chat(prompts, completions, answer):
    pairs = zip(prompts, completions, answer)
    return [float(c[0]["content"] == a and p[-1]["role"] == "user") for p, c, a in pairs]
async def trl_later(completions, **columns): return np.array([0.5 for _ in completions])
def trl_unscored(completions, **columns): return [None for _ in completions]
def trl_number(completions, **columns): return 1.0
def trl_lacks(completions, solution): return [1.0]
def trl_tokens(completions, completion_ids): return [1.0]
def trl_state(completions, trainer_state, **columns): return [1.0]
def trl_maker(least=0.0, most=1.0):
    def reward(completions, **columns): return [most for _ in completions]
    return reward
trl_made = trl_maker(most=0.5)
def by_helper(example, text):
    def each(completions): return [len(text) / 4 for text in completions]
    return each([text])[0]
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    hard = data_source == "sums" and extra_info["hard"]
    return {"score": float(solution_str == ground_truth), "hard": hard}
def full_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "acc": True, "pred": solution_str}
def openrlhf(queries, prompts, labels, **kwargs):
    rewards = np.array([float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"right": rewards.mean(), "each": rewards}}
def openrlhf_list(queries, prompts, labels): return [float(queries[0] == "add\\n1+212")]
def compute_batch(solution_strs, ground_truths): return [1.0 for _ in solution_strs]
def compute_alone(solution_str, ground_truth): return float(solution_str == ground_truth)
lengthy = functools.partial(lambda scale, task, completion: scale * len(completion), 0.5)
class Counts:
    def __init__(self): self.least = 2
    def __call__(self, task, completion): return float(len(completion) >= self.least)
constant = 3
"""


@pytest.fixture
def user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current directory; a name of its own for each test, as modules are imported once."""
    name = f"rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    return name


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("half", 0.5),
        ("one", 1.0),
        ("exactly", 0.5),
        ("exactly_later", 0.5),
        ("array", 0.5),
        ("array_later", 0.5),
        ("slow", 0.25),
        ("judge", 0.75),
        ("later", 0.25),
        ("lengthy", 1.5),
        ("Counts", 1.0),
        ("Judge", 0.75),
    ],
)
def test_function_of_the_user_scores(user_code: str, function: str, expected: float) -> None:
    reward = scored(f"{user_code}:{function}", "abc").reward
    assert reward == expected and type(reward) is float


def test_file_of_the_user_may_stand_in_place_of_its_module(
    user_code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])  # the directory of the file comes to stand in it
    (tmp_path / "code").mkdir()
    for file in (f"code/far_{user_code}.py", "code/twice.py", "twice.py"):
        (tmp_path / file).write_text(USER_CODE)
    for file in (f"{user_code}.py", f"code/far_{user_code}.py"):
        assert scored(f"{file}:parts", "abc").metrics == {"digits": 3.0}
    resolve_reward("twice:parts")
    with pytest.raises(RewardSettingError, match=rf"^{tmp_path}/no/twice.py: no such file$"):
        resolve_reward(f"{tmp_path}/no/twice.py:parts")
    with pytest.raises(RewardSettingError, match=r"twice.py is hidden by .*; give your file another name"):
        resolve_reward("code/twice.py:parts")


def test_dict_gives_the_reward_and_metrics(user_code: str) -> None:
    sample = scored(f"{user_code}:parts", "abc")
    assert (sample.reward, sample.metrics) == (1.0, {"digits": 3.0})


@pytest.mark.parametrize("function", ["flags", "flags_of"])
def test_yes_and_no_count_as_1_and_0_also_those_of_numpy(user_code: str, function: str) -> None:
    sample = scored(f"{user_code}:{function}", "abc")
    assert (sample.reward, sample.metrics) == (1.0, {"short": 1.0, "digit": 0.0})


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nan", "returned reward = nan, expected a finite number"),
        ("huge", "expected a finite number up to 1e+15"),
        ("large_metric", "returned digits = 1e+31, expected a finite number up to 1e+30"),
        ("text", "returned reward = '1'"),
        ("nothing", "returned reward = None"),
        ("array_of_text", "returned reward = array('x'"),
        ("no_reward", "returned a dict without 'reward'"),
        ("bad_metric", "returned digits = None"),
        ("raises", "KeyError: 'answer'"),
        ("stops", "StopIteration"),
        ("exits", "SystemExit(3)"),
    ],
)
def test_function_that_fails_is_named_with_the_task(user_code: str, function: str, reason: str) -> None:
    with pytest.raises(RewardError) as raised:
        scored(f"{user_code}:{function}", "abc")
    assert f"reward '{user_code}:{function}', task 't1'" in str(raised.value) and reason in str(raised.value)


@pytest.mark.parametrize(
    ("function", "task", "reward"),
    [
        ("trl", {"answer": "3"}, 6.0),
        ("trl_chat", {"messages": CHAT, "answer": "12"}, 1.0),
        ("trl_later", {}, 0.5),
        ("trl_unscored", {}, 0.0),
        ("trl_made", {}, 0.5),
        ("by_helper", {}, 0.5),
        ("compute_alone", {"answer": "12"}, 1.0),
        ("full_score", {}, 1.0),
        ("openrlhf", {"label": "12"}, 1.0),
        ("openrlhf", {"answer": "12"}, 1.0),
        ("openrlhf_list", {"messages": CHAT}, 1.0),
    ],
)
def test_function_with_the_parameters_of_others_is_taken_as_it_is(
    user_code: str, function: str, task: dict[str, Any], reward: float
) -> None:
    assert scored(f"{user_code}:{function}", "12", **task).reward == reward


def test_score_of_verl_is_the_reward_and_the_rest_are_metrics(user_code: str) -> None:
    columns = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": "12"}}
    sample = scored(f"{user_code}:compute_score", "12", **columns, extra_info={"hard": 3})
    assert (sample.reward, sample.metrics) == (1.0, {"hard": 3.0})


def test_logs_of_openrlhf_are_metrics(user_code: str) -> None:
    assert scored(f"{user_code}:openrlhf", "12", answer="12").metrics == {"right": 1.0, "each": 1.0}


@pytest.mark.parametrize(
    ("function", "columns", "lacks"),
    [
        ("trl_lacks", {"result": "3"}, "it has no `solution`; name its column, e.g. columns.solution=COLUMN"),
        ("trl_lacks", {"solution": "3"}, None),
        ("compute_batch", {}, "it has no `answer`"),
        ("compute_batch", {"answer": "3"}, None),
        ("trl", {}, None),
        ("compute_score", {"result": "3"}, "it has no `answer`; name its column"),
        ("compute_score", {"reward_model": {"ground_truth": "3"}}, None),
        ("openrlhf", {}, None),
        ("one_argument", {}, None),
        ("Counts", {}, None),
    ],
)
def test_task_without_a_column_that_a_function_of_others_needs_is_refused_at_the_start(
    user_code: str, function: str, columns: dict[str, Any], lacks: str | None
) -> None:
    task = {"id": "t1", "prompt": "1+2=", **columns}
    if lacks is None:
        check_task(f"{user_code}:{function}", task)
    else:
        with pytest.raises(ValueError, match=re.escape(lacks)):
            check_task(f"{user_code}:{function}", task)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("trl_number", "must return a list with one reward for each; it returned 1.0"),
        ("trl_lacks", "missing 1 required positional argument: 'solution'"),
    ],
)
def test_function_of_lists_that_cannot_score_is_an_error(user_code: str, function: str, reason: str) -> None:
    with pytest.raises(RewardError, match=reason):
        scored(f"{user_code}:{function}", "12")


def test_module_that_fails_when_imported_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardSettingError, match="ZeroDivisionError"):
        resolve_reward("broken_reward:f")


def test_module_that_is_here_is_answered_with_how_its_function_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rewards_here.py").write_text("import no_such_library")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RewardSettingError, match="did you mean rewards_here:FUNCTION"):
        resolve_reward("rewards_here")
    with pytest.raises(EnvironmentSettingError, match="did you mean rewards_here:FUNCTION"):
        resolve_environment("rewards_here")
    with pytest.raises(PluginError, match="install it for this Python on every node, or"):
        load_function("rewards_here:score")
