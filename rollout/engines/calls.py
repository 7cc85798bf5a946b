"""Blocking HTTP calls to a server that generates, over TCP or a Unix socket, each with a timeout."""

import http.client
import json
import socket
import urllib.parse
from collections.abc import Mapping
from typing import Any

from rollout.engines.answers import HOST_OF_SOCKET, EngineError, excerpt, parse_answer, socket_of


class EngineDead(EngineError):
    """The server answers, but its engine has ended (503)."""


class Calls:
    """Calls to one server. They raise EngineError, which names the call."""

    def __init__(self, base_url: str, timeout_s: float, drain_timeout_s: float) -> None:
        """`timeout_s`: of a quick call. `drain_timeout_s`: of a call that waits for running requests or moves
        weights. Raises ValueError for an address that is none.
        """
        self._socket = socket_of(base_url)
        parts = urllib.parse.urlsplit(HOST_OF_SOCKET if self._socket else base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"engine URL {base_url!r} must look like http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self.drain_timeout_s = drain_timeout_s

    def get(self, path: str, key: str) -> Any:
        """Return the value under `key` in the answer to a quick call."""
        answer = self.call("GET", path)
        if key not in answer:
            raise EngineError(f"GET {self.base_url}{path} answered without {key!r}: {answer}")
        return answer[key]

    def text(self, path: str) -> str:
        """Return the answer to a quick call, which is no JSON."""
        status, data = self._send("GET", path, None, timeout_s=self.timeout_s)
        if status >= 400:
            raise EngineError(f"GET {self.base_url}{path}: {status}: {excerpt(data)}")
        return data.decode(errors="replace")

    def post(
        self, path: str, body: dict[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Make a call that may wait for running requests; return the answer's JSON."""
        return self.call("POST", path, body, timeout_s=self.drain_timeout_s, headers=headers)

    def post_adapter(self, path: str, body: dict[str, Any]) -> None:
        """Make a call that vLLM has only if it was started for adapters, and answers with plain text."""
        status, data = self._send("POST", path, body, timeout_s=self.drain_timeout_s)
        if status >= 400:
            raise EngineError(
                f"POST {self.base_url}{path} {body['lora_name']}: {status}: {excerpt(data)}; for adapters a "
                "vLLM server must see the run's directory, and run with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 "
                "and with --enable-lora --max-lora-rank=(trainer.lora.rank or more)"
            )

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the answer's JSON; a call is quick unless `timeout_s` is given."""
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        status, data = self._send(method, path, body, timeout_s=timeout_s, headers=headers)
        if status == 404:
            raise EngineError(
                f"{method} {self.base_url}{path}: 404; a vLLM server must run with VLLM_SERVER_DEV_MODE=1"
            )
        return parse_answer(f"{method} {self.base_url}{path}", status, data)

    def _send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Return the status and body of the answer. Raises EngineDead for 503."""
        if self._socket:
            connection = _UnixConnection(self._socket, timeout_s)
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(
                method, self._prefix + path, data, {"Content-Type": "application/json", **(headers or {})}
            )
            response = connection.getresponse()
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{method} {self.base_url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 503:
            raise EngineDead(f"{method} {self.base_url}{path}: 503: {excerpt(answer)}")
        return response.status, answer


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket, which http.client knows nothing of."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
