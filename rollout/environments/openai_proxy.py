"""Serve the policy on loopback with the OpenAI API, for agents of other programs."""

import asyncio
import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from aiohttp import web

from rollout.engines.answers import EngineError, RequestRefused
from rollout.engines.bodies import BadRequest, error_body, parse_body
from rollout.engines.completion import Completion
from rollout.environments.openai_chat import (
    IGNORED,
    ChatBody,
    answer_body,
    answer_events,
    check_chat,
    reply_of,
)
from rollout.environments.policy import Episode, Policy
from rollout.environments.tool_calls import Tool
from rollout.tally import warn_once
from rollout.tasks.messages import Message, checked_message
from rollout.trajectory import Sample

MODEL = "policy"
"""The only model in the list; requests may name any."""
_MAX_BODY_BYTES = 64 * 2**20
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class _Node:
    """A reply, with the conversation before it."""

    episode: Episode
    replied: bool = False
    choices: Sequence["_Node"] = ()
    """All replies to its request, itself too."""
    repeats: int = 0
    """How many requests repeat it and go on."""
    continued: int = 0
    """How many of these go on with its tokens."""

    @property
    def is_passed_over(self) -> bool:
        """Whether the agent has gone on with another choice of the same request, and not with this one."""
        return not self.repeats and any(choice.repeats for choice in self.choices)


