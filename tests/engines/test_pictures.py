"""Pictures shown to every engine: it computes what the trainer does of the same files."""

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rollout.engines.admin import WrongWeights
from rollout.engines.answers import RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.engines.kinds.choice import engine_kind
from rollout.engines.model_facts import placeholder
from rollout.environments.policy import Policy
from rollout.environments.turns import sample_of
from rollout.origin import Sampling
from rollout.settings import EngineSettings
from rollout.tasks.pictures import TaskPictures
from rollout.trajectory import Group, Picture, Sample
from tests.engines.engines import KINDS, Engine, serving
from tests.models import CONTEXT
from trainer.batch.building import build_batch
from trainer.batch.packing import Microbatch, Packing, plan_step
from trainer.model import tiny_seeing
from trainer.model.learner import build_learner
from trainer.model.pictures import RunPictures
from trainer.settings import TrainerSettings

TOLERANCE = 1e-5
SAMPLING = Sampling(n=4, max_tokens=12, seed=3)


@dataclass
class Seeing:
    """An engine that sees, its model, and files of pictures."""

    engine: Engine
    model: Path
    other: Path
    """A model of this architecture with other weights."""
    images: Path
    digests: list[str]
    """Digests of these files: two of the size that the model takes, one that has to be made smaller."""

    def ask(self, prompt: Any, sampling: Sampling = SAMPLING, **asked: Any) -> list[Completion]:
        return self.play(lambda policy: policy.generate(prompt, n=sampling.n, **asked), sampling)

    def play(self, play: Callable[[Policy], Awaitable[Any]], sampling: Sampling = SAMPLING) -> Any:
        async def main() -> Any:
            facts = engine_kind(EngineSettings(kind=self.engine.kind), 0).facts(self.engine.admin, None)
            renderer = None if facts.renders_pictures else LocalTokenizer(self.model)
            facts = replace(facts, placeholder=placeholder(self.model) or -1)
            client = EngineClient(self.engine.url, facts=facts, images=self.images, renderer=renderer)
            async with client:
                return await play(Policy(client, sampling, 3))

        return asyncio.run(main())


def shown(*parts: str) -> list[dict[str, Any]]:
    """A message of texts and of pictures, which have 64 letters."""
    content = [{"type": "image", "image": part} if len(part) == 64 else {"type": "text", "text": part}
               for part in parts]  # fmt: skip
    return [{"role": "user", "content": content}]


def make_models(directory: Path) -> tuple[Path, Path]:
    """Two models whose weights are all far from what they are initialised with. They differ in what looks at
    pictures.
    """
    tiny_seeing.build(0, 0, directory / "first")
    models = directory / "first", directory / "other"
    models[1].mkdir()
    for path in models[0].iterdir():
        (models[1] / path.name).write_bytes(path.read_bytes())
    torch.manual_seed(0)
    tensors = load_file(models[0] / "model.safetensors")
    for model, parts in zip(models, ("", ("vision_tower", "multi_modal")), strict=True):
        for name in tensors:
            if name.startswith(parts):
                tensors[name] = tensors[name] + 0.1 * torch.randn_like(tensors[name])
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return models


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    directory = tmp_path_factory.mktemp("seeing")
    models, images, pictures = make_models(directory), directory / "images", TaskPictures()
    rng, digests = np.random.default_rng(0), list[str]()
    for size in ((32, 32), (32, 32), (100, 60)):
        file = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8))
        small.resize(size).save(file, "PNG")
        digests.append(pictures.take(file.getvalue(), None))
        pictures.publish(digests[-1], images)
    with serving(request.param, models[0], directory / "log") as engine:
        engine.admin.name_policy("first")
        assert engine.admin.prove() == []
        yield Seeing(engine, *models, images, digests)


def mismatch(
    seeing: Seeing, answers: Sequence[Completion | Sample], model: Path, exchange: bool = False
) -> float:
    """The largest difference between the trainer's logprobs and the engine's."""
    samples = [answer if isinstance(answer, Sample) else sample_of(answer) for answer in answers]
    for number, sample in enumerate(samples):
        sample.reward = float(number)
    batch = build_batch([Group(0, "0", "", samples)], manifest_sha256="", policy="", temperature=1.0, seed=0)
    learner = build_learner(model, torch.device("cpu"), TrainerSettings())
    learner.pictures = RunPictures(model, seeing.images)
    worst = 0.0
    for part in plan_step(batch, range(len(batch)), [1.0], 0, 4096, Packing(several=False)):
        asked = exchanged(part) if exchange else part
        with torch.no_grad():
            found = learner.logprobs(asked)[0] - torch.from_numpy(part.engine_logprobs)
        worst = max(worst, float(found.abs().max()))
    return worst


