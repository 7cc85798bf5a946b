"""Requests to an embedded engine's server."""

import http.client
import json
import threading
from collections.abc import Callable
from typing import Any

from tests.rollout.rollout_helpers import RunningServer


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
