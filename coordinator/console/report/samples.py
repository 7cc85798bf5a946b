"""Choose groups to read: those with the best, the median and the worst mean reward of an iteration."""

import contextlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from coordinator.console.report.values import numbers
from coordinator.console.views.heartbeats import is_number
from coordinator.directory import published
from coordinator.directory.layout import RunDir
from rollout.pictures import PictureError, is_digest, thumbnail
from rollout.storage import files

SAMPLES = 4
"""How many samples of a group are shown: the best, the worst, and some between."""
PROMPT_CHARACTERS, TEXT_CHARACTERS = 1_200, 1_600
PICTURES, PICTURE_SIDE = 4, 160
"""How many pictures of a prompt are shown, and their longest side in pixels."""
TURNS = 12
"""How many turns of a conversation are shown: half of them its first ones, the others its last ones."""


@dataclass(frozen=True)
class TurnText:
    """A turn of a conversation as shown."""

    role: str
    text: str
    generated: bool = False
    note: str = ""
    """`12 tokens, trained, cut`, if it is generated."""


@dataclass(frozen=True)
class SampleText:
    """A sample as shown."""

    text: str
    reward: float | None
    tokens: int | None
    cut: bool
    """Whether rollout.max_tokens cut it."""
    metrics: dict[str, float]
    turns: list[TurnText]
    """The conversation after the prompt, shown instead of `text`; empty for a single turn."""


@dataclass(frozen=True)
class GroupText:
    """A group as shown; `place` is best, median or worst."""

    place: str
    task_id: str
    prompt: str
    reward: float
    """The mean."""
    size: int
    samples: list[SampleText]
    pictures: list[str]
    """Pictures that its prompt shows, small, as `data:` URIs; none where they or Pillow are missing."""


@dataclass(frozen=True)
class IterationGroups:
    """The groups of an iteration; empty if its files are gone."""

    iteration: int
    groups: list[GroupText]


def reading(run_dir: RunDir, iteration: int) -> IterationGroups:
    """Read the chosen groups of an iteration's training trajectories."""
    manifest = published.read_manifest(run_dir, "train", iteration) or {}
    means = numbers(manifest, "rewards")
    rewards = {str(int(slot)): mean for slot, mean in means.items() if slot.isdecimal()}
    chosen = chosen_slots(rewards)
    lines = _lines(run_dir, iteration, chosen.values())
    groups = [
        group_text(place, lines[slot], rewards[str(slot)], _pictures(run_dir, lines[slot]))
        for place, slot in chosen.items()
        if slot in lines
    ]
    return IterationGroups(iteration, groups)


def chosen_slots(rewards: Mapping[str, float]) -> dict[str, int]:
    """{"best": slot, "median": slot, "worst": slot} by mean reward; fewer if there are fewer groups."""
    order = sorted(rewards, key=lambda slot: (-rewards[slot], int(slot)))
    places = {"best": 0, "worst": len(order) - 1, "median": len(order) // 2}
    slots: dict[str, int] = {}
    for place, index in places.items():
        if order and int(order[index]) not in slots.values():
            slots[place] = int(order[index])
    return {place: slots[place] for place in ("best", "median", "worst") if place in slots}


def _lines(run_dir: RunDir, iteration: int, slots: Collection[int]) -> dict[int, dict[str, Any]]:
    """Read the lines of `slots` in groups.jsonl; missing and damaged lines are left out."""
    path = run_dir.groups("train", iteration)
    try:
        texts = files.read(path).splitlines() if path.name in published.names(path.parent) else []
    except OSError:
        return {}
    by_slot: dict[int, dict[str, Any]] = {}
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("slot") in slots:  # pyright: ignore[reportUnknownMemberType]
            by_slot[line["slot"]] = line
    return by_slot


def _pictures(run_dir: RunDir, record: Mapping[str, Any]) -> list[str]:
    images, prompt = cast("list[Any]", record.get("images") or []), str(record.get("prompt"))
    digests = [str(name) for name in images if is_digest(name) and f"[image {name[:8]}]" in prompt]
    with contextlib.suppress(OSError, ImportError, PictureError):
        return [thumbnail(files.read(run_dir.images / name), PICTURE_SIDE) for name in digests[:PICTURES]]
    return []


def group_text(
    place: str, record: Mapping[str, Any], reward: float, pictures: Sequence[str] = ()
) -> GroupText:
    """Return a group as the page shows it, with long texts cut."""
    samples = _listed(record, "samples")
    samples.sort(key=_worse)
    last = len(samples) - 1
    count = min(SAMPLES, len(samples))
    indices = sorted({round(index * last / max(count - 1, 1)) for index in range(count)})
    texts = [
        SampleText(
            shortened(str(sample.get("text", "")), TEXT_CHARACTERS),
            _number(sample, "reward"),
            tokens if isinstance(tokens := sample.get("tokens"), int) else None,
            sample.get("finish_reason") == "length",
            numbers(sample, "metrics"),
            _turns(sample),
        )
        for sample in (samples[index] for index in indices)
    ]
    prompt = shortened(str(record.get("prompt", "")), PROMPT_CHARACTERS)
    task_id = str(record.get("task_id", ""))
    return GroupText(place, task_id, prompt, reward, len(samples), texts, list(pictures))


def _listed(record: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    entries: Any = record.get(name)
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []  # pyright: ignore


def _turns(sample: Mapping[str, Any]) -> list[TurnText]:
    """Return the conversation of a sample, without the middle of a long one."""
    turns = [_turn(turn) for turn in _listed(sample, "turns")]
    left_out = len(turns) - TURNS
    if left_out > 0:
        turns[TURNS // 2 : -TURNS // 2] = [TurnText("", f"[... {left_out} turns left out ...]")]
    return turns


def _turn(turn: Mapping[str, Any]) -> TurnText:
    text = shortened(str(turn.get("text", "")), TEXT_CHARACTERS)
    tokens, trained = _number(turn, "tokens"), _number(turn, "trained")
    if tokens is None or trained is None:
        return TurnText(str(turn.get("role", "")), text)
    share_text = (
        "trained" if trained >= tokens > 0 else f"{trained:.0f} of them trained" if trained else "not trained"
    )
    cut = ", cut" if turn.get("finish_reason") == "length" else ""
    return TurnText(str(turn.get("role", "")), text, True, f"{tokens:.0f} tokens, {share_text}{cut}")


def _worse(sample: Mapping[str, Any]) -> float:
    """Return a key to sort samples: the larger, the worse. A sample without a reward is the worst."""
    reward = _number(sample, "reward")
    return float("inf") if reward is None else -reward


def _number(sample: Mapping[str, Any], name: str) -> float | None:
    value = sample.get(name)
    return float(value) if value is not None and is_number(value) else None


def shortened(text: str, characters: int) -> str:
    """Return the beginning and the end of a text that is longer."""
    if len(text) <= characters:
        return text
    head, tail = 2 * characters // 3, characters // 3
    left_out = len(text) - head - tail
    return f"{text[:head]}\n[... {left_out:,} characters left out ...]\n{text[-tail:]}"
