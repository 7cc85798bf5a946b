"""Tokenise as the embedded engine does, in a process of this machine: for work that generates nothing."""

import asyncio
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.bodies import BadRequest, parse_body
from rollout.engines.client import EngineClient
from rollout.engines.model_dir import PathLike, companions, copied
from rollout.origin import Sampling
from rollout.pictures import digest_of
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool
from rollout.storage import files
from rollout.trajectory import Picture

DEADLINE_S = 60.0
"""How long a text may take; most take a millisecond."""
READING_DEADLINE_S = 300.0
"""How long pictures may take; the first ones import torch."""


class NoTokenizer(EngineError):
    """The model has no tokenizer that transformers can load here; the message is its reason, in one line."""


class LocalTokenizer(EngineClient):
    """Stands in for the client of an engine that only tokenises, and needs none. Its process starts with the
    first text, takes no torch, and stays for the next iteration.
    """

    def __init__(self, model_dir: PathLike, images: Path | None = None) -> None:
        """`images`: the directory of the run's pictures; None: there is none yet."""
        super().__init__("", images=images)
        self._model_dir = os.path.abspath(model_dir)

    async def generate(self, prompt: Any, sampling: Sampling) -> Any:
        raise EngineError("there is no engine here: an environment that demonstrates generates nothing")

    async def expanded(
        self, token_ids: list[int], pictures: Sequence[str]
    ) -> tuple[list[int], list[Picture]]:
        """Return the tokens with each placeholder as what its picture becomes, by the model's processor in a
        process of its own, and where the pictures are. Without a directory of pictures nothing changes.
        Raises RequestRefused.
        """
        if self.images is None:
            return token_ids, []
        paths = [str(self.images / digest) for digest in pictures]
        call = partial(_readers().call, self._model_dir, token_ids, paths, deadline_s=READING_DEADLINE_S)
        try:
            answer = await asyncio.to_thread(call)
        except (CallFailed, CallLost) as error:
            raise EngineError(f"the processor of {self._model_dir}: {error}") from error
        if isinstance(answer, str):
            raise RequestRefused(answer)
        expanded, places = answer
        return expanded, [Picture(digest, *at) for digest, at in zip(pictures, places, strict=True)]

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


@functools.cache
def _readers() -> ProcessPool:
    return ProcessPool(f"{__name__}:expanding", size=1)


def close_tokenizer() -> None:
    """End the processes; others start with the next text."""
    for pool in (_pool, _readers):
        if pool.cache_info().currsize:
            pool().close()
            pool.cache_clear()


def expanding() -> Callable[[str, list[int], list[str]], list[Any] | str]:
    """Return the function that a process of the pool calls: from a model's directory, tokens and the files of
    pictures to the expanded tokens and the places of the pictures in them, or to what is wrong.
    """
    from rollout.engines.embedded.picture_input import PictureMismatch, PictureReader

    @functools.cache
    def reader(model_dir: str) -> PictureReader:
        with copied(model_dir, companions(model_dir)) as copy:
            return PictureReader(copy)

    def answer(model_dir: str, token_ids: list[int], paths: list[str]) -> list[Any] | str:
        try:
            shown = []
            for path in paths:
                data = files.read(Path(path))
                if digest_of(data) != Path(path).name:
                    return f"{path}: this picture has changed; remove it, and start the run again"
                shown.append(reader(model_dir).read(data))
            expanded, places = reader(model_dir).expanded(token_ids, shown)
        except FileNotFoundError as error:
            return f"{error.filename}: this picture is missing"
        except PictureMismatch as error:
            return str(error)
        return [expanded, [[place.start, place.stop] for place in places]]

    return answer


def tokenizing() -> Callable[[str, str, dict[str, Any]], dict[str, Any] | str]:
    """Return the function that a process of the pool calls: from a model's directory, /tokenize or
    /detokenize and the body of such a request to the answer, or to the reason why it is refused. An answer
    with `error`: the model has no tokenizer.
    """
    missing: Any = None
    sys.modules["torch"] = missing  # transformers works without it; loading it takes seconds and memory
    from rollout.engines.embedded.protocol import DetokenizeBody, TokenizeBody
    from rollout.engines.embedded.text import TextTokenizer

    loaded: dict[str, TextTokenizer] = {}

    def answer(model_dir: str, path: str, body: dict[str, Any]) -> dict[str, Any] | str:
        document = json.dumps(body).encode()
        if model_dir not in loaded:
            with copied(model_dir, companions(model_dir)) as copy:
                try:
                    loaded[model_dir] = TextTokenizer(copy, model_dir)
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
