"""The embedded engine's server over HTTP: the shapes of the answers, and what is refused."""

import json
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.models import CONTEXT
from tests.rollout.engines.embedded.calls import call, complete, token_ids
from tests.rollout.rollout_helpers import RunningServer


def test_answer_has_the_shape_of_a_completion(server: RunningServer) -> None:
    body = {"prompt": "12+34=", "n": 2, "max_tokens": 3, "seed": 5, "logprobs": 0, "return_token_ids": True}
    status, answer = call(server, "POST", "/v1/completions", body)
    assert status == 200 and answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    choice = answer["choices"][0]
    count = len(choice["token_ids"])
    assert len(choice["prompt_token_ids"]) == 6
    assert {len(values) for values in choice["logprobs"].values()} == {count}
    assert all(logprob < 0 for logprob in choice["logprobs"]["token_logprobs"])
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 6


def test_logprobs_of_each_prompt_are_given_if_asked_for(server: RunningServer) -> None:
    prompts = [[13, 4, 5], [6], [4, 4]]
    choices = complete(server, prompt=prompts, n=2, max_tokens=1, prompt_logprobs=0)
    for choice, prompt in zip(choices, [prompt for prompt in prompts for _ in range(2)], strict=True):
        first, *entries = choice["prompt_logprobs"]
        assert first is None and [list(entry) for entry in entries] == [[str(t)] for t in prompt[1:]]
        assert all(entry[str(t)]["logprob"] < 0 for entry, t in zip(entries, prompt[1:], strict=True))
    assert complete(server, prompt="1", max_tokens=1)[0]["prompt_logprobs"] is None


def test_ids_and_logprobs_are_left_out_unless_asked_for(server: RunningServer) -> None:
    _, answer = call(server, "POST", "/v1/completions", {"prompt": "1", "max_tokens": 2})
    choice = answer["choices"][0]
    assert choice["logprobs"] is choice["token_ids"] is choice["prompt_token_ids"] is None
    assert isinstance(choice["text"], str)


def test_prompt_may_be_text_ids_or_a_list_of_either(server: RunningServer) -> None:
    _, tokens = call(server, "POST", "/tokenize", {"prompt": "1+2="})
    ids = tokens["tokens"]
    assert tokens["count"] == 4 and tokens["max_model_len"] == CONTEXT
    (single,) = token_ids(server, prompt="1+2=")
    assert token_ids(server, prompt=ids) == [single]
    assert token_ids(server, prompt=["1+2=", "1+2="]) == [single, single]
    assert token_ids(server, prompt=[ids, [*ids, 4]])[0] == single


def test_messages_take_the_template(server: RunningServer) -> None:
    _, messages = call(server, "POST", "/tokenize", {"messages": [{"role": "user", "content": "1+2"}]})
    _, text = call(server, "POST", "/tokenize", {"prompt": "user 1+2\na ", "add_special_tokens": False})
    assert messages["tokens"] == text["tokens"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "Invalid JSON"),
        (b"[]", "Input should be an object"),
        ({}, "prompt: Field required"),
        ({"prompt": ""}, "prompt: must not be empty"),
        ({"prompt": []}, "prompt: must not be empty"),
        ({"prompt": [3, 10**6]}, "token ids must lie in [0, "),
        ({"prompt": [-1]}, "token ids must lie in [0, "),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "1", "n": 0}, "n: "),
        ({"prompt": "1", "n": True}, "n: "),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens: "),
        ({"prompt": "1", "max_tokens": CONTEXT}, f"exceed the context of {CONTEXT}"),
        ({"prompt": [3] * (CONTEXT + 1), "max_tokens": None}, "exceed the context"),
        ({"prompt": "1", "temperature": -1}, "temperature: "),
        ({"prompt": "1", "temperature": "hot"}, "temperature: "),
        ({"prompt": "1", "top_p": 0}, "top_p: "),
        ({"prompt": "1", "seed": 2**63}, "seed: "),
        ({"prompt": "1", "stop": ""}, "stop string must not be empty"),
        ({"prompt": "1", "logprobs": 3}, "logprobs: only 0"),
        ({"prompt": "1", "prompt_logprobs": 1}, "prompt_logprobs: only 0"),
        ({"prompt": "1", "top_k": -2}, "top_k: "),
        ({"prompt": "1", "min_p": 1.5}, "min_p: "),
        ({"prompt": "1", "stream": True}, "stream: True is not supported"),
        ({"prompt": "1", "presence_penalty": 0.5}, "presence_penalty: 0.5 is not supported"),
    ],
)
def test_bad_request_is_refused_with_its_reason(server: RunningServer, body: Any, reason: str) -> None:
    status, answer = call(server, "POST", "/v1/completions", body)
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert reason in answer["error"]["message"] and answer["error"]["code"] == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "1", "messages": []}),
        ("/pause?mode=keep", None),
        ("/sleep?level=3", None),
        ("/collective_rpc", {"method": "exit"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "x", "other": 1}}),
        ("/update_weight_version", {}),
    ],
)
def test_bad_administrative_request_is_refused(server: RunningServer, path: str, body: Any) -> None:
    status, answer = call(server, "POST", path, body)
    assert status == 400 and answer["error"]["message"]


def test_another_model_and_another_path_are_not_found(server: RunningServer, model_dir: Path) -> None:
    status, answer = call(server, "POST", "/v1/completions", {"prompt": "1", "model": "gpt"})
    assert status == 404 and "`gpt` does not exist" in answer["error"]["message"]
    assert call(server, "GET", "/nowhere")[0] == 404
    assert complete(server, prompt="1", model=str(model_dir))
    assert call(server, "GET", "/v1/models")[1]["data"][0]["id"] == str(model_dir)


def test_it_listens_on_loopback_only(server: RunningServer) -> None:
    listening = [  # of the whole machine: the server may be a fork of another process than the one started
        tuple(connection.laddr)
        for connection in psutil.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN and server.port in connection.laddr
    ]
    assert listening == [("127.0.0.1", server.port)]


def test_client_that_goes_away_takes_its_rows_along(server: RunningServer) -> None:
    body = {"prompt": "1", "n": 4000, "max_tokens": CONTEXT - 1, "temperature": 0}  # minutes of work
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        with pytest.raises(TimeoutError):  # still at it
            connection.settimeout(0.3)
            connection.recv(1)
    started = time.monotonic()
    assert complete(server, prompt="1", max_tokens=2)
    assert time.monotonic() - started < 60
