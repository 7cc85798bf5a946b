"""Small models and a real vLLM server for the benchmarks of generation."""

import argparse
import contextlib
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from coordinator.machine.children import Child, Children
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import UNIX, EngineError
from rollout.engines.servers import server_command
from rollout.settings import EngineSettings

START_TIMEOUT_S = 600.0
MAX_MODEL_LEN = 512
ARGS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 2048,
    # On a CPU vLLM 0.32 dies ("CPU Generator does not use offset") when it splits a prompt with a seed.
    "enable_chunked_prefill": False,
    "distributed_executor_backend": "uni",
}
"""Arguments of vLLM, with a server and without."""
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Run the model in the process that schedules. Two processes would each keep a core busy while they wait for
each other, and a machine with 2 cores would have none left for the server and its client."""
WORDS = 8192
"""Vocabulary of the small model."""


def need_vllm(parser: argparse.ArgumentParser) -> None:
    """End with a line that says what to do if vLLM is not installed."""
    if find_spec("vllm") is None:
        parser.error(
            "vLLM is not installed for this Python; use .venv-vllm/bin/python (make test-vllm makes it)"
        )


def make_model(name: str, made: Path, seed: int = 0) -> Path:
    """Write a model with random weights: `tiny`, like builtin:tiny (0.3 M parameters), or `small` (29 M).

    Both tokenise character by character; `small` also has made-up words, and generates them.
    """
    from trainer.model import tiny  # here, because torch is slow to import

    if name == "tiny":
        tiny.build(seed=seed, steps=0, out=made)
        return made
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([f" word{k}" for k in range(WORDS - len(tokenizer))])
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=2 * MAX_MODEL_LEN,
        tie_word_embeddings=True,
        eos_token_id=tiny.EOS_ID,
        pad_token_id=tiny.PAD_ID,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(made)
    tokenizer.save_pretrained(made)
    return made


@dataclass(frozen=True)
class Vllm:
    """A server that runs, or is starting."""

    child: Child
    url: str
    admin: EngineAdmin

    def wait_ready(self) -> None:
        """Wait until it answers; if it does not, end the benchmark with its last words."""
        try:
            self.admin.wait_healthy(START_TIMEOUT_S, alive=lambda: self.child.poll() is None)
        except EngineError as error:
            raise SystemExit(f"{error}\n{self.child.tail(30)}") from error


def start_vllm(children: Children, model: Path) -> Vllm:
    """Start a server of the model, as a node does; it does not answer yet."""
    spool = children.new_spool("vllm")
    socket = spool / "engine.sock"
    server = server_command(EngineSettings(kind="vllm", args=ARGS), model, socket, gpus=0)
    child = children.start("vllm", server.argv, env={**server.env, **ENV}, spool=spool)
    url = f"{UNIX}{socket}"
    return Vllm(child, url, EngineAdmin(url, after_reload=server.after_reload))


def parameters_m(model: Path) -> float:
    """Return the millions of parameters of a model directory, by the size of its float32 files."""
    return round(sum(file.stat().st_size for file in model.glob("*.safetensors")) / 4e6, 1)


class Elsewhere:
    """Measures how many cores other programs used: not this process or its descendants."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._since = (time.monotonic(), *self._busy_s())

    def cores(self) -> float:
        """Return the average since this was made."""
        since_s, machine_s, ours_s = self._since
        machine_now_s, ours_now_s = self._busy_s()
        elsewhere_s = (machine_now_s - machine_s) - (ours_now_s - ours_s)
        return round(max(0.0, elsewhere_s / (time.monotonic() - since_s)), 2)

    def _busy_s(self) -> tuple[float, float]:
        machine = psutil.cpu_times()
        ours_s = 0.0
        for process in (self._me, *self._me.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                ours = process.cpu_times()
                ours_s += ours.user + ours.system + ours.children_user + ours.children_system
        return machine.user + machine.nice + machine.system, ours_s
