"""The embedded engine's server: the OpenAI completions API, with vLLM's administrative paths.

    python -m rollout.engines.embedded.server --model DIR --uds SOCKET --weight-version DIGEST

It needs neither a GPU nor vLLM. Unlike vLLM it reads new weights beside the old ones and takes them only when
they are whole. It refuses (400) what it cannot do, instead of ignoring it. On /pause?mode=wait it finishes
every started request and starts no other.
"""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from aiohttp import web
from pydantic_core import to_json
from transformers.utils import logging as transformers_logging

from rollout.engines.admin import EXTENSION
from rollout.engines.answers import LOOPBACK, UNIX
from rollout.engines.bodies import AnyBody, BadRequest, error_body, parse_body
from rollout.engines.content import WrongContent
from rollout.engines.embedded import protocol
from rollout.engines.embedded.batch import Generation, SampleInProgress
from rollout.engines.embedded.engine import EmbeddedEngine, EngineBusy, EngineStopped
from rollout.engines.embedded.picture_input import ShownPicture
from rollout.engines.embedded.pictures_of_requests import PicturesOfRequests
from rollout.engines.embedded.text import TextTokenizer
from rollout.engines.model_dir import WeightsError
from rollout.engines.token_counts import Generated

_MAX_BODY_BYTES = 256 * 2**20
BACKLOG = 4096
_MEMORY = frozenset({"weights", "kv_cache"})
"""What can sleep. Sleeping frees nothing here, because there is no GPU."""


