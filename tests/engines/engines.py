"""Servers of every kind that is installed here, and transformers on the same weights."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    MinPLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import UNIX
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.engines.kinds.choice import engine_kind
from rollout.origin import Sampling
from rollout.settings import EngineSettings
from tests.imports import forked
from tests.models import CONTEXT

REPOSITORY = Path(__file__).parents[2]
Kind = Literal["vllm", "torch"]
KINDS: list[Kind] = ["torch", "vllm"] if find_spec("vllm") else ["torch"]
START_TIMEOUT_S = 240.0
STOP_S = 20.0
VLLM_ARGS = {
    "dtype": "float32",
    "enforce-eager": True,
    "max-model-len": CONTEXT,
    "kv-cache-memory-bytes": 2**28,
}
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Several servers share the cores; vLLM would bind each of them to the same one."""

Request = tuple[str | Sequence[int], Sampling]


@dataclass
class Engine:
    """A server in a process group of its own."""

    kind: Kind
    url: str
    admin: EngineAdmin
    process: subprocess.Popen[bytes]

    def ask(self, prompt: str | Sequence[int], sampling: Sampling, **client: Any) -> list[Completion]:
        """The completions of one request."""
        return self.ask_at_once([(prompt, sampling)], **client)[0]

    def ask_at_once(self, requests: Sequence[Request], **client: Any) -> list[list[Completion]]:
        """The completions of each of several requests, all in flight together."""

        async def main() -> list[list[Completion]]:
            async with EngineClient(self.url, **client) as engine:
                return await asyncio.gather(*(engine.generate(*request) for request in requests))

        return asyncio.run(main())

    def tokenize(self, text: str | Sequence[dict[str, str]]) -> list[int]:
        async def main() -> list[int]:
            async with EngineClient(self.url) as client:
                return await client.tokenize(text)

        return asyncio.run(main())

    def kill(self) -> None:
        """SIGKILL its whole process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """SIGTERM, so that vLLM removes its shared memory; SIGKILL to what is left."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        self.kill()


@contextlib.contextmanager
def serving(
    kind: Kind, model: Path, log: Path, lora_rank: int = 0, ranks: int = 1, **args: Any
) -> Iterator[Engine]:
    """A server of `model` in float32, for adapters of `lora_rank`; what it says is in the file `log`.

    `ranks` and `args`: of vLLM.
    """
    socket = Path(tempfile.mkdtemp(prefix="flagpost-"), "engine.sock")
    settings = EngineSettings(
        kind=kind, dtype="float32", args={**VLLM_ARGS, **args}, tensor_parallel_size=ranks
    )
    served = engine_kind(settings, 0)
    server = served.command(model, socket, lora_rank)
    paths = [os.environ.get("PYTHONPATH", ""), str(REPOSITORY)]  # for a worker extension of the tests
    env = {**os.environ, **server.env, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with open(log, "wb") as file:
        process = subprocess.Popen(
            forked(server.argv), cwd=REPOSITORY, env=env, stdout=file, stderr=file, start_new_session=True
        )
    url = f"{UNIX}{socket}"
    engine = Engine(kind, url, served.admin(url), process)
    try:
        try:
            engine.admin.wait_healthy(START_TIMEOUT_S, lambda: process.poll() is None)
        except BaseException as error:
            error.add_note(log.read_text(errors="replace")[-5000:])
            raise
        yield engine
    finally:
        engine.stop()
        shutil.rmtree(socket.parent)


class Reference:
    """transformers on the weights of a model directory, in float32."""

    def __init__(self, model: Path) -> None:
        torch.set_num_threads(1)  # the cores are the servers'
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model)

    def logprobs(self, token_ids: list[int], temperature: float = 1.0) -> list[float]:
        """Natural logprobs of `token_ids[1:]`, each after all before it."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, :-1].double()
        logprobs = torch.log_softmax(logits / temperature, dim=-1)
        return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    def narrowed(self, token_ids: list[int], temperature: float, **settings: Any) -> list[float]:
        """As `logprobs`, with what `top_k`, `top_p` and `min_p` of transformers' own leave."""
        warpers = [("min_p", MinPLogitsWarper), ("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper)]
        with torch.inference_mode():
            logits = self._model(torch.tensor([token_ids])).logits[0, :-1].double() / temperature
        for name, warper in warpers:
            if name in settings:
                logits = warper(settings[name])(None, logits)
        return torch.log_softmax(logits, -1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()

    def error(self, completion: Completion, temperature: float = 1.0) -> float:
        """How far the worst of a completion's logprobs is off."""
        wanted = self.logprobs(completion.prompt_ids + completion.token_ids, temperature)
        wanted = wanted[len(completion.prompt_ids) - 1 :]
        return max(abs(a - b) for a, b in zip(completion.logprobs, wanted, strict=True))

    def greedy(self, prompt_ids: list[int], max_tokens: int) -> list[int]:
        """The completion of transformers' own `generate`, its end-of-sequence token included."""
        prompt = torch.tensor([prompt_ids])
        with torch.inference_mode():
            found = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False
            )
        return found[0, len(prompt_ids) :].tolist()
