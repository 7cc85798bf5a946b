"""Pictures in further turns: the engine, the sample and the trainer agree on each of them."""

import asyncio
import base64
import io
import shutil
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp.test_utils import TestServer
from PIL import Image

from rollout.engines.answers import EngineFacts, ExpansionChanged, RequestRefused
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion, ToolCall
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server import EmbeddedServer
from rollout.engines.model_facts import placeholder
from rollout.environments import policy as policies
from rollout.environments.chat import ChatTemplate
from rollout.environments.environment import resolve_environment, serve
from rollout.environments.policy import Episode, Policy
from rollout.environments.text_gym import TextGym
from rollout.environments.thinking import think_and_answer
from rollout.origin import Sampling
from rollout.pictures import digest_of, pictures_in, size_of
from rollout.storage import files
from rollout.tasks.task_set import load_tasks
from rollout.trajectory import Sample
from scripts.tiny_seeing_models import make_tiny_seeing
from tests.browser import CHROMIUM
from tests.faultfs import FaultFs, unavailable
from tests.rollout.scripted import Agent
from tests.trainer.model.test_pictures import SETTINGS, Seen, batch_of, learner_of, microbatches, mismatch
from trainer.batch.packing import Packing, plan_step
from trainer.model import tiny_seeing
from trainer.model.learner import build_learner
from trainer.model.pictures import PictureFault, RunPictures

PLACEHOLDER, PICTURE_TOKENS = 99, 17
SAMPLING = Sampling(n=6, max_tokens=24)
SHARED = Packing(pairs_per_token=768.0)


def painted(colour: int) -> np.ndarray:
    """(32, 32, 3) uint8: another picture for each number."""
    rows, columns = np.mgrid[:32, :32]
    shape = (rows * (1 + colour % 3) + columns * (1 + colour % 5)) % 16 < 8
    return np.where(shape[..., None], (40 * colour % 256, 90, 255 - 30 * colour % 256), 255).astype(np.uint8)


