"""Which tasks come next: order, shares, preference, and that a resumed run goes on where it was."""

import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.settings import RolloutSettings
from rollout.tasks.sampling import DrawnTasks, check_sampling, draw
from rollout.tasks.task_set import TaskError, TaskSet, task_order


def task_set(*classes: object) -> TaskSet:
    tasks = ({"id": str(index), "prompt": "p", "source": value} for index, value in enumerate(classes))
    return TaskSet(tuple(tasks), "digest")


MIXED = task_set(*["easy"] * 7, *["hard"] * 5, *["odd"] * 3)


def settings(sampling: str = "uniform", **others: Any) -> RolloutSettings:
    return RolloutSettings.model_validate({"task_sampling": sampling, **others})


def ratio(**shares: float) -> RolloutSettings:
    return settings("ratio", ratio=shares)


def drawn(tasks: TaskSet, given: RolloutSettings, count: int, **others: Any) -> DrawnTasks:
    defaults: dict[str, Any] = {"state": {}, "deferred": [], "success": {}, "iteration": 1}
    return draw(tasks, given, count, **{**defaults, **others})


def run_of(tasks: TaskSet, given: RolloutSettings, counts: list[int]) -> list[int]:
    """The tasks of iterations of these sizes, one after the other."""
    state: dict[str, int] = {}
    order: list[int] = []
    for iteration, count in enumerate(counts, start=1):
        result = drawn(tasks, given, count, state=state, iteration=iteration)
        state, order = result.state, order + result.tasks
    return order


# ---- uniform


def test_uniform_goes_on_in_the_order_of_old_runs() -> None:
    size = len(MIXED.tasks)
    assert run_of(MIXED, settings(), [4, 4, 30]) == task_order(size, 0, 0, 38)
    assert drawn(MIXED, settings(seed=3), 9, state={"": 11}).tasks == task_order(size, 3, 11, 9)


def test_deferred_tasks_come_first_and_no_task_comes_twice_in_a_pass() -> None:
    first = drawn(MIXED, settings(), 9)
    begun, deferred = first.tasks[:6], first.tasks[6:]
    second = drawn(MIXED, settings(), 9, state=first.state, deferred=deferred)
    assert second.tasks[:3] == deferred
    assert sorted(begun + second.tasks) == list(range(15))


def test_no_more_than_count_are_drawn_when_more_are_deferred() -> None:
    result = drawn(MIXED, settings(), 2, state={"": 5}, deferred=[3, 1, 4])
    assert (result.tasks, result.state, result.waiting) == ([3, 1], {"": 5}, [4])


def test_what_is_to_be_begun_again_comes_before_what_was_never_begun() -> None:
    result = drawn(MIXED, settings(), 4, again=[9, 8], deferred=[3, 1, 4])
    assert (result.tasks, result.waiting) == ([9, 8, 3, 1], [4])
    result = drawn(MIXED, settings("curriculum"), 4, again=[9, 8], deferred=[3, 1, 4])
    assert result.tasks[:2] == [9, 8] and len(result.tasks) == 4 and result.waiting == []


# ---- ratio


@given(
    st.dictionaries(st.sampled_from(["easy", "hard", "odd"]), st.integers(1, 1000), min_size=3),
    st.lists(st.integers(0, 40), max_size=8),
)
def test_shares_hold_at_every_moment_of_a_run_to_within_one_task(
    shares: dict[str, int], counts: list[int]
) -> None:
    order = run_of(MIXED, ratio(**shares), counts)
    total = sum(shares.values())
    counted: Counter[str] = Counter()
    for number, index in enumerate(order, start=1):
        counted[MIXED.tasks[index]["source"]] += 1
        assert all(abs(counted[name] - number * share / total) < 1 for name, share in shares.items())


def test_ratio_does_not_depend_on_where_iterations_are_cut() -> None:
    given = ratio(easy=0.3, hard=0.6, odd=0.1)
    assert run_of(MIXED, given, [1] * 60) == run_of(MIXED, given, [60]) == run_of(MIXED, given, [25, 35])


def test_each_class_is_gone_through_before_a_task_of_it_comes_again() -> None:
    order = run_of(MIXED, ratio(easy=1, hard=3, odd=0), [40])
    easy = [index for index in order if index < 7]
    assert len(easy) == 10 and sorted(easy[:7]) == [*range(7)] and len(set(easy[7:])) == 3
    hard = [index for index in order if 7 <= index < 12]
    assert len(hard) == 30 and all(sorted(hard[at : at + 5]) == [*range(7, 12)] for at in range(0, 30, 5))
    assert hard[:5] != hard[5:10]


def test_deferred_tasks_count_as_drawn_and_those_of_a_class_left_out_are_dropped() -> None:
    given = ratio(easy=1, hard=1, odd=0)
    first = drawn(MIXED, given, 6)
    second = drawn(MIXED, given, 6, state=first.state, deferred=[14, *first.tasks[4:]])
    assert second.tasks == run_of(MIXED, given, [10])[4:]
    third = drawn(MIXED, ratio(easy=1, hard=0, odd=0), 2, state={}, deferred=[9, 14, 3, 8, 1, 2])
    assert (third.tasks, third.waiting) == ([3, 1], [2]), "each of them waits for one place"


def test_another_ratio_in_mid_run_does_not_make_up_for_what_the_old_one_left() -> None:
    before = drawn(MIXED, ratio(easy=1, hard=0, odd=0), 100)
    after = drawn(MIXED, ratio(easy=1, hard=1, odd=0), 20, state=before.state)
    assert Counter(MIXED.tasks[index]["source"] for index in after.tasks) == {"easy": 10, "hard": 10}


