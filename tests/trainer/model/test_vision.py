"""What is no text of a model: by its modules where it is loaded, by names of tensors where memory is told."""

from math import prod
from pathlib import Path

import pytest
import torch

from rollout.engines.model_dir import tensor_names
from scripts.tiny_seeing_models import FAMILIES, make_tiny_seeing
from trainer.memory import Shape
from trainer.model.slices import blank_model
from trainer.model.vision import vision_modules, vision_parameters


@pytest.mark.parametrize("family", FAMILIES)
def test_tower_and_projector_are_known_by_modules_and_by_names(family: str, tmp_path: Path) -> None:
    directory = make_tiny_seeing(family, tmp_path / family)
    model, _ = blank_model(directory, torch.float32)
    vision, modules = vision_parameters(model), vision_modules(model)
    sizes = {name: prod(shape) for name, shape in ((n, p.shape) for n, p in model.named_parameters())}
    text = {name for name in sizes if ".layers." in name and "vision" not in name and "visual" not in name}
    assert vision and not text & vision.keys() and "lm_head.weight" not in vision
    assert set(vision) == {name for name in sizes if name.startswith(tuple(f"{m}." for m in modules))}
    shape = Shape.from_tensors({name: shape for name, (_, shape) in tensor_names(directory).items()})
    assert shape.frozen == sum(sizes[name] for name in vision)
    assert shape.all == sum(sizes.values())
