"""The named sets of an evaluation: which of its slots are theirs, what these are made with, what they score.

All sets share the slots of one rollout: first those of --eval-tasks, then those of each set, by name. So they
are split, claimed, recovered and aggregated together.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from coordinator.directory import manifests
from coordinator.settings.tree import RunSettings
from coordinator.start.eval_tasks import SECTION, joined_digest
from coordinator.start.inputs import Inputs
from coordinator.start.user_functions import Functions
from rollout.evaluation import evaluate
from rollout.origin import Code, Sampling, origin_document
from rollout.tasks.task_set import Task
from rollout.trajectory import Group


@dataclass(frozen=True)
class SetSlots:
    """A named set in an iteration: its slots are those from `begin` up to, not including, `end`."""

    name: str
    begin: int
    end: int
    tasks: str
    """The digest of its tasks."""
    sampling: Sampling
    reward: Code
    environment: Code
    success: float

    @property
    def section(self) -> str:
        """What its settings begin with."""
        return f"{SECTION}{self.name}"


def of_opened(opened: Mapping[str, Any]) -> Sequence[SetSlots]:
    """Return the named sets that an iteration.json has, by slot; none if it was opened without any."""
    return _adapter().validate_python(opened.get("eval_sets", []))


@cache
def _adapter() -> TypeAdapter[list[SetSlots]]:
    return TypeAdapter(list[SetSlots])


def changed_sets(opened: Mapping[str, Any], inputs: Inputs) -> Mapping[str, bool]:
    """Return the sets that an iteration was opened with and whose tasks are not there as they were, by their
    section in the settings; True: the set is not there at all. Sets that are new change nothing.
    """
    now = {name: loaded.tasks.digest for name, loaded in inputs.eval_sets.items()}
    return {
        eval_set.section: eval_set.name not in now
        for eval_set in of_opened(opened)
        if now.get(eval_set.name) != eval_set.tasks
    }


def task_change(opened: Mapping[str, Any], inputs: Inputs) -> str | None:
    """Say which tasks that an iteration is to be evaluated on have changed, without "since"; None: none."""
    if changed := changed_sets(opened, inputs):
        section, is_gone = next(iter(changed.items()))
        return f"{section} was dropped or renamed" if is_gone else f"the tasks of {section} have changed"
    # iteration.json has one digest over these and the tasks of the sets, which are as they were.
    sets = {eval_set.name: eval_set.tasks for eval_set in of_opened(opened)}
    is_same = joined_digest(inputs.eval_tasks, sets) == opened["eval_tasks"]
    return None if is_same else "the evaluation tasks have changed"


def without(document: Mapping[str, Any], sections: Collection[str]) -> Mapping[str, Any]:
    """Return an iteration.json without the sets of these sections."""
    sets = [
        eval_set
        for eval_set in document.get("eval_sets", [])
        if f"{SECTION}{eval_set['name']}" not in sections
    ]
    return {**document, "eval_sets": sets}


def own_slots(settings: RunSettings, inputs: Inputs) -> int:
    """Count the slots of --eval-tasks."""
    return min(len(inputs.eval_tasks.tasks), settings.eval.max_tasks) if inputs.eval_tasks else 0


def chosen_sets(settings: RunSettings, inputs: Inputs, sampling: Sampling) -> list[dict[str, Any]]:
    """Return the entries of the named sets in a new iteration.json, by the settings. `sampling`: that of the
    training, from which a set has what it cannot say itself.
    """
    begin, sets = own_slots(settings, inputs), list[SetSlots]()
    for name, eval_set in settings.eval_sets.items():
        loaded = inputs.eval_sets[name]
        # All of it is given where a set is filled; pydantic's types do not say so.
        values: dict[str, Any] = eval_set.model_dump()
        fields = {field: values[field] for field in ("max_tokens", "temperature", "top_p", "top_k", "min_p")}
        sampled = replace(sampling, n=values["samples_per_task"], **fields)
        end = begin + min(len(loaded.tasks.tasks), values["max_tasks"])
        code = loaded.functions.reward, loaded.functions.environment
        sets.append(SetSlots(name, begin, end, loaded.tasks.digest, sampled, *code, values["success"]))
        begin = end
    return [origin_document(eval_set) for eval_set in sets]


def joined(opened: Mapping[str, Any], loaded: Mapping[str, Functions] | None = None) -> dict[str, Code]:
    """Return the reward and the environment of all sets as one of each, for the origin of an evaluation's
    parts: as the iteration was opened, or as they are `loaded` now. Without named sets they are the run's.

    The names say the sampling of each set too, so that parts with another one are never mixed in.
    """
    sets = of_opened(opened)
    codes = [(eval_set.reward, eval_set.environment) for eval_set in sets]
    codes = [(Code(**opened["reward"]), Code(**opened["environment"])), *codes]
    if loaded is not None:
        codes = [(functions.reward, functions.environment) for functions in loaded.values()]
    if not sets:
        return {"reward": codes[0][0], "environment": codes[0][1]}
    titles = ["", *(f"{eval_set.name}: " for eval_set in sets)]
    sampled = ["", *(f" {json.dumps(origin_document(eval_set.sampling))}" for eval_set in sets)]
    return {
        "reward": _as_one([reward for reward, _ in codes], titles, [""] * len(codes)),
        "environment": _as_one([environment for _, environment in codes], titles, sampled),
    }


def _as_one(codes: Sequence[Code], before: Sequence[str], after: Sequence[str]) -> Code:
    names = [f"{begin}{code.name}{end}" for begin, code, end in zip(before, codes, after, strict=True)]
    digest = hashlib.sha256("\n".join(code.digest for code in codes).encode()).hexdigest()[:16]
    return Code("; ".join(names), digest)


def texts(document: Mapping[str, Any]) -> dict[str, str]:
    """Say of each set of an iteration.json, by its section in the settings, what the settings say of it."""
    return {
        eval_set.section: ", ".join(
            [
                f"tasks {eval_set.tasks[:8]} ({eval_set.end - eval_set.begin})",
                eval_set.reward.name,
                eval_set.environment.name,
            ]
            + [
                f"{name}={value}"
                for name, value in origin_document(eval_set.sampling).items()
                if name != "stop"
            ]
        )
        for eval_set in of_opened(document)
    }


def scores(
    groups: Sequence[Group],
    opened: Mapping[str, Any],
    settings: RunSettings,
    inputs: Inputs,
) -> dict[str, Any]:
    """Return the scores of an evaluation, for its manifest.

    `reward`, `error`, `pass_at` and `metrics` are of the tasks of --eval-tasks; without these `reward` is the
    mean over the named sets, each counted once, if all have a score. `sets` has the scores of each named set,
    if there are any.
    """
    sets = of_opened(opened)
    unnamed = [group for group in groups if not sets or group.slot < sets[0].begin]
    document = evaluate(unnamed, settings.eval.success)
    if not sets:
        return document
    named = {eval_set.name: _score(groups, eval_set, settings, inputs) for eval_set in sets}
    rewards = [score["reward"] for score in named.values() if "reward" in score]
    if sets[0].begin == 0 and len(rewards) == len(sets):  # fewer sets have another mean
        document["reward"] = sum(rewards) / len(rewards)
    return {**document, "metrics": manifests.figures(unnamed)["metrics"], "sets": named}


def _score(
    groups: Sequence[Group], eval_set: SetSlots, settings: RunSettings, inputs: Inputs
) -> dict[str, Any]:
    members = [group for group in groups if eval_set.begin <= group.slot < eval_set.end]
    figures = manifests.figures(members)
    samples = sum(len(group.samples) for group in members)
    rewards = {
        str(group.slot - eval_set.begin): mean
        for group in members
        if (mean := manifests.mean_reward(group)) is not None
    }
    tasks = inputs.eval_sets[eval_set.name].tasks.tasks
    score = {
        **evaluate(members, eval_set.success),
        "tasks": len(rewards),
        "samples": samples,
        "given_up": sum(group.given_up is not None for group in members),
        "length": round(figures["tokens"] / samples, 2) if samples else None,
        "truncated": figures["truncated"],
        "metrics": figures["metrics"] or None,
        "reward_by_source": by_source(rewards, tasks, settings.rollout.ratio_field),
    }
    return {
        "slots": [eval_set.begin, eval_set.end],
        **{name: value for name, value in score.items() if value is not None},
    }


def by_source(rewards: Mapping[str, float], tasks: Sequence[Task], field: str) -> dict[str, float] | None:
    """Return the mean of `rewards`, which are by slot, for each value that `field` has in the slots' tasks.

    None if it has a single value, or slots have no task here (an evaluation whose tasks were changed since).
    """
    by_value: dict[str, list[float]] = {}
    for slot, reward in rewards.items():
        if int(slot) >= len(tasks):
            return None
        by_value.setdefault(str(tasks[int(slot)].get(field)), []).append(reward)
    return (
        {name: sum(values) / len(values) for name, values in sorted(by_value.items())}
        if len(by_value) > 1
        else None
    )
