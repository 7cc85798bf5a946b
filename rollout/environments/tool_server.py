"""Tools that an MCP server offers (modelcontextprotocol.io), for the conversations of an environment."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from rollout.engines.completion import Completion
from rollout.environments.tool_calls import Tool
from rollout.tasks.messages import Message

RESULT_CHARACTERS = 20_000
"""A longer result of a tool is cut there, and says so."""


class ToolServerError(RuntimeError):
    """There is no answer from the server."""


class ToolServer:
    """The tools of an open server."""

    def __init__(self, client: Any, tools: Sequence[Tool], name: str) -> None:
        self.tools = tools
        """The server's tools, for `policy.with_tools`, or for the requests of an agent."""
        self._client = client
        self._name = name

    async def call(self, name: str, arguments: dict[str, Any]) -> str | list[dict[str, Any]]:
        """Return a tool's answer to the model, as the content of a message: its result, with the pictures
        that it shows, or what is wrong with the call, such as that it takes too long. Raises ToolServerError
        if the server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, ImageContent, TextContent

        try:
            result = await self._client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise ToolServerError(f"{self._name}, tool {name}: {error}") from error
            return f"error: {error}"
        except RuntimeError as error:  # a result that is not what the tool promises
            return f"error: {error}"
        shown = [block.data for block in result.content if isinstance(block, ImageContent)]
        texts = [
            block.text if isinstance(block, TextContent) else f"[{block.type}]"
            for block in result.content
            if not isinstance(block, ImageContent)
        ]
        text = "\n".join(texts)
        if len(text) > RESULT_CHARACTERS:
            text = f"{text[:RESULT_CHARACTERS]}\n[{len(text) - RESULT_CHARACTERS} more characters]"
        text = f"error: {text}" if result.is_error else text
        pictures = [{"type": "image", "image": f"data:image/png;base64,{data}"} for data in shown]
        return [*([{"type": "text", "text": text}] if text else []), *pictures] if pictures else text

    async def answer(self, turn: Completion) -> list[Message]:
        """Return the messages that answer the calls of a turn, which are made at the same time. They are what
        `episode.generate` takes next.
        """
        results = await asyncio.gather(*(self.call(call.name, call.arguments) for call in turn.calls))
        return [
            {"role": "tool", "tool_call_id": call.id, "content": text}
            for call, text in zip(turn.calls, results, strict=True)
        ]


@asynccontextmanager
async def tool_server(server: str | Sequence[str], timeout_s: float = 60.0) -> AsyncIterator[ToolServer]:
    """Open an MCP server: the URL of one that runs, or the command of one to start for as long as this is
    open. What takes longer than `timeout_s` has failed. Raises ToolServerError if there is no server.

        async with tool_server("http://127.0.0.1:9000/mcp") as server:
            turn = await policy.with_tools(server.tools).episode(j).generate(task["messages"])
    """
    name = server if isinstance(server, str) else " ".join(server)
    try:
        from mcp import Client, StdioServerParameters, stdio_client
    except ModuleNotFoundError as error:
        raise ToolServerError(f"tools of {name} need mcp ({error}): pip install -e '.[mcp]'") from error

    target: Any = server
    if not isinstance(server, str):
        target = stdio_client(StdioServerParameters(command=server[0], args=[*server[1:]]))
    raised: Exception | None = None
    try:
        async with AsyncExitStack() as stack:
            try:
                client = await stack.enter_async_context(Client(target, read_timeout_seconds=timeout_s))
                tools = [_function(tool) async for tool in _listed(client)]
            except Exception as error:  # whatever its transport raises
                raise ToolServerError(f"no MCP server answers at {name}: {_reason(error)}") from error
            try:
                yield ToolServer(client, tools, name)
            except Exception as error:
                raised = error
                raise
    except ToolServerError:
        raise
    except Exception as error:  # the transport's tasks put what the block raises into groups
        raise raised or ToolServerError(f"{name} does not answer any more: {_reason(error)}") from error


async def _listed(client: Any) -> AsyncIterator[Any]:
    """Yield every tool of a server, which lists them by pages."""
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for tool in page.tools:
            yield tool
        if not (cursor := page.next_cursor):
            return


def _function(tool: Any) -> Tool:
    parameters = tool.input_schema or {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _reason(error: BaseException) -> str:
    """Return the text of the first error in a group of groups, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split()) or type(error).__name__
