"""The client that asks a server for completions.

Both servers, vLLM and the embedded one, speak the OpenAI completions API with token ids.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from pydantic_core import from_json

from rollout.origin import Sampling
from rollout.trajectory import Turn

if TYPE_CHECKING:
    import aiohttp

UNIX = "unix:"
"""A base URL is http://HOST:PORT, or this and the path of a Unix socket that a server listens on."""
_EXCERPT = 500
_SPECIAL_TOKENS = 16
"""More than a tokenizer adds to a text."""
FIRST_RETRY_S = 0.05
LONGEST_RETRY_S = 1.0
_FINISH_REASONS = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), "stop"),
    **dict.fromkeys(("tool_calls", "function_call"), "stop"),
    **dict.fromkeys(("length", "max_tokens"), "length"),
}
"""What engines and agents say: it ended by itself, or it was cut."""
_FAILING_S = 60.0
"""How long an engine may answer with errors. One that dies does so until its process ends (vLLM's front end
for 8 s after its engine core, longer on a busy machine)."""


@dataclass(frozen=True)
class EngineFacts:
    """What those who ask an engine should know of it."""

    samples: int = 256
    """How many samples it generates at the same time, all its replicas together."""
    is_seeded: bool = True
    """Whether the seed of a request decides what is drawn. In vLLM the rest of the batch matters too, and the
    requests that have a seed are drawn one after the other: it gets none."""
    may_force: bool = True
    """Whether it may be made to write a form (JSON): what is trained on its samples corrects for tokens that
    the policy would not have chosen, or nothing is."""


class EngineError(RuntimeError):
    """The engine failed: it is gone, does not answer in time, or answers with an error."""


class RequestRefused(EngineError):
    """The engine works but refuses this request (400, 413, 422), e.g. because its prompt is too long."""


class ContextFull(RequestRefused):
    """The prompt leaves no room in the engine's context."""


