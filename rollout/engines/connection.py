"""The connection of a client to an engine: what a restarting engine does not answer is asked again."""

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from rollout.engines.answers import (
    HOST_OF_SOCKET,
    AdapterMissing,
    EngineError,
    RequestRefused,
    excerpt,
    parse_answer,
    socket_of,
)
from rollout.engines.completion import completion_request
from rollout.origin import Sampling

if TYPE_CHECKING:
    import aiohttp

FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
_FAILING_S = 60.0
"""How long an engine may answer with errors. One that dies does so until its process ends (vLLM's front end
for 8 s after its engine core, longer on a busy machine)."""


class Connection:
    """Requests over HTTP, without a limit. An async context manager, for one event loop.

    If a connection is refused or breaks, the request is repeated until `retry_s` has passed since the first
    failure (a server may be restarting).
    """

    def __init__(self, base_url: str, model: str | None, request_timeout_s: float, retry_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._socket = socket_of(self._base_url)
        self._model = model
        """The adapter to ask; None: the model itself."""
        self._request_timeout_s = request_timeout_s
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp  # here, because it takes 0.15 s and `run --help` imports this module

        path = self._socket
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0) if path else aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._request_timeout_s),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _post(self, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> dict[str, Any]:
        import aiohttp

        url = self._base_url + path
        pause_s, failing_since_s = FIRST_RETRY_S, None
        while True:
            started_s = time.monotonic()
            try:
                return await self._post_once(url, body, headers)
            except TimeoutError as error:
                raise EngineError(f"POST {url}: no answer within {self._request_timeout_s:g} s") from error
            except RequestRefused:
                raise
            except (aiohttp.ClientError, EngineError) as error:  # EngineError: it answers 500 while it dies
                now_s = time.monotonic()
                answers = isinstance(error, EngineError)
                was_well = not answers and now_s - started_s > LONGEST_RETRY_S  # it had accepted the request
                if failing_since_s is None or was_well:
                    pause_s, failing_since_s = FIRST_RETRY_S, now_s
                fails = answers and not isinstance(error, AdapterMissing)
                patience_s = min(self._retry_s, _FAILING_S) if fails else self._retry_s
                if now_s + pause_s > failing_since_s + patience_s:
                    if fails and await self._answers_others():
                        raise RequestRefused(
                            f"POST {url}: {error}; tried again for {patience_s:g} s. The engine answers "
                            "another request, so it is this one that it cannot answer"
                        ) from error
                    raise EngineError(
                        f"POST {url}: {type(error).__name__}: {error}; tried again for {patience_s:g} s. "
                        "Is the engine still running? Its log says more"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _read_context(self) -> int | None:
        """Return the engine's context in tokens; 0 if it does not say, None if it does not answer
        just now.
        """
        import aiohttp

        assert self._session is not None
        url = f"{self._base_url}/v1/models"
        try:
            async with self._session.get(self._asked(url)) as response:
                answer = parse_answer(f"GET {url}", response.status, await response.read())
            return max(int(card["max_model_len"] or 0) for card in answer["data"])
        except (aiohttp.ClientError, TimeoutError):
            return None
        except (EngineError, KeyError, TypeError, ValueError):
            return 0

    async def _answers_others(self) -> bool:
        """Return whether the engine generates a token for a prompt of one, in _FAILING_S."""
        import aiohttp

        url, least = f"{self._base_url}/v1/completions", completion_request([0], Sampling(max_tokens=1))
        try:
            async with asyncio.timeout(_FAILING_S):
                await self._post_once(url, least | ({"model": self._model} if self._model else {}))
        except (aiohttp.ClientError, TimeoutError, EngineError):
            return False
        return True

    async def _post_once(
        self, url: str, body: dict[str, Any], headers: Mapping[str, str] = {}
    ) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("EngineClient is used outside of `async with`")
        async with self._session.post(self._asked(url), json=body, headers=headers) as response:
            data = await response.read()
        if response.status == 404 and "model" in body:
            raise AdapterMissing(f"POST {url}: 404: {excerpt(data)}")
        return parse_answer(f"POST {url.removeprefix(self._base_url)}", response.status, data)

    def _asked(self, url: str) -> str:
        """Return the URL as aiohttp takes it, which knows the socket from the connector."""
        return url.replace(self._base_url, HOST_OF_SOCKET, 1) if self._socket else url
