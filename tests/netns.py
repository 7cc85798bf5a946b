"""Hosts on one machine: network namespaces, joined by bridges that lie in a namespace of their own.

Linux only, as root.

    with Hosts(3) as hosts:
        subprocess.run(hosts[1].argv(["ping", "-c1", hosts[0].address]))

The root namespace is not touched, so any number of these may exist side by side: names carry the pid, and
equal addresses in different sets do not see each other.
"""

import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, overload

_numbers = itertools.count()
DECOY = "172.17.0.1/16"
"""What docker0 has on every host."""
SETTLE_S = 60.0
"""How long the kernel may take to bring a link up, and killed processes to leave a namespace."""


class NetnsError(RuntimeError):
    """An `ip` command failed; the text is what it said."""


@dataclass(frozen=True)
class Host:
    """One namespace with `lo` and an interface `lanK` in each LAN."""

    name: str
    addresses: tuple[str, ...]
    """Its address in each LAN."""

    @property
    def address(self) -> str:
        """Its address in the first LAN."""
        return self.addresses[0]

    def argv(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host; its pid is that of `command`, as `ip` execs it."""
        return ["ip", "netns", "exec", self.name, *command]

    def pids(self) -> list[int]:
        """The processes that run on this host."""
        return [int(pid) for pid in _ip("netns", "pids", self.name).split()]


class Hosts(Sequence[Host]):
    """`n` hosts with the addresses 10.77.K.1 to 10.77.K.n in LAN K, of `lans`. A context manager.

    `decoy` gives every host a second, useless interface `docker0` with the same address everywhere. Leaving
    it kills what still runs on the hosts and deletes everything, also after a failed setup.
    """

    def __init__(self, n: int, *, lans: int = 1, decoy: bool = False) -> None:
        self._lans = lans
        self._decoy = decoy
        self._base = f"flagpost-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._base}-switch"
        self._hosts = [
            Host(f"{self._base}-{i}", tuple(f"10.77.{lan}.{i + 1}" for lan in range(lans))) for i in range(n)
        ]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._delete)
            _ip("netns", "add", self._switch)
            for lan in range(self._lans):
                _ip("-n", self._switch, "link", "add", f"lan{lan}", "type", "bridge")
                _ip("-n", self._switch, "link", "set", f"lan{lan}", "up")
            for i, host in enumerate(self._hosts):
                self._make(i, host)
            for host in self._hosts:
                _wait_until_up(host, self._lans)
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._delete()

    def __len__(self) -> int:
        return len(self._hosts)

    @overload
    def __getitem__(self, index: int) -> Host: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Host]: ...
    def __getitem__(self, index: int | slice) -> Host | Sequence[Host]:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def _make(self, i: int, host: Host) -> None:
        _ip("netns", "add", host.name)
        _ip("-n", host.name, "link", "set", "lo", "up")
        if self._decoy:  # first, as an unsuspecting choice would take the first
            _ip("-n", host.name, "link", "add", "docker0", "type", "veth", "peer", "name", "container")
            _ip("-n", host.name, "address", "add", DECOY, "dev", "docker0")
            _ip("-n", host.name, "link", "set", "container", "up")
            _ip("-n", host.name, "link", "set", "docker0", "up")
        for lan, address in enumerate(host.addresses):
            port = f"port{lan}-{i}"
            ends = ("type", "veth", "peer", "name", port, "netns", self._switch)
            _ip("-n", host.name, "link", "add", f"lan{lan}", *ends)
            _ip("-n", self._switch, "link", "set", port, "master", f"lan{lan}", "up")
            _ip("-n", host.name, "address", "add", f"{address}/24", "dev", f"lan{lan}")
            _ip("-n", host.name, "link", "set", f"lan{lan}", "up")

    def _delete(self) -> None:
        listed = {line.split()[0] for line in _ip("netns", "list").splitlines()}
        for host in self._hosts:
            if host.name in listed:
                _empty(host)
                _ip("netns", "delete", host.name)
        if self._switch in listed:
            _ip("netns", "delete", self._switch)


def _wait_until_up(host: Host, lans: int) -> None:
    """The kernel reports a link as up a moment after both of its ends are."""
    deadline_s = time.monotonic() + SETTLE_S
    expected = {f"lan{lan}" for lan in range(lans)}
    while not expected <= _links_up(host):
        if time.monotonic() > deadline_s:
            raise NetnsError(f"the links of {host.name} did not come up in {SETTLE_S} s")
        time.sleep(0.005)


def _links_up(host: Host) -> set[str]:
    lines = [line.split() for line in _ip("-n", host.name, "-brief", "link").splitlines()]
    return {name.partition("@")[0] for name, state, *_ in lines if state == "UP"}


def _empty(host: Host) -> None:
    """Kill what runs on a host, as long as something starts there."""
    deadline_s = time.monotonic() + SETTLE_S
    while (pids := host.pids()) and time.monotonic() < deadline_s:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise NetnsError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")
    return done.stdout


@functools.cache
def unavailable() -> str | None:
    """Why such hosts cannot be made here, for pytest.skip; None if they can. Tried once for real."""
    if sys.platform != "linux":
        return f"network namespaces need Linux, this is {sys.platform}"
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with Hosts(1) as hosts:
            subprocess.run(hosts[0].argv(["true"]), check=True, capture_output=True, text=True, timeout=60)
    except subprocess.CalledProcessError as error:
        return f"network namespaces do not work here: {error.stderr.strip()}"
    except NetnsError as error:
        return f"network namespaces do not work here: {error}"
    return None
