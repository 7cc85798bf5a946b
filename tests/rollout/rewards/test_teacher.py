"""The teacher: its logprobs go to the tokens that are trained, and what it cannot give costs the sample."""

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollout.environments.environment import single_turn
from rollout.part_file import decode_part, encode_part
from rollout.rewards.endpoint import EndpointError
from rollout.rewards.teacher import Teacher
from rollout.trajectory import Picture, Sample, Turn
from tests.rollout.collecting import FakeClient, run, slots
from tests.rollout.rewards.test_served import Served, served
from tests.rollout.test_part_file import HEADER

__all__ = ["served"]
IDS, TRAINED, TEXTS = [5, 6, 7, 8], [0, 1, 0, 1], ["<a>", "on", "e ", "two"]


def make_sample(text: str = "on two", turns: list[Turn] | None = None) -> Sample:
    mask = np.array(TRAINED, np.uint8)
    ids, nothing = np.array(IDS, np.int32), np.zeros(len(IDS), np.float32)
    return Sample(ids, mask, nothing, "stop", text, turns=turns or [])


def answer(logprobs: list[Any], texts: list[str] = TEXTS) -> dict[str, Any]:
    """As vLLM's: beside the token that is there it may name the likeliest one."""
    entries = [
        {str(token): {"logprob": logprob, "decoded_token": text}, "999": {"logprob": 0.0}}
        for token, logprob, text in zip(IDS, logprobs, texts, strict=True)
    ]
    return {"choices": [{"prompt_logprobs": [None, *entries[1:]]}]}


GOOD = answer([0, -1.5, -2, -0.25])


def asked(served: Served, sample: Sample, more: str = ",retries=1") -> list[float]:
    async def ask() -> list[float]:
        teacher = Teacher(f"{served.url}/v1{more}")
        try:
            return (await teacher.logprobs(sample)).tolist()
        finally:
            await teacher.close()

    return asyncio.run(ask())


def test_trained_tokens_get_the_teachers_logprobs(served: Served) -> None:
    served.answers = [503, GOOD]
    assert asked(served, make_sample(), ",model=big") == [0, -1.5, 0, -0.25]
    path, body = served.asked[-1]
    assert path == "/v1/completions" and body["prompt"] == IDS and body["model"] == "big"
    assert body["prompt_logprobs"] == 0, "the token that is there, and no likelier ones"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (404, "answered 404: not now"),
        ({"choices": [{"text": "3"}]}, "answered without the logprobs of all 4 tokens"),
        ({"choices": [{"prompt_logprobs": GOOD["choices"][0]["prompt_logprobs"][:3]}]}, "of all 4 tokens"),
        (answer([0, "-inf", -2, -1]), "a logprob is not a finite number"),
        (answer([0, -1, -2, -1], ["", "un", "", "deux"]), "reads the tokens of ontwo as undeux"),
    ],
    ids=["no path", "no logprobs", "too few", "impossible", "another tokenizer"],
)
def test_answer_that_cannot_be_used_is_an_error(served: Served, said: Any, why: str) -> None:
    served.answers = [said]
    with pytest.raises(EndpointError, match=why):
        asked(served, make_sample(), ",retries=0")


