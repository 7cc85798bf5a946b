"""The life of this node's engine: it is started when there is work, minded, put to sleep, and ended."""

import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from coordinator.directory.layout import RunDir
from coordinator.directory.published import Policy
from coordinator.journal.events import Say
from coordinator.machine.child import Child
from coordinator.machine.children import Children
from coordinator.machine.gpus import count_gpus, least_gpu_bytes
from coordinator.machine.host_lock import acquire, host_lock
from coordinator.machine.weights import Adapters, Loader, RunningServer
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import UNIX, EngineError, EngineFacts
from rollout.engines.kinds.choice import engine_kind
from rollout.engines.kinds.kind import EngineKind, ServerCommand
from rollout.engines.token_counts import Generated
from rollout.settings import EngineSettings

log = logging.getLogger(__name__)

MIND_S = 0.5
"""How often a server that generates is looked after."""
USERS_PATIENCE_S = 10.0
"""How long a server that the user runs may be away."""
STOP_S = 10.0
"""How long a server may take to end by itself: killed, vLLM leaves its shared memory behind."""
REFUSES_WORDS = 2
"""The exit status of a program that does not take its command line."""
_CAUSE = re.compile(r"\b([A-Z]\w*(?:Error|Exception): .+)")
_NO_CAUSE = "Engine core initialization failed"
"""What a process of vLLM says of another one, after that has said why."""


def last_words(tail: Callable[[int], str]) -> str:
    """Return the end of a sentence about a server that has died: the error that it names, and its last lines.
    `tail`: gives so many of them.
    """
    causes = [cause for cause in _CAUSE.findall(tail(200)) if _NO_CAUSE not in cause]
    return f"{f': {causes[-1]}' if causes else ''}; its last words:\n{tail(20)}"


class _NoLongerNeeded(Exception):
    """Nobody needs the server just now."""


