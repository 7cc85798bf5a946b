"""A tiny random model on disk, and embedded engines that serve it in processes of their own."""

import contextlib
import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

CHARACTERS = "0123456789+-*/=()[] .,abcdefghijklmnopqrstuvwxyz\n"
EOS = 1
CONTEXT = 256
START_TIMEOUT_S = 120


def make_model(path: Path, *, seed: int, hidden: int = 64) -> Path:
    """A random Qwen3 of 2 layers with a token for each character, with distributions far from uniform."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}a {% endif %}"
    )
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@dataclass
class RunningServer:
    process: subprocess.Popen[str]
    url: str
    port: int

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=10)


def start_server(model_dir: Path, *arguments: str) -> RunningServer:
    command = [sys.executable, "-m", "rollout.torch_server", "--model", str(model_dir), "--port", "0"]
    process = subprocess.Popen([*command, "--threads", "1", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if ready else ""
    if not line.startswith(f"serving {model_dir} on http://127.0.0.1:"):
        process.kill()
        process.wait()
        pytest.fail(f"the server did not start within {START_TIMEOUT_S} s: {line!r}")
    url = line.split()[-1]
    return RunningServer(process, url, int(url.rpartition(":")[2]))


@contextlib.contextmanager
def serving(model_dir: Path, *arguments: str) -> Iterator[RunningServer]:
    server = start_server(model_dir, *arguments)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()
        assert server.process.stdout is not None
        server.process.stdout.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not so within {timeout_s} s"
        time.sleep(0.01)


def write_lines(path: Path, *tasks: object) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path
