"""A server on a Unix socket: the client and the administrator ask it as one on a port."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.client import EngineClient
from rollout.origin import Sampling
from tests.models import CONTEXT
from tests.rollout.rollout_helpers import RunningServer, serving


@pytest.fixture(scope="module")
def directory() -> Iterator[Path]:
    """The path of a socket must be short."""
    made = Path(tempfile.mkdtemp(prefix="flagpost-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def on_socket(model_dir: Path, directory: Path) -> Iterator[RunningServer]:
    with serving(model_dir, "--weight-version", "first", "--uds", str(directory / "engine.sock")) as running:
        yield running


def test_it_is_administered_and_asked(on_socket: RunningServer, server: RunningServer) -> None:
    async def ask(url: str) -> object:
        async with EngineClient(url) as client:
            with pytest.raises(RequestRefused, match=f"context of {CONTEXT}"):
                await client.generate([3] * CONTEXT, Sampling())
            return await client.generate("1+2=", Sampling(n=2, max_tokens=8, seed=3))

    assert on_socket.url.startswith("unix:/")
    assert asyncio.run(ask(on_socket.url)) == asyncio.run(ask(server.url))
    assert EngineAdmin(on_socket.url).policy() == "first"
    assert EngineAdmin(on_socket.url).prompt_logprobs([1, 2, 3]) == EngineAdmin(server.url).prompt_logprobs(
        [1, 2, 3]
    )


def test_all_that_may_be_in_flight_connect_while_it_is_busy(on_socket: RunningServer) -> None:
    socket = on_socket.url.removeprefix("unix:")
    # What was started may only stand for the engine, as a client of a fork does.
    (engine,) = {each.pid for each in psutil.net_connections("unix") if each.laddr == socket and each.pid}

    async def ask() -> list[list[int]]:
        async with EngineClient(on_socket.url, retry_s=0.0) as client:
            asking = asyncio.gather(*(client.tokenize(f"{number}+1") for number in range(600)))
            await asyncio.sleep(1.0)
            os.kill(engine, signal.SIGCONT)
            return await asking

    os.kill(engine, signal.SIGSTOP)
    assert len(asyncio.run(ask())) == 600


def test_socket_that_nobody_listens_on_is_named(directory: Path) -> None:
    async def ask() -> None:
        async with EngineClient(f"unix:{directory}/gone.sock", retry_s=0.1) as client:
            await client.tokenize("1")

    with pytest.raises(EngineError, match=f"POST unix:{directory}/gone.sock/tokenize: .*tried again"):
        asyncio.run(ask())
    with pytest.raises(EngineError, match=f"GET unix:{directory}/gone.sock/weight_info: FileNotFoundError"):
        EngineAdmin(f"unix:{directory}/gone.sock").policy()