class AdapterMissing(EngineError):
    """The engine has no such adapter (404). An engine that has just restarted will get it soon."""


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that the model has written."""

    id: str
    """The message with the result names it, as `tool_call_id`."""
    name: str
    arguments: dict[str, Any]

    @property
    def wire(self) -> dict[str, Any]:
        """The call as messages have it in the OpenAI API."""
        function = {"name": self.name, "arguments": json.dumps(self.arguments, ensure_ascii=False)}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class Completion:
    """One completion. `logprobs`: natural, one for each of `token_ids`, in the distribution sampled from.
    `finish_reason`: `stop`, `length`, or one that no sample may have (see `finish_reason`).
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str
    said: Sequence[Turn] = ()
    """What was said to the model before it, since the completion before."""
    stop_string: str = ""
    """The stop string that ended it: its tokens are there, but `text` ends before it."""
    calls: Sequence[ToolCall] = ()
    """The tools that it calls, if it had some (Policy.with_tools)."""
    content: str | None = None
    """If it calls tools: the text before the calls. `text` is all of it."""
    likely: Sequence[tuple[str, Mapping[str, float]]] = ()
    """If logprobs were asked for: the text of each token, and the likeliest ones there with logprobs."""


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
        facts: EngineFacts = EngineFacts(),
    ) -> None:
        """`model`: the adapter to ask (rollout.engines.admin.adapter_name); None: the model itself."""
        self.facts = facts
        self._base_url = base_url.rstrip("/")
        self._socket = socket_of(self._base_url)
        self._model = model
        self._request_timeout_s = request_timeout_s
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None
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

    async def generate(self, prompt: str | Sequence[int], sampling: Sampling) -> list[Completion]:
        """Return the `sampling.n` completions of a prompt (text, or token ids that are taken as they are),
        which end where the engine's context does.

        Raises RequestRefused, e.g. if the prompt alone fills the context, or another EngineError.
        """
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

    async def _complete(self, prompt: str | Sequence[int], sampling: Sampling) -> list[Completion]:
        request = completion_request(prompt, sampling)
        if not self.facts.is_seeded:
            request["seed"] = None
        if self._model:
            request["model"] = self._model
        answer = await self._post("/v1/completions", request)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            completions = [_completion(choice, likely="logprobs" in sampling.more) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"{self._base_url}/v1/completions answered without what is needed ({error!r}): "
                f"{json.dumps(answer)[:_EXCERPT]}; it must support return_token_ids and logprobs"
            ) from error
        if len(completions) != sampling.n:
            raise EngineError(
                f"{self._base_url} returned {len(completions)} completions, asked for {sampling.n}"
            )
        return completions

    async def tokenize(self, text: str | Sequence[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of chat messages (through the chat template, with the generation prompt), or of a text
        that continues another one (without special tokens). `template`: what else the chat template gets,
        `tools` and `chat_template_kwargs`.
        """
        if isinstance(text, str):
            return await self._tokenize({"prompt": text, "add_special_tokens": False})
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
            raise EngineError(f"{self._base_url}/detokenize returned no text: {str(answer)[:_EXCERPT]}")
        return answer["prompt"]

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        answer = await self._post("/tokenize", body)
        if "tokens" not in answer:
            raise EngineError(f"{self._base_url}/tokenize returned no tokens: {str(answer)[:_EXCERPT]}")
        return answer["tokens"]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        url = self._base_url + path
        pause_s, failing_since_s = FIRST_RETRY_S, None
        while True:
            started_s = time.monotonic()
            try:
                return await self._post_once(url, body)
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
                    raise EngineError(
                        f"POST {url}: {type(error).__name__}: {error}; tried again for {patience_s:g} s. "
                        "Is the engine still running? Its log says more"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_RETRY_S)

    async def _post_once(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("EngineClient is used outside of `async with`")
        async with self._session.post(self._asked(url), json=body) as response:
            data = await response.read()
        if response.status == 404 and "model" in body:
            raise AdapterMissing(f"POST {url}: 404: {excerpt(data)}")
        return parse_answer(f"POST {url.removeprefix(self._base_url)}", response.status, data)

    def _asked(self, url: str) -> str:
        """Return the URL as aiohttp takes it, which knows the socket from the connector."""
        return url.replace(self._base_url, HOST_OF_SOCKET, 1) if self._socket else url


HOST_OF_SOCKET = "http://localhost"
"""What a request over a Unix socket says that it goes to."""


def socket_of(base_url: str) -> str | None:
    """Return the path of the Unix socket in a base URL; None for one of TCP."""
    return base_url.removeprefix(UNIX) if base_url.startswith(UNIX) else None


def completion_request(prompt: str | Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Return the body of a request for completions."""
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "logprobs": 0,
        "return_token_ids": True,
        # vLLM takes missing values from the model's generation_config.json. Qwen2.5's has a
        # repetition penalty, so the logprobs would be of another policy than the trainer's.
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        **sampling.more,
    }


def finish_reason(said: str) -> str:
    """`stop` or `length` for what an engine says; what is neither (abort, content_filter) stays as it is."""
    return _FINISH_REASONS.get(said, said)


def whole_characters(text: str) -> str:
    """Return a text without the replacement characters at its end, which may be bytes of a character that the
    next tokens complete.
    """
    return text.rstrip("\N{REPLACEMENT CHARACTER}")


def _completion(choice: dict[str, Any], *, likely: bool) -> Completion:
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if not isinstance(token_ids, list) or not isinstance(logprobs, list):
        raise TypeError("token_ids and token_logprobs must be lists")
    return Completion(
        choice["prompt_token_ids"],
        token_ids,
        logprobs,
        choice["text"],
        finish_reason(str(choice["finish_reason"])),
        stop_string=stop if isinstance(stop := choice.get("stop_reason"), str) else "",
        likely=_likely(choice["logprobs"]) if likely else (),
    )


def _likely(logprobs: dict[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    return list(zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))


def parse_answer(call: str, status: int, data: bytes) -> dict[str, Any]:
    """Return the JSON of an answer. Raises RequestRefused or another EngineError if it is an error or no
    JSON.
    """
    if status >= 400:
        kind = RequestRefused if status in (400, 413, 422) else EngineError
        raise kind(f"{call}: {status}: {excerpt(data)}")
    try:
        # Twice as fast as json.loads.
        answer = from_json(data.decode(errors="replace")) if data else {}
    except ValueError as error:
        raise EngineError(f"{call}: {status}, but no JSON: {excerpt(data)}") from error
    return answer if isinstance(answer, dict) else {"answer": answer}


def excerpt(data: bytes) -> str:
    """Return the beginning of what an answer says, in one line: the message if it is an error in JSON, as
    engines send it.
    """
    text = data.decode(errors="replace")
    try:
        error = from_json(text)
        error = error.get("error", error)
        text = str(error.get("message") or error.get("detail") or text)
    except (ValueError, AttributeError):
        pass  # it is no JSON, or of another form
    return " ".join(text[:_EXCERPT].split())
