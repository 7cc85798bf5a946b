"""Training on one GPU: numbers, memory, speed. Prints what it measures (`pytest -s`)."""

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from trainer.batch.batch import Batch, Counts
from trainer.batch.packing import bundle
from trainer.model.learner import Learner, build_learner
from trainer.settings import TrainerSettings
from trainer.update.step import train
from trainer.update.step_stats import StepStats

GIB = 2**30
PEAK_FLOPS = 989e12
"""Peak of an H100 or H200: bfloat16, dense."""
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
QWEN3_06B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LAYOUTS = {
    "replicated": {"layout": "replicated"},
    "sharded": {"layout": "sharded"},
    "kept": {"layout": "sharded", "activation_checkpointing": False},
    "offloaded": {"layout": "sharded", "cpu_offload": True},
}


def make_model(path: Path, shape: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, dtype=torch.bfloat16)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "small", SMALL)


@pytest.fixture(scope="module")
def qwen3_06b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen3_06b", QWEN3_06B)


@pytest.fixture(autouse=True)
def _empty_gpu(device: torch.device) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def make_batch(lengths: list[int], vocabulary: int) -> Batch:
    """Random tokens, all but the first eight of each sequence trained."""
    rng = np.random.default_rng(0)
    count, tokens = len(lengths), sum(lengths)
    mask = np.concatenate([np.arange(length) >= 8 for length in lengths])
    return Batch(
        token_ids=rng.integers(3, vocabulary, tokens).astype(np.int32),
        loss_mask=mask.astype(np.uint8),
        logprobs=np.where(mask, -np.log(vocabulary), 0).astype(np.float32),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        advantages=rng.choice(np.array([-0.5, 0.5], np.float32), count),
        rewards=np.zeros(count, np.float32),
        slots=np.arange(count, dtype=np.int32),
        temperatures=np.ones(count, np.float32),
        ages=np.zeros(count, np.int32),
        counts=Counts(count, count, count, count, 0, 0.0, 0.0),
        manifest_sha256="",
        policy="",
        seed=0,
    )


def run(learner: Learner, batch: Batch, settings: TrainerSettings) -> list[StepStats]:
    return train(learner, batch, settings, max_tokens=4096, report=lambda line: None)


def settings_of(layout: str, share_prompts: bool = False, **more: Any) -> TrainerSettings:
    """Return settings; without shared prompts no flex kernels are compiled, for 40 s in each learner."""
    more |= {"learning_rate": 1e-4, "warmup_steps": 0, "share_prompts": share_prompts}
    return TrainerSettings(**LAYOUTS[layout], **more)


