"""Text becomes tokens without an engine, as an engine would have it."""

import asyncio
import errno
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.embedded.local_tokenizer import LocalTokenizer, NoTokenizer, tokenizing
from rollout.origin import Sampling
from tests.rollout.rollout_helpers import RunningServer

MESSAGES = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "3"}]


def ask(client: EngineClient, question: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with client:
            return await question(client)

    return asyncio.run(main())


async def _everything(client: EngineClient) -> list[list[int]]:
    return [
        *[await client.tokenize(text) for text in ("12+é", "", MESSAGES)],
        *[await client.tokenize_whole(text) for text in ("12+é", "", MESSAGES)],
    ]


def test_tokens_are_those_of_the_engine(server: RunningServer, model_dir: Path) -> None:
    assert ask(LocalTokenizer(model_dir), _everything) == ask(EngineClient(server.url), _everything)


def test_its_process_loads_no_torch_and_serves_many_texts(model_dir: Path) -> None:
    async def many(client: EngineClient) -> list[list[int]]:
        return await asyncio.gather(*(client.tokenize(f"{i}+{i}") for i in range(200)))

    assert len(ask(LocalTokenizer(model_dir), many)) == 200
    (process,) = [
        child
        for child in psutil.Process().children(recursive=True)
        if any("local_tokenizer" in argument for argument in child.cmdline())
    ]
    libraries = {Path(region.path).name for region in process.memory_maps()}
    assert libraries and not any("torch" in name for name in libraries)


def test_messages_that_are_none_are_refused_and_a_missing_tokenizer_is_named(
    model_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(RequestRefused, match=r"messages\.1"):
        ask(LocalTokenizer(model_dir), lambda client: client.tokenize([{"content": [1]}, 3]))  # pyright: ignore
    with pytest.raises(NoTokenizer, match="instantiate"):
        ask(LocalTokenizer(tmp_path), lambda client: client.tokenize("1"))
    with pytest.raises(EngineError, match="there is no engine here"):
        ask(LocalTokenizer(model_dir), lambda client: client.generate("1", Sampling()))


def test_error_of_a_mount_that_passes_is_no_missing_tokenizer(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = iter(
        [
            OSError(errno.EIO, "Input/output error"),
            OSError("Stale file handle (os error 116)"),
            ValueError("no such class"),
        ]
    )

    class Texts:
        def __init__(self, _model_dir: str) -> None:
            if (error := next(errors, None)) is not None:
                raise error

        def detokenize(self, _tokens: list[int]) -> str:
            return "text"

    monkeypatch.setattr("rollout.engines.embedded.text.Texts", Texts)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # which it hides in its own process
    answer = tokenizing()
    arguments = str(model_dir), "/detokenize", {"model": "m", "tokens": [1]}
    assert answer(*arguments) == {"error": "ValueError: no such class"}
    assert answer(*arguments) == {"prompt": "text"}
