"""Tiny random models that are shown pictures, each with the files of its processor: for the tests, and for
the page of families.
"""

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from rollout.engines.embedded.picture_input import PictureReader
from rollout.pictures import digest_of
from rollout.trajectory import Group, Picture, Sample
from scripts.tiny_models import SPREAD
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.model.tiny import EOS_ID, PAD_ID, make_tokenizer

SIDE, PATCH, WIDTH = 16, 4, 64
SIZES = (20, 24), (20, 24), (40, 12)
IMAGES = "images"
"""The folder of pictures of noise beside a model."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}PLACEHOLDER{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
_TEXT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": SPREAD,
    "pad_token_id": PAD_ID,
    "bos_token_id": EOS_ID,
    "eos_token_id": EOS_ID,
}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "initializer_range": SPREAD,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [6, 5, 5], "rope_theta": 10000.0}}
_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "initializer_range": SPREAD,
}
_MEAN = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_SQUARE = {"size": {"height": SIDE, "width": SIDE}, **_MEAN}
_QWEN_IMAGES = {
    "patch_size": PATCH,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    **_MEAN,
}
_SPLIT = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}, **_MEAN}
_SPLIT_TOKENS = [
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
]

FAMILIES: dict[str, dict[str, Any]] = {
    "llava": {
        "tokens": ["<image>"],
        "text": {"model_type": "qwen3"},
        "vision": {"model_type": "clip_vision_model"},
        "model": {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        "images": ("CLIPImageProcessorPil", {**_SQUARE, "do_center_crop": False}),
        "processor": {
            "patch_size": PATCH, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 1
        },
    },
    "qwen2_vl": {
        "tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "text": _ROPE,
        "vision": {**_QWEN_VISION, "embed_dim": WIDTH, "hidden_size": WIDTH, "mlp_ratio": 2},
        "images": ("Qwen2VLImageProcessorPil", _QWEN_IMAGES),
        "placed": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen2_5_vl": {
        "tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "text": _ROPE,
        "vision": {**_QWEN_VISION, "hidden_size": WIDTH, "out_hidden_size": WIDTH, "intermediate_size": 48,
                   "window_size": 16, "fullatt_block_indexes": [1]},
        "images": ("Qwen2VLImageProcessorPil", _QWEN_IMAGES),
        "placed": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "qwen3_vl": {
        "tokens": ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"],
        "text": {"rope_parameters": {**_ROPE["rope_parameters"], "mrope_interleaved": True}},
        "vision": {**_QWEN_VISION, "hidden_size": WIDTH, "out_hidden_size": WIDTH, "intermediate_size": 48,
                   "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
        "images": ("Qwen2VLImageProcessorPil", _QWEN_IMAGES),
        "placed": "<|vision_start|><|image_pad|><|vision_end|>",
    },
    "gemma3": {
        "tokens": ["<boi>", "<eoi>", "<image>", "\n\n", "\n\n\n", "\n\n\n\n"],
        "named": {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image>"},
        "vision": {"vision_use_head": False},
        "text": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
        "model": {"mm_tokens_per_image": 4},
        "images": ("Gemma3ImageProcessorPil", _SQUARE),
        "processor": {"image_seq_length": 4},
    },
    "smolvlm": {
        "tokens": _SPLIT_TOKENS,
        "text": {"model_type": "llama"},
        "images": ("SmolVLMImageProcessorPil", _SPLIT),
        "processor": {"image_seq_len": 4},
    },
    "idefics3": {
        "tokens": _SPLIT_TOKENS,
        "text": {"model_type": "llama"},
        "images": ("Idefics3ImageProcessorPil", _SPLIT),
        "processor": {"image_seq_len": 4},
    },
    "internvl": {
        "tokens": ["<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
        "named": {"start_image_token": "<img>", "end_image_token": "</img>", "video_token": "<video>",
                  "context_image_token": "<IMG_CONTEXT>"},
        "text": {"model_type": "qwen2"},
        "vision": {"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH]},
        "model": {"image_seq_length": 4},
        "images": ("GotOcr2ImageProcessorPil", {**_SQUARE, "max_patches": 2}),
        "processor": {"image_seq_length": 4},
    },
    "mistral3": {
        "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "text": {"model_type": "mistral", "sliding_window": None},
        "vision": {"head_dim": WIDTH // 2},
        "images": ("PixtralImageProcessorPil", {"patch_size": PATCH, "size": {"longest_edge": 24}, **_MEAN}),
        "processor": {"patch_size": PATCH, "spatial_merge_size": 2},
    },
    "paligemma": {
        "tokens": ["<image>"],
        "text": {"model_type": "gemma"},
        "vision": {"projection_dim": WIDTH, "vision_use_head": False},
        "model": {"projection_dim": WIDTH},
        "images": ("SiglipImageProcessorPil", {**_SQUARE, "image_seq_length": 16}),
    },
}  # fmt: skip
"""What each needs beside the sizes: the first token stands for a picture in words."""


def make_tiny_seeing(family: str, directory: Path) -> Path:
    """Write a tiny random model of the family, with its processor, as a Hugging Face directory."""
    facts = FAMILIES[family]
    tokenizer: Any = make_tokenizer()
    tokenizer.add_tokens(facts["tokens"], special_tokens=True)
    tokenizer.bos_token = "<eos>"
    if named := facts.get("named"):
        tokenizer._set_model_specific_special_tokens(named)
    ids = dict(zip(facts["tokens"], tokenizer.convert_tokens_to_ids(facts["tokens"]), strict=True))
    placeholder, *_ = facts["tokens"]
    tokenizer.chat_template = CHAT_TEMPLATE.replace("PLACEHOLDER", facts.get("placed", placeholder))
    kind: Any = CONFIG_MAPPING[family]
    fields = kind().to_dict()
    image = ids.get("<image>", ids[placeholder])
    names = {"image_token_index": image, "image_token_id": image, "boi_token_index": ids[placeholder]}
    names |= {f"{name}_token_id": ids.get(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    names |= {"video_token_id": ids.get("<|video_pad|>"), "eoi_token_index": ids.get("<eoi>")}
    config = kind(
        text_config={"vocab_size": len(tokenizer), **_TEXT, **facts.get("text", {})},
        vision_config=(_VISION if "depth" not in facts.get("vision", {}) else {}) | facts.get("vision", {}),
        tie_word_embeddings=False,
        **{name: token for name, token in names.items() if name in fields},
        **facts.get("model", {}),
    )
    torch.manual_seed(0)
    model: Any = AutoModelForImageTextToText.from_config(config).float()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "norm" not in name:  # some projectors begin at zero
            nn.init.normal_(parameter, std=SPREAD)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = EOS_ID, PAD_ID
    model.save_pretrained(directory)
    if family in ("llava", "gemma3", "paligemma"):
        _name_as_on_the_hub(directory)
    tokenizer.save_pretrained(directory)
    name, settings = facts["images"]
    getattr(transformers, name)(**settings).save_pretrained(directory)
    if more := facts.get("processor"):
        (directory / "processor_config.json").write_text(json.dumps(more))
    (directory / IMAGES).mkdir()
    rng = np.random.default_rng(0)
    for width, height in SIZES:
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(data, "PNG")
        (directory / IMAGES / digest_of(data.getvalue())).write_bytes(data.getvalue())
    return directory


def _name_as_on_the_hub(directory: Path) -> None:
    """Name the weights of a CLIP or SigLIP tower as vendors' checkpoints do, which vLLM reads too."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    names = {name: re.sub(r"^vision_tower\.(?=(embeddings|encoder|pre_layrnorm|post_layernorm)\.)",
                          "vision_tower.vision_model.", name) for name in tensors}  # fmt: skip
    save_file({names[name]: tensor for name, tensor in tensors.items()}, path, {"format": "pt"})