def allocated_gib() -> float:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() / GIB


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_in_bfloat16_does_what_float32_on_the_cpu_does(
    device: torch.device, small: Path, layout: str
) -> None:
    """The losses and gradient norms of three steps, within what bfloat16 resolves (8 bits)."""
    batch = make_batch([200, 64, 300, 17, 128, 90], SMALL["vocab_size"])
    sizes: dict[str, Any] = {"global_batch_size": 2, "max_tokens_per_microbatch": 512}
    cpu_settings = settings_of("replicated", **sizes)
    exact = run(build_learner(small, torch.device("cpu"), cpu_settings), batch, cpu_settings)
    settings = settings_of(layout, **sizes)
    learner = build_learner(small, device, settings)
    assert learner.layout.sharded == (layout != "replicated")
    assert {parameter.dtype for parameter in learner.parameters.values()} == {torch.float32}
    found = run(learner, batch, settings)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, abs=0.02)
        assert mine.entropy == pytest.approx(theirs.entropy, rel=0.01)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_step_with_shared_prompts_does_what_it_does_without(
    device: torch.device, small: Path, layout: str
) -> None:
    batch = make_batch([40] * 16, SMALL["vocab_size"])
    prompts = batch.token_ids.reshape(4, 4, 40)[:, :, :8]
    prompts[:] = prompts[:, :1]
    apart = settings_of("replicated")
    exact = run(build_learner(small, torch.device("cpu"), apart), batch, apart)
    settings = settings_of(layout, share_prompts=True)
    learner = build_learner(small, device, settings)
    assert any(
        one.shared for one in bundle(batch, range(16), learner.arrangement.packing.pairs_per_token, 8192)
    )
    (mine,), (theirs,) = run(learner, batch, settings), exact
    assert mine.loss == pytest.approx(theirs.loss, abs=0.02)
    assert mine.entropy == pytest.approx(theirs.entropy, rel=0.01)
    assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=0.05)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_learner_leaves_the_gpu_and_comes_back_as_it_was(
    device: torch.device, small: Path, layout: str
) -> None:
    batch = make_batch([200, 64, 300, 17], SMALL["vocab_size"])
    settings = settings_of(layout, global_batch_size=4)

    def losses(offload: Callable[[Learner], None]) -> list[float]:
        learner = build_learner(small, device, settings)
        found = []
        for _ in range(3):
            found += [step.loss for step in run(learner, batch, settings)]
            offload(learner)
        return found

    def away_and_back(learner: Learner) -> None:
        before = allocated_gib()
        learner.to_host()
        left = allocated_gib()
        learner.to_device()
        print(f"{layout}: {before:.4f} GiB on the GPU, {left:.4f} left, {allocated_gib():.4f} back on it")
        if layout != "offloaded":  # FSDP's own offload has it on the host anyway
            numel = sum(parameter.numel() for parameter in learner.parameters.values())
            assert before - left > 0.95 * 3 * 4 * numel / GIB, "weights and two moments"
        now = dict(learner.model.named_parameters())
        assert all(now[name] is parameter for name, parameter in learner.parameters.items())

    assert losses(away_and_back) == pytest.approx(losses(lambda learner: None), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("layout", ["replicated", "sharded", "kept"])
def test_speed_and_memory_of_a_06b_model(device: torch.device, qwen3_06b: Path, layout: str) -> None:
    """A step of 16 k tokens: 16 sequences of 1,024.

    Model FLOPs of a trained token: 6 for each parameter that a token is multiplied with (2 forward, 4
    backward; the tied embedding once, as the head), and for the attention 6 x layers x heads x head_dim x
    length: 2 matrix products, 2 FLOPs, over half the square, 3 times for forward and backward. What is
    computed again does not count. Utilisation is that over PEAK_FLOPS x seconds.
    """
    length, count = 1024, 16
    batch = make_batch([length] * count, QWEN3_06B["vocab_size"])
    settings = settings_of(layout, global_batch_size=count, max_tokens_per_microbatch=length * count)
    learner = build_learner(qwen3_06b, device, settings)
    weights = sum(parameter.numel() for parameter in learner.parameters.values() if parameter.ndim > 1)
    width = QWEN3_06B["num_hidden_layers"] * QWEN3_06B["num_attention_heads"] * QWEN3_06B["head_dim"]
    flops = length * count * (6 * weights + 6 * width * length)
    seconds = []
    for _ in range(4):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        run(learner, batch, settings)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
    best_s = min(seconds[1:])
    peak = torch.cuda.max_memory_allocated() / GIB
    began_s = time.perf_counter()
    before = allocated_gib()
    learner.to_host()
    left, away_s = allocated_gib(), time.perf_counter() - began_s
    learner.to_device()
    torch.cuda.synchronize()
    print(
        f"\n0.6 B, {layout}: {best_s:.3f} s, {length * count / best_s:,.0f} tokens/s, "
        f"MFU {flops / PEAK_FLOPS / best_s:.1%}, peak {peak:.1f} GiB; off the GPU {away_s:.2f} s "
        f"({before:.2f} -> {left:.2f} GiB), and back {time.perf_counter() - began_s - away_s:.2f} s"
    )
    # Weights and moments 3 x 2.2 GiB, and less than the logits of the pack alone would take (9.3 GiB).
    logits = length * count * QWEN3_06B["vocab_size"] * 4 / GIB
    assert left < 0.2, "what is left are workspaces of the libraries"
    if layout == "sharded":
        assert peak - before < logits
