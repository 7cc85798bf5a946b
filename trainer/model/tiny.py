"""Make `builtin:tiny`: a Qwen3 of 0.3 M parameters that is taught to add.

    python -m trainer.model.tiny --seed S --out DIR [--steps 800] [--threads N]

The warm-up teaches the additions of the training split well, but puts most answers in brackets, which the
reward `exact` does not accept. So sampling solves over a third of the tasks. Reinforcement learning can earn
the rest: the model can add, and learns to answer as asked. (If the warm-up stopped early instead, the quality
of the policy would depend on the seed, and reinforcement learning would improve it slowly or break it.)
"""

import argparse
import string
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout.storage import files
from rollout.storage.writer import Writer, copy_of
from rollout.tasks.task_set import load_tasks

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID, UNK_ID = range(3)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
BRACKETED = 0.6
"""Fraction of the warm-up's answers in brackets. About the rest of the sampled answers are right as asked."""
REPORT_EVERY = 100


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character; a chat is the concatenation of its messages."""
    vocabulary = {token: k for k, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer: Any = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int) -> Qwen3ForCausalLM:
    """Return the model with random weights, which depend on the seed alone."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = EOS_ID
    model.generation_config.pad_token_id = PAD_ID
    return model


def warm_up(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int) -> None:
    """Supervised steps on the training split of the additions, most answers bracketed; prints progress."""
    tasks = load_tasks("builtin:arithmetic", seed=seed, split="train").tasks
    plain = _encode(tokenizer, [(task["prompt"], task["answer"]) for task in tasks])
    bracketed = _encode(tokenizer, [(task["prompt"], f"({task['answer']})") for task in tasks])
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=max(0.05, min(1.0, 2 / steps))
    )
    started = time.monotonic()
    for step in range(1, steps + 1):
        chosen = rng.integers(len(tasks), size=BATCH_SIZE)
        in_brackets = rng.random((BATCH_SIZE, 1, 1)) < BRACKETED
        examples = torch.from_numpy(np.where(in_brackets, bracketed[chosen], plain[chosen]))
        loss = model(input_ids=examples[:, 0], labels=examples[:, 1]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"warm-up {step}/{steps} | loss {loss.item():.2f} | {seconds:.1f} s", flush=True)


def _encode(tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]) -> NDArray[np.int64]:
    """(pairs, 2, length): token ids and labels of prompt, answer, end; a label of -100 is not trained."""
    rows = []
    for prompt, answer in pairs:
        prompt_ids, answer_ids = tokenizer.encode(prompt), [*tokenizer.encode(answer), EOS_ID]
        rows.append(([*prompt_ids, *answer_ids], [-100] * len(prompt_ids) + answer_ids))
    length = 6 + 5 + 1  # "27+58=", "(581)", end
    out = np.zeros((len(rows), 2, length), np.int64)
    out[:, 1] = -100
    for k, (token_ids, labels) in enumerate(rows):
        out[k, :, : len(token_ids)] = token_ids, labels
    return out


def build(seed: int, steps: int, out: Path) -> None:
    """Make the model directory `out`, which appears whole; raises FileExistsError if it exists."""
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it to make the model anew")
    tokenizer, model = make_tokenizer(), make_model(seed)
    if steps:
        warm_up(model, tokenizer, seed, steps)
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        staging = files.temporary_name(out)
        files.make_directory(staging)
        try:
            with Writer(staging) as writer:
                for path in Path(saved).iterdir():
                    writer.add(path.name, copy_of(path))
                writer.finish()
            files.fsync_directory(staging)
            files.rename(staging, out)
        except BaseException:
            files.remove_tree(staging)
            raise


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m trainer.model.tiny", description="Make builtin:tiny.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=800, help="of the warm-up; 0: random weights")
    parser.add_argument("--out", type=Path, required=True, help="the model directory; must not exist")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    args = parser.parse_args()
    disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    build(args.seed, args.steps, args.out)


if __name__ == "__main__":
    main()
