"""Tasks and reward of Reasoning Gym (extra `gym`), which generates questions and scores answers.

    --tasks reasoning_gym:leg_counting,size=5000,max_animals=8+chain_sum,size=2000 --reward reasoning_gym

Both run in separate processes. Generators use sets and global random state, which are the same everywhere in
a new process without hash randomisation. Some scorers evaluate what the model wrote.
"""

import difflib
import functools
import json
import random
import re
from collections.abc import Callable
from contextlib import closing
from typing import Any, Literal

from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.killable_rewards import LibraryReward, missing
from rollout.processes.pool import ProcessPool
from rollout.tasks.parameters import HELD_OUT, is_held_out, parse

SOURCE = "reasoning_gym:"
GENERATE_TIMEOUT_S = 1800.0
"""How long generating may take: the slowest data sets take a third of a second a question."""
SYSTEM = "system"
"""A parameter that the library does not have: the name of its system prompt. Without it there is none."""

_LIBRARY = {"library": "reasoning_gym", "extra": "gym"}


SHOWN = 3
"""So many names are proposed in place of one that is not there."""
ALL_NAMES = "python -c 'from reasoning_gym.factory import DATASETS; print(*sorted(DATASETS))'"


def gym_tasks(text: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Return the tasks of `NAME,PARAMETER=VALUE,...`; `+` joins data sets. VALUE is JSON or plain text.
    `size` (500) is the number of questions of both splits together; `seed` is the run's if it is not given.
    Raises ValueError with the reason, in one line.
    """
    tasks: list[dict[str, Any]] = []
    for part in re.split(r"\+(?=[a-z])", text):
        name, config = _parse(part, seed)
        if any(task["source"] == name for task in tasks):
            raise ValueError(f"{name} is named twice; name every data set once")
        system, items = _generated(name, json.dumps(config, sort_keys=True))
        before = len(tasks)
        questions: set[str] = set()
        for index, (question, answer) in enumerate(items):
            if question in questions or is_held_out(question) != (split == "eval"):
                continue
            questions.add(question)
            tasks.append(_task(name, config, index, question, answer, system))
        if len(tasks) == before:
            raise ValueError(
                f"{name} gives no {split} task out of {len(items)} questions; raise size (one question in "
                f"{HELD_OUT} is evaluation's)"
            )
    return tasks


def _parse(part: str, seed: int) -> tuple[str, dict[str, Any]]:
    name, parameters = parse(part)
    if not re.fullmatch(r"\w+", name):
        raise ValueError(f"{name!r} is not of the form NAME,PARAMETER=VALUE")
    return name, {"seed": seed, **parameters}


@functools.lru_cache(maxsize=8)  # the tasks of training and evaluation are parts of the same questions
def _generated(name: str, config: str) -> tuple[str | None, tuple[tuple[str, str | None], ...]]:
    if reason := missing(**_LIBRARY):
        raise ValueError(reason)
    try:
        with closing(ProcessPool(f"{__name__}:make_generator", size=1)) as pool:
            system, items = pool.call(name, json.loads(config), deadline_s=GENERATE_TIMEOUT_S)
    except CallFailed as error:
        raise ValueError(" ".join(str(error).removeprefix("ValueError: ").split())) from None
    except CallLost as error:
        raise ValueError(f"{name} could not be generated: {error}; lower size") from None
    return system, tuple((question, answer) for question, answer in items)


def _task(
    name: str, config: dict[str, Any], index: int, question: str, answer: str | None, system: str | None
) -> dict[str, Any]:
    task: dict[str, Any] = {"id": f"{name}/{index}", "source": name}
    if system is None:
        task["prompt"] = question
    else:
        messages = (("system", system), ("user", question))
        task["messages"] = [{"role": role, "content": content} for role, content in messages]
    if answer is not None:  # None: many answers are right
        task["answer"] = answer
    return {**task, "reasoning_gym": {"dataset": name, "config": config, "index": index}}


# ---- in the processes


def make_generator() -> Callable[[str, dict[str, Any]], Any]:
    """Make (name, config) -> the system prompt or None, and [question, answer or None] of all items."""
    dataset = _dataset_maker()

    def generate(name: str, config: dict[str, Any]) -> Any:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        prompt = config.get(SYSTEM)
        if prompt is not None and prompt not in SYSTEM_PROMPTS:
            raise ValueError(f"{SYSTEM}={prompt}: there is {', '.join(SYSTEM_PROMPTS)}")
        items_of = dataset(name, json.dumps(config))
        items = [_item(items_of, index) for index in range(len(items_of))]
        return SYSTEM_PROMPTS[prompt] if prompt else None, [[i["question"], i["answer"]] for i in items]

    return generate


def make_scorer() -> Callable[..., float]:
    """Make (data set, config, index, question, tagged, completion) -> the data set's own score of the answer.
    The answer is the text in the last <answer> tag. Without a tag it is the whole completion, or missing if
    `tagged`. The score is 0 if the answer is missing or the scorer cannot read it.
    """
    from reasoning_gym.utils import extract_answer

    dataset = _dataset_maker()

    @functools.lru_cache(maxsize=1024)  # a group's samples share it
    def item(name: str, config: str, index: int) -> dict[str, Any]:
        return _item(dataset(name, config), index)

    def score(
        name: str, config: dict[str, Any], index: int, question: str, tagged: bool, completion: str
    ) -> float:
        text = json.dumps(config)
        entry = item(name, text, index)
        if entry["question"] != question:
            raise ValueError(f"question {index} of {name} is another one with this version of reasoning_gym")
        answer = extract_answer(completion)
        if answer is None and not tagged:
            answer = completion.strip()
        if answer is None:
            return 0.0
        try:
            return float(dataset(name, text).score_answer(answer, entry))
        except Exception:  # a few scorers raise where the answer is no number, or no list
            return 0.0

    return score


def _dataset_maker() -> Callable[[str, str], Any]:
    import dataclasses

    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    @functools.lru_cache(maxsize=64)
    def dataset(name: str, config: str) -> Any:
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, SHOWN, cutoff=0.5)
            advice = f"did you mean {' or '.join(near)}? " if near else ""
            raise ValueError(f"no data set {name!r}; {advice}All names: {ALL_NAMES}")
        settings = {key: value for key, value in json.loads(config).items() if key != SYSTEM}
        names = [field.name for field in dataclasses.fields(DATASETS[name][1])]
        if unknown := [key for key in settings if key not in names]:
            raise ValueError(f"{name} has no parameter {unknown[0]!r}; there is {', '.join(names)}, {SYSTEM}")
        return reasoning_gym.create_dataset(name, **settings)

    return dataset


def _item(dataset: Any, index: int) -> dict[str, Any]:
    random.seed(index)  # some generators use the global one
    return dataset[index]


def _arguments(task: dict[str, Any], completion: str) -> tuple[Any, ...]:
    spec = task.get("reasoning_gym")
    if spec is None:
        raise ValueError(f"it is not a task of Reasoning Gym; give --tasks {SOURCE}NAME")
    tagged = "messages" in task  # the system prompt asked for <answer> tags
    question = task["messages"][-1]["content"] if tagged else task["prompt"]
    return spec["dataset"], spec["config"], spec["index"], question, tagged, completion


gym_reward = LibraryReward("rollout.tasks.reasoning_gym:make_scorer", _arguments, **_LIBRARY)
