"""Engines without servers: what one answers follows from prompt, seed and policy alone."""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollout.engines.admin import WrongWeights
from rollout.engines.answers import EngineError, EngineFacts
from rollout.engines.completion import Completion
from rollout.engines.model_dir import policy_digest
from rollout.engines.token_counts import Generated
from rollout.origin import Sampling
from rollout.storage.hashing import checksums
from tests.simulation.scheduler import Scheduler


class Engine:
    """A server: what it serves, and whether it sleeps."""

    def __init__(self, scheduler: Scheduler, lives: Callable[[], bool], model: str) -> None:
        self.scheduler = scheduler
        self.weights = policy_digest(checksums(Path(model)))
        """The digest of what it generates with; empty while that is dropped."""
        self.version: str | None = "default"
        """What it says that it generates with."""
        self.sleeps = False
        self._lives = lives
        self._healthy_s = scheduler.now_s + scheduler.random.uniform(0.5, 3.0)

    def answers(self) -> bool:
        return self._lives() and self.scheduler.now_s >= self._healthy_s

    def call(self, seconds: float) -> None:
        """A call that takes so long; EngineError if nobody answers."""
        self.scheduler.wait(seconds)
        if not self.answers():
            raise EngineError("connection refused")


class EngineAdmin:
    """The simulation's rollout.engines.admin.EngineAdmin."""

    def __init__(self, engines: Mapping[str, Engine], url: str, **_settings: Any) -> None:
        self._engine = engines[url]
        self._scheduler = self._engine.scheduler

    def healthy(self, timeout_s: float = 5.0) -> bool:
        return self.health(timeout_s) is True

    def health(self, timeout_s: float = 5.0) -> bool | None:
        try:
            self._engine.call(0.01)
        except EngineError:
            return None
        return True

    def generated(self) -> Generated:
        raise EngineError("a simulated engine counts nothing")

    def wait_healthy(self, timeout_s: float, alive: Callable[[], bool]) -> None:
        deadline_s = self._scheduler.now_s + timeout_s
        while not self.healthy():
            if not alive() or self._scheduler.now_s > deadline_s:
                raise EngineError("the engine exited before it answered")
            self._scheduler.wait(0.2)

    def policy(self) -> str | None:
        self._engine.call(0.001)
        return self._engine.version

    def name_policy(self, digest: str) -> None:
        self._engine.call(0.001)
        if digest != self._engine.weights:
            self._scheduler.violate(f"{digest} is said to be in an engine that holds {self._engine.weights}")
        self._engine.version = digest

    def reload(self, path: Path, digest: str, *, like: Path | None = None) -> None:
        self._engine.call(0.2)
        if (found := policy_digest(checksums(path))) != digest:
            self._scheduler.violate(f"{path} holds policy {found}, not {digest}")
        self._engine.weights, self._engine.version, self._engine.sleeps = found, digest, False

    def facts(self) -> EngineFacts:
        self._engine.call(0.001)
        return EngineFacts()

    def can_prove(self) -> bool:
        self._engine.call(0.01)
        return True

    def prove(self, path: Path | None = None, _adapter: Path | None = None) -> list[str]:
        self._engine.call(0.1)
        if path is not None and (found := policy_digest(checksums(path))) != self._engine.weights:
            raise WrongWeights(f"it computes with {self._engine.weights}, not {found}")
        return []

    def prompt_logprobs(
        self, token_ids: Sequence[int], _replica: int = 0, *, model: str | None = None
    ) -> list[float]:
        self._engine.call(0.01)
        return logprobs_of(token_ids, self._engine.weights)

    def sleep(self, level: int) -> None:
        self._engine.call(0.1)
        self._engine.sleeps = True
        if level == 2:
            self._engine.weights, self._engine.version = "", None

    def wake(self, *_tags: str) -> None:
        self._engine.call(0.1)
        self._engine.sleeps = False

    def is_sleeping(self) -> bool:
        self._engine.call(0.001)
        return self._engine.sleeps


class EngineClient:
    """The simulation's rollout.engines.client.EngineClient: answers follow from prompt, seed and policy."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        url: str,
        *,
        model: str | None = None,
        request_timeout_s: float,
        retry_s: float = 10.0,
        facts: EngineFacts,
        images: object = None,
        renderer: object = None,
    ) -> None:
        self.facts = facts
        self._engines = engines
        self._url = url
        self._retry_s = retry_s

    async def __aenter__(self) -> "EngineClient":
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass

    async def generate(self, prompt: str | Sequence[int], sampling: Sampling) -> list[Completion]:
        scheduler = self._engines[self._url].scheduler
        deadline_s = scheduler.now_s + self._retry_s
        while scheduler.now_s < deadline_s:
            engine = self._engines[self._url]
            await asyncio.sleep(scheduler.random.uniform(0.3, 3.0))
            if engine.answers():
                if engine.sleeps:
                    scheduler.violate(f"{scheduler.process.name} asks its engine while that sleeps")
                if not engine.weights:
                    scheduler.violate(f"{scheduler.process.name} asks its engine, which has no weights")
                return [completion(prompt, sampling, j, engine.weights) for j in range(sampling.n)]
        raise EngineError("connection refused")


def completion(prompt: str | Sequence[int], sampling: Sampling, j: int, policy: str) -> Completion:
    """Sample j of a group; its text is a line that says how it was sampled. It goes on for four tokens, on
    average.
    """
    draw = random.Random(f"{prompt} {sampling.seed} {j} {policy}")
    tokens: list[int] = []
    while len(tokens) < sampling.max_tokens and (not tokens or tokens[-1] > 12):
        tokens.append(draw.randrange(1, 50))
    text = json.dumps({"j": j, "policy": policy, "tokens": tokens, "sampling": asdict(sampling)})
    prompt_ids = [1, 2] if isinstance(prompt, str) else list(prompt)
    finish_reason = "stop" if tokens[-1] <= 12 else "length"
    return Completion(prompt_ids, tokens, [-1.0] * len(tokens), f"{text}\n", finish_reason)


def logprobs_of(token_ids: Sequence[int], policy: str) -> list[float]:
    """Of `token_ids[1:]`, as an engine and a trainer with these weights compute them."""
    draw = random.Random(f"{token_ids} {policy}")
    return [-draw.uniform(0.1, 9.0) for _ in token_ids[1:]]


async def reward(_task: Mapping[str, Any], text: str) -> float:
    """Of a completion, for the settings of a simulated run."""
    return float(sum(sum(json.loads(line)["tokens"]) for line in text.splitlines()) % 3)


async def other_reward(task: Mapping[str, Any], text: str) -> float:
    """Ten more."""
    return 10.0 + await reward(task, text)