class AgentSession:
    """In `async with serve(policy, j) as session:`, an agent uses `session.base_url` and `session.api_key`
    with any OpenAI client. Then `session.samples()` returns its conversations.

    It serves POST {base_url}/chat/completions and GET {base_url}/models. Answers are text, or calls of the
    request's `tools`, streamed or not, and `n` of them if it asks for so many. The run's sampling holds:
    temperature, top_p and seed of a request are ignored (a warning says so once). `max_tokens` can only lower
    the setting, which is the budget of a conversation as in Episode; `stop` adds to the setting's strings.

    A request that repeats the messages of an earlier request and its reply, has the same tools, and adds
    messages, continues that conversation with the same tokens. Any other request begins a new conversation,
    and the replies in it are part of its prompt. With rollout.history=template a request also begins one if
    the chat template would render the messages with other tokens. Seeds follow from the messages, so they do
    not depend on the speed of requests.

    Leaving the context cancels the requests in progress and closes the port. It raises EngineError in place
    of the agent's own error if the engine failed meanwhile.
    """

    def __init__(self, policy: Policy) -> None:
        self.base_url = ""
        """http://127.0.0.1:PORT/v1, set inside of the context."""
        self.api_key = secrets.token_urlsafe(24)
        """Requests must carry it, because other users of the machine can reach the port."""
        self._policy = policy
        self._nodes: list[_Node] = []
        self._known: dict[str, list[_Node]] = {}
        self._asked: Counter[str] = Counter()
        self._requests: set[asyncio.Task[None]] = set()
        self._engine_failure: EngineError | None = None
        self._ended = False
        self._runner = web.AppRunner(
            self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        self._ended = True
        for request in self._requests:
            request.cancel()
        try:
            await asyncio.gather(*self._requests, return_exceptions=True)
        finally:
            await self._runner.cleanup()
        if self._engine_failure is not None and kind is not asyncio.CancelledError:
            raise self._engine_failure

    def samples(self, *, passed_over: bool = False) -> list[Sample]:
        """One sample for each conversation, in the order of their last requests. If a conversation forks, the
        branches share its beginning, and only the first branch trains it.

        If a request had several choices (`n`) and the agent went on with some of them, the others have come
        to no end that a reward could score: they are left out. `passed_over`: return them too.
        """
        samples: list[Sample] = []
        trained: set[int] = set()
        for node in self._nodes:
            if not node.replied or node.continued:
                continue
            if node.is_passed_over and not passed_over:
                warn_once("choices", "choices that an agent has not gone on with are left out of the samples")
                continue
            sample = node.episode.sample()
            for turn in node.episode.turns:
                if id(turn) in trained:
                    begin = len(turn.prompt_ids)
                    sample.loss_mask[begin : begin + len(turn.token_ids)] = 0
                    sample.logprobs[begin : begin + len(turn.token_ids)] = 0
                trained.add(id(turn))
            if sample.loss_mask.any():
                samples.append(sample)
        return samples

    async def _replies(
        self,
        messages: Sequence[Message],
        *,
        n: int = 1,
        tools: Sequence[Tool] = (),
        may_call: bool = True,
        max_tokens: int | None = None,
        stop: Iterable[str] = (),
        more: Mapping[str, Any] | None = None,
    ) -> list[Completion]:
        """Return `n` replies to a request with these messages, each of them a conversation of its own from
        here on. `may_call`: calls are read from the text. `more`: as in Sampling.
        """
        digests = _digests(messages, json.dumps(tools) if tools else "")
        policy = self._policy.with_tools(tools) if tools else self._policy
        repeated, known = self._find(digests[:-1])
        parent = repeated
        if parent and await policy.rewrites(messages, parent.episode.asked_ids):
            parent, known = None, 0
        turns = parent.episode.turns if parent else []
        first, self._asked[digests[-1]] = self._asked[digests[-1]], self._asked[digests[-1]] + n
        names = [f"{digests[-1]}/{number}" for number in range(first, first + n)]
        nodes = [_Node(Episode(policy.derived(name), turns)) for name in names]
        self._nodes += nodes
        self._count(repeated, parent, 1)
        try:
            replies = await _all(
                node.episode.generate(messages[known:], max_tokens=max_tokens, stop=stop, more=more)
                for node in nodes
            )
        except BaseException:
            self._count(repeated, parent, -1)
            raise
        for number, (node, turn) in enumerate(zip(nodes, replies, strict=True)):
            node.replied, node.choices = True, nodes
            if not may_call:
                replies[number] = turn = replace(turn, calls=(), content=None)
            digest = _digest(digests[-1], checked_message(reply_of(turn)))
            self._known.setdefault(digest, []).append(node)
        return replies

    def _count(self, repeated: _Node | None, parent: _Node | None, requests: int) -> None:
        """Count requests that repeat a reply, and go on with the tokens of `parent`."""
        if repeated:
            repeated.repeats += requests
        if parent:
            parent.continued += requests

    def _find(self, digests: Sequence[str]) -> tuple[_Node | None, int]:
        """Return the longest known conversation that begins the messages, and how many messages it has."""
        for known in range(len(digests), 0, -1):
            if nodes := self._known.get(digests[known - 1]):
                return min(nodes, key=lambda node: node.repeats), known
        return None, 0

    def _app(self) -> web.Application:
        app = web.Application(
            client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_openai, self._authorized]
        )
        app.router.add_post("/v1/chat/completions", self._chat_completions)
        app.router.add_get("/v1/models", self._models)
        return app

    @web.middleware
    async def _authorized(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization", "")
        if not secrets.compare_digest(header.encode(), f"Bearer {self.api_key}".encode()):
            raise web.HTTPUnauthorized(text="the API key is not this session's: use session.api_key")
        if self._ended:
            raise web.HTTPServiceUnavailable(text="the session has ended")
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            return await handler(request)
        except RequestRefused:
            raise
        except EngineError as error:
            self._engine_failure = error
            raise
        finally:
            self._requests.discard(task)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "flagpost"}
        return web.json_response({"object": "list", "data": [card]})

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        body = parse_body(ChatBody, await request.read())
        messages = await self._policy.with_pictures(check_chat(body))
        for name in IGNORED:
            runs = getattr(self._policy.sampling, name, 0)
            if (body.model_extra or {}).get(name) not in (None, runs):
                warn_once(name, f"an agent asks for its own {name}: ignored, the run's sampling holds")
        turns = await self._replies(
            messages,
            n=body.n or 1,
            tools=body.tool_list,
            may_call=body.tool_choice != "none",
            max_tokens=body.limit,
            stop=body.stop_strings,
            more=body.more,
        )
        if not body.stream:
            return web.json_response(answer_body(body, body.model or MODEL, turns))
        events = answer_events(body, body.model or MODEL, turns)
        return web.Response(body=events, content_type="text/event-stream", charset="utf-8")


async def _all(work: Iterable[Awaitable[Completion]]) -> list[Completion]:
    """Return the completions of `work`, once all have ended. Raises the first error."""
    outcomes = await asyncio.gather(*work, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, Completion)]


@web.middleware
async def _errors_as_openai(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BadRequest, RequestRefused) as error:
        status, kind, message = 400, "invalid_request_error", str(error)
    except EngineError as error:
        status, kind, message = 503, "server_error", str(error)
    except web.HTTPException as error:
        status, kind, message = error.status, "invalid_request_error", error.text or error.reason
    # The engine was already retried; without this header clients would ask it again for up to a minute.
    headers = {"x-should-retry": "false"}
    return web.json_response(error_body(message, kind, status), status=status, headers=headers)


def _digests(messages: Sequence[Message], tools: str) -> list[str]:
    """For each message, a digest of the conversation up to it, which has these tools."""
    digests, digest = [], tools
    for message in messages:
        digest = _digest(digest, message)
        digests.append(digest)
    return digests


def _digest(before: str, message: Message) -> str:
    if message["role"] == "assistant":  # agents often strip replies
        message = {**message, "content": str(message.get("content", "")).strip()}
    return hashlib.sha256((before + json.dumps(message, sort_keys=True)).encode()).hexdigest()