class EngineHost:
    """Keeps one server at the policy that is asked for; or uses the one that the user runs (engine.url)."""

    def __init__(self, children: Children, run_dir: RunDir, rank: int, say: Say) -> None:
        self._children = children
        self._say = say
        self._run_dir = run_dir
        self._rank = rank
        self._loader = Loader(say)
        self._child: Child | None = None
        """The node's own server; None: the user runs it, or there is none yet."""
        self._admin: EngineAdmin | None = None
        self._kind: EngineKind | None = None
        self._server: ServerCommand | None = None
        self._unnamed: Policy | None = None
        """The policy that the node's own server was started with, until its name is set."""
        self._socket: Path | None = None
        """Where the node's own server listens: in the spool, which no other user can enter."""
        self._starts_again = False
        """Whether the node's own server is being started again while requests wait for it."""
        self._starts = 0
        self._started_s = 0.0
        self.url = ""
        """Base URL of the server, once there is one."""
        self.model: str | None = None
        """The name that requests must give for the policy of `ensure`: an adapter's; None: the model's."""
        self.facts = EngineFacts()
        """What the running server can do; defaults before."""
        self._facts_of: EngineAdmin | None = None

    def ensure(
        self,
        policy: Policy,
        settings: EngineSettings,
        check: Callable[[], None],
        adapters: Adapters | None = None,
    ) -> None:
        """Have a server that answers with `policy`; EngineError if that cannot be had. `check` may raise.

        `adapters`: if policies of the run may be adapters, and then in every call. A server of this node that
        fails is started once more: its files, or its port, may be there then; not one that refuses its words.
        """
        self._loader.adapters = adapters
        try:
            self._have(policy, settings, check)
        except EngineError as error:
            if self._child is None or self._child.poll() == REFUSES_WORDS:
                raise
            log.error("%s\nstarting it once more", error)
            self._child.stop(STOP_S)
            self._have(policy, settings, check)
        self.model = self._loader.name_of(policy)

    def _have(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        if self._admin is None or (self._child is not None and self._child.poll() is not None):
            self._start(policy, settings, self._socket)
        self._await(settings, check)
        if self._facts_of is not self._admin:
            assert self._kind is not None and self._admin is not None
            self.facts, self._facts_of = self._kind.facts(self._admin, self._server), self._admin
        if settings.url is None:
            self._load(policy, settings)
            return
        # Nodes of one host may share a server that the user runs: let one of them load the policy.
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
        assert self._admin is not None and self._kind is not None
        replicas = self._server.replicas if self._server else 1
        start = self._starts if self._child is not None else 0
        running = RunningServer(
            self._admin, self.url, replicas, start, self._kind.proves, self._kind.dtype[1]
        )
        self._loader.load(running, policy, settings.probe_tolerance)

    def end(self) -> None:
        """End this node's own server, if there is one; `ensure` starts another."""
        if self._child is not None:
            self._child.stop(STOP_S)

    def sleep(self, settings: EngineSettings) -> None:
        """Free the accelerator, if the server is this node's and has one; `restart` ends it in any case."""
        if self._child is None or self._child.poll() is not None:
            return
        assert self._admin is not None and self._server is not None
        if settings.sleep == "restart" or self.is_starting:  # one whose policy has no name yet may drop it
            self.end()
        elif self._server.on_gpu:
            try:
                # The model under adapters stays what it is; other weights are replaced whole.
                self._admin.sleep(settings.sleep or (1 if self._loader.adapters else 2))
            except EngineError as error:
                log.error("%s: it is ended, and started again when it is needed", error)
                self._child.stop(STOP_S)

    def check_serves(self) -> None:
        """Raise EngineError if the server has got other weights since `ensure`.

        Another run may use a server that the user runs, or it was started anew. A server that does not answer
        just now passes.
        """
        served = self._loader.served
        if self._admin is None or served is None or self._starts_again:
            return
        try:
            serves = self._admin.policy()
        except EngineError:
            return
        if serves != served.digest:
            raise EngineError(
                f"the engine at {self.url} serves {serves} now, not {served.digest} as at the start of "
                "this rollout; what it has made since is left out. Does another run use it?"
            )

    def restart_patience_s(self, settings: EngineSettings) -> float:
        """For how long a request that breaks is tried again: this node's server may be starting anew."""
        return settings.start_timeout_s if self._child is not None else USERS_PATIENCE_S

    def mind(
        self,
        settings: EngineSettings,
        check: Callable[[], None],
        generation_over: threading.Event,
        on_generated: Callable[[Generated], None] = lambda _: None,
    ) -> None:
        """While requests run, until `generation_over`, start this node's server again, at the same URL, when
        it has died or hangs. `on_generated` hears what it has generated since the last time.

        The client tries the requests that were in flight again, with the same seeds; finished ones are not
        asked twice. EngineError after `max_restarts`.
        """

        def check_or_end() -> None:
            check()
            if generation_over.is_set():
                raise _NoLongerNeeded

        answered_s, restarts = time.monotonic(), 0
        before: Generated | None = None
        while not generation_over.wait(MIND_S):
            if self._child is None or self._admin is None:
                continue
            if self._child.poll() is None:
                health = self._admin.health()
                if health:
                    answered_s = time.monotonic()
                    if (now := self._generated()) is not None:
                        on_generated(now.since(before or now))
                        before = now
                # A server that says that it is dead answers every request with an error, until it exits.
                if health is not False and time.monotonic() - answered_s < settings.health_timeout_s:
                    continue
            restarts += 1
            fault = f"the engine at {self.url} died or did not answer for {settings.health_timeout_s:g} s"
            if restarts > settings.max_restarts:
                times = f"{restarts} times in one rollout"
                raise EngineError(f"{fault}, {times}{last_words(self._child.tail)}")
            log.error("%s: starting it again (%d of %d)", fault, restarts, settings.max_restarts)
            self._starts_again = True
            try:
                self._child.kill()
                served = self._loader.served
                assert served is not None
                self._start(served, settings, self._socket)
                self._await(settings, check_or_end)
                self._load(served, settings)
            except _NoLongerNeeded:
                return  # it is starting: whoever needs it next waits for it
            finally:
                self._starts_again = False
            answered_s = time.monotonic()

    def _generated(self) -> Generated | None:
        """Return the server's count of what it has generated; None if it does not say."""
        assert self._admin is not None
        try:
            return self._admin.generated()
        except EngineError:
            return None

    @property
    def is_starting(self) -> bool:
        """Whether this node's own server was started, and has not answered yet."""
        return self._unnamed is not None

    def is_there(self) -> bool:
        """Return whether a server has been started or given."""
        return self._admin is not None

    def _start(self, policy: Policy, settings: EngineSettings, socket: Path | None = None) -> None:
        """Start a server, or take the user's; whether it answers is another question.

        `socket`: where the server before listened, if there was one: requests may wait for this one there.
        """
        gpus = count_gpus()
        self._kind = engine_kind(settings, gpus, self._children.python)
        if settings.url is not None:
            self.url, self._admin = settings.url, self._kind.admin(settings.url)
            return
        self._starts += 1
        self._socket = socket or self._children.spool / f"engine-{self._starts}.sock"
        self._socket.unlink(missing_ok=True)  # a server that was killed has left it
        model, adapters = self._loader.model_of(policy), self._loader.adapters
        rank = adapters.rank if adapters is not None else 0
        gpu_bytes = least_gpu_bytes() if gpus > 1 else None
        self._server = self._kind.command(model.directory.absolute(), self._socket, rank, gpu_bytes)
        path = self._run_dir.logs(self._rank) / f"engine.{os.getpid()}.{self._starts}.log"
        self._say("engine_start")
        self._started_s = time.monotonic()
        self._child = self._children.start("engine", self._server.argv, env=self._server.env, log=path)
        self._unnamed = model
        self.url = f"{UNIX}{self._socket}"
        self._admin = self._kind.admin(self.url)

    def _await(self, settings: EngineSettings, check: Callable[[], None]) -> None:
        """Wait until the server answers. What `check` raises leaves it starting, for the next time."""
        assert self._admin is not None

        def alive() -> bool:
            check()
            return self._child is None or self._child.poll() is None

        try:
            self._admin.wait_healthy(settings.start_timeout_s, alive)
        except EngineError as error:
            ending = last_words(self._child.tail) if self._child is not None else ""
            raise EngineError(f"{error}{ending}") from None
        unnamed, self._unnamed = self._unnamed, None  # another thread may wait for the same start
        if unnamed is not None:
            self._admin.name_policy(unnamed.digest)
            self._say("engine_ready", seconds=round(time.monotonic() - self._started_s, 3))
