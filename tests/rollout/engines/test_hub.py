"""What is fetched of a model on the Hub; the Hub is a directory here."""

import json
import shutil
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import (
    SafetensorsFileMetadata,
    SafetensorsRepoMetadata,
    TensorInfo,
    filter_repo_objects,
)

from rollout.engines.hub import NotFetched, fetch_model, fetch_shapes
from rollout.engines.model_dir import tensor_names
from rollout.hub_reach import why_unreachable

BESIDE = {
    "config.json",
    "tokenizer.json",
    "additional_chat_templates/tool_use.jinja",
    "tekken.json",
    "own.py",
}
FOREIGN = {
    *(
        "consolidated.safetensors",
        "model.fp16.safetensors",
        "pytorch_model.bin",
        "original/consolidated.00.pth",
    ),
    *(
        "original/params.json",
        "onnx/model.onnx",
        "model-Q4_K_M.gguf",
        "adapter/model.safetensors",
        "curve.png",
    ),
}


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put files on the Hub; returns where what is fetched lies."""

    def put(names: set[str], index: dict[str, str] | None = None) -> Path:
        for name in names:
            (tmp_path / "hub" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "hub" / name).write_text(name)
        if index:
            path = tmp_path / "hub" / "model.safetensors.index.json"
            path.write_text(json.dumps({"weight_map": index}))
        return tmp_path / "snapshots" / "0123abc"

    def snapshot_download(model: str, revision: str = "0123abc", **patterns: Any) -> str:
        assert (model, revision) == ("maker/model", "0123abc")
        names = [str(path.relative_to(tmp_path / "hub")) for path in (tmp_path / "hub").rglob("*.*")]
        for name in filter_repo_objects(names, **patterns):
            (tmp_path / "snapshots" / revision / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tmp_path / "hub" / name, tmp_path / "snapshots" / revision / name)
        return str(tmp_path / "snapshots" / revision)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return put


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("shards", [set[str](), {"model-00001-of-00002.safetensors", "part-b.safetensors"}])
def test_models_own_weights_and_all_that_goes_with_them_are_fetched_and_no_others(
    publish: Callable[..., Path], shards: set[str]
) -> None:
    own = shards or {"model.safetensors"}
    fetched = publish(BESIDE | FOREIGN | own, dict(zip("ab", sorted(shards), strict=False)))
    assert fetch_model("maker/model") == fetched
    assert files_of(fetched) == BESIDE | own | ({"model.safetensors.index.json"} if shards else set())


def test_reason_why_nothing_can_be_fetched_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(_model: str, **_patterns: Any) -> str:
        raise LocalEntryNotFoundError("no network\nand no copy")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("rollout.engines.hub.why_unreachable", lambda: None)
    with pytest.raises(NotFetched, match=r"^no network$"):
        fetch_model("maker/model")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("GatedRepo", "consent: give it at https://huggingface.co/maker/model, then set HF_TOKEN"),
        (
            "RepoNotFound",
            "there is no model of this name, or it is private: look at the name, or set HF_TOKEN",
        ),
    ],
)
def test_gated_model_and_one_that_is_not_there_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403 if code == "GatedRepo" else 404)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        try:
            with pytest.raises(NotFetched) as fetched:
                fetch_model("maker/model")
        finally:
            server.shutdown()
    assert reason in str(fetched.value)


def test_machine_that_cannot_find_the_hub_is_told_to_take_a_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def getaddrinfo(host: str, _port: None) -> list[Any]:
        raise socket.gaierror(-2, f"{host}: Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://hub.example:8443")
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("rollout.hub_reach.getproxies", dict)
    assert str(why_unreachable()).startswith("this machine finds no hub.example: without a network, fetch it")
    monkeypatch.setattr("rollout.hub_reach.getproxies", lambda: {"https": "http://proxy:3128"})
    assert why_unreachable() is None  # the proxy looks for it
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert why_unreachable() is None


def test_shapes_of_a_model_are_known_without_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(_model: str, local_files_only: bool) -> str:
        assert local_files_only
        raise LocalEntryNotFoundError("not here")

    tensors = {
        "a": TensorInfo("F32", [1 << 30, 2], (0, 1 << 33)),
        "b": TensorInfo("BF16", [], (1 << 33, (1 << 33) + 2)),
    }
    files = {"part.safetensors": SafetensorsFileMetadata({}, tensors)}
    weights = SafetensorsRepoMetadata(None, True, dict.fromkeys("ab", "part.safetensors"), files)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("rollout.engines.hub.why_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _model, name: str(tmp_path / name))
    monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", lambda _model: weights)
    (tmp_path / "shapes").mkdir()
    directory = fetch_shapes(tmp_path / "shapes", "maker/model")
    assert tensor_names(directory) == {"a": ("F32", (1 << 30, 2)), "b": ("BF16", ())}
    assert sum(path.stat().st_blocks * 512 for path in directory.iterdir()) < 1 << 20, "of 8 GiB"
    monkeypatch.setattr("rollout.engines.hub.why_unreachable", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", snapshot_download)
    with pytest.raises(NotFetched):
        fetch_shapes(tmp_path / "shapes", "maker/model")
