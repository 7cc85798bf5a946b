"""Speak with an environment server of the library OpenEnv (github.com/meta-pytorch/OpenEnv).

    GET /schema                          {"action": JSON schema, "observation": JSON schema, ...}
    WebSocket /ws, a session of its own:
        {"type": "reset", "data": {"seed": 7, ...}}      first, and again for another episode
        {"type": "step", "data": {an action's fields}}
        {"type": "close"}                                the server ends the connection
    and each reset and step is answered by
        {"type": "observation", "data": {"observation": {fields}, "reward": 0.5, "done": false}}
        {"type": "error", "data": {"message": "...", "code": "EXECUTION_ERROR"}}

The library's own client says the same. It is not used: the library brings a hundred packages, and needs an
older `mcp` than the extra `mcp`.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

if TYPE_CHECKING:
    import aiohttp

CLOSE_S, HANG_UP_S = 5.0, 0.5
"""How long a server may take to end a session, whose place the next one may need, and to say goodbye."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.1, 5.0
"""Waits between two tries to get a session of a server that has no more of them."""
MOST_BYTES = 2**26
"""Longest answer: a picture of a million pixels is about 12 MB as lists of numbers."""
EXCERPT = 300
"""Characters of what a server says that an error shows."""


class ServerFault(ValueError):
    """The server is not there, or says what it must not; the message has its URL."""


class NoFreeSession(ServerFault):
    """The server has no session left."""


class StepResult(NamedTuple):
    """What reset and step return."""

    fields: dict[str, Any]
    """Fields of the observation."""
    reward: float | None
    done: bool
    metrics: dict[str, float]
    """The numbers of the observation's `metadata`."""


async def schema_of(url: str, limit_s: float) -> dict[str, Any]:
    """Return the schemas of the server's actions and observations. Raises ServerFault."""
    import aiohttp  # here, because it is slow to import

    try:
        timeout = aiohttp.ClientTimeout(total=limit_s)
        async with aiohttp.ClientSession(timeout=timeout) as http, http.get(f"{url}/schema") as answer:
            text = await answer.text(errors="replace")
        if answer.status != 200:
            raise ServerFault(f"{url}/schema answers {answer.status}: {excerpt(text)}")
        schema = json.loads(text)
        for kind in ("action", "observation"):
            if not all(isinstance(field, dict) for field in schema[kind]["properties"].values()):
                raise TypeError(f"{kind} has properties that are none")
        return schema
    except TimeoutError:
        raise ServerFault(f"{url}/schema does not answer within {limit_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ServerFault(f"no server answers at {url}: {excerpt(error)}") from None
    except ServerFault:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerFault(f"{url}/schema is not that of an OpenEnv server: {excerpt(error)}") from None


class OpenEnvSession:
    """A session with the first of these servers that is there. `limit_s`: how long connecting, reset and step
    may each take. `busy_s`: how long to wait while all sessions are taken, of which `wait` is told.

        async with Session(urls, limit_s) as session:
            said = await session.reset({"seed": 7})
    """

    def __init__(
        self,
        urls: Sequence[str],
        limit_s: float,
        *,
        busy_s: float = math.inf,
        wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.url = urls[0]
        self._urls, self._limit_s, self._busy_s, self._wait = urls, limit_s, busy_s, wait
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._next: asyncio.Task[aiohttp.WSMessage] | None = None
        """The next message. It is always waited for: else nothing answers the server's pings, and a model
        that thinks for a minute would find the session closed.
        """

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self._socket is not None and self._next is not None:
                with suppress(TimeoutError, ConnectionError):
                    async with asyncio.timeout(CLOSE_S):
                        await self._socket.send_str('{"type": "close"}')
                        await self._next  # the server has let go of the session
        finally:
            await self._drop()

    async def reset(self, arguments: Mapping[str, Any]) -> StepResult:
        """Begin an episode, in a session that this opens. Raises ServerFault."""
        began_s, wait_s = time.monotonic(), FIRST_WAIT_S
        while True:
            try:
                await self._connect()
                return await self._ask("reset", arguments)
            except NoFreeSession as busy:
                await self._drop()
                if time.monotonic() - began_s > self._busy_s:
                    raise ServerFault(f"{busy} for {self._busy_s:g} s") from None
                self._wait(str(busy))
                self._urls = [*self._urls[1:], self._urls[0]]
                await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def step(self, action: Mapping[str, Any]) -> StepResult:
        """Act. Raises ServerFault."""
        return await self._ask("step", action)

    async def _connect(self) -> None:
        import aiohttp

        for place, url in enumerate(self._urls, 1):
            self._http = aiohttp.ClientSession()
            try:
                async with asyncio.timeout(self._limit_s):
                    times = aiohttp.ClientWSTimeout(ws_close=HANG_UP_S)  # pyright: ignore[reportCallIssue]
                    self._socket = await self._http.ws_connect(
                        f"{url}/ws", timeout=times, max_msg_size=MOST_BYTES
                    )
                self.url, self._next = url, asyncio.create_task(self._socket.receive())
                return
            except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
                await self._drop()
                if place == len(self._urls):
                    raise ServerFault(f"no server answers at {url}: {excerpt(error)}") from None
            except BaseException:
                await self._drop()
                raise

    async def _drop(self) -> None:
        if self._next is not None:
            self._next.cancel()
        socket, http = self._socket, self._http
        self._http = self._socket = self._next = None
        try:
            if socket is not None:
                await socket.close()
        finally:
            if http is not None:
                await http.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> StepResult:
        from aiohttp import WSMsgType

        assert self._socket is not None and self._next is not None
        try:
            async with asyncio.timeout(self._limit_s):
                with suppress(ConnectionError):  # it has hung up; what it has said before is still there
                    await self._socket.send_str(json.dumps({"type": kind, "data": data}))
                message = await self._next
        except TimeoutError:
            raise ServerFault(f"{self.url} does not answer {kind} within {self._limit_s:g} s") from None
        if message.type is not WSMsgType.TEXT:
            raise ServerFault(f"{self.url} has ended the connection and not answered {kind}")
        self._next = asyncio.create_task(self._socket.receive())
        try:
            return read(message.data)
        except NoFreeSession as error:
            raise NoFreeSession(f"{self.url}: all its sessions are taken ({error})") from None
        except ValueError as error:
            raise ServerFault(f"{self.url}, {kind}: {excerpt(error)}") from None


def read(text: str) -> StepResult:
    """Read an answer to reset or step. ValueError if it is none; Busy if the server has no session left."""
    try:
        message = json.loads(text)
        kind, data = message["type"], dict(message["data"])
        fields = {} if kind == "error" else dict(data["observation"])
        metadata = dict(data.get("metadata") or fields.get("metadata") or {})
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"it answers {excerpt(text)!r}; it must be an observation") from None
    if kind == "error":
        error_text = f"{data.get('message')} ({data.get('code')}) {data.get('errors') or ''}"
        raise (NoFreeSession if data.get("code") == "CAPACITY_REACHED" else ValueError)(excerpt(error_text))
    reward, done = data.get("reward"), data.get("done", False)
    if reward is not None and not _is_number(reward):
        raise ValueError(f"the reward is {excerpt(reward)}; it must be a finite number")
    if not isinstance(done, bool):
        raise ValueError(f"done is {excerpt(done)}; it must be true or false")
    metrics = {name: float(value) for name, value in metadata.items() if _is_number(value)}
    return StepResult(fields, None if reward is None else float(reward), done, metrics)


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def excerpt(text: object) -> str:
    """Return the beginning of a text, in one line."""
    return " ".join(str(text).split())[:EXCERPT] or type(text).__name__
