"""Written answers to pictures, as data sets have them: the trainer computes what transformers does."""

import asyncio
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rollout.engines.answers import RequestRefused
from rollout.engines.embedded import local_tokenizer
from rollout.engines.embedded.local_tokenizer import LocalTokenizer
from rollout.environments.demonstration import check_demonstrations, demonstration
from rollout.environments.labelled import check_labels, labelled
from rollout.environments.policy import Policy
from rollout.environments.preference import check_preferences, preference
from rollout.origin import Sampling
from rollout.pictures import pictures_in
from rollout.tasks.task_set import TaskError, TaskSet, load_tasks
from rollout.trajectory import Group, Sample, unfit
from trainer.batch.building import build_batch
from trainer.batch.packing import Packing, plan_step
from trainer.model import tiny_seeing
from trainer.model.learner import build_learner
from trainer.model.pictures import RunPictures
from trainer.settings import TrainerSettings

ASKED = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "colour?"}]}]
WORDS = [{"role": "user", "content": "colour?"}]


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": [{"type": "text", "text": text, "index": None}]}]


ROWS: dict[str, tuple[Any, ...]] = {
    "vsft": (demonstration, check_demonstrations, {"messages": [*ASKED, *said("red")]}, {"red": 1}),
    "prompt and completion": (
        *(demonstration, check_demonstrations, {"prompt": WORDS, "completion": said("red")}, {"red": 1}),
    ),
    "rlaif-v": (
        *(preference, check_preferences),
        {"prompt": ASKED, "chosen": said("red"), "rejected": said("blue")},
        {"red": 1, "blue": 0},
    ),
    "conversations": (
        *(preference, check_preferences),
        {"chosen": [*ASKED, *said("red")], "rejected": [*ASKED, *said("blue")]},
        {"red": 1, "blue": 0},
    ),
    "labels": (
        *(labelled, check_labels),
        {"prompt": ASKED, "completion": said("blue"), "label": False},
        {"blue": 0},
    ),
}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "seeing"
    tiny_seeing.build(0, 0, out)
    return out


class InThisProcess:
    """A pool of none."""

    def __init__(self, make: Callable[[], Callable[..., Any]]) -> None:
        self._function = make()

    def call(self, *arguments: Any, deadline_s: float) -> Any:
        return self._function(*json.loads(json.dumps(arguments)))


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", torch)  # which a process that tokenises does without
        tokenising = InThisProcess(local_tokenizer.tokenizing)
    expanding = InThisProcess(local_tokenizer.expanding)
    monkeypatch.setattr(local_tokenizer, "_pool", lambda: tokenising)
    monkeypatch.setattr(local_tokenizer, "_readers", lambda: expanding)


def png(colour: str) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((32, 32)).convert("RGB").point(
        [k if colour == "red" else 255 - k for k in range(256)] * 3
    ).save(out, "PNG")
    return out.getvalue()


