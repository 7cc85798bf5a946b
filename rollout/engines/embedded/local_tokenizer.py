"""Tokenise as the embedded engine does, in a process of this machine: for work that generates nothing."""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.bodies import BadRequest, parse_body
from rollout.engines.client import EngineClient
from rollout.origin import Sampling
from rollout.processes.pool import CallFailed, CallLost, ProcessPool
from rollout.storage.retry import PASSING, SharedFsError, library_errors, retry

if TYPE_CHECKING:
    from rollout.engines.embedded.text import Texts

DEADLINE_S = 60.0
"""How long a text may take; most take a millisecond."""


class NoTokenizer(EngineError):
    """The model has no tokenizer that transformers can load here; the message is its reason, in one line."""


class LocalTokenizer(EngineClient):
    """Stands in for the client of an engine that only tokenises, and needs none. Its process starts with the
    first text, takes no torch, and stays for the next iteration.
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        super().__init__("")
        self._model_dir = os.path.abspath(model_dir)

    async def generate(self, prompt: Any, sampling: Sampling) -> Any:
        raise EngineError("there is no engine here: an environment that demonstrates generates nothing")

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await asyncio.to_thread(_pool().call, self._model_dir, path, body, deadline_s=DEADLINE_S)
        except (CallFailed, CallLost) as error:
            raise EngineError(f"the tokenizer of {self._model_dir}: {error}") from error
        if isinstance(answer, str):
            raise RequestRefused(answer)
        if "error" in answer:
            raise NoTokenizer(answer["error"])
        return answer


@functools.cache
def _pool() -> ProcessPool:
    return ProcessPool(f"{__name__}:tokenizing", size=1)


def close_tokenizer() -> None:
    """End the process; another one starts with the next text."""
    if _pool.cache_info().currsize:
        _pool().close()
        _pool.cache_clear()


def tokenizing() -> Callable[[str, str, dict[str, Any]], dict[str, Any] | str]:
    """Return the function that a process of the pool calls: from a model's directory, /tokenize or
    /detokenize and the body of such a request to the answer, or to the reason why it is refused. An answer
    with `error`: the model has no tokenizer.
    """
    missing: Any = None
    sys.modules["torch"] = missing  # transformers works without it; loading it takes seconds and memory
    from rollout.engines.embedded.protocol import DetokenizeBody, TokenizeBody
    from rollout.engines.embedded.text import Texts

    def load(model_dir: str) -> "Texts":
        with library_errors():
            return Texts(model_dir)

    @functools.cache
    def texts(model_dir: str) -> "Texts":
        return retry("load the tokenizer of", Path(model_dir), functools.partial(load, model_dir))

    def answer(model_dir: str, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        document = json.dumps(body).encode()
        try:
            text = texts(model_dir)
        except Exception as error:  # of the files, of a library that is not there, of code that is not run
            if isinstance(error, OSError) and error.errno in PASSING:
                raise  # of the mount, for as long as it was tried: the model may have a tokenizer
            cause = error.__cause__ if isinstance(error, SharedFsError) else error
            return {"error": f"{type(cause).__name__}: {' '.join(str(cause).split()):.300}"}
        try:
            if path == "/detokenize":
                return {"prompt": text.detokenize(parse_body(DetokenizeBody, document).tokens)}
            return {"tokens": text.tokenize(parse_body(TokenizeBody, document))}
        except BadRequest as error:
            return str(error)

    return answer
