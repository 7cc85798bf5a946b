"""An engine that answers every request at once with the same completion, to measure its client.

    python scripts/bench/instant_server.py SAMPLES TOKENS [CORE]

Prints its port. The answer has vLLM's shape and size: SAMPLES choices of TOKENS tokens each with logprobs. It
also says that its weights are of the policy that it was last given. It ends when its standard input does.
"""

import asyncio
import json
import os
import sys
from typing import Any

PROMPT_TOKENS = 32


def answer(samples: int, tokens: int, policy: str = "") -> bytes:
    """Return the whole HTTP response of an engine with this policy."""
    words = [f" word{token}" for token in range(tokens)]
    logprobs = [-1.2345678806304932 - 0.001 * token for token in range(tokens)]
    choice: dict[str, Any] = {
        "text": "".join(words),
        "logprobs": {
            "text_offset": [7 * token for token in range(tokens)],
            "token_logprobs": logprobs,
            "tokens": words,
            "top_logprobs": [{word: logprob} for word, logprob in zip(words, logprobs, strict=True)],
        },
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [1000 + token for token in range(tokens)],
        "prompt_logprobs": None,
        "prompt_token_ids": list(range(PROMPT_TOKENS)),
    }
    choices = [{"index": index, **choice} for index in range(samples)]
    about = {"weight_version": policy, "is_sleeping": False}
    body = json.dumps({"id": "cmpl-0", "object": "text_completion", "choices": choices, **about}).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Engine:
    """What the server answers on all its connections."""

    def __init__(self, samples: int, tokens: int) -> None:
        self._size = samples, tokens
        self.answer = answer(samples, tokens)

    def take(self, request: bytes) -> None:
        """Have another policy if the request says so."""
        if b"/update_weight_version" in request:
            policy = json.loads(request[request.index(b"\r\n\r\n") :])["new_version"]
            self.answer = answer(*self._size, policy)


class Instant(asyncio.Protocol):
    """One connection: an answer for each request as soon as it is whole."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (head := self._received.find(b"\r\n\r\n")) >= 0:
            lines = self._received[:head].lower().split(b"\r\n")
            length = sum(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            if len(self._received) < (end := head + 4 + length):
                return
            self._engine.take(self._received[:end])
            self._received = self._received[end:]
            self._transport.write(self._engine.answer)


async def main() -> None:
    """Serve until standard input ends, i.e. the parent is gone."""
    samples, tokens, *core = map(int, sys.argv[1:])
    if core:
        os.sched_setaffinity(0, core)
    engine, loop, over = Engine(samples, tokens), asyncio.get_running_loop(), asyncio.Event()
    server = await loop.create_server(lambda: Instant(engine), "127.0.0.1", 0, backlog=1024)
    loop.add_reader(sys.stdin, over.set)
    print(server.sockets[0].getsockname()[1], flush=True)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(main())