def png(colour: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(painted(colour)).save(file, "PNG")
    return file.getvalue()


def shows(*pictures: Any, text: str = "?", role: str = "user") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": role, "content": [*parts, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("seeing") / "tiny"
    tiny_seeing.build(0, 0, model)
    return model


def with_policy(
    model: Path, images: Path, work: Callable[[Policy], Awaitable[Any]], sampling: Sampling = SAMPLING
) -> Any:
    """What `work` returns, whose policy is a real engine in float64."""

    async def main() -> Any:
        engine = EmbeddedEngine(model, dtype=torch.float64, max_batch=64)
        engine.start()
        facts = EngineFacts(placeholder=placeholder(model) or -1)
        async with (
            TestServer(EmbeddedServer(engine, str(model), "v").app()) as server,
            EngineClient(str(server.make_url("")).rstrip("/"), images=images, facts=facts) as client,
        ):
            return await work(Policy(client, sampling, 7))

    return asyncio.run(main())


def played(
    model: Path, images: Path, play: Callable[[Episode, int], Awaitable[Any]], **more: Any
) -> list[Any]:
    """What `play` returns of each sample."""

    async def work(policy: Policy) -> list[Any]:
        plays = [play(policy.episode(j), j) for j in range(policy.sampling.n)]
        return await asyncio.gather(*plays, return_exceptions=True)

    return with_policy(model, images, work, **more)


async def three_turns(episode: Episode, j: int) -> Sample:
    """The same picture for all, another one for each, and a turn without."""
    await episode.generate(shows(png(0), text="What do you see? " * 8), max_tokens=6)
    await episode.generate(shows(painted(1 + j), text="Now?", role="tool"), max_tokens=6)
    await episode.generate([{"role": "user", "content": "Sure?"}], max_tokens=6)
    return episode.sample()


@pytest.fixture(scope="module")
def seen(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    images = tmp_path_factory.mktemp("run") / "images"
    return Seen(model, images, [], [played(model, images, three_turns)])


@pytest.mark.parametrize("packing", [Packing(several=False), Packing(), SHARED])
def test_engine_and_trainer_compute_the_same_in_each_turn_and_exchanged_pictures_are_noticed(
    seen: Seen, packing: Packing
) -> None:
    learner, plan = learner_of(seen), microbatches(batch_of(seen.groups), packing)
    exchanged = []
    for part in plan:
        assert mismatch(learner, part) < 1e-5
        assert part.pictures is not None
        names = list(dict.fromkeys(digest for digest, _, _ in part.pictures))
        others = dict(zip(names, [*names[1:], names[0]], strict=True))
        wrong = replace(part, pictures=[(others[name], *at) for name, *at in part.pictures])
        if len(names) > 1:
            exchanged.append(mismatch(learner, wrong))
    assert exchanged and min(exchanged) > 1e-3
    if packing is SHARED:  # though their later pictures differ
        assert any(part.segments is not None for part in plan)
        assert sum(
            digest == digest_of(png(0)) for part in plan for digest, _, _ in part.pictures or ()
        ) < len(seen.groups[0])


def test_sample_lists_the_pictures_of_all_turns_which_are_files(seen: Seen) -> None:
    (samples,) = seen.groups
    assert sum(len(sample.pictures) == 2 for sample in samples) >= 4  # whose policy writes no placeholder
    for j, sample in enumerate(samples):
        if len(sample.pictures) < 2:
            continue
        first, second = sample.pictures
        assert (first.digest, first.begin, first.end) == (digest_of(png(0)), 0, PICTURE_TOKENS)
        data = (seen.images / second.digest).read_bytes()
        assert digest_of(data) == second.digest
        assert (np.asarray(Image.open(io.BytesIO(data))) == painted(1 + j)).all()
        assert set(sample.token_ids[second.begin : second.end]) == {PLACEHOLDER}
        assert (
            second.end - second.begin == PICTURE_TOKENS
            and not sample.loss_mask[second.begin : second.end].any()
        )
        assert [turn.text for turn in sample.turns if turn.role == "tool"] == [
            f"[image {second.digest[:8]}]Now?"
        ]
        assert len(sample.generated_turns) == 3


def test_another_node_makes_the_same_trajectory(seen: Seen, tmp_path: Path) -> None:
    again = played(seen.model, tmp_path / "images", three_turns)
    for sample, other in zip(seen.groups[0], again, strict=True):
        assert (sample.token_ids == other.token_ids).all() and sample.pictures == other.pictures
        assert (sample.logprobs == other.logprobs).all()


def test_template_that_wants_lists_of_parts_shows_a_turn_of_words_too(model: Path, tmp_path: Path) -> None:
    """As LLaVA's: of a content that is a text it shows nothing."""
    shutil.copytree(model, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}:"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
        "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}"
        "{% endfor %};{% endfor %}"
    )

    async def play(episode: Episode, j: int) -> str:
        await episode.generate([{"role": "user", "content": "Words"}], max_tokens=1)
        episode.turns[0].token_ids[:] = [5]
        await episode.generate(shows(png(1)), max_tokens=1)
        episode.turns[1].token_ids[:] = [5]
        await episode.generate([{"role": "user", "content": "Sure?"}], max_tokens=1)
        return await episode._policy.detokenize(episode.asked_ids[:-1])

    (text,) = played(tmp_path / "tiny", tmp_path / "images", play, sampling=Sampling(max_tokens=4))
    assert text == "user:Words;2;user:<image>?;2;user:Sure?;"


GYM = """
import numpy as np

class Squares:
    def reset(self, *, seed=None, options=None):
        self.at = seed % 24
        return self.seen(), {}

    def seen(self):
        screen = np.full((32, 32, 3), 255, np.uint8)
        screen[self.at : self.at + 8, :8] = 0
        return {"goal": "up?", "screen": screen}

    def step(self, action):
        self.at = (self.at + 3) % 24
        return self.seen(), 1.0, False, False, {}
"""


def test_observations_of_a_gym_are_shown(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "squares_gym.py").write_text(GYM)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    tasks = load_tasks("gym:squares_gym:Squares,size=2", seed=0, split="train")
    (task,) = tasks.tasks
    (first,) = pictures_in(task["messages"])
    assert tasks.pictures is not None and size_of(tasks.pictures.read(first)) == (32, 32)
    environment = TextGym("squares_gym:Squares")
    sampling = Sampling(n=2, max_tokens=8, stop=tuple("abcdefghijklm"))
    samples = with_policy(
        model, tmp_path / "images", lambda policy: environment(task, policy, sampling), sampling
    )
    environment._pool.close()
    for sample in samples:
        assert sample.fault is None and sample.pictures[0].digest == first
        assert len({picture.digest for picture in sample.pictures}) == len(sample.pictures)
    assert max(len(sample.pictures) for sample in samples) > 1


def test_storage_that_fails_and_publishes_late_loses_and_changes_no_sample(
    seen: Seen, tmp_path: Path
) -> None:
    """An engine's client of one mount, and the trainer's of another one, once it sees the part."""
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as shared:
        one, two = (mount.path for mount in shared.mounts)
        shared.set(error_rate=0.03, lie_rate=0.03)
        shared[1].set(publishes_s=2.0)
        samples = played(seen.model, one / "images", three_turns)
        files.publish(one / "part", b"made")
        for sample, calm in zip(samples, seen.groups[0], strict=True):
            assert (sample.token_ids == calm.token_ids).all() and sample.pictures == calm.pictures
        while "part" not in files.listing(two):
            time.sleep(0.05)
        learner = learner_of(Seen(seen.model, two / "images", [], []))
        for part in microbatches(batch_of([samples]), Packing()):
            assert mismatch(learner, part) < 1e-5
        digests = {picture.digest for sample in samples for picture in sample.pictures}
        left = {path.name for path in (shared.backing / "images").iterdir()} - digests
        assert all(files.is_temporary(name) for name in left)  # a lie about what it has removed


PAGE = """<!doctype html><title>A shop</title><body style="background: #ddd"><script>
document.onclick = event => {
    document.title = event.clientX < 300 ? "bought" : "left"
    document.body.style.background = `rgb(${event.clientX % 256}, ${event.clientY % 256}, 90)`
}
</script>"""
TEMPLATE = (
    "{% if tools %}Tools: {{ tools[0].function.name }}. {% endif %}{% for message in messages %}"
    "{{ message['role'] }}:{% for part in message['content'] if message['content'] is not string %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{{ message['content'] if message['content'] is string }};{% endfor %}"
)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_agent_sees_what_its_clicks_do_in_a_browser(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The words are those of a model that has learned nothing; each is read as a call, of a spot that
    follows from its tokens.
    """
    (tmp_path / "my_browser.py").write_text(Path(__file__).with_name("my_browser.py").read_text())
    (tmp_path / "page.html").write_text(PAGE)
    shutil.copytree(model, tmp_path / "tiny")
    (tmp_path / "tiny" / "chat_template.jinja").write_text(TEMPLATE)

    async def read(template: ChatTemplate, turn: Completion) -> Completion:
        (tool,) = template._tools
        spot = {"x": 5 * turn.token_ids[0], "y": 2 * turn.token_ids[-1]}
        return replace(turn, calls=[ToolCall("abcdefghi", tool["function"]["name"], spot)])

    monkeypatch.setattr(ChatTemplate, "read", read)
    sampling = Sampling(n=2, max_tokens=12, stop=tuple("0123456789abcdefghijklmnopqrs"), tool_parser="hermes")
    task = {"id": "1", "prompt": "Buy", "page": (tmp_path / "page.html").as_uri(), "answer": "bought"}
    browsers = resolve_environment(f"{tmp_path}/my_browser.py:browsers")
    samples = with_policy(
        tmp_path / "tiny", tmp_path / "images", lambda policy: browsers(task, policy, sampling), sampling
    )
    for sample in samples:
        assert len(sample.pictures) >= 2
        assert len({picture.digest for picture in sample.pictures}) >= 2  # it has seen what it did
        for picture in sample.pictures:
            assert size_of((tmp_path / "images" / picture.digest).read_bytes())[0] > 300
    assert {sample.reward for sample in samples} <= {0.0, 1.0}
    learner = learner_of(Seen(tmp_path / "tiny", tmp_path / "images", [], []))
    for part in microbatches(batch_of([samples]), Packing()):
        assert mismatch(learner, part) < 1e-5


def test_reasoning_about_a_picture_may_be_ended(seen: Seen, tmp_path: Path) -> None:
    sampling = Sampling(n=3, max_tokens=12, thinking_tokens=4, reasoning_end="</think>")

    async def work(policy: Policy) -> list[Sample]:
        return await think_and_answer(shows(png(1)), policy, sampling)

    samples = with_policy(seen.model, tmp_path / "images", work, sampling)
    assert all([picture.digest for picture in sample.pictures] == [digest_of(png(1))] for sample in samples)
    assert max(sample.metrics["reasoning_cut"] for sample in samples) == 1.0
    learner = learner_of(Seen(seen.model, tmp_path / "images", [], []))
    for part in microbatches(batch_of([samples]), Packing()):
        assert mismatch(learner, part) < 1e-5


@pytest.mark.parametrize("name", ["tensor_parallel_size", "context_parallel"])
def test_pictures_that_the_start_could_not_know_of_are_refused_by_layouts_without(
    seen: Seen, name: str
) -> None:
    learner = build_learner(seen.model, torch.device("cpu"), SETTINGS)
    learner.layout = replace(learner.layout, **{name: 2})
    with pytest.raises(PictureFault, match=f"trainer.{name}=2 does not go with pictures of samples; give 1"):
        learner.see(RunPictures(seen.model, seen.images), True)


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "idefics3"]
)  # positions of its own; a picture of many tokens
def test_another_family_computes_the_same_in_each_turn(family: str, tmp_path: Path) -> None:
    model = make_tiny_seeing(family, tmp_path / family)
    samples = played(model, tmp_path / "images", three_turns, sampling=Sampling(n=3, max_tokens=18))
    assert {2} <= {len(sample.pictures) for sample in samples}
    learner = learner_of(Seen(model, tmp_path / "images", [], []))
    batch = batch_of([samples])
    for part in plan_step(batch, range(len(batch)), [1.0], 0, 4096, learner.arrangement.packing):
        assert mismatch(learner, part) < 1e-5


def test_turn_with_the_token_for_a_picture_is_the_last_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "warn_once", pytest.fail)  # the engine is not asked what it would refuse

    async def play(episode: Episode, j: int) -> Sample:
        while episode.tokens_left > 0 and len(episode.turns) < 8:
            await episode.generate(shows(png(j)), max_tokens=8)
        return episode.sample()

    samples = played(model, tmp_path / "images", play, sampling=Sampling(n=8, max_tokens=32))
    written = [[PLACEHOLDER in sample.token_ids[turn.begin : turn.end] for turn in sample.generated_turns]
               for sample in samples]  # fmt: skip
    last = [turns.index(True) for turns in written if True in turns]
    assert last
    for sample, turns in zip(samples, written, strict=True):
        if True in turns[:-1]:
            assert sample.finish_reason == "length"
            assert all(turn.begin == turn.end for turn in sample.generated_turns[turns.index(True) + 1 :])
            assert len(sample.pictures) == turns.index(True) + 1
    learner = learner_of(Seen(model, tmp_path / "images", [], []))
    for part in microbatches(batch_of([samples]), SHARED):
        assert mismatch(learner, part) < 1e-5


def test_pictures_count_in_the_context(model: Path, tmp_path: Path) -> None:
    async def play(episode: Episode, j: int) -> Sample:
        for _ in range(8):
            turn = await episode.generate(shows(*[png(1)] * 16), max_tokens=2)
            if turn.finish_reason == "length" and not turn.token_ids:
                break
        return episode.sample()

    for sample in played(model, tmp_path / "images", play, sampling=Sampling(n=2, max_tokens=99)):
        shown = len(sample.pictures)
        assert sample.finish_reason == "length" and (shown in (16, 32, 48) or PLACEHOLDER in sample.token_ids)
        assert 48 * PICTURE_TOKENS < 1024 < 64 * PICTURE_TOKENS and len(sample.token_ids) <= 1024


def test_however_an_environment_gives_a_picture_it_is_shown(model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    uri = f"data:image/png;base64,{base64.b64encode(png(1)).decode()}"
    ways = [
        shows(png(1)),
        shows(tmp_path / "a.png"),
        shows(str(tmp_path / "a.png")),
        shows(uri),
        shows(Image.fromarray(painted(1))),
        shows(painted(1)),
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "?"}],
            }
        ],
    ]

    async def play(episode: Episode, j: int) -> Sample:
        await episode.generate([{"role": "user", "content": "Look: "}], max_tokens=1)
        await episode.generate(ways[j], max_tokens=1)
        return episode.sample()

    samples = played(model, tmp_path / "images", play, sampling=Sampling(n=len(ways), max_tokens=4))
    assert {picture.digest for sample in samples for picture in sample.pictures} == {digest_of(png(1))}
    assert sum(bool(sample.pictures) for sample in samples) > len(ways) // 2
    assert [path.name for path in (tmp_path / "images").iterdir()] == [digest_of(png(1))]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (shows(b"GIF"), "content: is no PNG"),
        (
            shows(painted(1)[..., 0]),
            r"an array \(32, 32\) of uint8; it must be \(height, width, 3\)",
        ),
        (shows(painted(1) / 255), "of float64; it must be"),
        (shows("none.png"), "none.png: No such file"),
        (shows("http://a/b.png"), "nothing is fetched"),
        (shows(png(1), role="assistant"), "in a message of the assistant; give it to the user's"),
        (shows(None), "a part of the type image shows none"),
        (shows(png(1), text="<image>"), "gives them 2 places"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_reason(
    model: Path, tmp_path: Path, message: Any, reason: str
) -> None:
    async def play(episode: Episode, j: int) -> None:
        await episode.generate([{"role": "user", "content": "Look: "}], max_tokens=1)
        episode.turns[0].token_ids[:] = [5]  # whatever it has said
        with pytest.raises(RequestRefused, match=reason):
            await episode.generate(message)

    assert played(model, tmp_path / "images", play, sampling=Sampling(max_tokens=4)) == [None]


def test_engine_that_makes_other_tokens_of_earlier_pictures_is_a_fault_with_a_name(
    model: Path, tmp_path: Path
) -> None:
    async def play(policy: Policy) -> None:
        episode = policy.episode()
        turn = await episode.generate(shows(png(1)), max_tokens=2)
        episode.turns[0] = replace(turn, prompt_ids=[7, *turn.prompt_ids[1:]], token_ids=[5, 6])
        with pytest.raises(ExpansionChanged, match="turn 1: the engine makes other tokens of the 1 pictures"):
            await episode.generate(shows(png(2)), max_tokens=2)

    with_policy(model, tmp_path / "images", play)


def test_agent_shows_pictures_in_its_requests(seen: Seen, tmp_path: Path) -> None:
    """It sends the whole conversation each time; a path is not read for it."""

    def asks(colour: int) -> dict[str, Any]:
        url = f"data:image/png;base64,{base64.b64encode(png(colour)).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]
        return {"role": "user", "content": parts}

    async def work(policy: Policy) -> list[Sample]:
        async with aiohttp.ClientSession() as http, serve(policy, 1) as session:
            agent = Agent(session, http)
            said = await agent.ask([asks(1)], max_tokens=4)
            await agent.ask([*said, asks(2)], max_tokens=4)
            (tmp_path / "a.png").write_bytes(png(1))
            for url in (str(tmp_path / "a.png"), "http://127.0.0.1/a.png", digest_of(png(1))):
                parts = [{"type": "image_url", "image_url": {"url": url}}]
                status, text = await agent.post({"messages": [{"role": "user", "content": parts}]})
                assert status == 400 and "must be data:image/" in text
            return session.samples()

    (sample,) = with_policy(seen.model, tmp_path / "images", work)
    assert [picture.digest for picture in sample.pictures] == [digest_of(png(1)), digest_of(png(2))]
    learner = learner_of(Seen(seen.model, tmp_path / "images", [], []))
    (part,) = microbatches(batch_of([[sample, replace(sample)]]), Packing())
    assert mismatch(learner, part) < 1e-5
