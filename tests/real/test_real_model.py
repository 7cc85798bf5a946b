"""Whole runs of a chat model that people have trained. `make real` runs them."""

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.real_model import GEMMA, model_directory
from tests.cluster.cluster import Cluster
from tests.cluster.weights import worst_logprob
from tests.engines.engines import KINDS, ONE_THREAD, VLLM_ARGS, Reference

QUESTIONS = [f"What is {k} + {k + 3}? Answer in one short sentence." for k in range(2, 10)]
SMALL = (
    *("rollout.tasks_per_iteration=4", "rollout.samples_per_task=2", "rollout.max_tokens=10"),
    *("trainer.global_batch_size=8", "trainer.learning_rate=1e-5", "trainer.warmup_steps=0"),
    "rollout.reward=tests.real.plugins:brevity",
)
SMALLEST = (
    *("rollout.tasks_per_iteration=2", "rollout.samples_per_task=2", "rollout.max_tokens=8"),
    *("trainer.global_batch_size=4", "trainer.warmup_steps=0"),
    "rollout.reward=tests.real.plugins:brevity",
)
NO_EVALUATION = ("--eval-interval", "0")
AGREES = 1e-3
"""How far a logprob of an engine may lie from that of the trainer's model."""
LONGEST_S = 900.0
pytestmark = [
    pytest.mark.timeout(LONGEST_S),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


@pytest.fixture(scope="session")
def model() -> Path:
    return model_directory()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory for runs, whose checkpoints have gigabytes."""
    made = tmp_path / "runs"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def lines_of(path: Path, lines: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def chat_tasks(place: Path) -> str:
    return lines_of(place / "tasks.jsonl", [{"messages": ask(question)} for question in QUESTIONS])


def run(
    place: Path,
    name: str,
    model: Path,
    *words: str,
    prefix: Sequence[str] = (),
    sizes: Sequence[str] = SMALL,
) -> Cluster:
    """A run that has ended well."""
    cluster = Cluster(place / name, place / "cache", place)
    try:
        cluster.start(0, "--model", str(model), *sizes, *words, prefix=prefix)
        assert cluster.wait(LONGEST_S) == [0], cluster.everything_said()
    finally:
        cluster.close()
    # Answers of so small a model are at times worth the same, and nothing is measured without a step.
    measured = [line["kl_engine"] for line in cluster.metrics() if line["loss"] is not None]
    assert measured and max(measured) < 1e-5
    return cluster


def grpo(place: Path, base: Path, *words: str, prefix: Sequence[str] = ()) -> Cluster:
    """Two iterations of reinforcement learning, each evaluated, whose samples are those of a policy in the
    model's chat template.
    """
    held_out = lines_of(place / "eval.jsonl", [{"messages": ask(f"What is {k} + 1?")} for k in range(4)])
    evaluated = ("--eval-interval", "1", "--eval-tasks", held_out)
    words = ("--iterations", "2", "--tasks", chat_tasks(place), *evaluated, *words)
    cluster = run(place, "grpo", base, *words, prefix=prefix)
    assert all(line["eval_reward"] is not None for line in cluster.metrics())

    tokenizer = AutoTokenizer.from_pretrained(base)
    rendered = {
        tokenizer.apply_chat_template(ask(question), tokenize=False, add_generation_prompt=True)
        for question in QUESTIONS
    }
    for iteration, policy in ((1, base), (2, cluster.run_dir.checkpoint(1))):
        assert worst_logprob(cluster, iteration, Reference(policy)) < AGREES
        for group in cluster.groups(iteration).values():
            sample = group.samples[0]
            prompt = sample.token_ids[: int(sample.loss_mask.argmax())]
            assert tokenizer.decode(prompt) in rendered
    return cluster


@pytest.mark.skipif("vllm" not in KINDS, reason="vLLM is not installed here")
def test_chat_model_trains_with_vllm(model: Path, place: Path) -> None:
    chosen = {name: value for name, value in VLLM_ARGS.items() if name != "dtype"}  # by default it agrees
    engine = [f"engine.args.{name}={json.dumps(value)}" for name, value in chosen.items()]
    prefix = ["env", "SPT_NOENV=1", *(f"{name}={value}" for name, value in ONE_THREAD.items())]
    grpo(place, model, "--engine", "vllm", *engine, prefix=prefix)


def test_chat_model_goes_on_from_demonstrations_is_evaluated_and_exported(model: Path, place: Path) -> None:
    answers = [
        {"messages": [*ask(question), {"role": "assistant", "content": f"It is {2 * k + 3}."}]}
        for k, question in enumerate(QUESTIONS, 2)
    ]
    shown = ("trainer.algorithm=sft", "--tasks", lines_of(place / "shown.jsonl", answers), *NO_EVALUATION)
    sft = run(place, "sft", model, "--iterations", "2", *shown)
    losses = [line["loss"] for line in sft.metrics()]
    assert losses[1] < losses[0]
    cluster = grpo(place, sft.run_dir.checkpoint(2), "--engine", "torch")

    first = cluster.metrics()[0]
    again = json.loads(cluster.command("eval", "--checkpoint", "0", "--json"))
    assert again["sets"]["eval"]["reward"] == pytest.approx(first["eval_reward"], abs=1e-6)

    cluster.command("export", "-o", str(place / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(place / "exported", dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(cluster.run_dir.checkpoint(2), dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(sft.run_dir.checkpoint(2), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = torch.tensor([tokenizer.encode(QUESTIONS[0])])
    assert torch.equal(exported(ids).logits, trained(ids).logits)
    assert not torch.equal(exported(ids).logits, base(ids).logits)
    assert exported.lm_head.weight is exported.model.embed_tokens.weight
    theirs = AutoTokenizer.from_pretrained(place / "exported")
    assert theirs.chat_template == tokenizer.chat_template


def test_adapters_of_a_chat_model_are_exported_as_peft_reads_them(model: Path, place: Path) -> None:
    adapters = ("trainer.lora.rank=8", "trainer.learning_rate=1e-3")
    words = ("--iterations", "2", "--tasks", chat_tasks(place), *NO_EVALUATION, *adapters)
    cluster = run(place, "lora", model, *words)
    assert worst_logprob(cluster, 2, Reference(cluster.run_dir.checkpoint(1))) < AGREES
    assert worst_logprob(cluster, 2, Reference(model)) > AGREES
    cluster.command("export", "-o", str(place / "exported"))
    from peft import PeftModel

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, str(place / "exported"))
    assert sum("lora_B" in name and bool(p.abs().sum() > 0) for name, p in loaded.named_parameters()) > 100
    cluster.command("export", "--merge", "-o", str(place / "merged"))
    merged = AutoModelForCausalLM.from_pretrained(place / "merged", dtype="auto")
    base = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    ids = torch.tensor([AutoTokenizer.from_pretrained(model).encode(QUESTIONS[0])])
    without = base(ids).logits
    of_peft: Any = PeftModel.from_pretrained(base, str(place / "exported")).merge_and_unload()
    assert torch.equal(merged(ids).logits, of_peft(ids).logits)
    assert not torch.equal(merged(ids).logits, without)


def test_model_of_another_family_that_has_no_template_trains_adapters(place: Path) -> None:
    """Gemma 3: sliding windows, 262,144 tokens, SentencePiece."""
    gemma = model_directory(name=GEMMA)
    prompts = [f"{k} + {k + 3} =" for k in range(2, 4)]
    tasks = lines_of(place / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    adapters = ("trainer.lora.rank=8", "trainer.learning_rate=1e-3")
    words = ("--iterations", "2", "--tasks", tasks, *NO_EVALUATION, *adapters)
    cluster = run(place, "gemma", gemma, *words, sizes=SMALLEST)
    assert worst_logprob(cluster, 2, Reference(cluster.run_dir.checkpoint(1))) < AGREES
    assert worst_logprob(cluster, 2, Reference(gemma)) > AGREES
    tokenizer = AutoTokenizer.from_pretrained(gemma)
    for group in cluster.groups(1).values():
        sample = group.samples[0]
        shown = tokenizer.decode(sample.token_ids[: int(sample.loss_mask.argmax())])
        assert shown.removeprefix("<bos>") in prompts
