"""Ask a server over HTTP for a score: with a deadline, with retries, and each question once."""

import asyncio
import hashlib
import json
import random
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rollout.environment_variables import proxy_of

if TYPE_CHECKING:
    import aiohttp

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
"""Longest wait between two tries. It doubles from the first one to this."""
WORTH_ANOTHER_TRY = {408, 409, 425, 429, *range(500, 600)}
"""Answers of a server that is busy or ill; others would be the same again."""
_EXCERPT = 200


class EndpointError(RuntimeError):
    """The server gave no usable answer; the message has its URL and the reason."""


class _PendingQuestion:
    """A question for as long as somebody waits for its answer."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.failure: EndpointError | None = None


class Endpoint:
    """Sends JSON to a URL and reads what is answered. Answers are remembered in memory, by what was sent, the
    last `cache` of them; a question that is being asked is not asked a second time.

    A connection that fails, a try longer than `timeout_s`, an answer in WORTH_ANOTHER_TRY, and an answer that
    cannot be used are tried again, `retries` times. `at_once` tries are under way at most.
    """

    def __init__(
        self, url: str, headers: dict[str, str], *, timeout_s: float, retries: int, at_once: int, cache: int
    ) -> None:
        self.url = url
        self._headers = headers
        self._timeout_s, self._retries, self._at_once, self._cache = timeout_s, retries, at_once, cache
        self._known: OrderedDict[bytes, Any] = OrderedDict()
        """By a digest of what was sent."""
        self._asked: weakref.WeakValueDictionary[bytes, _PendingQuestion] = weakref.WeakValueDictionary()
        self._open: tuple[aiohttp.ClientSession, asyncio.Semaphore] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, question: dict[str, Any], read: Callable[[Any], Any]) -> Any:
        """Return the value that `read` makes of the answer, which is JSON. `read` raises ValueError for an
        answer that cannot be used. Raises EndpointError.
        """
        sent = json.dumps(question, sort_keys=True)
        if not self._cache:
            return await self._tried(sent, read)
        key = hashlib.sha256(sent.encode("utf-8", "surrogatepass")).digest()
        entry = self._asked.setdefault(key, _PendingQuestion())
        async with entry.lock:
            if entry.failure is not None:  # what it was asked before is the answer of all who waited
                raise EndpointError(str(entry.failure))
            if key not in self._known:
                try:
                    self._known[key] = await self._tried(sent, read)
                except EndpointError as error:
                    entry.failure = error
                    raise
            self._known.move_to_end(key)
            answer = self._known[key]
            while len(self._known) > self._cache:
                self._known.popitem(last=False)
            return answer

    async def look(self, url: str, question: Any = None) -> tuple[int, str] | None:
        """Return the status and the text of one answer, to a GET without a question; None without an answer,
        which is no error.
        """
        import aiohttp

        session, _ = self._opened()
        method = "GET" if question is None else "POST"
        try:
            async with session.request(method, url, json=question, headers=self._headers) as response:
                return response.status, await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None

    async def close(self) -> None:
        """Close the connections; the next question opens others."""
        if self._open is not None and self._loop is asyncio.get_running_loop():
            await self._open[0].close()
        self._open = None

    def _opened(self) -> "tuple[aiohttp.ClientSession, asyncio.Semaphore]":
        """Return the connections of this event loop, and the places for tries."""
        import aiohttp  # here, because it takes 0.15 s and `run --help` imports this module

        if self._open is None or self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            connector = aiohttp.TCPConnector(limit=0)
            proxy = proxy_of(self.url)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, proxy=proxy)
            self._open = session, asyncio.Semaphore(self._at_once)
        return self._open

    async def _tried(self, sent: str, read: Callable[[Any], Any]) -> Any:
        began_s, tries = time.monotonic(), self._retries + 1
        for attempt in range(1, tries + 1):
            answer, problem, wait_s = await self._once(sent, read)
            if problem is None:
                return answer
            if wait_s is None or attempt == tries:
                spent = f" ({attempt} tries in {time.monotonic() - began_s:.1f} s)" if attempt > 1 else ""
                raise EndpointError(f"{self.url}: {problem}{spent}")
            least_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** (attempt - 1))
            await asyncio.sleep(max(wait_s, least_s * random.uniform(0.5, 1.0)))

    async def _once(self, sent: str, read: Callable[[Any], Any]) -> tuple[Any, str | None, float | None]:
        """Return (answer, None, None), or (None, what is wrong, seconds to wait at least; None: for ever)."""
        import aiohttp

        try:
            session, places = self._opened()
            async with places, session.post(self.url, data=sent, headers=self._headers) as response:
                text = await response.text(errors="replace")
                if response.status >= 400:
                    problem = f"answered {response.status}: {' '.join(text.split()):.{_EXCERPT}}"
                    after = response.headers.get("Retry-After", "")
                    wait_s = min(LONGEST_WAIT_S, float(after)) if after.isdecimal() else 0.0
                    return None, problem, wait_s if response.status in WORTH_ANOTHER_TRY else None
            return read(json.loads(text)), None, None
        except TimeoutError:
            return None, f"no answer within {self._timeout_s:g} s", 0.0
        except aiohttp.ClientError as error:
            return None, f"{type(error).__name__}: {' '.join(str(error).split())}", 0.0
        except ValueError as error:
            return None, f"{' '.join(str(error).split())}", 0.0
