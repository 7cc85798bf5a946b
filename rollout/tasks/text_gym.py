"""Tasks of environments with Gymnasium's interface: their first observations, by seed.

    --tasks gym:MODULE:CLASS,PARAMETER=VALUE,... --environment gym:MODULE:CLASS

CLASS may be any function that makes an environment. It runs in another process.
"""

import functools
import hashlib
import inspect
import json
import logging
import math
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Literal

from rollout.loaded_code import sources
from rollout.pictures import PictureError, image_url
from rollout.plugins import PluginError, load_function
from rollout.processes.killable_process import CallFailed, CallLost
from rollout.processes.pool import ProcessPool, log_as
from rollout.tasks.parameters import SIZE, parse
from rollout.tasks.pictures import png

log = logging.getLogger(__name__)

SOURCE = "gym:"
LOAD_TIMEOUT_S = 1800.0
"""How long all first observations may take."""
STEP_TIMEOUT = "step_timeout_s"
"""A parameter of ours: how long making the environment, `reset`, `step` and `close` may each take."""
STEP_TIMEOUT_S = 60.0
"""The default of STEP_TIMEOUT."""
KILLED_S = 5.0
"""How long a call may go on then before its process is ended."""
Content = str | list[dict[str, Any]]
"""Content of a message: a text, or parts, with pictures as the OpenAI API has them."""
DEFAULT_SIZE = 500
EVALUATION = 10
"""One seed in 10 belongs to evaluation."""


def text_gym_tasks(text: str, *, seed: int, split: Literal["train", "eval"]) -> list[dict[str, Any]]:
    """Return the tasks of `NAME,PARAMETER=VALUE,...`; the parameters are the environment's, SIZE and
    STEP_TIMEOUT. Seeds follow from the run's. Raises ValueError with the reason, in one line.
    """
    name, parameters = parse(text)
    limit_s, seeds = limit_of(parameters), seeds_of(parameters, f"gym/{seed}", split)
    observations = _observations(name, json.dumps(parameters, sort_keys=True), limit_s, tuple(seeds.values()))
    return [
        {
            "id": f"{name}/{number}",
            "source": name,
            "seed": task_seed,
            "messages": [{"role": "user", "content": content}],
            "gym": {"name": name, "parameters": parameters, STEP_TIMEOUT: limit_s},
        }
        for (number, task_seed), content in zip(seeds.items(), observations, strict=True)
    ]


def limit_of(parameters: dict[str, Any]) -> float:
    """Take STEP_TIMEOUT out of the parameters. ValueError if it is no time."""
    limit_s = parameters.pop(STEP_TIMEOUT, STEP_TIMEOUT_S)
    if type(limit_s) not in (int, float) or not limit_s > 0:
        raise ValueError(f"{STEP_TIMEOUT}={limit_s}: give a number of seconds above 0")
    return float(limit_s)


def seeds_of(parameters: dict[str, Any], label: str, split: Literal["train", "eval"]) -> dict[int, int]:
    """Take SIZE out of the parameters, and return the seeds of a split's tasks, by the tasks' numbers. They
    follow from `label`. ValueError if there are none.
    """
    size = parameters.pop(SIZE, DEFAULT_SIZE)
    numbers = [number for number in range(size) if (number % EVALUATION == 0) == (split == "eval")]
    if not numbers:
        raise ValueError(f"{SIZE}={size} leaves no {split} task; raise it")
    return {number: _seed(f"{label}/{number}") for number in numbers}


