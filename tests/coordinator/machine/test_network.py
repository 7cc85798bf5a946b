"""Which address and interface a node takes: with made-up peers, and in real network namespaces."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest

from coordinator.machine import network
from coordinator.machine.network import Address, NetworkError, Peer, address_towards
from coordinator.node.identity import Identity
from tests import netns
from tests.netns import Host, Hosts

DOCKER = Address("172.17.0.1", 16, "docker0")


def peer(identity: str, *addresses: str | Address) -> Peer:
    """A made-up peer; a plain string is an address with a 24-bit network on an interface of its own."""
    made = [a if isinstance(a, Address) else Address(a, 24, f"eth{i}") for i, a in enumerate(addresses)]
    return Peer(identity, tuple(made))


def routes(table: dict[str, str]) -> Callable[[str], str | None]:
    """A routing table: prefix of an address as text -> the local address that leads there."""

    def route(ip: str) -> str | None:
        return next((source for prefix, source in table.items() if ip.startswith(prefix)), None)

    return route


def test_address_is_loopback_when_all_peers_are_on_this_host() -> None:
    assert address_towards(peer("a", "10.0.0.1"), [peer("a", "10.0.0.1")]) == "127.0.0.1"
    assert address_towards(peer("a", "10.0.0.1"), []) == "127.0.0.1"
    assert address_towards(peer("a"), [peer("a")]) == "127.0.0.1"


def test_address_is_not_loopback_when_one_of_the_peers_is_elsewhere() -> None:
    peers = [peer("a", "10.0.0.1"), peer("b", "10.0.0.2")]
    assert address_towards(peer("a", "10.0.0.1"), peers, route=routes({"10.": "10.0.0.1"})) == "10.0.0.1"


def test_address_that_two_hosts_have_is_ignored() -> None:
    mine = peer("a", DOCKER, "10.0.0.1")
    table = routes({"172.17.": "172.17.0.1", "10.": "10.0.0.1"})
    peers = [peer("b", DOCKER, "10.0.0.2"), peer("c", DOCKER, "10.0.0.3")]
    assert address_towards(mine, peers, route=table) == "10.0.0.1"


def test_docker_bridge_of_this_node_alone_is_ignored() -> None:
    mine, peers = peer("a", DOCKER, "10.0.0.1"), [peer("b", "10.0.0.2"), peer("c", "10.0.0.3")]
    assert (
        address_towards(mine, peers, route=routes({"172.17.": "172.17.0.1", "10.": "10.0.0.1"})) == "10.0.0.1"
    )


def test_hosts_that_share_nothing_but_docker_bridges_are_refused() -> None:
    with pytest.raises(NetworkError, match=r"172\.17\.0\.1/16 \(docker0\).*none is its own"):
        address_towards(peer("a", DOCKER), [peer("b", DOCKER)], route=routes({"172.17.": "172.17.0.1"}))


def test_shared_subnet_wins_over_the_default_route() -> None:
    # Everybody's first card is a private network of its own with the default route.
    mine, others = peer("a", "192.168.1.5", "10.0.0.1"), [peer("b", "192.168.2.5", "10.0.0.2")]
    assert (
        address_towards(mine, others, route=routes({"10.0.0.": "10.0.0.1", "": "192.168.1.5"})) == "10.0.0.1"
    )


def test_address_must_serve_all_peers() -> None:
    # 10.0.0.1 shares a subnet with two of three peers, but only 10.9.0.1 leads to all.
    mine = peer("a", "10.0.0.1", "10.9.0.1")
    others = [peer("b", "10.0.0.2", "10.9.0.2"), peer("c", "10.0.0.3", "10.9.0.3"), peer("d", "10.9.0.4")]
    assert (
        address_towards(mine, others, route=routes({"10.0.": "10.0.0.1", "10.9.": "10.9.0.1"})) == "10.9.0.1"
    )


def test_peers_in_other_subnets_are_reached_through_a_router() -> None:
    mine, others = peer("a", "10.0.1.5"), [peer("b", "10.0.2.5"), peer("c", "10.0.3.5")]
    assert address_towards(mine, others, route=routes({"10.": "10.0.1.5"})) == "10.0.1.5"


def test_first_address_wins_among_equals_whatever_the_order_of_the_peers() -> None:
    mine = peer("a", "10.0.0.1", "10.9.0.1")
    others = [peer("b", "10.9.0.2", "10.0.0.2"), peer("c", "10.0.0.3", "10.9.0.3")]
    table = routes({"10.0.": "10.0.0.1", "10.9.": "10.9.0.1"})
    assert address_towards(mine, others, route=table) == "10.0.0.1"
    assert address_towards(mine, others[::-1], route=table) == "10.0.0.1"


def test_error_names_candidates_and_routes_when_no_single_address_serves() -> None:
    mine, others = peer("a", "10.0.0.1", "10.9.0.1"), [peer("b", "10.0.0.2"), peer("c", "10.9.0.3")]
    with pytest.raises(NetworkError) as caught:
        address_towards(mine, others, route=routes({"10.0.": "10.0.0.1"}))
    for part in ("10.0.0.1/24 (eth0), 10.9.0.1/24 (eth1)", "10.0.0.2 via 10.0.0.1", "10.9.0.3 via no route"):
        assert part in str(caught.value)


def test_peer_survives_json() -> None:
    mine = peer("a", DOCKER, "10.0.0.1")
    assert Peer.from_dict(json.loads(json.dumps(mine.to_dict()))) == mine


def test_identity_is_the_same_in_another_process() -> None:
    code = "from coordinator.machine.network import host_identity; print(host_identity())"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == network.host_identity()


def test_local_addresses_leave_out_loopback() -> None:
    assert not [address for address in network.local_addresses() if address.ip.startswith("127.")]


def test_interface_towards_loopback_is_the_loopback_interface() -> None:
    interface = network.interface_towards("127.0.0.1")
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[interface]]


def test_free_port_can_be_listened_on_and_a_foreign_address_is_refused() -> None:
    port = network.free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        pass
    with pytest.raises(NetworkError, match=r"cannot listen on 203\.0\.113\.7: .*addresses of this node"):
        network.free_port("203.0.113.7")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """Three hosts with docker0 and two LANs; the third is cut off from the first LAN."""
    if reason := netns.unavailable():
        pytest.skip(reason)
    with Hosts(3, lans=2, decoy=True) as made:
        subprocess.run(made[2].argv(["ip", "link", "set", "lan0", "down"]), check=True, timeout=30)
        yield made


def on(host: Host, code: str) -> str:
    """What a Python snippet prints on a host."""
    prelude = "import json; from coordinator.machine.network import *\n"
    command = host.argv([sys.executable, "-c", prelude + code])
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def namespaces() -> set[str]:
    """The names of all network namespaces."""
    command = ["ip", "netns", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return {line.split()[0] for line in listed.splitlines()}


def test_hosts_find_the_network_that_all_of_them_share(hosts: Hosts) -> None:
    published = [json.loads(on(host, "print(json.dumps(this_peer().to_dict()))")) for host in hosts]
    peers = [Peer.from_dict(data) for data in published]
    assert len({p.identity for p in peers}) == 3
    assert [[a.interface for a in p.addresses] for p in peers] == [
        ["docker0", "lan0", "lan1"],
        ["docker0", "lan0", "lan1"],
        ["docker0", "lan1"],
    ]
    for i, host in enumerate(hosts):
        others = json.dumps([published[j] for j in range(3) if j != i])
        code = f"""
