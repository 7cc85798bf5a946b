"""The client that asks a server for completions, vLLM or the embedded engine."""

import asyncio
import json
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollout.engines import appended_text
from rollout.engines.answers import (
    EXCERPT,
    GENERATE,
    HOST_OF_SOCKET,
    AdapterMissing,
    ContextFull,
    EngineError,
    EngineFacts,
    RequestRefused,
    excerpt,
    parse_answer,
    prompt_logprobs,
    scoring_request,
    socket_of,
)
from rollout.engines.completion import (
    Completion,
    completion_of,
    completion_request,
    generate_request,
    generated_choices,
)
from rollout.origin import Sampling
from rollout.pictures import digest_of, image_url, pictures_in
from rollout.storage import files
from rollout.trajectory import Picture

if TYPE_CHECKING:
    import aiohttp

_SPECIAL_TOKENS = 16
"""More than a tokenizer adds to a text."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
_FAILING_S = 60.0
"""How long an engine may answer with errors. One that dies does so until its process ends (vLLM's front end
for 8 s after its engine core, longer on a busy machine)."""


class EngineClient:
    """Asks for completions over HTTP, without a limit. An async context manager, for one event loop.

    If a connection is refused or breaks, the request is repeated until `retry_s` has passed since the first
    failure (a server may be restarting).
    """

    facts = EngineFacts()

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        request_timeout_s: float = 1800.0,
        retry_s: float = 10.0,
        facts: EngineFacts = facts,
        images: Path | None = None,
        renderer: "EngineClient | None" = None,
    ) -> None:
        """`model`: the adapter to ask (rollout.engines.admin.adapter_name); None: the model itself. `images`:
        the directory of the run's pictures. `renderer`: what writes messages that show pictures as tokens, if
        the engine does not (EngineFacts.renders_pictures).
        """
        self._renderer = renderer
        self.images = images
        self.facts = facts
        self._base_url = base_url.rstrip("/")
        self._socket = socket_of(self._base_url)
        self._model = model
        self._request_timeout_s = request_timeout_s
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = Counter[int]()
        """How many samples of groups each replica has."""
        self._tokenizer_facts: dict[str, bool] = {}
        self._context: int | None = None
        """The engine's context in tokens, read when it first refuses a request; 0: it does not say."""

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

    async def generate(
        self, prompt: str | Sequence[int], sampling: Sampling, pictures: Sequence[str] = ()
    ) -> list[Completion]:
        """Return the `sampling.n` completions of a prompt (text, or token ids that are taken as they are),
        which end where the engine's context does. `pictures`: the digests of those that the prompt has a
        placeholder for.

        Raises RequestRefused, e.g. if the prompt alone fills the context, or another EngineError.
        """
        if pictures:  # the engine cuts the completions itself: it alone knows how many tokens a picture has
            return await self._complete(prompt, sampling, pictures)
        known = self._context  # now: another request may read it while this one is refused
        try:
            return await self._complete(*await self._fitted(prompt, sampling))
        except RequestRefused:
            if known is None and self._context is None:
                self._context = await self._read_context()  # it may have been asked for more than fits
            if known is not None or not self._context:
                raise
            return await self._complete(*await self._fitted(prompt, sampling))

    async def _fitted(
        self, prompt: str | Sequence[int], sampling: Sampling
    ) -> tuple[str | Sequence[int], Sampling]:
        """Return the request with at most the tokens that the context has left, once the context is known."""
        if not self._context:
            return prompt, sampling
        if isinstance(prompt, str):
            if len(prompt.encode()) + _SPECIAL_TOKENS + sampling.max_tokens <= self._context:
                return prompt, sampling  # a token has a byte at least
            prompt = await self.tokenize_whole(prompt)
        room = self._context - len(prompt)
        if room < 1:
            raise ContextFull(
                f"a prompt of {len(prompt)} tokens fills the engine's context of {self._context}"
            )
        return prompt, replace(sampling, max_tokens=min(sampling.max_tokens, room))

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

    async def _complete(
        self, prompt: str | Sequence[int], sampling: Sampling, pictures: Sequence[str] = ()
    ) -> list[Completion]:
        special_tokens = self.facts.special_tokens
        request = completion_request(prompt, sampling, special_tokens)
        if pictures:
            request["content_parts"] = [await asyncio.to_thread(self._part, digest) for digest in pictures]
        if not self.facts.is_seeded:
            request["seed"] = None
        if self.facts.routed_layers:
            request["return_routed_experts"] = True
        if self._model:
            request["model"] = self._model
        path = "/v1/completions"
        if pictures and not self.facts.renders_pictures:
            path, request = GENERATE, generate_request(request)
        headers: dict[str, str] = {}
        replica = min(range(self.facts.replicas), key=lambda each: self._in_flight[each])
        if sampling.n > 1 and self.facts.replicas > 1:
            # Else vLLM deals the samples out, and each replica computes their prompt.
            headers = {"X-data-parallel-rank": str(replica)}
        self._in_flight[replica] += sampling.n
        try:
            answer = await self._post(path, request, headers)
        finally:
            self._in_flight[replica] -= sampling.n
        try:
            choices = answer["choices"] if path != GENERATE else generated_choices(answer)
            choices = sorted(choices, key=lambda choice: choice["index"])
            completions = [
                completion_of(choice, sampling, special_tokens, pictures, self.facts.routed_layers)
                for choice in choices
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._base_url}{path} answered without what is needed ({error!r}): "
                f"{json.dumps(answer)[:EXCERPT]}; it must support return_token_ids and logprobs"
            ) from error
        if len(completions) != sampling.n:
            raise EngineError(
                f"{self._base_url} returned {len(completions)} completions, asked for {sampling.n}"
            )
        return completions

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Natural logprobs, at temperature 1, of `token_ids[1:]`, each given all tokens before it. Raises
        RequestRefused, e.g. if they fill the context, or another EngineError.
        """
        answer = await self._post("/v1/completions", scoring_request(token_ids, self._model))
        try:
            logprobs = prompt_logprobs(answer, token_ids)
            if not all(map(math.isfinite, logprobs)):
                raise ValueError("one is not a finite number")
            return logprobs
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise RequestRefused(
                f"{self._base_url}/v1/completions answered without the logprobs of {len(token_ids)} tokens "
                f"({error!r}): {json.dumps(answer)[:EXCERPT]}"
            ) from error

    def _part(self, digest: str) -> dict[str, Any]:
        """Return a picture for a request. Raises RequestRefused if its file is missing or has changed."""
        if self.images is None:
            raise RequestRefused(f"picture {digest}: this client knows no directory of pictures")
        path = self.images / digest
        try:
            data = files.read(path)
        except FileNotFoundError:
            raise RequestRefused(f"{path}: this picture is missing") from None
        if digest_of(data) != digest:
            raise RequestRefused(f"{path}: this picture has changed; remove it, and start the run again")
        return image_url(data)

    async def expanded(
        self, token_ids: list[int], pictures: Sequence[str]
    ) -> tuple[list[int], list[Picture]]:
        """See LocalTokenizer: an engine expands the prompts that it goes on from itself."""
        raise EngineError("an environment that demonstrates has no engine")

    async def tokenize(self, text: str | Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of chat messages (through the chat template, with the generation prompt), or of a text
        that continues another one: they spell it exactly, also where the tokenizer puts a space in front of
        a text. `template`: what else the chat template gets, `tools` and `chat_template_kwargs`.
        """
        if isinstance(text, str):
            return await appended_text.token_ids(text, self._plain, self.detokenize, self._tokenizer_facts)
        return await self._tokenize({"messages": list(text), "add_generation_prompt": True, **template})

    async def tokenize_whole(self, text: str | Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of a whole sequence: chat messages without the generation prompt, or a text with special
        tokens, as `generate` reads it. `template`: as in `tokenize`.
        """
        if isinstance(text, str):
            return await self._tokenize({"prompt": text, "add_special_tokens": True})
        return await self._tokenize({"messages": list(text), "add_generation_prompt": False, **template})

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, with special tokens."""
        answer = await self._post("/detokenize", {"tokens": list(token_ids)})
        if not isinstance(answer.get("prompt"), str):
            raise EngineError(f"{self._base_url}/detokenize returned no text: {str(answer)[:EXCERPT]}")
        return answer["prompt"]

    async def _plain(self, text: str) -> list[int]:
        """Return the token ids of a text without special tokens, as the tokenizer begins a text."""
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        if self._renderer is not None and pictures_in(body.get("messages")):
            return await self._renderer._tokenize(body)
        answer = await self._post("/tokenize", body)
        if "tokens" not in answer:
            raise EngineError(f"{self._base_url}/tokenize returned no tokens: {str(answer)[:EXCERPT]}")
        return answer["tokens"]

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
