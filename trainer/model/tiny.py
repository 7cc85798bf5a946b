"""Make `builtin:tiny`: a Qwen3 of 0.3 M parameters that is taught to add, or to use the calculator.

    python -m trainer.model.tiny --seed S --out DIR [--tasks builtin:arithmetic] [--steps 800] [--threads N]

The warm-up teaches the tasks of the training split well, but mostly in a way that earns nothing. Additions:
it puts most answers in brackets, which the reward `exact` does not accept. Products: it mostly guesses, and
does not use the calculator. So sampling solves over a third of the tasks. Reinforcement learning can earn the
rest: the model can do it, and learns to do it as asked. (If the warm-up stopped early instead, the quality of
the policy would depend on the seed, and reinforcement learning would improve it slowly or break it.)
"""

import argparse
import string
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollout.environments.calculator import CLOSE, OPEN
from rollout.storage.writer import publish_directory
from rollout.tasks.task_set import Task, load_tasks

CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"
SPECIAL = ("<pad>", "<eos>", "<unk>")
PAD_ID, EOS_ID, UNK_ID = range(3)
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"

BATCH_SIZE = 128
LEARNING_RATE = 3e-3
ASTRAY = 0.6
"""Fraction of the warm-up that earns nothing. About the rest of the sampled answers are right as asked."""
REPORT_EVERY = 100

Text = list[tuple[str, bool]]
"""Pieces of a text, and whether the model is taught to write each."""


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


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, source: str, seed: int, steps: int
) -> None:
    """Supervised steps on the training split of a built-in set, most of them astray; prints progress."""
    tasks = load_tasks(source, seed=seed, split="train").tasks
    as_asked, astray = LESSONS[source](tasks, seed)
    length = max(sum(len(piece) for piece, _ in text) for text in as_asked + astray) + 1
    right, wrong = (_encode(tokenizer, texts, length) for texts in (as_asked, astray))
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=max(3, steps), pct_start=max(0.05, min(1.0, 2 / steps))
    )
    started = time.monotonic()
    for step in range(1, steps + 1):
        chosen = rng.integers(len(tasks), size=BATCH_SIZE)
        is_astray = rng.random((BATCH_SIZE, 1, 1)) < ASTRAY
        examples = torch.from_numpy(np.where(is_astray, wrong[chosen], right[chosen]))
        loss = model(input_ids=examples[:, 0], labels=examples[:, 1]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % REPORT_EVERY == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"warm-up {step}/{steps} | loss {loss.item():.2f} | {seconds:.1f} s", flush=True)


def _additions(tasks: Sequence[Task], _seed: int) -> tuple[list[Text], list[Text]]:
    """Return the texts that are taught for each task: as asked, and in brackets."""
    plain: list[Text] = [[(task["prompt"], False), (task["answer"], True)] for task in tasks]
    return plain, [[(task["prompt"], False), (f"({task['answer']})", True)] for task in tasks]


def _products(tasks: Sequence[Task], seed: int) -> tuple[list[Text], list[Text]]:
    """Return the texts that are taught for each task: with the calculator, and a guess."""
    used: list[Text] = []
    for task in tasks:
        call = f"{OPEN}{task['id']}{CLOSE}"
        value = task["answer"]
        used.append([(task["prompt"], False), (call, True), (f"={value}\n", False), (value, True)])
    guesses = np.random.default_rng(seed).integers(100, 10_000, len(tasks))
    return used, [
        [(task["prompt"], False), (str(guess), True)] for task, guess in zip(tasks, guesses, strict=True)
    ]


LESSONS = {"builtin:arithmetic": _additions, "builtin:products": _products}
"""What the warm-up teaches for each of the built-in sets."""


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[Text], length: int) -> NDArray[np.int64]:
    """(texts, 2, length): token ids and labels of each text and its end; a label of -100 is not trained."""
    out = np.zeros((len(texts), 2, length), np.int64)
    out[:, 1] = -100
    for row, text in zip(out, texts, strict=True):
        end = 0
        for piece, is_taught in text:
            token_ids = cast(list[int], tokenizer.encode(piece))
            row[0, end : end + len(token_ids)] = token_ids
            if is_taught:
                row[1, end : end + len(token_ids)] = token_ids
            end += len(token_ids)
        row[:, end] = EOS_ID
    return out


def build(seed: int, steps: int, out: Path, source: str = "builtin:arithmetic") -> None:
    """Make the model directory `out`, which appears whole; raises FileExistsError if it exists."""
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it to make the model again")
    tokenizer, model = make_tokenizer(), make_model(seed)
    if steps:
        warm_up(model, tokenizer, source, seed, steps)
    with TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        publish_directory(Path(saved), out)


def main(make: Callable[[int, int, Path, str], None] = build, lessons: Collection[str] = LESSONS) -> None:
    """Parse the command line and build: `make` gets the seed, the steps, the directory and what is taught."""
    parser = argparse.ArgumentParser(description="Make builtin:tiny.")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--tasks", choices=lessons, default=next(iter(lessons)), help="what it is taught")
    parser.add_argument("--steps", type=int, default=800, help="of the warm-up; 0: random weights")
    parser.add_argument("--out", type=Path, required=True, help="the model directory; must not exist")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: torch's choice")
    args = parser.parse_args()
    disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    make(args.seed, args.steps, args.out, args.tasks)


if __name__ == "__main__":
    main()