def test_changing_the_kind_of_sampling_and_back_goes_on_where_it_was() -> None:
    state: dict[str, int] = {}
    seen: list[int] = []
    for kind in (settings(), ratio(easy=1, hard=1, odd=1), settings("curriculum"), settings()):
        result = drawn(MIXED, kind, 5, state=state)
        state = result.state
        seen += result.tasks if kind == settings() else []
    assert seen == task_order(15, 0, 0, 10)


def test_classes_may_be_numbers() -> None:
    tasks = task_set(1, 2, 2, 2.5)
    order = run_of(tasks, settings("ratio", ratio={"1": 1, "2": 1, "2.5": 1}), [30])
    assert Counter(tasks.tasks[index]["source"] for index in order) == {1: 10, 2: 10, 2.5: 10}


@pytest.mark.parametrize(
    ("shares", "field", "reason"),
    [
        ({}, "source", "needs shares above 0, e.g. rollout.ratio.easy=1; by 'source'"),
        ({"easy": 0, "hard": 0, "odd": 0}, "source", "needs shares above 0"),
        ({"easy": 1, "hrad": 1}, "source", "rollout.ratio.hrad=1: no such class; by 'source'"),
        ({"easy": 1, "hard": 1}, "source", "no share for the class 'odd'; give rollout.ratio.odd=0 to leave"),
        ({"easy": 1}, "level", "task '0' has no class: it has no field 'level'"),
        ({"easy": 1}, "tags", "task '0' has no class: its field 'tags' is ['a']"),
    ],
)
def test_ratio_that_does_not_fit_the_tasks_is_an_error_in_one_line(
    shares: dict[str, float], field: str, reason: str
) -> None:
    tasks = TaskSet(tuple({**task, "tags": ["a"]} for task in MIXED.tasks), "digest")
    given = settings("ratio", ratio=shares, ratio_field=field)
    with pytest.raises(TaskError) as raised:
        check_sampling(tasks, given)
    assert reason in str(raised.value) and "\n" not in str(raised.value)
    with pytest.raises(TaskError):
        drawn(tasks, given, 3)


def test_error_names_the_classes_that_there_are() -> None:
    with pytest.raises(TaskError, match=r"easy \(7 tasks\), hard \(5 tasks\), odd \(3 tasks\)"):
        check_sampling(MIXED, ratio(easy=1))


def test_a_ratio_is_not_looked_at_by_other_kinds() -> None:
    check_sampling(MIXED, settings(ratio={"no such class": 1}))


# ---- curriculum


def frequencies(success: dict[int, float], size: int, count: int, iterations: int = 400) -> list[float]:
    """How often each task is drawn, per iteration."""
    tasks = task_set(*["x"] * size)
    counted: Counter[int] = Counter()
    for iteration in range(1, iterations + 1):
        counted.update(
            drawn(tasks, settings("curriculum"), count, success=success, iteration=iteration).tasks
        )
    return [counted[index] / iterations for index in range(size)]


def test_curriculum_prefers_what_is_solved_half_of_the_time() -> None:
    often = frequencies({0: 0.0, 1: 0.1, 2: 0.5, 3: 0.9, 4: 1.0}, size=5, count=1)
    never, seldom, half, mostly, always = often
    assert half > seldom > never > 0 and half > mostly > always > 0
    # weights 0.05, 0.36, 1, 0.36, 0.05 of 1.82; three standard deviations of 400 draws are 0.075
    assert half == pytest.approx(1 / 1.82, abs=0.075) and seldom == pytest.approx(0.36 / 1.82, abs=0.06)


def test_unseen_tasks_are_as_welcome_as_half_solved_ones() -> None:
    unseen, half, solved = frequencies({1: 0.5, 2: 1.0}, size=3, count=1)
    assert unseen == pytest.approx(half, abs=0.11) and solved < 0.1


def test_curriculum_takes_success_beyond_0_and_1_for_these() -> None:
    low, high, half = frequencies({0: -3.0, 1: 7.0, 2: 0.5}, size=3, count=1)
    assert 0 < low < 0.12 and 0 < high < 0.12 and half > 0.8


def test_curriculum_draws_no_task_twice_until_all_have_come() -> None:
    success = {index: index / 14 for index in range(15)}
    order = drawn(MIXED, settings("curriculum"), 40, success=success).tasks
    assert sorted(order[:15]) == sorted(order[15:30]) == list(range(15))
    assert len(order) == 40 and len(set(order[30:])) == 10
    assert order[:15] != order[15:30]


def test_curriculum_is_a_function_of_seed_iteration_and_success() -> None:
    def order(iteration: int, seed: int = 0, **others: Any) -> list[int]:
        return drawn(MIXED, settings("curriculum", seed=seed), 8, iteration=iteration, **others).tasks

    assert order(1) == order(1) == order(1, deferred=[9, 9], state={"": 4})
    assert all(one != other for one, other in pairwise([order(1), order(2), order(3), order(1, seed=1)]))
    assert order(1) == [1, 8, 13, 0, 12, 10, 11, 6]


@pytest.mark.parametrize("kind", ["uniform", "curriculum"])
def test_a_hundred_thousand_tasks_are_no_burden(kind: str) -> None:
    tasks = task_set(*["x"] * 100_000)
    success = {index: 0.3 for index in range(0, 100_000, 2)}
    started_s = time.perf_counter()
    result = drawn(tasks, settings(kind), 1024, success=success)
    assert time.perf_counter() - started_s < 5  # 0.02 s, and the machine may be busy
    assert len(set(result.tasks)) == 1024
