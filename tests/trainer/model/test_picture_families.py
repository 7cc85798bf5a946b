"""Families that are shown pictures: the embedded engine and the trainer compute the same of each."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from rollout.engines.embedded.picture_input import PictureReader
from rollout.origin import Sampling
from rollout.pictures import pictures_in, size_of
from scripts.tiny_seeing_models import FAMILIES, IMAGES, make_tiny_seeing
from tests.trainer.model.test_pictures import Seen, asked, batch_of, learner_of, mismatch
from trainer.batch.packing import plan_step
from trainer.model.packed_sequences import SequenceSeparation

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
"""PaliGemma's processor of transformers makes arrays of tensors."""
APART = {"gemma3": SequenceSeparation.PICTURES}
"""What keeps sequences with pictures apart; in others positions. With older transformers these are enough for
all, but Gemma 3 shares no prompt.
"""


def task(words: str, pictures: Sequence[str]) -> dict[str, Any]:
    """A task that shows pictures, each followed by words."""
    parts = [[{"type": "image", "image": digest}, {"type": "text", "text": words}] for digest in pictures]
    content = [part for pair in parts for part in pair] or words
    system = {"role": "system", "content": "Look. "}
    return {"id": words, "messages": [system, {"role": "user", "content": content}]}


@pytest.fixture(scope="module", params=list(FAMILIES))
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    for family, module in (("mistral3", "torchvision"), ("smolvlm", "num2words")):
        if request.param == family:  # transformers asks for it, and uses nothing of it
            pytest.importorskip(module)
    model = make_tiny_seeing(request.param, tmp_path_factory.mktemp("seen") / request.param)
    images = model / IMAGES
    by_size: dict[tuple[int, int], list[str]] = {}
    for path in images.iterdir():
        by_size.setdefault(size_of(path.read_bytes()), []).append(path.name)
    (third,), (first, second) = sorted(by_size.values(), key=len)
    tasks = [task("and", [first, second]), task("What is it?", [third]), task("Why?", [])]
    return Seen(model, images, tasks, asked(model, images, tasks, Sampling(n=3, max_tokens=6)))


def test_engine_and_trainer_compute_the_same_and_exchanged_pictures_are_noticed(seen: Seen) -> None:
    learner = learner_of(seen)
    packing, apart, name = learner.arrangement.packing, learner.arrangement.separation, seen.model.name
    assert apart in (SequenceSeparation.POSITIONS, APART.get(name)) and packing.several == (
        name != "paligemma"
    )
    assert bool(packing.pairs_per_token) == (packing.several and apart is APART.get(name, apart))
    (part,) = plan_step(batch_of(seen.groups), range(9), [1.0], 0, 2000, packing)
    assert mismatch(learner, part) < 1e-5
    assert part.pictures is not None
    first, second = pictures_in(seen.tasks[0]["messages"])
    others = {first: second, second: first}
    exchanged = [(others.get(digest, digest), *at) for digest, *at in part.pictures]
    assert mismatch(learner, replace(part, pictures=exchanged)) > 1e-3


def test_line_breaks_on_both_sides_of_a_picture_stay_although_those_between_two_are_one_token(
    tmp_path: Path,
) -> None:
    model = make_tiny_seeing("gemma3", tmp_path / "gemma3")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    two, four = tokenizer.convert_tokens_to_ids(["\n\n", "\n\n\n\n"])
    assert tokenizer.encode("\n\n\n\n", add_special_tokens=False) == [four]
    ids = PictureReader(model).example.token_ids
    assert (ids[0], ids[-1]) == (two, two) and len(ids) == 8


@torch.no_grad()
def test_written_token_of_features_is_embedded_as_a_token(seen: Seen) -> None:
    """Its embedding is that of another one here, so it computes what that one does."""
    learner = learner_of(seen)
    assert learner.pictures is not None
    (part,) = plan_step(batch_of(seen.groups[:1]), range(3), [1.0], 0, 2000, learner.arrangement.packing)
    example, other = learner.pictures.example, 40
    token = example.token_ids[example.features[0]]
    weight = learner.scorer.causal.get_input_embeddings().weight
    weight[token] = weight[other]
    written, meant = part.token_ids.copy(), part.token_ids.copy()
    answers = np.unravel_index(part.scored_at[1:4] + 1, written.shape)
    written[answers], meant[answers] = token, other
    scores = [learner.logprobs(replace(part, token_ids=ids))[0] for ids in (written, meant, part.token_ids)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-6, rtol=0)
    assert (scores[0] - scores[2]).abs().max() > 1e-3
