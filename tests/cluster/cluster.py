"""Real nodes for tests: processes of `run`, ended by pid, and a check that none of theirs is left."""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from coordinator.directory.layout import RunDir
from coordinator.machine.children import PROGRAMS
from coordinator.settings.tree import SettingsError
from coordinator.start.user_functions import load_functions
from rollout.part_file import decode_part
from rollout.settings import RolloutSettings
from rollout.trajectory import Group
from tests.commands import run_forked, start_forked
from tests.imports import shared_imports

REPOSITORY = Path(__file__).parents[2]
DEFAULTS = RolloutSettings()
TOKEN = "FLAGPOST_TEST"
"""Environment variable that marks a cluster's processes, their children included."""

FAST = (
    "tiny.warmup_steps=0",
    "rollout.tasks_per_iteration=8",
    "rollout.samples_per_task=4",
    "rollout.part_interval_s=0.1",
    "rollout.reward=tests.cluster.plugins:digits",
    "eval.max_tasks=4",
    "trainer.global_batch_size=16",
    "cluster.beat_s=0.3",
    "cluster.node_timeout_s=15",
)
"""Settings of a run that takes seconds and still learns something."""


class Cluster:
    """The nodes of one run directory. They are forks of the test process, and their engines and trainers
    forks of another one, as those of `run local` are; unless they are `separate`, and import for themselves.
    """

    def __init__(self, root: Path, cache: Path, logs: Path, separate: bool = False) -> None:
        self.root = root
        self.run_dir = RunDir(root)
        self._logs = logs
        self._token = secrets.token_hex(8)
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in {"RANK", "MASTER_ADDR"}},
            "XDG_CACHE_HOME": str(cache),
            "OMP_NUM_THREADS": "1",
            TOKEN: self._token,
            **({} if separate else shared_imports()),
        }
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._separate = separate
        self._older_forks = self._forks()
        self._starts = 0

    def start(
        self,
        rank: int,
        *arguments: str,
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        role: Sequence[str] = (),
        program: Sequence[str] = ("coordinator.cli",),
        root: Path | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a node: the master for rank 0. Its output is appended to what `output` returns.

        `variables`: of its environment, beside those of all; `program`: a module that runs nodes, and the
        arguments of its own; `root`: where this node sees the run directory, if it has a mount of its own.
        """
        environment = {**self.environment, **(variables or {})}
        role = role or (["--worker", str(rank)] if rank else ["--master"])
        words = [*program, *role, "--log-path", str(root or self.root), *arguments]
        with open(self._log(rank), "ab") as log:
            if self._separate or prefix or self._has_another_python():
                self.nodes[rank] = subprocess.Popen(
                    [*prefix, sys.executable, "-m", *words],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            else:
                _load_plugins(words)
                self.nodes[rank] = start_forked(words, REPOSITORY, environment, stdout=log, stderr=log)
        return self.nodes[rank]

    def run(self, nodes: int, *arguments: str, timeout_s: float = 240.0) -> list[int]:
        """Start a master and its workers, wait for all; their exit codes."""
        self.start(0, "--num-nodes", str(nodes), *arguments)
        for rank in range(1, nodes):
            self.start(rank)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 240.0) -> list[int]:
        """Exit codes of all nodes, in order of rank."""
        deadline_s = time.monotonic() + timeout_s
        try:
            return [
                node.wait(max(0.1, deadline_s - time.monotonic())) for _, node in sorted(self.nodes.items())
            ]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.everything_said()}") from None

    def command(self, *arguments: str) -> str:
        """The output of another `run` command on the run directory."""
        done = run_forked([*arguments, "--log-path", str(self.root)], REPOSITORY, self.environment)
        done.check_returncode()
        return done.stdout

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one node, to nothing else."""
        self.nodes[rank].send_signal(number)

    def output(self, rank: int) -> str:
        """What the processes of `rank` have printed so far."""
        return self._log(rank).read_text()

    def everything_said(self) -> str:
        """All output, for messages."""
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in sorted(self.nodes))

    def until(self, ready: Callable[[], Any], what: str, timeout_s: float = 180.0) -> Any:
        """Poll until `ready()` is true; its value."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if value := ready():
                return value
            time.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {timeout_s} s:\n{self.everything_said()}")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl."""
        if not self.run_dir.metrics.exists():
            return []
        return [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]

    def manifest(self, iteration: int, kind: Any = "train") -> dict[str, Any]:
        """A published manifest."""
        return json.loads(self.run_dir.manifest(kind, iteration).read_text())

    def groups(self, iteration: int, kind: Any = "train") -> dict[int, Group]:
        """The groups that a manifest names, by slot; fails if one is named twice."""
        found: dict[int, Group] = {}
        for entry in self.manifest(iteration, kind)["parts"]:
            data = (self.run_dir.trajectories(kind, iteration) / entry["file"]).read_bytes()
            for group in decode_part(data)[1]:
                if group.slot in entry["slots"]:
                    assert group.slot not in found
                    found[group.slot] = group
        return found

    def left_behind(self) -> list[str]:
        """Processes of this cluster that still run, reapers that are about to end included. A fork has the
        words and the environment of the process that it is a fork of; engines of the test session are older.
        """
        found: list[str] = []
        forks = self._forks() - self._older_forks
        for process in psutil.process_iter():
            try:
                is_ours = process.pid in forks or process.environ().get(TOKEN) == self._token
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def close(self) -> None:
        """Kill the nodes that are left; AssertionError if something of theirs outlives them."""
        for node in self.nodes.values():
            if node.poll() is None:
                node.kill()
            node.wait()
        deadline_s = time.monotonic() + 60.0
        while (left := self.left_behind()) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        for line in left:
            os.kill(int(line.split()[0]), signal.SIGKILL)
        assert not left, f"left behind: {left}\n{self.everything_said()}"

    def _has_another_python(self) -> bool:
        """Whether a variable is set that Python reads when it starts."""
        names = {name for name in (*self.environment, *os.environ) if name.startswith("PYTHON")}
        return any(self.environment.get(name) != os.environ.get(name) for name in names)

    def _forks(self) -> set[int]:
        """The servers of the forks, their forks, and the clients that stand for them."""
        sockets = {self.environment[name] for name in PROGRAMS if name in self.environment}
        processes = psutil.process_iter(["cmdline"])
        return {each.pid for each in processes if not sockets.isdisjoint(each.info["cmdline"] or ())}

    def _log(self, rank: int) -> Path:
        return self._logs / f"node_{rank}.log"


def _load_plugins(words: Sequence[str]) -> None:
    """Load the reward and the environment of plugins.py that a node is told to use: for what the test process
    has loaded, its forks start no process.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    reward = given.get("rollout.reward", DEFAULTS.reward)
    environment = given.get("rollout.environment", DEFAULTS.environment)
    if "tests.cluster.plugins:" in reward + environment:
        with contextlib.suppress(SettingsError):  # which the node is to say
            load_functions(reward, environment)


def token_ids(groups: dict[int, Group]) -> dict[int, list[list[int]]]:
    """The token ids of every sample, by slot."""
    return {slot: [sample.token_ids.tolist() for sample in group.samples] for slot, group in groups.items()}


def finish(cluster: Cluster, *arguments: str) -> None:
    """Run one node to its end, which has to be that of the run."""
    assert cluster.run(1, *arguments) == [0], cluster.everything_said()
    cluster.close()
