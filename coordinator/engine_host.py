"""This node's engine: started when there is something to generate, reloaded in place, ended with the node."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.children import Child, Children
from coordinator.network import LOOPBACK, free_port
from coordinator.outputs import Policy
from coordinator.run_dir import RunDir
from rollout.engine import EngineAdmin, EngineError
from rollout.settings import EngineSettings

log = logging.getLogger(__name__)


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
        self._loaded: Path | None = None
        self._starts = 0

    def ensure(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        """Have a server that answers with `policy`; EngineError if that cannot be had. `check` may raise."""
        if self._admin is None or (self._child is not None and self._child.poll() is not None):
            self._start(policy, settings, check)
        assert self._admin is not None
        if self._admin.is_sleeping():
            self._admin.wake()
        if self._admin.policy() != policy.digest:
            # An engine may answer 200 to weights that lack a tensor: they must be like those that it has.
            like = self._loaded if self._loaded is not None and self._loaded.is_dir() else None
            self._admin.reload(policy.directory.absolute(), policy.digest, like=like)
        if (serves := self._admin.policy()) != policy.digest:
            raise EngineError(
                f"the engine at {self.url} serves policy {serves} after loading {policy.digest}"
            )

    def sleep(self) -> None:
        """Free the accelerator. A server that the user runs is left alone."""
        if self._child is not None and self._admin is not None and self._child.poll() is None:
            self._admin.sleep(1)

    def is_there(self) -> bool:
        """Whether a server has been started or given."""
        return self._admin is not None

    def leave_epoch(self) -> None:
        """Nothing: an engine stays warm across epochs, and proves its policy before it is used again."""

    def _start(self, policy: Policy, settings: EngineSettings, check: Callable[[], None]) -> None:
        if settings.url is not None:
            self.url = settings.url
            self._admin = EngineAdmin(settings.url)
            self._admin.wait_healthy(settings.start_timeout_s, _checked(check))
            return
        port = free_port(LOOPBACK)
        self._starts += 1
        argv = [sys.executable, "-m", "rollout.torch_server", "--port", str(port)]
        argv += ["--model", str(policy.directory.absolute()), "--weight-version", policy.digest]
        argv += ["--dtype", settings.dtype, "--max-batch", str(settings.max_batch)]
        path = self._run_dir.logs(self._rank) / f"engine.{os.getpid()}.{self._starts}.log"
        child = self._children.start("engine", argv, log=path)
        self._child = child
        self.url = f"http://{LOOPBACK}:{port}"
        admin = EngineAdmin(self.url)

        def alive() -> bool:
            check()
            return child.poll() is None

        try:
            admin.wait_healthy(settings.start_timeout_s, alive)
        except EngineError as error:
            child.kill()
            raise EngineError(f"{error}; the end of {path}:\n{child.tail(20)}") from None
        self._admin = admin


def _checked(check: Callable[[], None]) -> Callable[[], bool]:
    def alive() -> bool:
        check()
        return True

    return alive
