"""What is logged of losses that come by the thousand: the first of a kind, then counts."""

import logging
import threading
from typing import Any

import pytest

from rollout.engines.answers import RequestRefused
from rollout.environments.environment import single_turn
from rollout.origin import Sampling
from rollout.processes.killable_process import CallFailed
from rollout.rewards.reward import Reward
from rollout.tally import MOST_KINDS, Tally, amount
from rollout.tasks.task_set import Task
from rollout.trajectory import Sample
from tests.rollout.collecting import FakeClient, run, slots

log = logging.getLogger(__name__)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return texts


def judge(task: Task, completion: str) -> float:
    raise KeyError(f"answer of {task['id']}")


def test_samples_lost_for_one_reason_are_logged_once_and_then_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tally = Tally(log)
    for iteration in range(2):
        groups, failure = run(FakeClient(), slots(3), reward=Reward("my:judge", judge), tally=tally)
        assert failure is None and sum(len(group.failed) for group in groups) == 12
        shown = [record for record in caplog.records if record.exc_info]
        assert len(shown) == (iteration == 0), "a traceback is shown once"
        first, counted, summed_up = said(caplog)
        assert "loses a sample: reward 'my:judge', task 't" in first
        assert counted.startswith("11 more samples were lost like this: reward 'my:judge', task 't")
        assert "3 of 3 groups were given up, 12 samples were lost" in summed_up


def test_losses_that_are_not_alike_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    def two_faults(task: Task, completion: str) -> float:
        raise KeyError("answer") if task["id"] in ("t0", "t1") else ZeroDivisionError("by zero")

    run(FakeClient(), slots(5), reward=Reward("my:judge", two_faults))
    first = [text for text in said(caplog) if "loses a sample" in text]
    assert len(first) == 2 and "KeyError" in first[0] and "ZeroDivisionError" in first[1]


def test_reasons_that_all_differ_are_no_flood_either(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(log)
    words = ["".join(chr(97 + int(digit)) for digit in str(number)) for number in range(1000)]
    for word in words:
        tally.note("samples", "slot 1 loses a sample", ValueError(f"no such word: {word}"), None)
    tally.say_counts()
    texts = said(caplog)
    assert len(texts) == MOST_KINDS + 2
    assert texts[-1].startswith(f"{1000 - MOST_KINDS - 1} more samples")


def test_reasons_that_differ_in_an_address_are_of_one_kind(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(log)
    for thing in ("<A at 0x7fc6514790e0>", "<A at 0x7fc65147bca0>"):
        tally.note("groups", "a group is given up", ValueError(f"got {thing}"), None)
    assert len(said(caplog)) == 1


def test_groups_that_an_engine_refuses_are_one_line_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def asks(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        return await single_turn(task, policy, sampling)

    refused = FakeClient(fail=lambda prompt: RequestRefused(f"a prompt of {prompt} is too long"))
    groups, _ = run(refused, slots(3), environment=asks)
    assert len(groups) == 3 and all(group.given_up for group in groups)
    assert not any(record.exc_info for record in caplog.records)
    first, counted, _ = said(caplog)
    assert first == "the group of task 't0' is given up: a prompt of p0 is too long"
    assert counted.startswith("2 more groups were lost like this: a prompt of p0")


@pytest.mark.parametrize(
    ("error", "text"), [(SystemExit(3), "SystemExit: 3"), (KeyError("solution"), "KeyError: 'solution'")]
)
def test_group_that_the_users_code_has_lost_names_the_kind_of_error(
    error: BaseException, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        raise error

    run(FakeClient(), slots(1), environment=fails)
    assert said(caplog)[0] == f"the group of task 't0' is given up: {text}"


def test_losses_are_counted_although_the_collection_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()

    def ends(task: Task, completion: str) -> float:
        if task["id"] == "t3":
            stop.set()
        raise KeyError("answer")

    run(FakeClient(), slots(99), {"concurrency": 4}, reward=Reward("my:judge", ends), stop=stop)
    assert any("more samples were lost like this" in text for text in said(caplog))


def test_traceback_begins_where_the_users_code_does(caplog: pytest.LogCaptureFixture) -> None:
    run(FakeClient(), slots(2), reward=Reward("my:judge", judge))
    assert caplog.text.count('File "') == 1 and "in judge" in caplog.text


def test_traceback_of_another_process_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    async def failed(task: Task, completion: str) -> float:
        error = CallFailed("TypeError: score() takes 1 positional argument")
        error.add_note('File "my_rewards.py", line 3, in score')
        raise error

    run(FakeClient(), slots(2), reward=Reward("my:judge", failed))
    assert caplog.text.count("in score") == 1


def test_note_of_another_process_is_shown_without_frames_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    error = CallFailed("TypeError: no")
    error.add_note('File "my_rewards.py", line 3, in score')
    Tally(log).note("samples", "slot 1 loses a sample", ValueError("no"), error)
    assert said(caplog) == ['slot 1 loses a sample: ValueError: no\nFile "my_rewards.py", line 3, in score']


def test_one_loss_is_counted_in_the_singular(caplog: pytest.LogCaptureFixture) -> None:
    tally = Tally(log)
    for _ in range(2):
        tally.note("groups", "slot 1 is given up", ValueError("no"), None)
    tally.say_counts()
    assert said(caplog)[-1] == "1 more group was lost like this: ValueError: no"
    assert amount(1, "groups", "were") == "1 group was" and amount(2, "groups", "are") == "2 groups are"


def test_groups_of_fewer_samples_than_asked_for_are_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.tally._warned", set[str]())  # other tests may have heard it

    async def one(task: Task, policy: Any, sampling: Sampling) -> list[Sample]:
        return (await single_turn(task, policy, sampling))[:1]

    run(FakeClient(), slots(3), environment=one)
    (text,) = [text for text in said(caplog) if "sampling.n" in text]
    assert (
        "returned 1 sample of the 4 of sampling.n, e.g. of task 't0': a group of one teaches nothing" in text
    )
    caplog.clear()
    run(FakeClient(), slots(3), environment=single_turn)
    assert said(caplog) == []
