"""Client and administrator of an engine, against the embedded one and against servers that misbehave."""

import asyncio
import base64
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollout.engines import connection
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import GENERATE, EngineError, EngineFacts, RequestRefused, parse_answer
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from rollout.pictures import digest_of
from rollout.trajectory import Picture
from tests.models import CONTEXT
from tests.ports import unused_port
from tests.rollout.rollout_helpers import RunningServer


def ask(url: str, sampling: Sampling, prompt: Any = "1+2=", **settings: Any):
    async def main():
        async with EngineClient(url, **settings) as client:
            return await client.generate(prompt, sampling)

    return asyncio.run(main())


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def http_answer(status: str, body: str) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body.encode())
        await writer.drain()

    return answer


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def generate_from(*answers: Answer, **settings: Any):
    """What the client makes of a server that answers so, one connection after the other."""
    remaining = list(answers)

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await remaining.pop(0)(reader, writer)
        finally:
            writer.close()

    async def main():
        server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(f"http://127.0.0.1:{port}", **settings) as client:
            return await client.generate("1", Sampling())

    return asyncio.run(main())


CHOICE = {
    "index": 0,
    "text": "a",
    "finish_reason": "stop",
    "prompt_token_ids": [3],
    "token_ids": [4, 1],
    "logprobs": {"token_logprobs": [-0.5, -1.0]},
}


def test_base_url_may_end_in_a_slash(server: RunningServer) -> None:
    sampling = Sampling(max_tokens=5, seed=9)
    assert ask(server.url, sampling) == ask(server.url + "/", sampling)


@pytest.mark.parametrize("is_seeded", [True, False])
def test_engine_that_seeds_do_not_decide_for_gets_none(is_seeded: bool) -> None:
    asked: list[dict[str, Any]] = []

    class Client(EngineClient):
        async def _post(
            self, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}
        ) -> dict[str, Any]:
            asked.append(body)
            return {"choices": [{**CHOICE, "index": j} for j in range(body["n"])]}

    client = Client("http://127.0.0.1:1", facts=EngineFacts(is_seeded=is_seeded))
    asyncio.run(Policy(client, Sampling(n=3), seed=7).generate("1+1=", n=3))
    (body,) = asked
    assert (body["seed"], body["n"]) == (7 if is_seeded else None, 3)


class Pictured(EngineClient):
    """A client of a vLLM that makes 17 tokens of a picture."""

    def __init__(self, images: Path, ranges: int = 1, **settings: Any) -> None:
        facts = EngineFacts(renders_pictures=False)
        super().__init__("http://127.0.0.1:1", facts=facts, images=images, **settings)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._ranges = ranges

    async def _post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> dict[str, Any]:
        self.asked.append((path, body))
        entries = [
            {"token": token, "logprob": logprob, "top_logprobs": [{"token": token, "logprob": logprob}]}
            for token, logprob in (("a", -0.5), ("<eos>", -1.0))
        ]
        numbers = range(body["sampling_params"]["n"])
        choices = [{**CHOICE, "index": j, "logprobs": {"content": entries}} for j in reversed(numbers)]
        for choice in choices:
            del choice["prompt_token_ids"]
        places = [{"offset": 1, "length": 17}] * self._ranges
        ids = [3, *[99] * 17, 4]
        return {"prompt_token_ids": ids, "mm_placeholders": {"image": places}, "choices": choices}


class Renderer(EngineClient):
    async def _post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> dict[str, Any]:
        assert path == "/tokenize"
        return {"tokens": [3, 99, 4]}


def shown_in(images: Path) -> list[dict[str, Any]]:
    digest = digest_of(b"a picture")
    (images / digest).write_bytes(b"a picture")
    return [{"role": "user", "content": [{"type": "image", "image": digest}]}]


