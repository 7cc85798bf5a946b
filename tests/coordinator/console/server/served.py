"""A server in a thread of the test, with no launcher that starts anything unless one is given."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from coordinator.console.server.access import TokenCheck
from coordinator.console.server.app import Service
from coordinator.console.server.client import Server
from coordinator.machine.network import LOOPBACK

TOKEN = "a-token-of-the-tests"


class Served:
    """The address of a server, and requests to it as nobody's client would make them."""

    def __init__(self, port: int, root: Path) -> None:
        self.port, self.root = port, root
        self.url = f"http://{LOOPBACK}:{port}"
        self.server = Server(self.url, TOKEN)

    def ask(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers of an answer; with the token unless `headers` say otherwise."""
        connection = http.client.HTTPConnection(LOOPBACK, self.port, timeout=30)
        sent = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()

    def post(self, path: str, document: Any) -> tuple[int, str]:
        """Status and refusal of a POST."""
        status, body, _ = self.ask("POST", path, json.dumps(document).encode())
        return status, json.loads(body).get("error", "")


@contextmanager
def serving(root: Path, **more: Any) -> Iterator[Served]:
    """A server of `root`; `more`: of the Service. `at_once=0` starts nothing."""
    loop, began, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    ports: list[int] = []

    async def serve() -> None:
        runner = web.AppRunner(Service(root, TokenCheck(TOKEN), **more).app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, 0).start()
        ports.append(runner.addresses[0][1])
        began.set()
        await ended.wait()
        await runner.cleanup()
        await loop.shutdown_default_executor()

    root.mkdir(exist_ok=True)
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert began.wait(60)
        yield Served(ports[0], root)
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(60)
        loop.close()
