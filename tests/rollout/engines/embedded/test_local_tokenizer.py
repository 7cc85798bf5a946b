"""Text becomes tokens without an engine, as an engine would have it."""

import asyncio
import errno
import os
import sys
from collections.abc import Awaitable, Callable
from functools import partial
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
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch"))  # which it hides in its own process
    body = {"model": "m", "messages": MESSAGES}
    tokens = tokenizing()(str(model_dir), "/tokenize", body)
    read, stat = Path.read_bytes, os.stat
    seen: set[tuple[Any, str]] = set()

    def fails_first(call: Callable[..., Any], path: Any, *arguments: Any, **more: Any) -> Any:
        if str(path).startswith(str(model_dir)) and (call, str(path)) not in seen:
            seen.add((call, str(path)))
            raise OSError(errno.EIO, "Input/output error")
        return call(path, *arguments, **more)

    monkeypatch.setattr(Path, "read_bytes", lambda path: fails_first(read, path))
    monkeypatch.setattr(os, "stat", partial(fails_first, stat))
    assert tokenizing()(str(model_dir), "/tokenize", body) == tokens
    assert {(read, str(model_dir / name)) for name in ("tokenizer.json", "chat_template.jinja")} <= seen
    (tmp_path / "config.json").write_text("{")
    answer = tokenizing()(str(tmp_path), "/tokenize", body)
    assert isinstance(answer, dict) and str(tmp_path) in answer["error"]  # not the copy that it was read from
