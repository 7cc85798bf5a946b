"""Families that are shown pictures: the embedded engine and the trainer compute the same of each."""

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollout.origin import Sampling
from rollout.pictures import digest_of, pictures_in
from scripts.tiny_seeing_models import FAMILIES, make_tiny_seeing
from tests.trainer.model.test_pictures import Seen, asked, batch_of, learner_of, mismatch
from trainer.batch.packing import plan_step

SIZES = (20, 24), (20, 24), (40, 12)
ARRANGED = {"gemma3": (True, False), "paligemma": (False, False)}
"""Whether a row holds several sequences with pictures, and whether they share prompts; both in others."""


def saved_pictures(images: Path) -> list[str]:
    """The digests of pictures of noise."""
    images.mkdir()
    rng, digests = np.random.default_rng(0), list[str]()
    for width, height in SIZES:
        data = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(data, "PNG")
        digests.append(digest_of(data.getvalue()))
        (images / digests[-1]).write_bytes(data.getvalue())
    return digests


def task(words: str, pictures: Sequence[str]) -> dict[str, Any]:
    """A task that shows pictures, each followed by words."""
    parts = [[{"type": "image", "image": digest}, {"type": "text", "text": words}] for digest in pictures]
    content = [part for pair in parts for part in pair] or words
    system = {"role": "system", "content": "Look. "}
    return {"id": words, "messages": [system, {"role": "user", "content": content}]}


@pytest.fixture(scope="module", params=[family for family in FAMILIES if family != "paligemma"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    if request.param == "mistral3":
        pytest.importorskip(
            "torchvision"
        )  # transformers imports it with the processor, and uses nothing of it
    directory = tmp_path_factory.mktemp(request.param)
    model = make_tiny_seeing(request.param, directory / request.param)
    first, second, third = saved_pictures(directory / "images")
    tasks = [task("and", [first, second]), task("What is it?", [third]), task("Why?", [])]
    return Seen(
        model,
        directory / "images",
        tasks,
        asked(model, directory / "images", tasks, Sampling(n=3, max_tokens=6)),
    )


def test_engine_and_trainer_compute_the_same_and_exchanged_pictures_are_noticed(seen: Seen) -> None:
    learner = learner_of(seen)
    packing = learner.arrangement.packing
    assert (packing.several, bool(packing.pairs_per_token)) == ARRANGED.get(seen.model.name, (True, True))
    (part,) = plan_step(batch_of(seen.groups), range(9), [1.0], 0, 2000, packing)
    assert mismatch(learner, part) < 1e-5
    assert part.pictures is not None
    first, second = pictures_in(seen.tasks[0]["messages"])
    others = {first: second, second: first}
    exchanged = [(others.get(digest, digest), *at) for digest, *at in part.pictures]
    assert mismatch(learner, replace(part, pictures=exchanged)) > 1e-3
