"""Rewards that a server gives: what it is asked, what is tried again or asked once, what is refused."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout.rewards import endpoint
from rollout.rewards.resolve import RewardSettingError, check_task, resolve_reward
from rollout.rewards.reward import Reward, RewardError
from rollout.rewards.served import ServedReward
from rollout.settings import RolloutSettings
from rollout.trajectory import Sample
from tests.rollout.rewards.scoring import make_sample, score_one

TASK: dict[str, Any] = {"id": "t1", "prompt": "1+2=", "answer": "3", "level": 7}


class Served:
    """A server on the loopback whose answers are a list; the last one stays."""

    def __init__(self) -> None:
        self.answers: list[Any] = [0.5]
        self.asked: list[Any] = []
        self.headers: list[Any] = []
        self.now = self.most = 0
        self.delay_s = 0.0
        self.url = ""
        self.models: Any = {"data": []}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.now += 1
        self.most = max(self.most, self.now)
        self.asked.append((request.path, await request.json()))
        self.headers.append(request.headers)
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        await asyncio.sleep(self.delay_s)
        self.now -= 1
        if isinstance(answer, int) and answer >= 400:
            return web.Response(status=answer, text="not\nnow")
        return web.Response(text=answer) if isinstance(answer, str) else web.json_response(answer)

    async def list_models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(self.models)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(endpoint, "FIRST_WAIT_S", 0.01)
    made, loop, ready = Served(), asyncio.new_event_loop(), threading.Event()

    async def main() -> None:
        app = web.Application()
        app.router.add_post("/{path:.*}", made.handle)
        app.router.add_get("/v1/models", made.list_models)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await over.wait()
        await runner.cleanup()

    over = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    yield made
    loop.call_soon_threadsafe(over.set)
    thread.join(60)
    loop.close()


def scored(setting: str, *texts: str, task: dict[str, Any] = TASK) -> list[Sample]:
    return with_reward(resolve_reward(setting), *texts, task=task)


def with_reward(reward: Reward, *texts: str, task: dict[str, Any] = TASK) -> list[Sample]:
    async def main() -> list[Sample]:
        samples = [make_sample(text) for text in texts]
        try:
            await asyncio.gather(*(score_one(reward, task, sample) for sample in samples))
        finally:
            await reward.close()
        return samples

    return asyncio.run(main())


def chat(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_reward_model_gets_task_and_completion_and_gives_reward_and_metrics(served: Served) -> None:
    served.answers = [0.25, {"reward": 0.75, "tokens": 3}]
    setting = f"{served.url}/score"
    assert scored(setting, "3")[0].reward == 0.25
    (sample,) = scored(setting, "4")
    assert (sample.reward, sample.metrics) == (0.75, {"tokens": 3.0})
    assert served.asked[0] == ("/score", {"task": TASK, "completion": "3"})


def test_judge_is_asked_by_chat_and_its_score_is_a_fraction(served: Served) -> None:
    served.answers = [chat("<think>Score: 1</think>Score: 3, no.\n**Score:** 8/10")]
    (sample,) = scored(f"judge:{served.url}/v1,model=m", "It is {answer}.")
    assert sample.reward == 0.8
    path, asked = served.asked[0]
    assert path == "/v1/chat/completions" and (asked["model"], asked["temperature"]) == ("m", 0)
    (message,) = asked["messages"]
    assert "<question>\n1+2=\n</question>" in message["content"] and "It is {answer}." in message["content"]


def test_judge_has_a_prompt_of_the_users_and_its_digest_follows_the_text(
    served: Served, tmp_path: Path
) -> None:
    served.answers = [chat("Score: 4")]
    file = tmp_path / "tone.txt"
    file.write_text("{prompt}|{answer}|{level}|{completion}")
    setting = f"judge:{served.url}/v1,model=m,prompt={file},best=5,name=tone"
    task = {**TASK, "messages": [{"role": "user", "content": "hi"}, {"role": "user", "content": "you"}]}
    (sample,) = scored(f"{setting}=2 + exact=1", "3", task=task)
    assert sample.reward == pytest.approx(2 * 0.8 + 1) and sample.metrics == {"tone": 0.8, "exact": 1.0}
    assert served.asked[0][1]["messages"][0]["content"] == "user: hi\n\nuser: you|3|7|3"
    with pytest.raises(ValueError, match=r"^it has no `level`, which the judge's prompt needs"):
        check_task(setting, {"id": "1", "prompt": "p", "answer": "3"})
    before = resolve_reward(setting).code.digest
    file.write_text("{completion}")
    assert resolve_reward(setting).code.digest != before


def test_digest_follows_the_endpoint_and_each_parameter() -> None:
    settings = ["http://a:1/s", "http://b:1/s", "http://a:1/s,retries=1", "judge:http://a:1/s,model=m"]
    digests = [resolve_reward(setting).code.digest for setting in [*settings, "judge:http://a:1/s,model=n"]]
    assert len(set(digests)) == 5 and resolve_reward(settings[0]).code.digest == digests[0]


@pytest.mark.parametrize("answers", [[503, 429, 0.5], ["{", 0.5], [{"no": 1}, 0.5]])
def test_what_may_pass_is_tried_again(served: Served, answers: list[Any]) -> None:
    served.answers = answers
    assert scored(f"{served.url}/score", "3")[0].reward == 0.5
    assert len(served.asked) == len(answers)


def test_server_that_is_not_there_is_named() -> None:
    with pytest.raises(RewardError) as raised:
        scored("http://127.0.0.1:9/score,retries=1", "3")
    said = str(raised.value)
    assert said.startswith("reward 'reward_model', task 't1': http://127.0.0.1:9/score: ")
    assert "(2 tries in " in said


@pytest.mark.parametrize(
    ("answer", "more", "tries", "reason"),
    [
        (400, "", 1, "answered 400: not now"),
        (500, ",retries=2", 3, "answered 500: not now (3 tries in "),
        ({"score": 1}, ",retries=1", 2, "expected a number, or an object with a number `reward`"),
        ({"reward": "1"}, "", 1, "returned reward = '1', expected a finite number"),
    ],
)
def test_answer_that_is_no_reward_is_an_error_that_names_reward_task_and_url(
    served: Served, answer: Any, more: str, tries: int, reason: str
) -> None:
    served.answers = [answer]
    with pytest.raises(RewardError) as raised:
        scored(f"{served.url}/score{more}", "3")
    assert "reward 'reward_model', task 't1': " in str(raised.value) and reason in str(raised.value)
    assert len(served.asked) == tries


@pytest.mark.parametrize(
    ("said", "reason"),
    [("Good.", "the judge's answer has no \"Score: N\": 'Good.'"), ("Score: 11", "not between 0 and 10")],
)
def test_judge_without_a_score_is_asked_again_and_then_an_error(
    served: Served, said: str, reason: str
) -> None:
    served.answers = [chat(said)]
    with pytest.raises(RewardError, match=reason):
        scored(f"judge:{served.url}/v1,model=m,retries=2", "3")
    assert len(served.asked) == 3
    served.answers = [chat(said), chat(said), chat(said), chat(said), chat("Score: 0")]
    assert scored(f"judge:{served.url}/v1,model=m,retries=2", "3")[0].reward == 0


def test_slow_server_is_given_up_after_the_deadline(served: Served) -> None:
    served.delay_s = 5.0
    with pytest.raises(RewardError, match=r"no answer within 0\.2 s \(2 tries"):
        scored(f"{served.url}/score,timeout_s=0.2,retries=1", "3")


def test_same_answer_to_the_same_task_is_asked_once_also_at_the_same_time(served: Served) -> None:
    reward = resolve_reward(f"{served.url}/score,cache=2")
    served.delay_s = 0.05
    assert [sample.reward for sample in with_reward(reward, "3", "3", "4", "3")] == [0.5] * 4
    assert len(served.asked) == 2
    with_reward(reward, "3", "4")  # in another event loop
    assert len(served.asked) == 2
    with_reward(reward, "5")
    with_reward(reward, "5")
    assert len(served.asked) == 3
    with_reward(reward, "3")  # the oldest was forgotten
    assert len(served.asked) == 4


def test_error_is_not_remembered_and_without_a_cache_nothing_is(served: Served) -> None:
    reward = resolve_reward(f"{served.url}/score,retries=0,cache=0")
    served.answers = [500, 0.5, 0.25]
    with pytest.raises(RewardError):
        with_reward(reward, "3")
    assert [with_reward(reward, "3")[0].reward for _ in range(2)] == [0.5, 0.25]


def test_who_waits_for_the_same_answer_gets_the_same_failure(served: Served) -> None:
    served.answers, served.delay_s = [503], 0.05
    reward = resolve_reward(f"{served.url}/s,retries=1")

    async def ask() -> Any:
        try:
            return await reward.values([TASK] * 6, ["3"] * 6, RolloutSettings())
        finally:
            await reward.close()

    failures = asyncio.run(ask())
    assert all("answered 503" in str(failure) for failure in failures) and len(served.asked) == 2


def test_requests_at_once_are_limited(served: Served) -> None:
    served.delay_s = 0.05
    scored(f"{served.url}/score,at_once=3", *(str(n) for n in range(12)))
    assert served.most == 3 and len(served.asked) == 12


def test_key_comes_from_a_variable_and_is_in_no_document(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    setting = f"{served.url}/score,key_from=JUDGE_KEY"
    scored(setting, "3")
    assert served.headers[0]["Authorization"] == "Bearer s3cret"
    digest = resolve_reward(setting).code.digest
    monkeypatch.setenv("JUDGE_KEY", "other")
    assert resolve_reward(setting).code.digest == digest
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(RewardSettingError, match="key_from=JUDGE_KEY: this variable is not set here"):
        resolve_reward(setting)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("http://", "'http://' is not a URL; write e.g."),
        ("http://h:x/s", "is not a URL"),
        ("http://me:secret@h/s", "leave user and password out of the URL"),
        ("http://h/s,model=m", "no parameter 'model'; there is name, key_from, timeout_s"),
        ("http://h/s,retries=few", "retries=few: give a number"),
        ("http://h/s,timeout_s=0", "timeout_s=0: give a value of 0.001 or more"),
        ("judge:http://h/v1", "give the judge's model"),
        ("judge:h,model=m", "'h' is not a URL"),
        ("judge:http://h/v1,model=m,prompt=none.txt", "prompt=none.txt: cannot be read"),
        ("exact=1 + http://h/s,name=reward=10", "name=reward: so is the sum called"),
        ("http://h/s=1 + http://i/s=1", "two rewards are called reward_model; add name=NAME"),
    ],
)
def test_setting_that_is_wrong_is_an_error_in_one_line(setting: str, reason: str) -> None:
    with pytest.raises(RewardSettingError) as raised:
        resolve_reward(setting)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_prompt_without_a_place_for_the_answer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("{prompt}")
    with pytest.raises(RewardSettingError, match=r"has no \{completion\}, where the answer goes"):
        resolve_reward(f"judge:http://h/v1,model=m,prompt={tmp_path}/p.txt")


def problem(setting: str, max_tokens: int) -> str | None:
    async def main() -> str | None:
        reward = ServedReward(setting)
        try:
            return await reward.problem(max_tokens)
        finally:
            await reward.close()

    return asyncio.run(main())


def test_start_learns_why_a_server_would_score_nothing(served: Served) -> None:
    judge = f"judge:{served.url}/v1,model=big"
    assert problem(judge, 4096) is None  # it lists none
    served.models = {"data": [{"id": "big", "max_model_len": 2048}]}
    assert problem(judge, 1024) is None
    assert (
        problem(judge, 2048)
        == "the judge reads 2048 tokens, and a sample alone may have rollout.max_tokens=2048"
    )
    assert problem(f"judge:{served.url}/v1,model=bug", 9) == "there is no model 'bug', but big"
    served.models = "none"
    assert problem(judge, 4096) is None
    assert problem(f"{served.url}/score", 4096) is None
    assert problem("http://127.0.0.1:9/score", 4096) == "http://127.0.0.1:9/score does not answer"