def test_vllm_gets_pictures_beside_the_tokens_and_its_answer_is_as_any_other(tmp_path: Path) -> None:
    messages = shown_in(tmp_path)
    client = Pictured(tmp_path, model="policy-1", renderer=Renderer(""))
    sampling = Sampling(n=2, temperature=0.7, stop=("x",), max_tokens=9)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
    policy = Policy(client, sampling, seed=7)
    completions = asyncio.run(policy.generate(messages, n=2, more={"logprobs": 1, "response_format": form}))
    ((path, body),) = client.asked
    assert path == GENERATE and {*body} == {
        *("token_ids", "content_parts", "model", "return_token_ids", "output_mode", "sampling_params")
    }
    assert (body["token_ids"], body["model"], body["output_mode"]) == ([3, 99, 4], "policy-1", "text")
    url = f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"
    assert body["content_parts"] == [{"type": "image_url", "url": url}] and body["return_token_ids"]
    params = body["sampling_params"]
    assert (params["n"], params["temperature"], params["stop"], params["max_tokens"]) == (2, 0.7, ["x"], 9)
    assert params["seed"] == 7 and params["logprobs"] == 1 and "response_format" not in params
    assert params["structured_outputs"] == {"json": {"type": "integer"}}
    for completion in completions:
        assert completion.pictures == [Picture(digest_of(b"a picture"), 1, 18)]
        assert (len(completion.prompt_ids), completion.token_ids, completion.text) == (19, [4, 1], "a")
        assert completion.logprobs == [-0.5, -1.0] and completion.finish_reason == "stop"
        assert completion.likely == [("a", {"a": -0.5}), ("<eos>", {"<eos>": -1.0})]


def test_vllm_that_has_not_a_place_for_each_picture_or_knows_no_such_form_is_an_error(tmp_path: Path) -> None:
    messages = shown_in(tmp_path)
    policy = Policy(Pictured(tmp_path, ranges=2, renderer=Renderer("")), Sampling(), seed=7)
    with pytest.raises(EngineError, match=f"{GENERATE} answered without what is needed"):
        asyncio.run(policy.generate(messages))
    policy = Policy(Pictured(tmp_path, renderer=Renderer("")), Sampling(), seed=7)
    with pytest.raises(RequestRefused, match="response_format: 'structural_tag' is not supported"):
        asyncio.run(policy.generate(messages, more={"response_format": {"type": "structural_tag"}}))


def test_request_that_the_engine_refuses_is_told_from_a_failure(server: RunningServer) -> None:
    with pytest.raises(RequestRefused, match=f"{CONTEXT} tokens fills the engine's context of {CONTEXT}"):
        ask(server.url, Sampling(max_tokens=1), prompt="1" * CONTEXT)


def test_error_of_the_server_is_shown_with_status_and_body() -> None:
    with pytest.raises(EngineError, match="500: out of memory") as raised:
        generate_from(*[http_answer("500 Internal Server Error", "out of memory")] * 9, retry_s=0.2)
    assert not isinstance(raised.value, RequestRefused)


