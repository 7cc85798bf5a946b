"""Log lines of a node: where they come from, and nothing that steers a terminal."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from coordinator.journal import logs
from coordinator.journal.events import Events
from coordinator.journal.logs import Prefix
from rollout.environments.environment import serve
from rollout.environments.policy import Policy
from rollout.origin import Sampling
from tests.rollout.scripted import ScriptedClient


def test_text_of_a_model_steers_no_terminal() -> None:
    prefix = Prefix(2)
    prefix.follow(lambda: " it 7 train_rollout", lambda: ("", ""))
    text = "given up: \x1b]0;title\x07\x1b[2J\x9b31m\r gone\tto\nanother line"
    record = logging.LogRecord("name", logging.WARNING, "file", 1, "%s", (text,), None)
    said = "given up: ^[]0;title^G^[[2J\\x9b31m^M gone\tto\nanother line"
    assert prefix.format(record) == f"[rank 2 it 7 train_rollout] warning: {said}"


def test_neither_does_the_text_of_an_error() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        record = logging.LogRecord("name", logging.ERROR, "file", 1, "", (), (ValueError, error, None))
    said = Prefix(0).format(record)
    assert "^[[2J" in said and "\x1b" not in said


def test_text_that_is_half_of_a_character_ends_nothing(tmp_path: Path) -> None:
    prefix = Prefix(0)
    prefix.keep(tmp_path, Events())
    file, _events = logging.getLogger().handlers[-2:]
    record = logging.LogRecord("name", logging.ERROR, "file", 1, "cannot score \ud83d", (), None)
    try:
        file.handle(record)  # alone: no process of pytest can send this text to another
    finally:
        prefix.close()
    assert any("cannot score \\ud83d" in file.read_text() for file in tmp_path.iterdir() if file.is_file())


@pytest.fixture
def as_before() -> Iterator[None]:
    """The levels of loggers are for all tests of the process: they are put back."""
    loggers = [logging.getLogger(name) for name in ("", "rollout.storage.retry", "asyncio", "watchdog")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def test_agents_http_client_has_no_line_for_each_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_before: None
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.set_up(0)

    async def agent() -> None:
        policy = Policy(ScriptedClient("5.", "6."), Sampling(), 1)
        async with (
            serve(policy) as session,
            openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client,
        ):
            for _ in range(2):
                message = {"role": "user", "content": "2+3"}
                await client.chat.completions.create(model="policy", messages=[message])  # type: ignore
            logging.getLogger("my_environment").info("the agent is done")
            logging.getLogger("httpx2").warning("and a warning of anybody")

    asyncio.run(agent())
    assert capsys.readouterr().err.splitlines() == [
        "[rank 0] the agent is done",
        "[rank 0] warning: and a warning of anybody",
    ]
