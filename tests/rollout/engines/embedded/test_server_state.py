"""The embedded engine's server: new weights, adapters, pauses, sleep, signals."""

import json
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from rollout.engines.embedded import server as server_module
from tests.adapters import make_adapter
from tests.rollout.engines.embedded.calls import call, complete, in_background, token_ids
from tests.rollout.rollout_helpers import RunningServer, serving


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
        (missing, "no values for 1 tensors of a Qwen3ForCausalLM, e.g. 'model.norm.weight'"),
        (renamed, "; it does not know 1 that are there, e.g. "),
        (shape, "has shape "),
        (larger, "another architecture"),
        (tmp_path / "nowhere", "is not a directory"),
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
        assert time.monotonic() - started < 30


def test_broken_model_directory_and_taken_port_end_it_with_one_line(
    server: RunningServer,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process is not the server's to end
    for arguments, reason in (
        (["--model", str(model_dir / "nowhere"), "--port", "0"], "is not a directory"),
        (["--model", str(model_dir), "--port", str(server.port)], "address already in use"),
    ):
        assert server_module.main(arguments) == 1
        message = capsys.readouterr().err
        assert message.startswith("torch_server: ") and reason in message and message.count("\n") == 1
