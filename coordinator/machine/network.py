"""This node's address and interface towards its peers, and free ports. IPv4 only.

A machine has many addresses: docker0 is 172.17.0.1 on every host, a second card leads to a network that the
peers are not in. So a node publishes all its addresses. It chooses one by asking the kernel which it would
use to reach the addresses that the peers have published. That sends no packet.
"""

import ipaddress
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil

LOOPBACK = "127.0.0.1"
ONLY_IPV6 = (
    "addresses of IPv6 alone, and nodes reach each other by IPv4: give each an IPv4 address (a private "
    "network or a tunnel between them will do), or use one machine"
)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MACHINE_ID = Path("/etc/machine-id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class NetworkError(RuntimeError):
    """No address of this node serves. The text names the candidates."""


@dataclass(frozen=True)
class Address:
    """An IPv4 address of a network interface."""

    ip: str
    prefix: int
    """Length of the network's prefix in bits."""
    interface: str

    def in_subnet(self, ip: str) -> bool:
        """Return whether `ip` lies in this address's network."""
        network = ipaddress.ip_network(f"{self.ip}/{self.prefix}", strict=False)
        return ipaddress.ip_address(ip) in network

    def __str__(self) -> str:
        return f"{self.ip}/{self.prefix} ({self.interface})"


@dataclass(frozen=True)
class Peer:
    """Where a node is, as it publishes it in its heartbeats."""

    identity: str
    addresses: tuple[Address, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON; `from_dict` reads it."""
        addresses = [[address.ip, address.prefix, address.interface] for address in self.addresses]
        return {"identity": self.identity, "addresses": addresses}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the Peer of a `to_dict`; KeyError, TypeError or ValueError if `data` is something else."""
        addresses = (Address(str(ip), int(prefix), str(name)) for ip, prefix, name in data["addresses"])
        return cls(str(data["identity"]), tuple(addresses))

    def __str__(self) -> str:
        return ", ".join(map(str, self.addresses)) or "no address"


def boot() -> str:
    """Return a text that two processes share if and only if they run on one machine, between two starts of
    it.
    """
    if sys.platform == "darwin":
        command = ["/usr/sbin/sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout.strip()
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # gVisor, WSL and some sandboxes have none: then a start of the machine goes unnoticed
        machine = _MACHINE_ID.read_text().strip() if _MACHINE_ID.is_file() else ""
        return f"{socket.gethostname()}-{machine}"


def has_boot_id() -> bool:
    """Return whether this machine says when it was started."""
    return sys.platform == "darwin" or _BOOT_ID.is_file()


def host_identity() -> str:
    """Return a text that two processes share if and only if they share machine and network namespace."""
    if sys.platform == "darwin":  # it has no network namespaces
        return boot()
    return f"{boot()}/{_NETWORK_NAMESPACE.stat().st_ino}"


def pid_space() -> str:
    """Return a text that two processes share if and only if one pid means one process to both of them."""
    if sys.platform == "darwin":  # it has no namespaces
        return host_identity()
    return f"{boot()}/{_PID_NAMESPACE.stat().st_ino}"


def local_addresses() -> list[Address]:
    """IPv4 addresses of the interfaces that are up, in the kernel's order, without 127.*; perhaps none."""
    stats = psutil.net_if_stats()
    return [
        Address(entry.address, ipaddress.ip_network(f"0.0.0.0/{entry.netmask or 32}").prefixlen, interface)
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not ipaddress.ip_address(entry.address).is_loopback
        # An alias such as eth0:1 is up when eth0 is.
        if (device := stats.get(interface.partition(":")[0])) and device.isup
    ]


def has_ipv6_alone() -> bool:
    """Return whether the interfaces of this machine have IPv6 addresses towards others, and none of IPv4."""
    six = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    return not local_addresses() and any(
        entry.family == socket.AF_INET6 and ipaddress.ip_address(entry.address.partition("%")[0]).is_global
        for entry in six
    )


def own_names() -> set[str]:
    """Return the names and addresses of this machine, those by which it reaches itself included."""
    host = socket.gethostname()
    addresses = {address.ip for address in local_addresses()}
    return {host, host.partition(".")[0], "localhost", LOOPBACK, *addresses}


def this_peer() -> Peer:
    """Return this node as a Peer, as it publishes itself."""
    return Peer(host_identity(), tuple(local_addresses()))


def source_towards(ip: str) -> str | None:
    """Return the local address that the kernel would use to reach `ip`; None if there is no route. Sends
    nothing.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((ip, 9))  # connecting a datagram socket only looks up the route; any port will do
        except OSError:
            return None
        return str(probe.getsockname()[0])


def address_towards(
    own_peer: Peer, peers: Sequence[Peer], *, route: Callable[[str], str | None] = source_towards
) -> str:
    """Return the one address of this node under which all `peers` can reach it. Equal input gives an equal
    answer.

    Loopback if all peers are on this host, or there are none. Otherwise an address that the route to each
    of the other hosts takes; among several, one in the same subnet as most of these hosts, then the first
    in `own_peer`. An address that two hosts have (docker0) identifies neither and is ignored. NetworkError if
    no address serves. `route` says which local address leads to an IP.
    """
    hosts = list({peer.identity: peer for peer in peers if peer.identity != own_peer.identity}.values())
    if not hosts:
        return LOOPBACK
    hosts_of = Counter(ip for host in [own_peer, *hosts] for ip in {address.ip for address in host.addresses})
    candidates = [address for address in own_peer.addresses if hosts_of[address.ip] == 1]
    # Of each other host: the routes to its addresses, as pairs of my address and its address.
    routes = [
        [(route(address.ip), address.ip) for address in host.addresses if hosts_of[address.ip] == 1]
        for host in hosts
    ]
    serving = [c for c in candidates if all(any(source == c.ip for source, _ in pairs) for pairs in routes)]
    if not serving:
        raise NetworkError(_why_none(own_peer, hosts, routes))

    def neighbours(candidate: Address) -> int:
        """Hosts that it reaches in its own subnet."""
        return sum(
            any(source == candidate.ip and candidate.in_subnet(ip) for source, ip in pairs)
            for pairs in routes
        )

    return max(serving, key=neighbours).ip  # max takes the first of equals


def _why_none(own_peer: Peer, hosts: Sequence[Peer], routes: list[list[tuple[str | None, str]]]) -> str:
    lines = [
        f"  {host}: "
        + (", ".join(f"{ip} via {source or 'no route'}" for source, ip in pairs) or "none is its own")
        for host, pairs in zip(hosts, routes, strict=True)
    ]
    if has_ipv6_alone():
        return f"this node has {ONLY_IPV6}"
    return (
        f"no address of this node leads to all other nodes. Candidates: {own_peer}. Routes to the others:\n"
        + "\n".join(lines)
        + "\nPut all nodes into one network, or give this node a route to each (see `ip route get ADDRESS`)."
    )


def interface_towards(ip: str) -> str:
    """Return the interface that traffic with `ip` uses, for gloo and NCCL; NetworkError if there is no route.

    For an address of this node: the interface that has it, where its peers find it. For 127.0.0.1: lo or lo0.
    """
    source = source_towards(ip)
    for interface, entries in psutil.net_if_addrs().items():
        if any(entry.family == socket.AF_INET and entry.address == source for entry in entries):
            return interface
    addresses = ", ".join(map(str, local_addresses())) or "none but loopback"
    raise NetworkError(
        f"no interface of this node leads to {ip} (route: {source}); its addresses: {addresses}"
    )


def free_port(ip: str) -> int:
    """Return a TCP port that was free on the local address `ip` just now. NetworkError if `ip` is
    not local.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((ip, 0))
        except OSError as error:
            addresses = ", ".join(map(str, local_addresses())) or "none but loopback"
            message = f"cannot listen on {ip}: {error.strerror}; addresses of this node: {addresses}"
            raise NetworkError(message) from error
        return int(probe.getsockname()[1])
