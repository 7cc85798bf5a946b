"""A stand-in for the servers of OpenEnv, which cannot be installed beside `mcp` 2: it speaks the protocol of
release 0.10, and makes trouble where it is told to.
"""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any, Self

from aiohttp import WSMsgType, web
from pydantic import BaseModel, ValidationError


class Action(BaseModel, extra="forbid"):
    metadata: dict[str, Any] = {}


class Observation(BaseModel, extra="forbid"):
    done: bool = False
    reward: bool | int | float | None = None
    metadata: dict[str, Any] = {}


class Server:
    """Serves an environment on a port of its own while it is open, `most` sessions at the same time. It pings
    every `ping_s`, and hangs up if no answer comes in half of it.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        action: Any,
        observation: Any,
        most: int = 64,
        ping_s: float | None = None,
    ) -> None:
        self.ping_s = ping_s
        self.make, self.action, self.observation, self.most = make, action, observation, most
        self.sessions, self.most_sessions, self.begun = 0, 0, 0
        self.url = ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _serve(self) -> None:
        async def start() -> web.AppRunner:
            app = web.Application()
            app.add_routes([web.get("/schema", self._schema), web.get("/ws", self._session)])
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            return runner

        runner = self._loop.run_until_complete(start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _schema(self, _request: web.Request) -> web.Response:
        kinds = {"action": self.action, "observation": self.observation}
        return web.json_response({name: kind.model_json_schema() for name, kind in kinds.items()})

    async def _session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(heartbeat=self.ping_s)
        await socket.prepare(request)
        if self.sessions >= self.most:
            await socket.send_str(error("Server at capacity", "CAPACITY_REACHED"))
            await socket.close()
            return socket
        self.sessions += 1
        self.begun += 1
        self.most_sessions = max(self.most_sessions, self.sessions)
        try:
            environment = self.make()
            async for message in socket:
                if message.type is not WSMsgType.TEXT or json.loads(message.data)["type"] == "close":
                    break
                said = self._said(environment, json.loads(message.data))
                if said == "never":
                    continue
                if said == "hang up":
                    request.transport.abort()  # type: ignore[union-attr]
                    break
                await socket.send_str(said)
        finally:
            self.sessions -= 1
        return socket

    def _said(self, environment: Any, asked: dict[str, Any]) -> str:
        try:
            if asked["type"] == "reset":
                said = environment.reset(**asked["data"])
            else:
                said = environment.step(self.action.model_validate(asked["data"]))
        except ValidationError as wrong:
            return error("Invalid message", "VALIDATION_ERROR", errors=wrong.errors())
        except Exception as wrong:
            return error(str(wrong), "EXECUTION_ERROR")
        if isinstance(said, str):
            return said
        fields = said.model_dump()
        reward, done, metadata = fields.pop("reward"), fields.pop("done"), fields["metadata"]
        data = {"observation": fields, "reward": reward, "done": done}
        return json.dumps(
            {"type": "observation", "data": {**data, **({"metadata": metadata} if metadata else {})}}
        )


def error(message: str, code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}, default=str)
