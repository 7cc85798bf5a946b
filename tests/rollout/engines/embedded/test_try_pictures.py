"""A model is tried with a picture before the start, without its weights."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.engines.embedded.try_pictures import trying, why_no_pictures
from scripts.tiny_seeing_models import make_tiny_seeing


@pytest.fixture(scope="module")
def reason() -> Callable[[str], str]:
    return trying()


def test_model_that_may_be_shown_pictures_is_tried_in_another_process(tmp_path: Path) -> None:
    model = make_tiny_seeing("qwen2_vl", tmp_path / "model")
    (model / "model.safetensors").unlink()
    assert why_no_pictures(model) == ""


def test_what_a_model_lacks_for_pictures_is_said_in_one_line(
    tmp_path: Path, reason: Callable[[str], str]
) -> None:
    model = make_tiny_seeing("gemma3", tmp_path / "model")
    assert reason(str(model)) == ""
    facts = json.loads((model / "processor_config.json").read_text())
    (model / "processor_config.json").write_text(json.dumps(facts | {"image_seq_length": "four"}))
    assert reason(str(model)).startswith("TypeError: ")
    if not find_spec("torchvision"):
        mistral = make_tiny_seeing("mistral3", tmp_path / "mistral")
        assert reason(str(mistral)).startswith("ImportError: PixtralProcessor requires the Torchvision")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config["text_config"]))
    assert reason(str(model)) == "a Gemma3ForCausalLM of transformers has no part for them"
