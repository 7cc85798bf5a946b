"""Make `builtin:tiny` for builtin:shapes: a LLaVA of 0.45 M parameters, with its processor.

    python -m trainer.model.tiny_seeing --seed S --out DIR [--steps 800] [--threads N]

As in trainer.model.tiny the warm-up teaches the tasks well, but puts most answers in brackets, which earn
nothing.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from rollout.engines.embedded.picture_input import PictureReader
from rollout.pictures import pictures_in
from rollout.storage.writer import publish_directory
from rollout.tasks.shape_pictures import SIDE
from rollout.tasks.task_set import SHAPES, load_tasks
from trainer.model import tiny

PLACEHOLDER = "<image>"
PATCH = 8
BATCH_SIZE, LEARNING_RATE = 32, 1e-3
"""A picture costs four times what a question does, and at a higher rate it is not looked at."""
STEPS = 2
"""Smaller steps for each one that is asked for: shapes are told apart after 1600."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}" + PLACEHOLDER + "{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


def make_processor() -> Any:
    """Return a processor whose tokenizer is that of builtin:tiny, with a placeholder for pictures."""
    tokenizer = tiny.make_tokenizer()
    tokenizer.add_tokens([PLACEHOLDER], special_tokens=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    images = CLIPImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(seed: int) -> Any:
    """Return the model with random weights, which depend on the seed alone."""
    text = tiny.make_model(seed).config
    text.vocab_size += 1
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=text,
        image_token_index=text.vocab_size - 1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_seq_length=(SIDE // PATCH) ** 2 + 1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = tiny.EOS_ID
    model.generation_config.pad_token_id = tiny.PAD_ID
    return model


def warm_up(model: Any, processor: Any, model_dir: Path, seed: int, steps: int) -> None:
    """Supervised steps on the training split, most of them astray; prints progress."""
    tasks = load_tasks(SHAPES, seed=seed, split="train")
    assert tasks.pictures is not None
    reader = PictureReader(model_dir)
    pixels, rows = list[Tensor](), list[tuple[list[int], list[int], list[int]]]()
    for task in tasks.tasks:
        shown = reader.read(tasks.pictures.read(pictures_in(task["messages"])[0]))
        question = task["messages"][0]["content"][1]["text"]
        prompt = [*shown.token_ids, *processor.tokenizer.encode(question)]
        answers = [processor.tokenizer.encode(text) for text in (task["answer"], f"({task['answer']})")]
        rows.append((prompt, *answers))
        pixels.append(shown.tensors["pixel_values"])
    length = max(len(prompt) + len(astray) for prompt, _, astray in rows) + 1
    examples = np.full((2, len(rows), 2, length), -100, np.int64)  # as asked and astray; ids and labels
    examples[:, :, 0] = tiny.PAD_ID
    for k, (prompt, *answers) in enumerate(rows):
        for example, answer in zip(examples[:, k], answers, strict=True):
            end = len(prompt) + len(answer)
            example[0, : end + 1] = [*prompt, *answer, tiny.EOS_ID]
            example[1, len(prompt) : end + 1] = example[0, len(prompt) : end + 1]
    rng, started = np.random.default_rng(seed), time.monotonic()
    steps *= STEPS
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=max(0.05, min(1.0, 2 / steps))
    )
    all_pixels = torch.cat(pixels)
    for step in range(1, steps + 1):
        chosen = rng.integers(len(rows), size=BATCH_SIZE)
        astray = (rng.random(BATCH_SIZE) < tiny.ASTRAY).astype(int)
        batch = torch.from_numpy(examples[astray, chosen])
        loss = model(input_ids=batch[:, 0], pixel_values=all_pixels[chosen], labels=batch[:, 1]).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % tiny.REPORT_EVERY == 0 or step == steps:
            seconds = time.monotonic() - started
            print(f"warm-up {step}/{steps} | loss {loss.item():.2f} | {seconds:.1f} s", flush=True)


def build(seed: int, steps: int, out: Path, _source: str = SHAPES) -> None:
    """Make the model directory `out`, which appears whole; raises FileExistsError if it exists."""
    if out.exists():
        raise FileExistsError(f"{out} exists; remove it to make the model again")
    processor, model = make_processor(), make_model(seed)
    with TemporaryDirectory() as saved:
        processor.save_pretrained(saved)
        model.config.save_pretrained(saved)
        if steps:
            warm_up(model, processor, Path(saved), seed, steps)
        # Else transformers writes names that are its own, not those of the Hub's models, which vLLM knows.
        model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
        model.save_pretrained(saved)
        publish_directory(Path(saved), out)


if __name__ == "__main__":
    tiny.main(build, (SHAPES,))
