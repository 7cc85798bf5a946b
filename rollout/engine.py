"""A server that generates, seen from outside: a client for completions, and an administrator for its weights.

Both servers, vLLM and the embedded one, speak the same paths: the OpenAI completions API with token ids, and
the administrative ones that vLLM opens under VLLM_SERVER_DEV_MODE=1.
"""

import asyncio
import http.client
import json
import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from rollout.weights import WeightsError, check_model_dir, tensor_names

if TYPE_CHECKING:
    import aiohttp

LOADING = "loading"
"""The weight version of an engine whose weights are being replaced; no policy has it as its digest."""

_EXCERPT = 500
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class EngineError(RuntimeError):
    """The engine failed: it is not there, does not answer in time, or answers with an error."""


class RequestRefused(EngineError):
    """The engine is well, but this request is not (400, 413, 422): its prompt is too long, say."""


@dataclass(frozen=True)
class Sampling:
    """How completions are sampled. `seed`: completion j of `n` is drawn with seed + j; None: any."""

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """One completion; `logprobs`: natural, one for each of `token_ids`, of the distribution sampled from."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str


class EngineClient:
    """Completions over HTTP, as many at once as are asked for. An async context manager; one event loop only.

    A connection that is refused or breaks is tried again until `retry_s` has passed since the first failure
    (a server may be restarting): with a seed the answer is the same, so a repeat does no harm.
    """

    def __init__(self, base_url: str, *, request_timeout_s: float = 1800.0, retry_s: float = 10.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._request_timeout_s = request_timeout_s
        self._retry_s = retry_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        import aiohttp  # here, because it takes 0.15 s and `run --help` imports this module too

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._request_timeout_s),
        )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, prompt: str | Sequence[int], sampling: Sampling) -> list[Completion]:
        """The `sampling.n` completions of a prompt (text, or token ids that are taken as they are).

        Raises RequestRefused or another EngineError.
        """
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "n": sampling.n,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "seed": sampling.seed,
            "logprobs": 0,
            "return_token_ids": True,
            # vLLM takes what a request leaves open from the model's generation_config.json, and e.g. Qwen2.5
            # ships a repetition penalty there: the logprobs would be of another policy than the trainer's.
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        answer = await self._post("/v1/completions", body)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            completions = [_completion(choice) for choice in choices]
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

    async def tokenize(self, text: str | Sequence[dict[str, str]]) -> list[int]:
        """Token ids of chat messages (through the chat template, with the generation prompt), or of plain
        text that continues something (no special tokens are added).
        """
        if isinstance(text, str):
            body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        else:
            body = {"messages": list(text), "add_generation_prompt": True}
        answer = await self._post("/tokenize", body)
        if "tokens" not in answer:
            raise EngineError(f"{self._base_url}/tokenize returned no tokens: {str(answer)[:_EXCERPT]}")
        return answer["tokens"]

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        import aiohttp

        url = self._base_url + path
        pause_s, give_up_at = _FIRST_RETRY_S, None
        while True:
            try:
                return await self._post_once(url, body)
            except TimeoutError as error:
                raise EngineError(f"POST {url}: no answer within {self._request_timeout_s:g} s") from error
            except aiohttp.ClientError as error:
                now = time.monotonic()
                give_up_at = now + self._retry_s if give_up_at is None else give_up_at
                if now + pause_s > give_up_at:
                    raise EngineError(
                        f"POST {url}: {type(error).__name__}: {error}; tried again for {self._retry_s:g} s. "
                        "Is the engine still running? Its log says more"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)

    async def _post_once(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        if self._session is None:
            raise RuntimeError("EngineClient is used outside of `async with`")
        async with self._session.post(url, json=body) as response:
            text = await response.text()
        return _parse_answer(f"POST {url}", response.status, text)


class EngineAdmin:
    """The engine's health and weights; plain blocking calls, each with a timeout. Raises EngineError."""

    def __init__(self, base_url: str, *, timeout_s: float = 30.0, drain_timeout_s: float = 1800.0) -> None:
        """`timeout_s`: of a call that should be quick; `drain_timeout_s`: of those that wait for running
        requests or move weights.
        """
        parts = urllib.parse.urlsplit(base_url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"engine URL {base_url!r} must look like http://127.0.0.1:8000")
        self._host, self._port = parts.hostname, parts.port or 80
        self._prefix = parts.path.rstrip("/")
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._drain_timeout_s = drain_timeout_s

    def healthy(self, timeout_s: float = 5.0) -> bool:
        """Whether the engine answers that it is well."""
        try:
            self._call("GET", "/health", timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    def wait_healthy(self, timeout_s: float, alive: Callable[[], bool]) -> None:
        """Wait until the engine answers; EngineError after `timeout_s`, or once `alive()` says its process is
        gone.
        """
        give_up_at = time.monotonic() + timeout_s
        pause_s = _FIRST_RETRY_S
        while not self.healthy():
            if not alive():
                raise EngineError(f"the engine for {self._base_url} exited before it answered; see its log")
            if time.monotonic() + pause_s > give_up_at:
                raise EngineError(
                    f"{self._base_url} did not become healthy within {timeout_s:g} s; see its log"
                )
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _LONGEST_RETRY_S)

    def model_name(self) -> str:
        """The name under which the model is served."""
        return str(self._get("/v1/models", "data")[0]["id"])

    def policy(self) -> str | None:
        """The weight version: the digest given at the last reload; None while weights are being replaced, or
        after that has failed.
        """
        version = self._get("/weight_info", "weight_version")
        return None if version in (None, LOADING) else str(version)

    def reload(
        self, path: str | os.PathLike[str], digest: str, *, like: str | os.PathLike[str] | None = None
    ) -> None:
        """Replace the weights by those of a model directory; from then on `policy()` is `digest`.

        The files are verified first, against the tensors (names and shapes) of the model directory `like` if
        given, since vLLM accepts a directory with tensors missing and then generates garbage; WeightsError
        leaves the engine as it was, serving. An EngineError may leave it with half of the weights: it stays
        paused and has no policy, so that it cannot serve them. Reload a good checkpoint, or restart it. A
        sleeping engine is woken.
        """
        check_model_dir(path)
        if like is not None:
            _check_same_tensors(path, like)
        asleep = self.is_sleeping()
        if asleep:
            self.wake("weights")
        self._admin("/pause?mode=wait")
        self._set_version(LOADING)
        reload_weights = {"method": "reload_weights", "kwargs": {"weights_path": os.fspath(path)}}
        try:
            self._admin("/collective_rpc", reload_weights)
            if asleep:
                self.wake("kv_cache")
            # Without it vLLM goes on with keys and values of the old weights: wrong outputs, no error.
            if not self._admin("/reset_prefix_cache").get("success", True):
                raise EngineError("the prefix cache was not reset: requests are still running")
        except EngineError as error:
            raise EngineError(
                f"loading {os.fspath(path)} into {self._base_url} failed, it stays paused; "
                f"reload a good checkpoint or restart it: {error}"
            ) from error
        self._set_version(digest)
        self._admin("/resume")

    def sleep(self, level: int) -> None:
        """Free the accelerator's memory: 1 keeps the weights in host memory, 2 drops them. Running requests
        end first.
        """
        self._admin(f"/sleep?level={level}&mode=wait")

    def wake(self, *tags: str) -> None:
        """Undo sleep, for `weights` or `kv_cache` alone if named."""
        self._admin("/wake_up" + "".join(f"{'&' if n else '?'}tags={tag}" for n, tag in enumerate(tags)))

    def is_sleeping(self) -> bool:
        return bool(self._get("/is_sleeping", "is_sleeping"))

    def _set_version(self, version: str) -> None:
        self._admin("/update_weight_version", {"new_version": version})

    def _get(self, path: str, key: str) -> Any:
        answer = self._call("GET", path, timeout_s=self._timeout_s)
        if key not in answer:
            raise EngineError(f"GET {self._base_url}{path} answered without {key!r}: {answer}")
        return answer[key]

    def _admin(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call("POST", path, body, timeout_s=self._drain_timeout_s)

    def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._prefix + path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(f"{method} {self._base_url}{path}: {type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if response.status == 404:
            raise EngineError(
                f"{method} {self._base_url}{path}: 404; a vLLM server must run with VLLM_SERVER_DEV_MODE=1"
            )
        return _parse_answer(f"{method} {self._base_url}{path}", response.status, text)


def _completion(choice: dict[str, Any]) -> Completion:
    token_ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if len(token_ids) != len(logprobs):
        raise ValueError(f"{len(token_ids)} token ids, {len(logprobs)} logprobs")
    return Completion(
        choice["prompt_token_ids"], token_ids, logprobs, choice["text"], str(choice["finish_reason"])
    )


def _parse_answer(call: str, status: int, text: str) -> dict[str, Any]:
    if status >= 400:
        kind = RequestRefused if status in (400, 413, 422) else EngineError
        raise kind(f"{call}: {status}: {text[:_EXCERPT]}")
    try:
        answer = json.loads(text) if text else {}
    except ValueError as error:
        raise EngineError(f"{call}: {status}, but no JSON: {text[:_EXCERPT]}") from error
    return answer if isinstance(answer, dict) else {"answer": answer}


def _check_same_tensors(path: str | os.PathLike[str], like: str | os.PathLike[str]) -> None:
    found = {name: shape for name, (_, shape) in tensor_names(path).items()}
    wanted = {name: shape for name, (_, shape) in tensor_names(like).items()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise WeightsError(
                f"{os.fspath(path)}: tensor {name!r} has shape {found.get(name, 'none (it is missing)')}, "
                f"in {os.fspath(like)} it has {wanted.get(name, 'none (it is missing)')}"
            )