mine, others = this_peer(), [Peer.from_dict(data) for data in json.loads({others!r})]
ip = address_towards(mine, others)
print(ip, interface_towards(ip), interface_towards({hosts[(i + 1) % 3].addresses[1]!r}), free_port(ip) > 0)
"""
        assert on(host, code) == f"{host.addresses[1]} lan1 lan1 True"


def test_two_of_the_hosts_prefer_their_first_network(hosts: Hosts) -> None:
    other = on(hosts[1], "print(json.dumps(this_peer().to_dict()))")
    code = f"print(address_towards(this_peer(), [Peer.from_dict(json.loads({other!r}))]))"
    assert on(hosts[0], code) == hosts[0].address


def test_interface_towards_an_unreachable_address_is_an_error(hosts: Hosts) -> None:
    code = """
try:
    interface_towards("203.0.113.7")
except NetworkError as error:
    print(error)
"""
    assert "no interface of this node leads to 203.0.113.7" in on(hosts[0], code)


def test_hosts_reach_each_other_and_leave_nothing_behind() -> None:
    if reason := netns.unavailable():
        pytest.skip(reason)
    with Hosts(2) as pair:
        address = pair[0].address
        serve = f"""
import socket
from coordinator.machine.network import free_port
port = free_port({address!r})
server = socket.create_server(({address!r}, port))
print(port, flush=True)
server.accept()[0].sendall(b"hello")
server.accept()
"""
        command = pair[0].argv([sys.executable, "-c", serve])
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        ask = f"import socket; print(socket.create_connection(({address!r}, {port}), 10).recv(5))"
        assert on(pair[1], ask) == "b'hello'"
        assert pair[0].pids() == [server.pid]
    server.communicate(timeout=60)
    assert server.returncode == -signal.SIGKILL
    assert not {host.name for host in pair} & namespaces()


def test_failed_setup_of_hosts_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := netns.unavailable():
        pytest.skip(reason)
    monkeypatch.setattr(netns, "DECOY", "not an address")
    broken = Hosts(2, decoy=True)
    with pytest.raises(netns.NetnsError, match="not an address"):
        broken.__enter__()
    names = subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    assert broken[0].name not in names


def test_a_machine_without_a_boot_id_has_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BOOT_ID", tmp_path / "absent")
    assert network.boot() == network.boot() != ""
    assert network.host_identity().startswith(network.boot())


def test_a_host_with_ipv6_alone_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    six = SimpleNamespace(family=socket.AF_INET6, address="2001:4860:4860::8888%eth0", netmask=None)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": [six]})
    with pytest.raises(NetworkError, match=r"IPv6 alone.*give each an IPv4 address"):
        address_towards(peer("a"), [peer("b", "10.0.0.2")], route=lambda _ip: None)


def test_a_node_sees_an_address_that_comes_late_or_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Identity(*[cast(Any, None)] * 9)
    node.peers = [peer("b", "10.0.0.9")]
    for here in ([], ["10.0.0.1"], ["10.0.0.2"]):
        monkeypatch.setattr(network, "this_peer", lambda here=here: peer("a", *here))
        monkeypatch.setattr(network, "address_towards", lambda mine, _others: mine.addresses[0].ip)
        if here:
            node.find_address()
            assert node.address == here[0]