def has_pictures(directory: Path) -> bool:
    """Return whether make_tiny_seeing has made this directory."""
    return (directory / IMAGES).is_dir()


def make_seeing_batch(directory: Path) -> Batch:
    """Make 9 sequences of 3 prompts, for the model of a directory: with two pictures, with one, without."""
    rng, reader = np.random.default_rng(0), PictureReader(directory)
    digests = sorted(os.listdir(directory / IMAGES))
    groups: list[Group] = []
    for slot, places in enumerate(((1, 5), (0,), ())):
        shown = digests[: len(places)] if slot == 0 else digests[2 : 2 + len(places)]
        words = rng.integers(3, 90, 12).tolist()
        for place in places:
            words.insert(place, reader.placeholder)
        read = [reader.read((directory / IMAGES / digest).read_bytes()) for digest in shown]
        prompt, ranges = reader.expanded(words, read)
        pictures = [
            Picture(digest, place.start, place.stop) for digest, place in zip(shown, ranges, strict=True)
        ]
        samples: list[Sample] = []
        for reward in (0.0, 1.0, 0.5):
            ids = np.array([*prompt, *rng.integers(3, 90, int(rng.integers(2, 20)))], np.int32)
            mask = (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)
            engine = (mask * rng.uniform(-5, -4, len(ids))).astype(np.float32)
            samples.append(Sample(ids, mask, engine, "stop", text="", reward=reward, pictures=pictures))
        groups.append(Group(slot, f"task-{slot}", "", samples))
    return build_batch(groups, manifest_sha256="m", policy="p", temperature=1.0, seed=7)
