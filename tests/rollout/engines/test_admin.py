"""What the administrator of an engine asks for, and in which order; a prompt's logprobs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import EngineError, EngineFacts
from rollout.engines.model_dir import WeightsError
from rollout.origin import Sampling
from tests.adapters import make_adapter
from tests.rollout.engines.test_client import ask
from tests.rollout.rollout_helpers import RunningServer


def test_logprobs_of_a_prompt_are_those_of_the_samples_that_became_it(server: RunningServer) -> None:
    (completion,) = ask(server.url, Sampling(max_tokens=12, seed=3))
    token_ids = completion.prompt_ids + completion.token_ids
    found = EngineAdmin(server.url).prompt_logprobs(token_ids)
    assert len(found) == len(token_ids) - 1
    assert found[len(completion.prompt_ids) - 1 :] == pytest.approx(completion.logprobs, abs=1e-9)


def answering(monkeypatch: pytest.MonkeyPatch, path: str, answer: Any) -> EngineAdmin:
    """An administrator of a server that gives this answer at `path`."""
    admin = EngineAdmin("http://127.0.0.1:1")
    monkeypatch.setattr(admin._calls, "_send", lambda _method, asked, *_, **__: (
        200, json.dumps(answer).encode() if asked.startswith(path) else b"{}"
    ))  # fmt: skip
    return admin


@pytest.mark.parametrize(
    ("scheduler", "replicas", "samples"),
    [
        ({"max_num_seqs": 1024, "max_num_active_seqs": None}, 8, 8192),
        ({"max_num_seqs": 512, "max_num_active_seqs": 128}, 1, 128),
        ({"max_num_seqs": 64}, 2, 128),  # an older vLLM
        ({}, 2, 256),
        (None, 2, 256),
    ],
)
def test_vllm_says_how_many_samples_it_generates_at_once_and_gets_no_seeds(
    monkeypatch: pytest.MonkeyPatch, scheduler: Any, replicas: int, samples: int
) -> None:
    config = {"scheduler_config": scheduler, "parallel_config": {"data_parallel_size": replicas}}
    admin = answering(monkeypatch, "/server_info", {"vllm_config": config, "system_env": {}})
    assert admin.facts() == EngineFacts(samples, is_seeded=False, renders_pictures=False)
    admin = answering(monkeypatch, "/collective_rpc", {"results": [scheduler, None]})
    if scheduler:
        assert admin.most_samples() == samples // replicas
    else:
        with pytest.raises(EngineError, match="scheduler answered"):
            admin.most_samples()


def test_server_that_says_nothing_of_itself_is_given_what_most_can(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = answering(monkeypatch, "/server_info", {"choices": []})
    assert admin.facts() == EngineFacts(256, is_seeded=False, renders_pictures=False)


class Recorder(BaseHTTPRequestHandler):
    """A server that writes down what it is asked for; to vLLM a paused engine is asleep."""

    version, fails, missing, sleeps = "before", "", "", True
    models: ClassVar[list[str]] = ["/models/m"]
    asked: ClassVar[list[str]] = []

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.removeprefix("/")
        said = json.loads(body).values() if body else []
        if self.command == "POST":
            type(self).asked.append(" ".join([path, *(value for value in said if isinstance(value, str))]))
        if path == "update_weight_version":
            type(self).version = json.loads(body)["new_version"]
        models = [{"id": name} for name in self.models]
        facts = {"is_sleeping": self.sleeps, "weight_version": self.version, "success": True, "data": models}
        text = b"Success" if path.endswith("lora_adapter") else json.dumps(facts).encode()
        fails = 500 if self.fails and self.fails in self.asked[-1:] else 200
        self.send_response(404 if path == self.missing else fails)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = answer

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[str, type[Recorder]]]:
    handler = type("OneRecorder", (Recorder,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as recording:
        thread = threading.Thread(target=recording.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{recording.server_port}", handler
        recording.shutdown()
        thread.join()


def test_reload_brings_back_the_weights_first_and_the_cache_last(
    recorder: tuple[str, type[Recorder]], model_dir: Path
) -> None:
    url, handler = recorder
    EngineAdmin(url, after_reload=("repack",)).reload(model_dir, "new")
    assert handler.asked == [
        "wake_up?tags=weights",
        "pause?mode=wait",
        "update_weight_version loading",
        "collective_rpc reload_weights",
        "collective_rpc repack",
        "reset_prefix_cache",
        "wake_up?tags=kv_cache",
        "update_weight_version new",
        "resume",
    ]


def test_engine_with_half_of_the_weights_is_not_woken_before_it_has_them_all(
    recorder: tuple[str, type[Recorder]], model_dir: Path
) -> None:
    url, handler = recorder
    handler.fails = "collective_rpc reload_weights"
    with pytest.raises(EngineError, match="stays paused"):
        EngineAdmin(url).reload(model_dir, "bad")
    assert handler.asked[-1] == handler.fails
    handler.fails = ""
    handler.asked.clear()
    EngineAdmin(url).reload(model_dir, "good")
    assert handler.asked.index("collective_rpc reload_weights") < handler.asked.index("wake_up?tags=kv_cache")
    assert "wake_up?tags=weights" not in handler.asked


@pytest.fixture(scope="module")
def adapter_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapters") / "adapter", model_dir, seed=0)


def test_adapter_takes_the_place_of_our_others_while_nothing_runs(
    recorder: tuple[str, type[Recorder]], adapter_dir: Path
) -> None:
    url, handler = recorder
    handler.models = ["/models/m", "users", "policy-old", "policy-new"]
    EngineAdmin(url).load_adapter(adapter_dir, "new")
    assert handler.asked == [
        "wake_up",
        "pause?mode=wait",
        f"v1/load_lora_adapter policy-new {adapter_dir}",
        "reset_prefix_cache",
        "v1/unload_lora_adapter policy-old",
        "update_weight_version new",
        "resume",
    ]


def test_engine_that_refuses_an_adapter_goes_on_with_what_it_served(
    recorder: tuple[str, type[Recorder]], adapter_dir: Path, model_dir: Path
) -> None:
    url, handler = recorder
    handler.missing, handler.sleeps = "v1/load_lora_adapter", False
    with pytest.raises(EngineError, match=r"policy-new: 404: .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
        EngineAdmin(url).load_adapter(adapter_dir, "new")
    assert handler.version == "before" and handler.asked[-1] == "resume"
    handler.asked.clear()
    with pytest.raises(WeightsError, match="is a whole model, not an adapter"):
        EngineAdmin(url).load_adapter(model_dir, "new")
    assert handler.asked == []


@pytest.mark.parametrize("version", ["loading", "dropped"])
def test_engine_without_whole_weights_takes_no_adapter_and_is_not_woken(
    recorder: tuple[str, type[Recorder]], adapter_dir: Path, version: str
) -> None:
    url, handler = recorder
    handler.version = version
    with pytest.raises(EngineError, match="reload its model first"):
        EngineAdmin(url).load_adapter(adapter_dir, "new")
    assert handler.asked == []


def test_answer_without_the_logprobs_of_the_prompt_is_an_error(
    recorder: tuple[str, type[Recorder]],
) -> None:
    with pytest.raises(EngineError, match="without the prompt's logprobs"):
        EngineAdmin(recorder[0]).prompt_logprobs([1, 2, 3])