class EmbeddedServer:
    """Serves one engine over HTTP."""

    def __init__(self, engine: EmbeddedEngine, model_dir: str, weight_version: str) -> None:
        self._engine = engine
        self._model_dir = model_dir
        self._weight_version = weight_version
        self._asleep: set[str] = set()
        self._adapter: str | None = None
        """The name of the adapter that is merged into the weights."""
        self._texts = TextTokenizer(model_dir)
        self._pictures = PicturesOfRequests(engine, model_dir)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=[_errors_as_openai])
        get, post = app.router.add_get, app.router.add_post
        get("/health", self.health)
        get("/metrics", self.metrics)
        get("/v1/models", self.models)
        post("/v1/completions", self.completions)
        post("/tokenize", self.tokenize)
        post("/detokenize", self.detokenize)
        post("/pause", self.pause)
        post("/resume", self.resume)
        post("/sleep", self.sleep)
        post("/wake_up", self.wake_up)
        get("/is_sleeping", self.is_sleeping)
        post("/collective_rpc", self.collective_rpc)
        get("/server_info", self.server_info)
        post("/v1/load_lora_adapter", self.load_lora_adapter)
        post("/reset_prefix_cache", self.reset_prefix_cache)
        post("/update_weight_version", self.update_weight_version)
        get("/weight_info", self.weight_info)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.healthy else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=Generated(self._engine.tokens, self._engine.completions).text())

    async def models(self, request: web.Request) -> web.Response:
        limit = self._engine.max_model_len
        return web.json_response(protocol.model_list(self._model_dir, self._adapter, limit))

    async def completions(self, request: web.Request) -> web.Response:
        body = await self._body(request, protocol.CompletionBody)
        if self._adapter is not None and body.model != self._adapter:
            raise web.HTTPNotFound(text=f"Only `{self._adapter}` is served: it is merged into the weights.")
        protocol.check_completion(body)
        prompts = body.prompts(lambda text: self._texts.encode(text, body.add_special_tokens))
        shown: list[tuple[ShownPicture, int]] = []
        if body.content_parts:
            prompts[0], shown = await asyncio.to_thread(self._pictures.shown, prompts[0], body)
        seed = protocol.new_seed() if body.seed is None else body.seed
        limit = self._engine.max_model_len
        generations = [
            Generation(
                prompt_ids=prompt_ids,
                n=body.n,
                pictures=shown,
                max_tokens=protocol.check_prompt(
                    prompt_ids,
                    # Who asks cannot know how many tokens a picture becomes.
                    None if shown and len(prompt_ids) + (body.max_tokens or 0) > limit else body.max_tokens,
                    vocab_size=self._engine.vocab_size,
                    max_model_len=limit,
                ),
                temperature=1.0 if body.temperature is None else body.temperature,
                top_p=1.0 if body.top_p is None else body.top_p,
                stop=body.stop_strings,
                seed=seed,
                stop_ids=frozenset(body.stop_token_ids or ()),
                top_k=max(0, body.top_k or 0),
                min_p=body.min_p or 0.0,
                skip_special=body.skip_special_tokens,
                with_routes=body.return_routed_experts,
            )
            for prompt_ids in prompts
        ]
        # A client that disconnects cancels this handler and so the futures; then the engine drops the rows.
        finished = await asyncio.gather(*(asyncio.wrap_future(self._engine.submit(g)) for g in generations))
        is_scored = body.prompt_logprobs is not None
        scored = [await self._prompt_logprobs(prompt_ids) if is_scored else None for prompt_ids in prompts]
        answer = protocol.completion_body(
            self._model_dir,
            [
                self._choice(row, body, of_prompt)
                for rows, of_prompt in zip(finished, scored, strict=True)
                for row in rows
            ],
            prompt_tokens=sum(map(len, prompts)),
            completion_tokens=sum(len(row.token_ids) for rows in finished for row in rows),
        )
        # Faster than json.dumps, which takes 0.2 ms a group of the thread that all requests share.
        return web.Response(body=to_json(answer), content_type="application/json")

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request, protocol.TokenizeBody)
        tokens = self._texts.tokenize(body)
        limit = self._engine.max_model_len
        return web.json_response(
            {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}
        )

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request, protocol.DetokenizeBody)
        return web.json_response({"prompt": self._texts.detokenize(body.tokens)})

    async def pause(self, request: web.Request) -> web.Response:
        await self._pause(request)
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        if self._asleep:
            raise BadRequest(f"{sorted(self._asleep)} are asleep: POST /wake_up first")
        await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "resumed"})

    async def sleep(self, request: web.Request) -> web.Response:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise BadRequest(f"level: must be 0, 1 or 2, got {level!r}")
        await self._pause(request)
        self._asleep = set() if level == "0" else set(_MEMORY)
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        tags = request.query.getall("tags", []) or None
        self._asleep -= _MEMORY if tags is None else set(tags)
        if not self._asleep:
            await asyncio.wrap_future(self._engine.resume())
        return web.json_response({"status": "sleeping" if self._asleep else "awake", "tags": tags})

    async def is_sleeping(self, request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self._asleep)})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await self._body(request, protocol.RpcBody)
        if body.method == "prove_content":
            unproved = await asyncio.wrap_future(self._engine.prove(body.kwargs.path, body.kwargs.adapter))
            return web.json_response({"results": [unproved]})
        if body.kwargs.weights_path is None:
            raise BadRequest("reload_weights needs kwargs.weights_path, a directory")
        await asyncio.wrap_future(self._engine.reload(body.kwargs.weights_path))
        self._adapter = None
        return web.json_response({"results": [None]})

    async def server_info(self, request: web.Request) -> web.Response:
        config = {
            "parallel_config": {"worker_extension_cls": EXTENSION, "data_parallel_size": 1},
            "scheduler_config": {"max_num_seqs": self._engine.max_batch},
        }
        return web.json_response({"vllm_config": config, "is_seeded": True, "renders_pictures": True})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        body = await self._body(request, protocol.AdapterBody)
        await asyncio.wrap_future(self._engine.load_adapter(body.lora_path))
        self._adapter = body.lora_name
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": True})  # there is no cache

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self._weight_version = (await self._body(request, protocol.VersionBody)).new_version
        return web.json_response({"success": True, "new_version": self._weight_version})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._weight_version})

    async def _body(self, request: web.Request, kind: type[AnyBody]) -> AnyBody:
        body = parse_body(kind, await request.read())
        if body.model not in (None, "", self._model_dir, self._adapter):
            raise web.HTTPNotFound(text=f"The model `{body.model}` does not exist.")
        return body

    async def _pause(self, request: web.Request) -> None:
        mode = request.query.get("mode", "abort")
        if mode != "abort" and mode != "wait":
            raise BadRequest(f"mode: only abort and wait are supported, got {mode!r}")
        await asyncio.wrap_future(self._engine.pause(mode))

    async def _prompt_logprobs(self, prompt_ids: list[int]) -> list[Any]:
        logprobs = await asyncio.wrap_future(self._engine.prompt_logprobs(prompt_ids))
        return protocol.prompt_logprobs_body(prompt_ids, self._texts.of_each(prompt_ids), logprobs)

    def _choice(
        self, row: SampleInProgress, body: protocol.CompletionBody, prompt_logprobs: list[Any] | None
    ) -> dict[str, Any]:
        prompt_ids = row.generation.prompt_ids
        with_ids = bool(body.return_token_ids)
        ranges = [[begin, begin + len(shown.token_ids)] for shown, begin in row.generation.pictures]
        logprobs = protocol.logprobs_body(self._texts.of_each(row.token_ids), row.logprobs)
        return {
            "text": self._texts.completion(row),
            "logprobs": None if body.logprobs is None else logprobs,
            "finish_reason": row.finish_reason,
            "stop_reason": row.stop_reason,
            "token_ids": row.token_ids if with_ids else None,
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": prompt_ids if with_ids else None,
            **({"image_ranges": ranges} if ranges else {}),
            **({"routed_experts": protocol.routes_body(row.routes)} if body.return_routed_experts else {}),
        }


