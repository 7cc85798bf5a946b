"""Tools of an MCP server: what the model reads of them, and servers that do not answer."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollout import ToolServer, tool_server
from rollout.engines.completion import Completion
from rollout.environments import tool_server as module
from rollout.environments.tool_calls import ToolCall
from tests.ports import unused_port

SERVER = """
import os, sys, time
from mcp.server.mcpserver import Image, MCPServer
server = MCPServer("sums", log_level="CRITICAL")

@server.tool()
def add(a: int, b: int) -> int:
    "Add two integers."
    return a + b

@server.tool()
def fail() -> str:
    raise ValueError("no luck")

@server.tool()
def slow() -> str:
    time.sleep(600)
    return "late"

@server.tool()
def look() -> list:
    return ["A page", Image(data=b"bytes of a PNG", format="png")]

@server.tool()
def end() -> str:
    os._exit(3)

@server.tool()
def long() -> str:
    return "x" * 20_100
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """What starts a server, on its standard input and output."""
    (tmp_path / "server.py").write_text(f"{SERVER}\nserver.run('stdio')\n")
    return [sys.executable, str(tmp_path / "server.py")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server behind HTTP, in a thread."""
    import uvicorn

    names: dict[str, Any] = {}
    exec(SERVER, names)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # a client may come before the thread has begun
        app = names["server"].streamable_http_app()
        served = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
        thread = threading.Thread(target=served.run, args=([listener],))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        served.should_exit = True
        thread.join(60)


def asked(server: str | list[str], *calls: tuple[str, dict[str, Any]], timeout_s: float = 60.0) -> list[Any]:
    async def ask() -> list[Any]:
        async with tool_server(server, timeout_s) as opened:
            return [await opened.call(name, arguments) for name, arguments in calls]

    return asyncio.run(ask())


@pytest.mark.parametrize("how", ["url", "command"])
def test_model_reads_results_and_what_is_wrong_with_a_call(how: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(how)
    right, bad, raised, unknown, long, shown = asked(
        server, ("add", {"a": 27, "b": 58}), ("add", {"a": "x"}), ("fail", {}), ("none", {}), ("long", {}),
        ("look", {}),
    )  # fmt: skip
    assert right == "85"
    assert bad.startswith("error: ") and "valid integer" in bad
    assert raised.startswith("error: Error executing tool fail") and unknown == "error: Unknown tool: none"
    assert len(long) < 20_100 and long.endswith("x\n[100 more characters]")
    text, picture = shown
    assert text == {"type": "text", "text": "A page"}
    assert picture == {"type": "image", "image": "data:image/png;base64,Ynl0ZXMgb2YgYSBQTkc="}


def test_tools_have_the_form_of_the_openai_api_and_calls_are_answered_in_their_order(url: str) -> None:
    calls = tuple(ToolCall(f"id{n}", "add", {"a": n, "b": 1}) for n in range(3))
    turn = Completion([], [], [], "", "tool_calls", calls=calls)

    async def answer() -> tuple[ToolServer, Any]:
        async with tool_server(url) as opened:
            return opened, await opened.answer(turn)

    opened, answers = asyncio.run(answer())
    assert answers == [{"role": "tool", "tool_call_id": f"id{n}", "content": str(n + 1)} for n in range(3)]
    add, *others = opened.tools
    assert add["type"] == "function" and add["function"]["description"] == "Add two integers."
    assert set(add["function"]["parameters"]["properties"]) == {"a", "b"} and len(others) == 5


def test_tools_of_all_pages_are_listed() -> None:
    class Paged:
        async def list_tools(self, cursor: str | None) -> Any:
            number = int(cursor or 0)
            follows = str(number + 1) if number < 2 else None
            return type("Page", (), {"tools": [number], "next_cursor": follows})

    async def numbers() -> list[int]:
        return [tool async for tool in module._listed(Paged())]

    assert asyncio.run(numbers()) == [0, 1, 2]


def test_slow_call_is_an_error_for_the_model_and_the_command_ends_with_the_block(command: list[str]) -> None:
    assert "timed out" in asked(command, ("slow", {}), timeout_s=10.0)[0]
    left = [child for child in psutil.Process().children() if command[1] in child.cmdline()]
    assert left == []


def test_server_that_ends_is_an_error_of_the_environment(command: list[str]) -> None:
    with pytest.raises(module.ToolServerError, match=r"server\.py, tool end: Connection closed"):
        asked(command, ("end", {}))


def test_server_behind_a_url_that_ends_is_an_error_of_the_environment(tmp_path: Path) -> None:
    port = unused_port()
    (tmp_path / "server.py").write_text(f"{SERVER}\nserver.run('streamable-http', port={port})\n")
    process = subprocess.Popen([sys.executable, str(tmp_path / "server.py")], stderr=subprocess.DEVNULL)

    async def ask() -> None:
        url = f"http://127.0.0.1:{port}/mcp"
        for _ in range(600):
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            await asyncio.sleep(0.1)
        async with tool_server(url) as opened:
            assert await opened.call("add", {"a": 27, "b": 58}) == "85"
            process.kill()
            process.wait()
            await opened.call("add", {"a": 27, "b": 58})

    try:
        with pytest.raises(module.ToolServerError, match=rf"{port}/mcp does not answer any more: .*"):
            asyncio.run(ask())
    finally:
        process.kill()
        process.wait()


def test_what_the_block_raises_is_what_is_raised(url: str) -> None:
    async def fail() -> None:
        async with tool_server(url):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        asyncio.run(fail())


def test_result_that_is_not_what_a_tool_promises_is_an_error_for_the_model() -> None:
    class Client:
        async def call_tool(self, name: str, _arguments: Any) -> Any:
            raise RuntimeError(f"Invalid structured content returned by tool {name}")

    said = asyncio.run(ToolServer(Client(), [], "x").call("f", {}))
    assert str(said).startswith("error: Invalid structured")


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (["/no/such/program"], "/no/such/program: .*No such file"),
        (["false"], "false: Connection closed"),
        ("http://127.0.0.1:1/mcp", "http://127.0.0.1:1/mcp: All connection attempts failed"),
    ],
)
def test_server_that_is_not_there_is_named_in_one_line(server: str | list[str], reason: str) -> None:
    with pytest.raises(module.ToolServerError, match=f"^no MCP server answers at {reason}") as raised:
        asked(server)
    assert "\n" not in str(raised.value)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(module.ToolServerError, match=r"pip install -e '\.\[mcp\]'$"):
        asked("http://127.0.0.1:1/mcp")