def test_request_that_alone_is_answered_with_an_error_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM does where a grammar leaves no token: the engine is well, and no restart would help."""
    real = EngineClient._post_once

    async def post_once(
        client: EngineClient, url: str, body: dict[str, Any], headers: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        if body["prompt"] == "1":
            return parse_answer("POST", 500, b"no token may follow")
        return await real(client, url, body)

    monkeypatch.setattr(EngineClient, "_post_once", post_once)
    good = http_answer("200 OK", json.dumps({"choices": [CHOICE]}))
    with pytest.raises(RequestRefused, match=r"500: no token may follow; .* answers another request"):
        generate_from(good, retry_s=0.2)
    monkeypatch.setattr(connection, "_FAILING_S", 0.5)
    for fails in (http_answer("500 Internal Server Error", "engine died"), hang):
        with pytest.raises(EngineError, match="500: no token may follow") as raised:
            generate_from(fails, retry_s=0.2)
        assert not isinstance(raised.value, RequestRefused)


def test_server_that_takes_its_time_for_each_error_is_given_up_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LONGEST_RETRY_S", 0.05)

    async def slow_error(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        await http_answer("502 Bad Gateway", "nobody there")(reader, writer)

    with pytest.raises(EngineError, match=r"502: nobody there.*tried again for 0\.5 s"):
        generate_from(*[slow_error] * 40, retry_s=0.5)


def test_error_of_a_server_that_recovers_is_tried_again() -> None:
    good = http_answer("200 OK", json.dumps({"choices": [CHOICE]}))
    (completion,) = generate_from(http_answer("500 Internal Server Error", "engine died"), good)
    assert completion.token_ids == [4, 1]


def test_adapter_that_a_restarted_engine_does_not_have_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "_FAILING_S", 0.0)
    good = http_answer("200 OK", json.dumps({"choices": [CHOICE]}))
    absent = [http_answer("404 Not Found", "no such model")] * 2
    with pytest.raises(EngineError, match="404: no such model"):
        generate_from(*absent, good)
    (completion,) = generate_from(*absent, good, model="policy-1")
    assert completion.token_ids == [4, 1]


def test_broken_connection_is_tried_again() -> None:
    good = http_answer("200 OK", json.dumps({"choices": [CHOICE]}))
    (completion,) = generate_from(hang_up, hang_up, good)
    assert completion.token_ids == [4, 1] and completion.logprobs == [-0.5, -1.0]


def test_server_that_is_not_there_is_an_error_within_the_retry_time() -> None:
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"tried again for 0\.3 s"):
        ask(f"http://127.0.0.1:{unused_port()}", Sampling(), retry_s=0.3)
    assert time.monotonic() - started < 30


def test_server_that_never_answers_is_an_error_within_the_timeout() -> None:
    with pytest.raises(EngineError, match=r"no answer within 0\.2 s"):
        generate_from(hang, request_timeout_s=0.2)


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        "{}",
        json.dumps({"choices": [{**CHOICE, "token_ids": None}]}),
        json.dumps({"choices": [{**CHOICE, "logprobs": None}]}),
        json.dumps({"choices": []}),
    ],
)
def test_answer_without_what_training_needs_is_an_error(body: str) -> None:
    with pytest.raises(EngineError):
        generate_from(http_answer("200 OK", body))


@pytest.mark.parametrize(
    ("said", "meant"),
    [("stop", "stop"), ("eos_token", "stop"), ("tool_calls", "stop"), ("function_call", "stop"),
     ("length", "length"), ("max_tokens", "length"), ("abort", "abort"), ("content_filter",) * 2],
)  # fmt: skip
def test_reasons_of_other_servers_are_those_of_a_sample_or_stay_what_they_are(said: str, meant: str) -> None:
    body = json.dumps({"choices": [{**CHOICE, "finish_reason": said}]})
    assert generate_from(http_answer("200 OK", body))[0].finish_reason == meant


@pytest.mark.parametrize("prompt", ["1" * 200, [3] * 200, "1" * 254, [3] * 250])
def test_request_takes_what_is_left_of_the_context(server: RunningServer, prompt: str | list[int]) -> None:
    async def ask(*prompts: str | list[int]) -> list[list[Completion]]:
        async with EngineClient(server.url) as client:
            sampling = Sampling(n=2, max_tokens=CONTEXT, seed=3)
            return await asyncio.gather(*(client.generate(prompt, sampling) for prompt in prompts))

    for first, second in asyncio.run(ask(prompt, prompt)), asyncio.run(ask(prompt, prompt)):
        assert [one.token_ids for one in first] == [one.token_ids for one in second]
        for one, other in zip(first, second, strict=True):  # they may be computed beside others, or alone
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-9)
        for completion in first:
            total = len(completion.prompt_ids) + len(completion.token_ids)
            assert completion.finish_reason == "stop" or total == CONTEXT
    with pytest.raises(RequestRefused, match=rf"a prompt of {CONTEXT} tokens fills the engine's context"):
        asyncio.run(ask([3] * CONTEXT))


def test_refusals_that_come_while_the_context_is_read_are_asked_again_too() -> None:
    sent = 0
    both_were_sent, first_was_asked_again = asyncio.Event(), asyncio.Event()
    head = "HTTP/1.1 {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        asked = await reader.readuntil(b"\r\n\r\n")
        status, body = "200 OK", json.dumps({"data": [{"max_model_len": 10}]})
        if asked.startswith(b"POST"):
            length = int(asked.lower().partition(b"content-length:")[2].split()[0])
            wanted = json.loads(await reader.readexactly(length))["max_tokens"]
            body = json.dumps({"choices": [CHOICE]})
            if wanted > 9:
                sent += 1
                if sent == 2:
                    both_were_sent.set()
                    await first_was_asked_again.wait()
                await both_were_sent.wait()
                status, body = "400 Bad Request", "too long"
            else:
                first_was_asked_again.set()
        writer.write(head.format(status, len(body), body).encode())
        await writer.drain()
        writer.close()

    async def main() -> list[list[Completion]]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, EngineClient(f"http://127.0.0.1:{port}") as client:
            asks = (client.generate([3], Sampling(max_tokens=20)) for _ in range(2))
            return await asyncio.wait_for(asyncio.gather(*asks), 60)

    assert [len(completions) for completions in asyncio.run(main())] == [1, 1]


def test_waiting_for_an_engine_ends_at_its_deadline_or_when_it_answers(server: RunningServer) -> None:
    EngineAdmin(server.url).wait_healthy(60, alive=lambda: True)
    with pytest.raises(EngineError, match=r"did not become healthy within 0\.2 s"):
        EngineAdmin(f"http://127.0.0.1:{unused_port()}").wait_healthy(0.2, alive=lambda: True)


def test_admin_reads_the_version_of_the_weights(server: RunningServer) -> None:
    admin = EngineAdmin(server.url)
    assert admin.policy() == "first"
    assert not admin.is_sleeping()


def test_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="must look like"):
        EngineAdmin("127.0.0.1:8000")


def test_samples_of_a_group_go_to_the_replica_that_has_fewest() -> None:
    asked: list[str | None] = []

    async def main() -> None:
        async with EngineClient("http://127.0.0.1:1", facts=EngineFacts(replicas=2)) as client:

            async def post(url: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> dict[str, Any]:
                asked.append(headers.get("X-data-parallel-rank"))
                await asyncio.sleep(0.01 * body["n"])
                choice = {"finish_reason": "stop", "token_ids": [1], "prompt_token_ids": [1], "text": ""}
                choice["logprobs"] = {"token_logprobs": [0.0]}
                return {"choices": [{**choice, "index": k} for k in range(body["n"])]}

            client._post_once = post
            asking = [asyncio.create_task(client.generate([1], Sampling(n=n))) for n in (8, 2, 3, 1)]
            await asyncio.gather(*asking)

    asyncio.run(main())
    assert asked == ["0", "1", "1", None], "of a single sample vLLM decides"


@pytest.mark.parametrize("entry", [None, {"5": {"logprob": float("-inf")}}, {"6": {"logprob": -1.0}}])
def test_prompt_whose_logprobs_are_missing_or_not_finite_is_refused(
    monkeypatch: pytest.MonkeyPatch, entry: dict[str, Any] | None
) -> None:
    async def post_once(*_: Any) -> dict[str, Any]:
        return {"choices": [{"prompt_logprobs": [None, entry]}]}

    monkeypatch.setattr(EngineClient, "_post_once", post_once)
    with pytest.raises(RequestRefused, match="answered without the logprobs of 2 tokens"):
        asyncio.run(EngineClient("http://127.0.0.1:1").prompt_logprobs([4, 5]))