@web.middleware
async def _errors_as_openai(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BadRequest, WeightsError) as error:
        status, kind, message = 400, "BadRequestError", str(error)
    except EngineBusy as error:
        status, kind, message = 409, "ConflictError", str(error)
    except (EngineStopped, WrongContent) as error:
        status, kind, message = 500, "InternalServerError", str(error)
    except web.HTTPException as error:
        status, kind, message = error.status, error.reason, error.text or error.reason
    return web.json_response(error_body(message, kind, status), status=status)


def main(argv: list[str] | None = None) -> int:
    """Serve until killed. Returns 1 if the model cannot be loaded or the port is in use."""
    args = _parse_args(argv)
    # End at once: nobody needs the running requests of an engine that is being ended.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    transformers_logging.disable_progress_bar()
    try:
        engine = EmbeddedEngine(args.model, dtype=getattr(torch, args.dtype), max_batch=args.max_batch)
        server = EmbeddedServer(engine, args.model, args.weight_version)
        engine.start()
        asyncio.run(_serve(server, args))
    except (WeightsError, OSError) as error:
        print(f"torch_server: {error}", file=sys.stderr)
        return 1
    return 0


async def _serve(server: EmbeddedServer, args: argparse.Namespace) -> None:
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    # It has no authentication. As many as are in flight may connect at once.
    if args.uds:
        await web.UnixSite(runner, args.uds, backlog=BACKLOG).start()
        url = UNIX + args.uds
    else:
        await web.TCPSite(runner, LOOPBACK, args.port, backlog=BACKLOG).start()
        url = f"http://{LOOPBACK}:{runner.addresses[0][1]}"
    print(f"serving {args.model} on {url}", flush=True)
    await asyncio.Event().wait()


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollout.engines.embedded.server", description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face model directory")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--uds", metavar="SOCKET", help="the path of a Unix socket to listen on")
    where.add_argument("--port", type=int, help=f"listen on {LOOPBACK}, open to all users; 0: any free one")
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32", "bfloat16"])
    parser.add_argument("--max-batch", default=256, type=_positive, help="sequences decoded together")
    parser.add_argument(
        "--weight-version", default="default", help="name of the weights, until they are replaced"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