def load(directory: Path, *rows: dict[str, Any]) -> TaskSet:
    (directory / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return load_tasks(str(directory / "rows.jsonl"), seed=0, split="train")


def made(environment: Any, task: dict[str, Any], model: Path, images: Path | None) -> list[Sample]:
    sampling = Sampling(max_tokens=20)
    policy = Policy(LocalTokenizer(model, images), sampling, 0)
    return asyncio.run(environment(task, policy, sampling, (1,)))


@pytest.mark.parametrize("kind", ROWS)
def test_rows_as_published_become_samples_with_the_tokens_of_the_models_own_processor(
    kind: str, seeing: Path, tmp_path: Path
) -> None:
    environment, check, row, answers = ROWS[kind]
    for name in ("red", "blue"):
        (tmp_path / f"{name}.png").write_bytes(png(name))
    tasks = load(tmp_path, *({**row, "images": [f"{name}.png"]} for name in ("red", "blue")))
    check(tasks)
    processor: Any = AutoProcessor.from_pretrained(seeing, backend="pil")
    model: Any = AutoModelForImageTextToText.from_pretrained(seeing)
    groups = list[Group]()
    expected = list[np.ndarray]()
    for number, (task, name) in enumerate(zip(tasks.tasks, ("red", "blue"), strict=True)):
        (shown,) = pictures_in(task["messages"])
        assert tasks.pictures is not None
        tasks.pictures.publish(shown, tmp_path / "images")
        samples = made(environment, task, seeing, tmp_path / "images")
        assert {sample.text: sample.reward for sample in samples} == answers
        picture = Image.open(tmp_path / f"{name}.png")
        for sample in samples:
            inputs = processor(
                text=[f"<image>colour?{sample.text}<eos>"], images=[picture], return_tensors="pt"
            )
            trained = sample.loss_mask == 1
            assert (
                sample.token_ids[:-1].tolist() == inputs["input_ids"][0][: len(sample.token_ids) - 1].tolist()
            )
            assert [(p.digest, p.begin, p.end) for p in sample.pictures] == [(shown, 0, 17)]
            assert not trained[: 17 + len("colour?")].any() and trained[17 + len("colour?") :].all()
            assert unfit(sample, demonstrated=True) is None
            ids = torch.from_numpy(sample.token_ids).long()[None]
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0, :-1]
            taken = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
            expected.append(taken.numpy()[trained[1:]])
        groups.append(Group(number, str(number), "", samples))
    settings = TrainerSettings(advantage="one", clip="likelihood", engine_correction="off")
    batch = build_batch(groups, manifest_sha256="", policy="", temperature=1.0, seed=0, settings=settings)
    learner = build_learner(seeing, torch.device("cpu"), settings)
    learner.pictures = RunPictures(seeing, tmp_path / "images")
    plan = plan_step(batch, range(len(batch)), [1.0], 0, 256, Packing())
    with torch.no_grad():
        computed = np.concatenate([learner.logprobs(part)[0].numpy() for part in plan])
    np.testing.assert_allclose(np.sort(computed), np.sort(np.concatenate(expected)), atol=1e-5)


def test_pictures_make_another_sample_and_a_missing_or_changed_one_is_refused_by_name(
    seeing: Path, tmp_path: Path
) -> None:
    environment, _, row, _ = ROWS["vsft"]
    (tmp_path / "red.png").write_bytes(png("red"))
    (task,) = load(tmp_path, {**row, "images": ["red.png"]}).tasks
    (digest,) = pictures_in(task["messages"])
    for content, reason in ((None, "this picture is missing"), (b"x", "this picture has changed")):
        if content is not None:
            (tmp_path / digest).write_bytes(content)
        with pytest.raises(RequestRefused, match=f"{tmp_path / digest}: {reason}"):
            made(environment, task, seeing, tmp_path)
    (before_any,) = made(environment, task, seeing, None)  # at a start, to look at the words
    assert before_any.pictures == [] and len(before_any.token_ids) == len("<colour?red<")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [*WORDS, {"role": "assistant", "content": [{"type": "image"}]}]},
         "1.content: a picture in a message of the assistant; give it to the user's"),
        ({"prompt": "colour?", "chosen": "red", "rejected": "blue"}, "give it as `messages`"),
        ({"messages": [*ASKED, *ASKED, *said("red")]}, "holds 1 pictures, and the messages have 2 places"),
        ({"chosen": said("red"), "rejected": said("blue")}, "no message of the user is there"),
    ],
)  # fmt: skip
def test_rows_that_cannot_show_their_picture_are_one_line(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "red.png").write_bytes(png("red"))
    with pytest.raises(TaskError) as refusal:
        load(tmp_path, {**row, "images": ["red.png"]})
    assert reason in str(refusal.value) and "\n" not in str(refusal.value)
    assert "rows.jsonl:1" in str(refusal.value)
