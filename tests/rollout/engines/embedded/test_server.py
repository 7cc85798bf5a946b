"""The embedded engine's server over HTTP: the shapes of the answers, what is refused, weights, signals."""

import http.client
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.numpy

from rollout.engines.embedded import server as server_module
from tests.adapters import make_adapter
from tests.models import CONTEXT
from tests.rollout.rollout_helpers import RunningServer, serving


def call(server: RunningServer, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method, path, data)
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    if response.headers.get_content_type() == "text/plain":
        return response.status, text.decode()
    return response.status, json.loads(text) if text else None


def complete(server: RunningServer, **body: Any) -> list[dict[str, Any]]:
    status, answer = call(
        server, "POST", "/v1/completions", {"logprobs": 0, "return_token_ids": True, "seed": 1, **body}
    )
    assert status == 200, answer
    return answer["choices"]


def token_ids(server: RunningServer, **body: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in complete(server, **body)]


def in_background(function: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


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


def test_256_requests_at_once_get_what_each_gets_alone(server: RunningServer) -> None:
    prompts = [f"{i}+{7 * i}=" for i in range(256)]
    alone = [token_ids(server, prompt=prompt, seed=i)[0] for i, prompt in enumerate(prompts[:20])]
    together: dict[int, list[int]] = {}

    def ask(i: int) -> None:
        together[i] = token_ids(server, prompt=prompts[i], seed=i)[0]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(together) == 256
    assert [together[i] for i in range(20)] == alone


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
        ({"prompt": "1", "top_k": 5}, "top_k: 5 is not supported"),
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
    listening = [
        connection.laddr
        for connection in psutil.Process(server.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
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
    assert time.monotonic() - started < 10


def save_altered(source: Path, target: Path, alter: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    shutil.copytree(source, target)
    tensors = safetensors.numpy.load_file(target / "model.safetensors")
    alter(tensors)
    safetensors.numpy.save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def own(model_dir: Path):
    """A server for the tests that change its state."""
    with serving(model_dir, "--weight-version", "first", "--max-batch", "8") as running:
        yield running


def reload(server: RunningServer, path: Path) -> tuple[int, Any]:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
    return call(server, "POST", "/collective_rpc", body)


def test_reload_in_place_changes_the_outputs_and_back(
    own: RunningServer, model_dir: Path, other_model_dir: Path
) -> None:
    before = token_ids(own, prompt="1+2=", n=4)
    assert reload(own, other_model_dir) == (200, {"results": [None]})
    assert token_ids(own, prompt="1+2=", n=4) != before
    assert call(own, "GET", "/weight_info")[1] == {"weight_version": "first"}
    answer = call(own, "POST", "/update_weight_version", {"new_version": "second"})
    assert answer == (200, {"success": True, "new_version": "second"})
    assert call(own, "GET", "/weight_info")[1] == {"weight_version": "second"}
    assert reload(own, model_dir)[0] == 200
    assert token_ids(own, prompt="1+2=", n=4) == before


def test_damaged_checkpoint_is_refused_and_the_model_serves_on_unchanged(
    own: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    before = token_ids(own, prompt="1+2=", n=4)
    truncated = shutil.copytree(model_dir, tmp_path / "truncated")
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    missing = save_altered(model_dir, tmp_path / "missing", lambda t: t.pop("model.norm.weight"))
    renamed = save_altered(
        model_dir, tmp_path / "renamed", lambda t: t.update(x=t.pop("model.layers.1.mlp.up_proj.weight"))
    )
    shape = save_altered(
        model_dir, tmp_path / "shape", lambda t: t.update({"model.norm.weight": t["model.norm.weight"][:-1]})
    )
    larger = shutil.copytree(model_dir, tmp_path / "larger")
    config = json.loads((larger / "config.json").read_text())
    (larger / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    for path, reason in (
        (truncated, "its header describes"),
        (missing, "missing keys: ['model.norm.weight']"),
        (renamed, "missing keys"),
        (shape, "mismatched keys"),
        (larger, "another architecture"),
        (tmp_path / "nowhere", "is no directory"),
    ):
        status, answer = reload(own, path)
        assert status == 400 and reason in answer["error"]["message"], (path, answer)
        assert token_ids(own, prompt="1+2=", n=4) == before


def test_adapter_is_asked_by_its_name_and_nothing_else_is_served_beside_it(
    own: RunningServer, model_dir: Path, tmp_path: Path
) -> None:
    def load(name: str, path: Path) -> tuple[int, Any]:
        return call(own, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    before = token_ids(own, prompt="1+2=", n=4)
    adapter = make_adapter(tmp_path / "adapter", model_dir, seed=0)
    assert load("one", model_dir)[0] == 400 and token_ids(own, prompt="1+2=", n=4) == before
    assert load("one", adapter) == (200, "Success: LoRA adapter 'one' added successfully.")
    changed = token_ids(own, prompt="1+2=", n=4, model="one")
    assert changed != before
    assert [card["id"] for card in call(own, "GET", "/v1/models")[1]["data"]] == [str(model_dir), "one"]
    for body in ({}, {"model": str(model_dir)}, {"model": "two"}):
        status, answer = call(own, "POST", "/v1/completions", {"prompt": "1", **body})
        assert status == 404 and answer["error"]["message"], body
    assert call(own, "POST", "/tokenize", {"prompt": "1", "model": str(model_dir)})[0] == 200
    assert load("two", adapter)[0] == 200
    assert token_ids(own, prompt="1+2=", n=4, model="two") == changed
    assert reload(own, model_dir)[0] == 200
    assert token_ids(own, prompt="1+2=", n=4) == before
    assert len(call(own, "GET", "/v1/models")[1]["data"]) == 1


def test_pause_finishes_what_has_started_and_holds_the_rest(
    own: RunningServer, other_model_dir: Path
) -> None:
    # 20 rows in a batch of 8: most of the request still waits when the pause comes.
    first = {"prompt": "1+2=", "n": 20, "max_tokens": 200}
    expected = token_ids(own, **first)
    held_expected = token_ids(own, prompt="3+4=")
    running, results = in_background(lambda: token_ids(own, **first))
    while reload(own, other_model_dir / "nowhere")[0] != 409:  # refused for its path until the rows run
        assert running.is_alive(), "the request was over before it could be paused"
    assert call(own, "POST", "/pause?mode=wait") == (200, {"status": "paused"})
    running.join(timeout=60)
    assert results == [expected]
    held, held_results = in_background(lambda: token_ids(own, prompt="3+4="))
    held.join(timeout=0.3)
    assert held.is_alive()
    assert call(own, "POST", "/resume") == (200, {"status": "resumed"})
    held.join(timeout=60)
    assert held_results == [held_expected]


def test_pause_with_abort_ends_running_requests_with_what_they_have(own: RunningServer) -> None:
    body = {"prompt": "1+2=", "n": 2000, "max_tokens": 200}
    running, results = in_background(lambda: complete(own, **body))
    while reload(own, Path("nowhere"))[0] != 409:
        assert running.is_alive()
    assert call(own, "POST", "/pause?mode=abort")[0] == 200
    running.join(timeout=60)
    assert {choice["finish_reason"] for choice in results[0]} >= {"abort"}
    assert call(own, "POST", "/resume")[0] == 200
    assert complete(own, prompt="1", max_tokens=2)


def test_sleeping_engine_generates_once_it_is_awake(own: RunningServer) -> None:
    assert call(own, "POST", "/sleep?level=1") == (200, {"status": "sleeping", "level": 1})
    assert call(own, "GET", "/is_sleeping") == (200, {"is_sleeping": True})
    assert call(own, "POST", "/resume")[0] == 400
    held, results = in_background(lambda: token_ids(own, prompt="3+4="))
    assert call(own, "POST", "/wake_up?tags=weights") == (200, {"status": "sleeping", "tags": ["weights"]})
    held.join(timeout=0.3)
    assert held.is_alive()
    assert call(own, "POST", "/wake_up?tags=kv_cache")[1]["status"] == "awake"
    held.join(timeout=60)
    assert len(results) == 1 and call(own, "GET", "/is_sleeping")[1] == {"is_sleeping": False}


def test_sigterm_ends_it_at_once_even_while_it_generates(own: RunningServer) -> None:
    body = json.dumps({"prompt": "1", "n": 4000, "max_tokens": 200}).encode()
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        connection.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        while reload(own, Path("nowhere"))[0] != 409:
            pass
        started = time.monotonic()
        assert own.stop() == 0
        assert time.monotonic() - started < 2


def test_broken_model_directory_and_taken_port_end_it_with_one_line(
    server: RunningServer,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is not the server's to end
    for arguments, reason in (
        (["--model", str(model_dir / "nowhere"), "--port", "0"], "is no directory"),
        (["--model", str(model_dir), "--port", str(server.port)], "address already in use"),
    ):
        assert server_module.main(arguments) == 1
        message = capsys.readouterr().err
        assert message.startswith("torch_server: ") and reason in message and message.count("\n") == 1
