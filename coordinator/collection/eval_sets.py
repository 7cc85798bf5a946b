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

from coordinator.directory import parts
from coordinator.settings.tree import RunSettings
from coordinator.start.eval_tasks import SECTION, joined_digest
from coordinator.start.functions import Functions
from coordinator.start.inputs import Inputs
from rollout.evaluation import evaluate
from rollout.origin import Code, Sampling, described
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
    now = {name: one.tasks.digest for name, one in inputs.eval_sets.items()}
    return {one.section: one.name not in now for one in of_opened(opened) if now.get(one.name) != one.tasks}


def task_change(opened: Mapping[str, Any], inputs: Inputs) -> str | None:
    """Say which tasks that an iteration is to be evaluated on have changed, without "since"; None: none."""
    if changed := changed_sets(opened, inputs):
        section, is_gone = next(iter(changed.items()))
        return f"{section} was dropped or renamed" if is_gone else f"the tasks of {section} have changed"
    # iteration.json has one digest over these and the tasks of the sets, which are as they were.
    sets = {one.name: one.tasks for one in of_opened(opened)}
    is_same = joined_digest(inputs.eval_tasks, sets) == opened["eval_tasks"]
    return None if is_same else "the evaluation tasks have changed"


def without(document: Mapping[str, Any], sections: Collection[str]) -> Mapping[str, Any]:
    """Return an iteration.json without the sets of these sections."""
    sets = [one for one in document.get("eval_sets", []) if f"{SECTION}{one['name']}" not in sections]
    return {**document, "eval_sets": sets}


def own_slots(settings: RunSettings, inputs: Inputs) -> int:
    """Count the slots of --eval-tasks."""
    return min(len(inputs.eval_tasks.tasks), settings.eval.max_tasks) if inputs.eval_tasks else 0


def chosen_sets(settings: RunSettings, inputs: Inputs, sampling: Sampling) -> list[dict[str, Any]]:
    """Return what the settings say of the named sets, for a new iteration.json. `sampling`: that of the
    training, from which a set has what it cannot say itself.
    """
    begin, found = own_slots(settings, inputs), list[SetSlots]()
    for name, one in settings.eval_sets.items():
        loaded = inputs.eval_sets[name]
        # All of it is given where a set is filled; pydantic's types do not say so.
        about: dict[str, Any] = one.model_dump()
        own = {field: about[field] for field in ("max_tokens", "temperature", "top_p")}
        sampled = replace(sampling, n=about["samples_per_task"], **own)
        end = begin + min(len(loaded.tasks.tasks), about["max_tasks"])
        code = loaded.functions.reward, loaded.functions.environment
        found.append(SetSlots(name, begin, end, loaded.tasks.digest, sampled, *code, about["success"]))
        begin = end
    return [described(one) for one in found]


def joined(opened: Mapping[str, Any], loaded: Mapping[str, Functions] | None = None) -> dict[str, Code]:
    """Return the reward and the environment of all sets as one of each, for the origin of an evaluation's
    parts: as the iteration was opened, or as they are `loaded` now. Without named sets they are the run's.

    The names say the sampling of each set too, so that parts with another one are never mixed in.
    """
    sets = of_opened(opened)
    codes = [(one.reward, one.environment) for one in sets]
    codes = [(Code(**opened["reward"]), Code(**opened["environment"])), *codes]
    if loaded is not None:
        codes = [(of.reward, of.environment) for of in loaded.values()]
    if not sets:
        return {"reward": codes[0][0], "environment": codes[0][1]}
    titles = ["", *(f"{one.name}: " for one in sets)]
    sampled = ["", *(f" {json.dumps(described(one.sampling))}" for one in sets)]
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
        one.section: ", ".join(
            [f"tasks {one.tasks[:8]} ({one.end - one.begin})", one.reward.name, one.environment.name]
            + [f"{name}={value}" for name, value in described(one.sampling).items() if name != "stop"]
        )
        for one in of_opened(document)
    }


def scores(
    groups: Sequence[Group],
    opened: Mapping[str, Any],
    settings: RunSettings,
    inputs: Inputs,
) -> dict[str, Any]:
    """Return what an evaluation's manifest says of the scores.

    `reward`, `error`, `pass_at` and `metrics` are of the tasks of --eval-tasks; without these `reward` is the
    mean over the named sets, each counted once, if all have a score. `sets` has the scores of each named set,
    if there are any.
    """
    sets = of_opened(opened)
    own = [group for group in groups if not sets or group.slot < sets[0].begin]
    document = evaluate(own, settings.eval.success)
    if not sets:
        return document
    named = {one.name: _score(groups, one, settings, inputs) for one in sets}
    rewards = [of["reward"] for of in named.values() if "reward" in of]
    if sets[0].begin == 0 and len(rewards) == len(sets):  # fewer sets have another mean
        document["reward"] = sum(rewards) / len(rewards)
    return {**document, "metrics": parts.figures(own)["metrics"], "sets": named}


def _score(groups: Sequence[Group], one: SetSlots, settings: RunSettings, inputs: Inputs) -> dict[str, Any]:
    own = [group for group in groups if one.begin <= group.slot < one.end]
    figures = parts.figures(own)
    samples = sum(len(group.samples) for group in own)
    rewards = {
        str(group.slot - one.begin): mean for group in own if (mean := parts.mean_reward(group)) is not None
    }
    tasks = inputs.eval_sets[one.name].tasks.tasks
    found = {
        **evaluate(own, one.success),
        "tasks": len(rewards),
        "samples": samples,
        "given_up": sum(group.given_up is not None for group in own),
        "length": round(figures["tokens"] / samples, 2) if samples else None,
        "truncated": figures["truncated"],
        "metrics": figures["metrics"] or None,
        "reward_by_source": by_source(rewards, tasks, settings.rollout.ratio_field),
    }
    return {"slots": [one.begin, one.end], **{name: of for name, of in found.items() if of is not None}}


def by_source(rewards: Mapping[str, float], tasks: Sequence[Task], field: str) -> dict[str, float] | None:
    """Return the mean of `rewards`, which are by slot, for each value that `field` has in the slots' tasks.

    None if it has a single value, or slots have no task here (an evaluation whose tasks were changed since).
    """
    found: dict[str, list[float]] = {}
    for slot, reward in rewards.items():
        if int(slot) >= len(tasks):
            return None
        found.setdefault(str(tasks[int(slot)].get(field)), []).append(reward)
    return {name: sum(of) / len(of) for name, of in sorted(found.items())} if len(found) > 1 else None