def content_with(parts: list[dict[str, Any]]) -> Content:
    """Return the content of these parts. Texts that follow each other are lines of one."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if content and part["type"] == content[-1]["type"] == "text":
            part = {"type": "text", "text": f"{content.pop()['text']}\n{part['text']}"}
        content.append(part)
    return content[0]["text"] if [part["type"] for part in content] == ["text"] else content


def state_of(observation: Content) -> str:
    """Return the name of the state that an observation shows, for `Sample.reward_turns`: its digest."""
    return hashlib.sha256(json.dumps(observation, sort_keys=True).encode()).hexdigest()[:16]


def code_behind(name: str) -> dict[str, tuple[str, str]]:
    """Return the source of the environment's class, by module, as this process has loaded it. Raises
    ValueError if there is no such class.
    """
    return sources(name, _maker(name))


def _maker(name: str) -> Callable[..., Any]:
    """Return the class or function that makes the environment. PluginError if there is none."""
    if ":" not in name:
        raise PluginError(f"{name!r}: give {SOURCE}MODULE:CLASS, or a function that makes the environment")
    return load_function(name, make=False)


def _check_parameters(name: str, maker: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Raise PluginError if `maker` cannot take the parameters. What cannot be known passes."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # it is written in C
        return
    try:
        signature.bind(**parameters)
    except TypeError as error:
        raise PluginError(f"{name} takes {signature}: {error}") from None


def _seed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1


@functools.lru_cache(maxsize=4)
def _observations(name: str, parameters: str, limit_s: float, seeds: tuple[int, ...]) -> list[Content]:
    try:
        with closing(ProcessPool(f"{__name__}:make_resetter", size=1, say=log_as(name))) as pool:
            return pool.call(name, json.loads(parameters), limit_s, seeds, deadline_s=LOAD_TIMEOUT_S)
    except (CallFailed, CallLost) as error:
        raise ValueError(" ".join(str(error).removeprefix("PluginError: ").split())) from None


# ---- in the processes


def make_resetter() -> Callable[..., list[Content]]:
    """Make (name, parameters, limit of a step, seeds) -> the first observations."""

    def observe(name: str, parameters: dict[str, Any], limit_s: float, seeds: list[int]) -> list[Content]:
        environment = TextEnvironment(name, parameters, limit_s)
        observations = [environment.reset(seed, None) for seed in seeds]
        environment.close()
        return observations

    return observe


class TextEnvironment:
    """The environment behind a name. Each call raises TimeoutError after `limit_s`; if it goes on all the
    same, the process is ended. ValueError if it returns nonsense.
    """

    def __init__(self, name: str, parameters: dict[str, Any], limit_s: float) -> None:
        self._limit_s = limit_s
        with _limited("making the environment", limit_s):
            maker = _maker(name)
            _check_parameters(name, maker, parameters)
            self._environment = maker(**parameters)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> Content:
        """Return the first observation."""
        with _limited("reset", self._limit_s):
            answer = self._environment.reset(seed=seed, options=options)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise ValueError(f"reset returned {answer!r:.200}; it must return observation, info")
        return self._content(answer[0], "reset")

    def step(self, action: str) -> tuple[Content, float, bool, dict[str, float]]:
        """Return the observation, the reward, whether the episode ends, and `info["metrics"]`."""
        with _limited("step", self._limit_s):
            answer = self._environment.step(action)
        if not isinstance(answer, tuple) or len(answer) != 5:
            shape = "observation, reward, terminated, truncated, info"
            raise ValueError(f"step returned {answer!r:.200}; it must return {shape}")
        observation, reward, terminated, truncated, info = answer
        ends = bool(terminated or truncated)
        if not isinstance(reward, (int, float)) and not hasattr(reward, "__float__"):
            raise ValueError(f"step returned the reward {reward!r:.200}; it must be a number")
        if not math.isfinite(float(reward)):
            raise ValueError(f"step returned the reward {float(reward)}; it must be finite")
        metrics = {str(key): float(value) for key, value in ((info or {}).get("metrics") or {}).items()}
        return ("" if ends else self._content(observation, "step")), float(reward), ends, metrics

    def _content(self, observation: Any, where: str) -> Content:
        """Return the Content of an observation: a text, a picture (an array), or those that a dict has. With
        `render_mode` rgb_array, as in Gymnasium, what `render` returns comes last.
        """
        shown = [*observation.values()] if isinstance(observation, dict) else [observation]
        if getattr(self._environment, "render_mode", None) == "rgb_array":
            with _limited("render", self._limit_s):
                shown = [value for value in shown if isinstance(value, str)] + [self._environment.render()]
        return content_with([_part(value, where) for value in shown])

    def close(self) -> None:
        """Close it, if it can be closed."""
        if hasattr(self._environment, "close"):
            with _limited("close", self._limit_s):
                self._environment.close()


def _part(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if not hasattr(value, "__array_interface__"):
        raise ValueError(
            f"{where} returned an observation of type {type(value).__name__}; it must be a string, or a "
            "picture: an array (height, width, 3) of uint8"
        )
    try:
        return image_url(png(value))
    except PictureError as error:
        raise ValueError(f"{where} returned an observation that is not a picture: {error}") from None


@contextmanager
def _limited(call: str, limit_s: float) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the next one ends the process
        raise TimeoutError(f"{call} takes longer than {STEP_TIMEOUT}={limit_s:g}")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s, KILLED_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