@pytest.mark.parametrize(
    "sample",
    [
        make_sample("on  two\n"),
        make_sample("o t"),
        make_sample("öther"),
        make_sample("of several turns", [Turn("user", "and?")]),
    ],
    ids=["spaces", "special tokens", "not ascii", "turns"],
)
def test_texts_that_tokenizers_write_in_other_ways_are_not_compared(served: Served, sample: Sample) -> None:
    served.answers = [GOOD]
    assert asked(served, sample) == [0, -1.5, 0, -0.25]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("localhost:8000", "is not a URL"),
        ("http://127.0.0.1:1/v1,prompt=x", "no parameter 'prompt'; there is key_from"),
        ("http://127.0.0.1:1/v1,retries=-1", "retries=-1: give a value of 0 or more"),
        ("http://127.0.0.1:1/v1,key_from=ABSENT_KEY", "this variable is not set here"),
    ],
)
def test_setting_that_is_wrong_is_named(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Teacher(name)


def longest_sample(name: str) -> int | None:
    async def ask() -> int | None:
        teacher = Teacher(name)
        try:
            return await teacher.longest(9)
        finally:
            await teacher.close()

    return asyncio.run(ask())


BIG, SMALL = {"id": "big", "max_model_len": 33}, {"id": "small", "max_model_len": 9}


@pytest.mark.parametrize(
    ("answers", "models", "longest"),
    [
        ([GOOD], {"data": [BIG, SMALL]}, 32),
        ([GOOD], {"data": [SMALL, {"id": "big", "max_model_len": None}]}, None),
        ([GOOD], "no models", None),
        ([503], {"data": [BIG]}, 32),
    ],
)
def test_teacher_is_asked_how_long_a_sample_may_be(
    served: Served, answers: list[Any], models: Any, longest: int | None
) -> None:
    served.answers, served.models = answers, models
    assert longest_sample(f"{served.url}/v1,model=big") == longest
    assert served.asked[0][1]["prompt"] == [9, 9]


def test_teacher_that_is_not_there_yet_is_not_refused() -> None:
    assert longest_sample("http://127.0.0.1:1/v1") is None


def told(logprob: float) -> dict[str, Any]:
    """Of a sample of FakeClient: one token of the prompt, one that is trained, which is the slot's text."""
    return {"choices": [{"prompt_logprobs": [None, {"4": {"logprob": logprob}}]}]}


def test_samples_of_a_collection_are_stored_with_what_the_teacher_says(served: Served) -> None:
    served.answers = [told(-0.5)]
    groups, failure = run(FakeClient(), slots(3), {"teacher": f"{served.url}/v1"})
    assert failure is None and len(served.asked) == 12
    _, stored = decode_part(encode_part(groups, HEADER))
    for group in stored:
        assert [sample.reward for sample in group.samples] == [1.0] * 4
        for sample in group.samples:
            assert sample.teacher_logprobs is not None and sample.teacher_logprobs.tolist() == [0, -0.5]


def test_tasks_of_a_source_have_a_teacher_of_their_own(served: Served) -> None:
    served.answers = [told(-0.5)]
    work = slots(3)
    work[1].task["source"] = "math"
    teachers = {"teacher": f"{served.url}/v1", "teachers": {"math": f"{served.url}/math/v1"}}
    _, failure = run(FakeClient(), work, teachers)
    assert failure is None
    assert Counter(path for path, _ in served.asked) == {"/v1/completions": 8, "/math/v1/completions": 4}


def test_sample_without_an_answer_is_lost_and_the_rest_of_its_group_stays(served: Served) -> None:
    served.answers = [told(-0.5), 404, told(-1)]
    ((group,), failure) = run(FakeClient(), slots(1), {"teacher": f"{served.url}/v1"})
    assert failure is None and len(group.samples) == 3
    assert group.failed[0].startswith("teacher, task 't0': http://127.0.0.1")


def test_sample_whose_environment_shows_a_picture_is_lost_with_the_reason(served: Served) -> None:
    async def showing(task: Any, policy: Any, sampling: Any) -> list[Sample]:
        samples = await single_turn(task, policy, sampling)
        samples[0].pictures = [Picture("0" * 64, 0, 1)]
        return samples

    served.answers = [told(-0.5)]
    ((group,), failure) = run(FakeClient(), slots(1), {"teacher": f"{served.url}/v1"}, environment=showing)
    assert failure is None and len(group.samples) == 3 and len(served.asked) == 3
    (reason,) = group.failed
    assert reason.startswith("teacher, task 't0': it is shown no pictures, and its environment shows some; ")


def test_part_without_a_teacher_is_as_it_was(served: Served) -> None:
    groups, _ = run(FakeClient(), slots(1))
    data = encode_part(groups, HEADER)
    assert b"teacher_logprobs" not in data
    assert decode_part(data)[1][0].samples[0].teacher_logprobs is None


def test_part_needs_the_teachers_logprobs_of_all_samples_or_of_none() -> None:
    groups, _ = run(FakeClient(), slots(2))
    groups[0].samples[0].teacher_logprobs = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="teacher_logprobs are missing"):
        encode_part(groups, HEADER)