def exchanged(part: Microbatch) -> Microbatch:
    assert part.pictures is not None
    names = [digest for digest, _, _ in part.pictures]
    return replace(
        part, pictures=[(name, *at) for name, (_, *at) in zip(names[::-1], part.pictures, strict=True)]
    )


def test_logprobs_of_two_pictures_are_the_trainers_and_exchanged_ones_are_noticed(seeing: Seeing) -> None:
    first, _, large = seeing.digests
    completions = seeing.ask(shown("Which of ", first, large, "?"))
    begin = len("Which of ")
    for completion in completions:
        assert completion.pictures == [
            Picture(first, begin, begin + 17),
            Picture(large, begin + 17, begin + 34),
        ]
        assert completion.prompt_ids[begin : begin + 34] == [99] * 34 and len(completion.prompt_ids) == 44
    assert mismatch(seeing, completions, seeing.model) < TOLERANCE
    assert mismatch(seeing, completions, seeing.model, exchange=True) > 1e-3


def test_other_weights_look_at_the_same_picture_anew_and_are_proved(seeing: Seeing) -> None:
    prompt = shown(*seeing.digests[:2], "What?")
    assert mismatch(seeing, seeing.ask(prompt), seeing.model) < TOLERANCE
    try:
        seeing.engine.admin.reload(seeing.other, "other")
        assert seeing.engine.admin.prove(seeing.other) == []
        assert mismatch(seeing, seeing.ask(prompt), seeing.other) < TOLERANCE
        with pytest.raises(WrongWeights):
            seeing.engine.admin.prove(seeing.model)
    finally:
        seeing.engine.admin.reload(seeing.model, "first")


def test_completions_end_at_the_context_at_a_stop_string_and_with_the_likeliest_tokens(
    seeing: Seeing,
) -> None:
    context = CONTEXT if seeing.engine.kind == "vllm" else 1024
    prompt = shown(seeing.digests[0], "?")
    long = shown(seeing.digests[0], "a" * (context - 27))
    for completion in seeing.ask(long, Sampling(n=8, max_tokens=2000)):
        is_cut = len(completion.prompt_ids) + len(completion.token_ids) == context
        assert completion.finish_reason == ("length" if is_cut else "stop")
    digits = tuple("0123456789abcdefghijklm")
    for completion in seeing.ask(prompt, Sampling(n=4, max_tokens=60, stop=digits)):
        if completion.finish_reason == "stop" and completion.stop_string:
            assert completion.stop_string in digits and not set(completion.text) & set(digits)
    (completion,) = seeing.ask(prompt, Sampling(max_tokens=3), more={"logprobs": 0})
    assert len(completion.likely) == len(completion.token_ids)
    assert mismatch(seeing, [completion] * 2, seeing.model) < TOLERANCE


def test_further_turn_shows_another_picture_behind_the_first_one(seeing: Seeing) -> None:
    async def play(policy: Policy) -> list[Sample]:
        episodes = [policy.episode(j) for j in range(6)]
        for episode in episodes:
            await episode.generate(shown("Is ", seeing.digests[0], " red?"), max_tokens=2)
            await episode.generate(shown(seeing.digests[2], "And this?"), max_tokens=2)
        written = [episode.turns[0].token_ids for episode in episodes]
        return [episode.sample() for episode, ids in zip(episodes, written, strict=True) if 99 not in ids]

    samples = seeing.play(play)
    assert samples
    for sample in samples:
        assert [picture.digest for picture in sample.pictures] == [seeing.digests[0], seeing.digests[2]]
    assert mismatch(seeing, samples, seeing.model) < TOLERANCE


def test_placeholder_that_stands_for_no_picture_is_a_token_as_any_other(seeing: Seeing) -> None:
    """As a policy may write it. Only vLLM takes it in a prompt."""
    if seeing.engine.kind == "vllm":
        completions = seeing.ask([10, 99, 11, 99, 12], pictures=seeing.digests[:1])
        assert completions[0].prompt_ids == [10, *[99] * 17, 11, 99, 12]
        assert mismatch(seeing, completions, seeing.model) < TOLERANCE


def test_prompt_that_is_too_long_and_places_without_a_picture_are_refused(seeing: Seeing) -> None:
    first = seeing.digests[0]
    with pytest.raises(RequestRefused, match=r"context|maximum"):
        seeing.ask(shown(first, "a" * 1100))
    with pytest.raises(RequestRefused, match=r"they show 1 pictures, and .* gives them 2 places"):
        seeing.ask(shown(first, "<image>"))
    assert len(seeing.ask(shown(first))) == 4
