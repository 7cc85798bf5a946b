"""This node's engine: started when there is something to generate, reloaded in place, ended with the node."""

import asyncio
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from coordinator.children import Child, Children
from coordinator.host_lock import acquire, host_lock
from coordinator.network import LOOPBACK, free_port
from coordinator.outputs import Policy
from coordinator.run_dir import RunDir
from rollout.engine import EngineError
from rollout.engine_admin import EngineAdmin
from rollout.settings import EngineSettings

log = logging.getLogger(__name__)

MIND_S = 0.5
"""How often a server that generates is looked after."""
USERS_PATIENCE_S = 10.0
"""How long a server of the user's may be away."""


class EngineHost:
    """Keeps one server at the policy that is asked for; or uses the user's own (engine.url)."""

    def __init__(self, children: Children, run_dir: RunDir, rank: int) -> None:
        self._children = children
        self._run_dir = run_dir
        self._rank = rank
        self._child: Child | None = None
        self._admin: EngineAdmin | None = None
        self.url = ""
        """Base URL of the server, once there is one."""
        self._served: Policy | None = None
        self._port = 0
        self._starts = 0

    def ensure(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        """Have a server that answers with `policy`; EngineError if that cannot be had. `check` may raise.

        One of ours that fails is started once more: its files, or its port, may be there then.
        """
        try:
            self._have(policy, settings, check)
        except EngineError as error:
            if self._child is None:
                raise
            log.error("%s\nstarting it once more", error)
            self._child.kill()
            self._have(policy, settings, check)
        self._served = policy

    def _have(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        if self._admin is None or (self._child is not None and self._child.poll() is not None):
            self._start(policy, settings)
        self._await(settings, check)
        if settings.url is None:
            self._load(policy)
            return
        # Nodes of one host may share a server of the user's: let one of them load the policy.
        lock = host_lock("engine-" + settings.url.partition("//")[2].replace("/", "_"))
        if not acquire(lock, check, settings.start_timeout_s):
            raise EngineError(
                f"another node of this host takes too long to load a policy into {settings.url}"
            )
        try:
            self._load(policy)
        finally:
            lock.release()

    def _load(self, policy: Policy) -> None:
        assert self._admin is not None
        if self._admin.is_sleeping():
            self._admin.wake()
        if self._admin.policy() != policy.digest:
            self._admin.reload(policy.directory.absolute(), policy.digest, like=self._like(policy))
        if (serves := self._admin.policy()) != policy.digest:
            raise EngineError(
                f"the engine at {self.url} serves policy {serves} after loading {policy.digest}"
            )

    def _like(self, policy: Policy) -> Path | None:
        """A model directory with the same tensors: an engine may answer 200 to weights that lack one.

        The policy served before, if a trainer of ours has written both: the user's own model may tie or pad
        its tensors in another way.
        """
        before = self._served
        if before is None or not before.iteration or not policy.iteration or not before.directory.is_dir():
            return None
        return before.directory

    def sleep(self) -> None:
        """Free the accelerator. A server that the user runs is left alone."""
        if self._child is None or self._admin is None or self._child.poll() is not None:
            return
        try:
            self._admin.sleep(1)
        except EngineError as error:
            log.error("%s: it is ended, and started again when it is needed", error)
            self._child.kill()

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
                if await asyncio.to_thread(self._admin.healthy):
                    answered_s = time.monotonic()
                if time.monotonic() - answered_s < settings.health_timeout_s:
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
        argv = [sys.executable, "-m", "rollout.torch_server", "--port", str(self._port)]
        argv += ["--model", str(policy.directory.absolute()), "--weight-version", policy.digest]
        argv += ["--dtype", settings.dtype, "--max-batch", str(settings.max_batch)]
        path = self._run_dir.logs(self._rank) / f"engine.{os.getpid()}.{self._starts}.log"
        self._child = self._children.start("engine", argv, log=path)
        self.url = f"http://{LOOPBACK}:{self._port}"
        self._admin = EngineAdmin(self.url)

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
