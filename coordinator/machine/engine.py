"""This node's engine: started when there is something to generate, reloaded in place, ended with the node."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Policy
from coordinator.journal.events import Say
from coordinator.machine.children import Child, Children
from coordinator.machine.gpus import count_gpus
from coordinator.machine.host_lock import acquire, host_lock
from coordinator.machine.network import LOOPBACK, free_port
from rollout.engines.admin import PROBE, EngineAdmin, adapter_name
from rollout.engines.client import EngineError
from rollout.engines.servers import Server, server_command
from rollout.engines.weights import ADAPTER_CONFIG
from rollout.settings import EngineSettings

log = logging.getLogger(__name__)

MIND_S = 0.5
"""How often a server that generates is looked after."""
USERS_PATIENCE_S = 10.0
"""How long a server of the user's may be away."""
FIRST_TOKENS = 4
"""Logprobs that an error shows of a probe."""
STOP_S = 10.0
"""How long a server may take to end by itself: killed, vLLM leaves its shared memory behind."""


@dataclass(frozen=True)
class Adapters:
    """Of a run that trains adapters: the model that they are added to, which the engine keeps, and their
    rank.
    """

    base: Policy
    rank: int


class EngineHost:
    """Keeps one server at the policy that is asked for; or uses the user's own (engine.url)."""

    def __init__(self, children: Children, run_dir: RunDir, rank: int, say: Say) -> None:
        self._children = children
        self._say = say
        self._run_dir = run_dir
        self._rank = rank
        self._child: Child | None = None
        self._admin: EngineAdmin | None = None
        self.url = ""
        """Base URL of the server, once there is one."""
        self.model: str | None = None
        """The name that requests must give for the policy of `ensure`: an adapter's; None: the model's."""
        self._adapters: Adapters | None = None
        self._served: Policy | None = None
        self._proven: tuple[str, int] | None = None
        """The policy whose probe a server of ours has passed, and which start of it that was."""
        self._unnamed: Policy | None = None
        """What a server of ours was started with, until it has been told the name of that."""
        self._server: Server | None = None
        self._port = 0
        self._starts = 0
        self._started_s = 0.0

    def ensure(
        self,
        policy: Policy,
        settings: EngineSettings,
        check: Callable[[], None],
        adapters: Adapters | None = None,
    ) -> None:
        """Have a server that answers with `policy`; EngineError if that cannot be had. `check` may raise.

        `adapters`: if policies of the run may be adapters, and then in every call. One of ours that fails is
        started once more: its files, or its port, may be there then.
        """
        self._adapters = adapters
        try:
            self._have(policy, settings, check)
        except EngineError as error:
            if self._child is None:
                raise
            log.error("%s\nstarting it once more", error)
            self._child.stop(STOP_S)
            self._have(policy, settings, check)
        self._served, self.model = policy, self._adapter(policy)

    def _adapter(self, policy: Policy) -> str | None:
        """The name under which `policy` is served if it is an adapter."""
        if self._adapters is None or not policy.iteration:
            return None
        return adapter_name(policy.digest) if ADAPTER_CONFIG in published.names(policy.directory) else None

    def _have(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        if self._admin is None or (self._child is not None and self._child.poll() is not None):
            self._start(policy, settings)
        self._await(settings, check)
        if settings.url is None:
            self._load(policy, settings)
            return
        # Nodes of one host may share a server of the user's: let one of them load the policy.
        lock = host_lock("engine-" + settings.url.partition("//")[2].replace("/", "_"))
        if not acquire(lock, check, settings.start_timeout_s):
            raise EngineError(
                f"another node of this host takes too long to load a policy into {settings.url}"
            )
        try:
            self._load(policy, settings)
        finally:
            lock.release()

    def _load(self, policy: Policy, settings: EngineSettings) -> None:
        """Have the server that is there answer with `policy`, and prove it."""
        assert self._admin is not None
        began_s = time.monotonic()
        if self._admin.policy() != policy.digest:
            self._reload(policy)
        elif self._admin.is_sleeping():
            self._admin.wake()
        elif self._child is not None and self._proven == (policy.digest, self._starts):
            return
        self._proven = None
        if (serves := self._admin.policy()) != policy.digest:
            raise EngineError(
                f"the engine at {self.url} serves policy {serves} after loading {policy.digest}"
            )
        if (wrong := self._probe(policy, settings)) is not None:
            log.error("%s\nloading it once more", wrong)
            self._reload(policy)
            if (wrong := self._probe(policy, settings)) is not None:
                raise EngineError(wrong)
        self._proven = policy.digest, self._starts
        self._say("reload", policy=policy.iteration, seconds=round(time.monotonic() - began_s, 3))

    def _reload(self, policy: Policy) -> None:
        assert self._admin is not None
        path, like = policy.directory.absolute(), self._like(policy)
        if self._adapters is None or self._adapter(policy) is None:
            self._admin.reload(path, policy.digest, like=like)
            return
        base, serves = self._adapters.base, self._admin.policy()
        # A server of the user's may hold any model; what we have loaded before is an adapter of this one.
        if serves != base.digest and (self._served is None or serves != self._served.digest):
            self._admin.reload(base.directory.absolute(), base.digest)
        self._admin.load_adapter(path, policy.digest, like=like)

    def _like(self, policy: Policy) -> Path | None:
        """A model directory with the same tensors: an engine may answer 200 to weights that lack one.

        The policy served before, if a trainer of ours has written both: the user's own model may tie or pad
        its tensors in another way.
        """
        before = self._served
        if before is None or not before.iteration or not policy.iteration or not before.directory.is_dir():
            return None
        same_kind = (self._adapter(before) is None) == (self._adapter(policy) is None)
        return before.directory if same_kind else None

    def _probe(self, policy: Policy, settings: EngineSettings) -> str | None:
        """What is wrong if the engine's logprobs are not the ones that the trainer wrote with a checkpoint.

        Every replica is asked. A checkpoint without a probe passes, and so does the model of the start.
        """
        assert self._admin is not None
        probe = published.read_json(policy.directory / PROBE) if policy.iteration else None
        if probe is None:
            return None
        wanted: list[float] = probe["logprobs"]
        for replica in range(self._server.replicas if self._server else 1):
            found = self._admin.prompt_logprobs(probe["token_ids"], replica, model=self._adapter(policy))
            mean = sum(abs(a - b) for a, b in zip(wanted, found, strict=True)) / len(wanted)
            if not mean <= settings.probe_tolerance:  # nor is nan
                return (
                    f"the engine at {self.url} (replica {replica}) does not compute what the trainer does "
                    f"with {policy.directory}: logprobs of its {PROBE} differ by {mean:.4g} on average, "
                    f"engine.probe_tolerance is {settings.probe_tolerance:g}; the first are "
                    f"{_shown(found)}, the trainer's {_shown(wanted)}"
                )
        return None

    def sleep(self, settings: EngineSettings) -> None:
        """Free the accelerator, if the server is ours and has one; `restart` ends it in any case."""
        if self._child is None or self._child.poll() is not None:
            return
        assert self._admin is not None and self._server is not None
        if settings.sleep == "restart":
            self._child.stop(STOP_S)
        elif self._server.on_gpu:
            try:
                self._admin.sleep(settings.sleep)
            except EngineError as error:
                log.error("%s: it is ended, and started again when it is needed", error)
                self._child.stop(STOP_S)

    def check_serves(self) -> None:
        """EngineError if a server that the user runs has got other weights since `ensure`: another run may
        use it too, or it was started anew. One that cannot be asked just now has not said so.
        """
        if self._child is not None or self._admin is None or self._served is None:
            return
        try:
            serves = self._admin.policy()
        except EngineError:
            return
        if serves != self._served.digest:
            raise EngineError(
                f"the engine at {self.url} serves {serves} now, not {self._served.digest} as at the start of "
                "this rollout; what it has made since is left out. Does another run use it?"
            )

    def restart_patience_s(self, settings: EngineSettings) -> float:
        """For how long a request that breaks is tried again: a server of ours may be starting anew."""
        return settings.start_timeout_s if self._child is not None else USERS_PATIENCE_S

    async def mind(self, settings: EngineSettings, check: Callable[[], None]) -> NoReturn:
        """While requests run: start a server of ours again, under the same URL, when it has died or hangs.

        The requests that were in flight are tried again by the client, with the same seeds: finished ones
        are not asked twice. EngineError after `max_restarts`.
        """
        answered_s, restarts = time.monotonic(), 0
        while True:
            await asyncio.sleep(MIND_S)
            if self._child is None or self._admin is None:
                continue
            if self._child.poll() is None:
                health = await asyncio.to_thread(self._admin.health)
                if health:
                    answered_s = time.monotonic()
                # One that says that it is dead answers every request with an error, until it exits.
                if health is not False and time.monotonic() - answered_s < settings.health_timeout_s:
                    continue
            restarts += 1
            how = f"the engine at {self.url} died or did not answer for {settings.health_timeout_s:g} s"
            if restarts > settings.max_restarts:
                times = f"{restarts} times in one rollout"
                raise EngineError(f"{how}, {times}; its last words:\n{self._child.tail(20)}")
            log.error("%s: starting it again (%d of %d)", how, restarts, settings.max_restarts)
            self._child.kill()
            assert self._served is not None
            self._start(self._served, settings, self._port)
            await asyncio.to_thread(self._await, settings, check)
            await asyncio.to_thread(self._load, self._served, settings)
            answered_s = time.monotonic()

    def is_there(self) -> bool:
        """Whether a server has been started or given."""
        return self._admin is not None

    def _start(self, policy: Policy, settings: EngineSettings, port: int | None = None) -> None:
        """Start a server, or take the user's; whether it answers is another question."""
        if settings.url is not None:
            self.url, self._admin = settings.url, EngineAdmin(settings.url)
            return
        self._port = port or free_port(LOOPBACK)
        self._starts += 1
        adapters = self._adapters
        model = adapters.base if adapters is not None and self._adapter(policy) is not None else policy
        rank = adapters.rank if adapters is not None else 0
        self._server = server_command(settings, model.directory.absolute(), self._port, count_gpus(), rank)
        path = self._run_dir.logs(self._rank) / f"engine.{os.getpid()}.{self._starts}.log"
        self._say("engine_start")
        self._started_s = time.monotonic()
        self._child = self._children.start("engine", self._server.argv, env=self._server.env, log=path)
        self._unnamed = model
        self.url = f"http://{LOOPBACK}:{self._port}"
        self._admin = EngineAdmin(self.url, after_reload=self._server.after_reload)

    def _await(self, settings: EngineSettings, check: Callable[[], None]) -> None:
        """Wait until the server answers. What `check` raises leaves it starting, for the next time."""
        assert self._admin is not None

        def alive() -> bool:
            check()
            return self._child is None or self._child.poll() is None

        try:
            self._admin.wait_healthy(settings.start_timeout_s, alive)
        except EngineError as error:
            said = f"; its last words:\n{self._child.tail(20)}" if self._child is not None else ""
            raise EngineError(f"{error}{said}") from None
        if self._unnamed is not None:
            self._admin.name_policy(self._unnamed.digest)
            self._unnamed = None
            self._say("engine_ready", seconds=round(time.monotonic() - self._started_s, 3))


def _shown(logprobs: list[float]) -> str:
    return ", ".join(f"{logprob:.3f}" for logprob in logprobs[:FIRST_TOKENS])
