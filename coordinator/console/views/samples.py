"""`run samples`: conversations of a run as the model saw them, special tokens included."""

import asyncio
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.layout import Kind, RunDir
from coordinator.phases import eval_sets
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import find_data
from coordinator.start.inputs import base_model_dir
from coordinator.start.start import last_start
from rollout.engines.answers import EngineError
from rollout.engines.embedded.local_tokenizer import LocalTokenizer, close_tokenizer
from rollout.pictures import PictureError, size_of
from rollout.storage import files
from rollout.tasks.messages import answer_of
from rollout.tasks.task_set import TaskError, load_tasks
from rollout.trajectory import Group, Sample

Order = Literal["spread", "best", "worst", "flat"]
BOLD, PLAIN = "\033[1m", "\033[0m"


class ShownSample(NamedTuple):
    """A sample to show, and the group that it is of."""

    group: Group
    sample: Sample


def show_samples(root: Path, iteration: int | None, count: int, order: Order, kind: Kind) -> None:
    """Print `count` samples of an iteration (None: the newest that has any), in bold what was generated; of
    the evaluation, where a run has nothing else. SettingsError if there are none.
    """
    run = Run(root)
    if not run.collected(kind) and run.collected("eval"):
        kind = "eval"
    if iteration is None:
        iteration = max(run.collected(kind), default=1)
    chosen = choose_samples(list(run.trajectories(iteration, kind)), order)[:count]
    if not chosen:
        of_flat = " whose group has the same reward for all" if order == "flat" else ""
        raise SettingsError(f"{root}: iteration {iteration} has no {kind} sample{of_flat}")
    start = last_start(root)
    settings = RunSettings.published(start.settings) if start else RunSettings()
    answers, tokenizer = _answers(run.run_dir, iteration, settings, kind), _tokenizer(run, settings)
    begin, end = (BOLD, PLAIN) if sys.stdout.isatty() else ("", "")
    try:
        for group, sample in chosen:
            print(_title(iteration, group, sample))
            for text, is_generated in _texts(run.run_dir, group, sample, tokenizer):
                print(f"{begin}{text}{end}" if is_generated else text, end="")
            answer = answers(group)
            print("\n" if answer is None else f"\n--- answer: {answer}\n")
    finally:
        close_tokenizer()


def choose_samples(groups: Sequence[Group], order: Order) -> list[ShownSample]:
    """Return samples in the order to show them. spread: the first of each group, then the second, ...; flat:
    the first of each group whose samples all have the same reward.
    """
    if order == "flat":
        flat = [group for group in groups if len({sample.reward for sample in group.samples}) == 1]
        return [ShownSample(group, group.samples[0]) for group in flat if len(group.samples) > 1]
    rows = [
        (number, ShownSample(group, sample))
        for group in groups
        for number, sample in enumerate(group.samples)
    ]
    if order == "spread":
        rows.sort(key=lambda row: row[0])
    else:
        rows.sort(key=lambda row: row[1].sample.reward or 0.0, reverse=order == "best")
    return [chosen for _, chosen in rows]


def _title(iteration: int, group: Group, sample: Sample) -> str:
    rewards = [other.reward for other in group.samples if other.reward is not None]
    mean = f" (mean of {len(rewards)}: {sum(rewards) / len(rewards):.3g})" if rewards else ""
    reward = "no reward" if sample.reward is None else f"reward {sample.reward:g}{mean}"
    metrics = "".join(f", {name} {value:g}" for name, value in sample.metrics.items())
    tokens = f"{int(sample.loss_mask.sum())} tokens, {sample.finish_reason}"
    return f"=== iteration {iteration}, task {group.task_id}: {reward}{metrics}; {tokens}"


def _texts(
    run_dir: RunDir, group: Group, sample: Sample, tokenizer: LocalTokenizer | None
) -> Iterator[tuple[str, bool]]:
    """Yield the sample's text in pieces, each with whether it was generated."""
    try:
        if tokenizer is not None:
            # The tokens between two changes of the mask are read together, those of a picture not at all.
            shown = {picture.begin: picture for picture in sample.pictures}
            changes = (np.flatnonzero(np.diff(sample.loss_mask)) + 1).tolist()
            starts = {0, *changes, *shown, *(picture.end for picture in sample.pictures)}
            for begin, end in itertools.pairwise(sorted({*starts, sample.token_ids.size})):
                if begin in shown:
                    yield _label(run_dir, shown[begin].digest), False
                    continue
                text = asyncio.run(tokenizer.detokenize(sample.token_ids[begin:end].tolist()))
                yield text, bool(sample.loss_mask[begin])
            return
    except EngineError:
        pass  # the model's files are gone: the words without its special tokens
    yield f"{group.prompt}\n", False
    yield from ((f"{turn.text}\n", turn.begin is not None) for turn in sample.turns)
    if not sample.turns:
        yield sample.text, True


def _label(run_dir: RunDir, digest: str) -> str:
    """Return `[image ab12cd34 448x448]`; without the size where the picture, or Pillow, is missing."""
    try:
        width, height = size_of(files.read(run_dir.images / digest))
    except (OSError, ImportError, PictureError):
        return f"[image {digest[:8]}]"
    return f"[image {digest[:8]} {width}x{height}]"


def _tokenizer(run: Run, settings: RunSettings) -> LocalTokenizer | None:
    try:
        return LocalTokenizer(base_model_dir(settings, run.run_dir))
    except SettingsError:
        return None


def _answers(
    run_dir: RunDir, iteration: int, settings: RunSettings, kind: Kind
) -> Callable[[Group], Any | None]:
    """Return what gives the answer to the task of a group; None where it has none, or is not here now."""
    if kind == "train":
        of_training = _answers_of(settings.tasks, settings, "train", settings.columns)
        return lambda group: of_training.get(group.task_id)
    source = settings.evaluation_tasks or settings.tasks
    opened = published.read_json(run_dir.iteration_json(iteration)) or {}
    sets = [(each, settings.eval_sets.get(each.name)) for each in eval_sets.of_opened(opened)]
    unnamed = _answers_of(source, settings, "eval", settings.eval_columns)
    named = [
        (each.begin, each.end, _answers_of(chosen.tasks, settings, "eval", chosen.columns))
        for each, chosen in sets
        if chosen is not None
    ]

    def of_evaluation(group: Group) -> Any | None:
        of_its_set = [answers for begin, end, answers in named if begin <= group.slot < end]
        return (of_its_set or [unnamed])[0].get(group.task_id)

    return of_evaluation


def _answers_of(
    source: str, settings: RunSettings, split: Literal["train", "eval"], columns: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the answers of tasks by id; {} where the tasks are not here (any more)."""
    try:
        tasks = load_tasks(
            find_data(source, settings),
            seed=settings.rollout.seed,
            split=split,
            columns=columns,
            directory=None,
        )
    except (TaskError, OSError):
        return {}
    return {task["id"]: answer for task in tasks.tasks if (answer := answer_of(task)) is not None}
