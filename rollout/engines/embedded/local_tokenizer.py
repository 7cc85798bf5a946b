"""Tokenise as the embedded engine does, in a process of this machine: for work that generates nothing."""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.bodies import BadRequest, parse_body
from rollout.engines.client import EngineClient
from rollout.engines.model_dir import companions, copied
from rollout.origin import Sampling
from rollout.processes.pool import CallFailed, CallLost, ProcessPool

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

    loaded: dict[str, Texts] = {}

    def answer(model_dir: str, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        document = json.dumps(body).encode()
        if model_dir not in loaded:
            with copied(model_dir, companions(model_dir)) as copy:
                try:
                    loaded[model_dir] = Texts(copy, model_dir)
                except Exception as error:  # of files, of a missing library, of code that is not run
                    reason = " ".join(str(error).replace(str(copy), model_dir).split())
                    has_pieces = (copy / "tokenizer.model").exists()
                    if has_pieces and find_spec("sentencepiece") is None:
                        reason = f"pip install sentencepiece, if its tokenizer.model is one; {reason}"
                    return {"error": f"{type(error).__name__}: {reason:.300}"}
        text = loaded[model_dir]
        try:
            if path == "/detokenize":
                return {"prompt": text.detokenize(parse_body(DetokenizeBody, document).tokens)}
            return {"tokens": text.tokenize(parse_body(TokenizeBody, document))}
        except BadRequest as error:
            return str(error)

    return answer
