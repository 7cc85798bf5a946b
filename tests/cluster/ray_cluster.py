"""A Ray cluster on loopback addresses, which are as many machines; all its files are temporary."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.cluster.cluster import REPOSITORY
from tests.cluster.launchers import text, until
from tests.ports import unused_port

RAY = Path(sys.executable).with_name("ray")
HEAD = "127.0.0.2"
SMALL = (
    *("--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats", "--block"),
    *("--dashboard-agent-listen-port=0", "--dashboard-agent-grpc-port=0", "--runtime-env-agent-port=0"),
    *("--metrics-export-port=0", "--min-worker-port=0", "--max-worker-port=0"),
)
"""Any free ports, and hardly any memory."""


def unavailable() -> str | None:
    """Why there is no Ray for these tests, if so."""
    if not RAY.exists():
        return "needs Ray"
    return None if sys.platform.startswith("linux") else "needs loopback addresses beside 127.0.0.1"


def started(environment: Mapping[str, str], machines: int) -> "RayCluster":
    """A cluster of so many machines, the head among them. Ray's own start fails now and then on a machine
    with much to do: then another one is started.
    """
    for is_last in (False, False, True):
        cluster = RayCluster(environment)
        try:
            cluster.__enter__()
            for _ in range(machines - 1):
                cluster.add()
            return cluster
        except AssertionError:
            cluster.__exit__()
            if is_last:
                raise
    raise AssertionError


class RayCluster:
    """A head, and one raylet after the other. A context manager: all of it is gone at the end."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need short names
        patient = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": "120"}  # tests run on busy machines
        self.environment = {**environment, **patient, "RAY_USAGE_STATS_ENABLED": "0"}
        self.address = f"{HEAD}:{unused_port(HEAD)}"
        self.client = f"ray://{HEAD}:{unused_port(HEAD)}"
        self.dashboard = f"http://{HEAD}:{unused_port(HEAD)}"
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "RayCluster":
        try:
            port, client, dashboard = (
                url.rpartition(":")[2] for url in (self.address, self.client, self.dashboard)
            )
            ports = (f"--port={port}", f"--ray-client-server-port={client}", f"--dashboard-port={dashboard}")
            here = ("--include-dashboard=true", f"--dashboard-host={HEAD}", f"--temp-dir={self.place}/ray")
            self.start(HEAD, "--head", *ports, *here)
        except BaseException:
            self.__exit__()
            raise
        return self

    def add(self, prefix: tuple[str, ...] = (), cpus: int = 1) -> subprocess.Popen[bytes]:
        """Start another machine; `prefix`: a command that starts it in its own way."""
        host = f"127.0.0.{len(self._started) + 2}"
        return self.start(host, f"--address={self.address}", prefix=prefix, cpus=cpus)

    def start(
        self, host: str, *options: str, prefix: tuple[str, ...] = (), cpus: int = 1
    ) -> subprocess.Popen[bytes]:
        """Start a raylet, and wait until it runs."""
        log = self.place / f"start-{len(self._started)}"
        command = [
            *prefix,
            str(RAY),
            "start",
            f"--node-ip-address={host}",
            *options,
            *SMALL,
            f"--num-cpus={cpus}",
        ]
        with open(log, "wb") as out:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )
        self._started.append(process)
        until(
            lambda: process.poll() is not None or "Ray runtime started" in text(log),
            lambda: f"no raylet:\n{text(log)}{self._said_by_head()}",
            90.0,
        )
        assert process.poll() is None, text(log)
        return process

    def _said_by_head(self) -> str:
        """The end of what the head's server has logged."""
        logs = sorted(self.place.glob("ray/session_2*/logs/gcs_server.*"))
        ends = [f"\n{log.name}:\n" + "\n".join(text(log).splitlines()[-20:]) for log in logs]
        return f"\nthe head has ended: {self._started[0].poll()}{''.join(ends)}"

    def raylets(self) -> dict[int, str]:
        """The raylets that run, with the host of each, the head's not included."""
        found: dict[int, str] = {}
        for starter in self._started[1:]:
            if starter.poll() is None:
                for child in psutil.Process(starter.pid).children():
                    if child.name() == "raylet" and child.status() != psutil.STATUS_ZOMBIE:
                        found[child.pid] = re.findall(r"--node_ip_address=(\S+)", " ".join(child.cmdline()))[
                            0
                        ]
        return found

    def __exit__(self, *_error: object) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with contextlib.suppress(ProcessLookupError):  # what Ray starts stays in its group
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self.place, ignore_errors=True)


def raylet_of(node: psutil.Process) -> int:
    """The raylet under which a node was started."""
    return int(node.environ()["RAY_RAYLET_PID"])
