"""The checks of `run doctor --peers N` between nodes: which came, delays, clocks, ports, versions.

Rank 0 lets all nodes do the same step and judges the answers (`Host`); a worker does each step (`attend`).
Only rank 0 reports.
"""

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from coordinator.console.doctor import node_checks as judge
from coordinator.console.doctor.checks import Check, Latency, judge_create
from coordinator.console.doctor.meeting import Answer, DoctorError, DoctorGuest, Host
from coordinator.console.doctor.node_checks import RoundTrip
from coordinator.console.doctor.probe import has_hard_links
from coordinator.directory.layout import MASTER
from coordinator.machine import network
from coordinator.machine.filesystems import Mount
from coordinator.machine.network import Peer
from rollout.storage import once

PINGS, PINGS_S = 20, 5.0
"""Round trips, and the time after which no further one begins."""
CLAIMS = 50
CONNECT_S = 5.0


# ---- rank 0


def checks_between(
    host: Host, missing: Mapping[int, str], mount: Mount, directory: Path
) -> Generator[tuple[str, Callable[[], list[Check]]]]:
    """Yield each check's name and function. `missing`: ranks that did not come, and what to type there."""
    yield "nodes", lambda: [judge.judge_nodes({r: m["host"] for r, m in host.members.items()}, missing)]
    if len(host.members) > 1:
        yield "their checks", lambda: _their_checks(host)
        yield "delay and clock", lambda: _ping(host, mount)
        yield "create once", lambda: [_race(host, directory)]
        yield "ports", lambda: _ports(host)
        yield "versions", lambda: _compare(host)
    if host.lost:
        yield "lost nodes", lambda: [judge.judge_lost(host.lost)]


def _their_checks(host: Host) -> list[Check]:
    judged: list[Check] = []
    for rank, answer in sorted(host.step("checks").items()):
        checks = [Check.from_dict(data) for data in answer.result["checks"]]
        judged += judge.judge_their_checks(rank, host.members[rank]["host"], checks)
    return judged


def _ping(host: Host, mount: Mount) -> list[Check]:
    """Measure round trips between rank 0 and each worker.

    The first does not count if there is a second: a worker that has waited for long looks less often.
    """
    trips: dict[int, list[RoundTrip]] = {}
    listings: dict[int, dict[str, float]] = {}
    until_s = time.monotonic() + PINGS_S
    for _ in range(PINGS + 1):
        began_s, began_at = time.monotonic(), time.time()
        for rank, answer in host.step("ping").items():
            trips.setdefault(rank, []).append(_round_trip(began_s, began_at, answer))
            listings[rank] = answer.result["listings"]
        if time.monotonic() > until_s:
            break
    listings[MASTER] = host.listings.facts()
    return judge.judge_listings(listings, mount) + [
        check
        for rank, done in sorted(trips.items())
        for check in (
            judge.judge_delay(rank, Latency(tuple(trip.delay_s for trip in done[1:] or done)), mount),
            judge.judge_clock(rank, min(done, key=lambda trip: trip.delay_s)),
        )
    ]


def _round_trip(began_s: float, began_at: float, answer: Answer) -> RoundTrip:
    """Measure one message there and back; only the offset uses two clocks, as in NTP."""
    midway_at = (began_at + answer.seen_at) / 2
    return RoundTrip((answer.seen_s - began_s) / 2, answer.result["at"] - midway_at)


def _race(host: Host, directory: Path) -> Check:
    """Let all nodes create the same names, each with its own content."""
    paths = [host.claim_path(number) for number in range(CLAIMS)]
    won_here: list[bool] = []
    answers = host.step("claim", {"paths": paths}, lambda: won_here.extend(_create(paths, MASTER)))
    everybody = [won_here, *(answer.result["won"] for answer in answers.values())]
    winners = [sum(won) for won in zip(*everybody, strict=True)]
    doubled, orphaned = sum(count > 1 for count in winners), winners.count(0)
    return judge_create(CLAIMS, doubled, orphaned, has_hard_links(directory), nodes=len(everybody))


def _create(paths: Sequence[str], rank: int) -> list[bool]:
    return [once.create_once(Path(path), f"rank {rank}".encode()) for path in paths]


def _ports(host: Host) -> list[Check]:
    """Let every node listen on the address that it would train on, and every other node connect to it."""
    peers = {str(rank): member["peer"] for rank, member in host.members.items()}
    reached_here: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        doors = {MASTER: open_door(stack, MASTER, peers, host.members[MASTER]["token"])}
        doors |= {rank: answer.result for rank, answer in host.step("listen", {"peers": peers}).items()}
        addresses = {
            str(rank): {**door, "token": host.members[rank]["token"]}
            for rank, door in doors.items()
            if not door["problem"]
        }
        answers = host.step(
            "connect", {"doors": addresses}, lambda: reached_here.update(try_doors(MASTER, addresses))
        )
    reached = {MASTER: reached_here} | {rank: answer.result for rank, answer in answers.items()}
    return [judge.judge_training_addresses(doors), judge.judge_ports(doors, reached)]


def _compare(host: Host) -> list[Check]:
    return [
        judge.judge_equal_versions({rank: member["versions"] for rank, member in host.members.items()}),
        judge.judge_all_gpus({rank: member["gpus"] for rank, member in host.members.items()}),
    ]


# ---- a worker


def attend(guest: DoctorGuest, rank: int, own_checks: Callable[[], list[Check]]) -> bool:
    """Do each step of the session that `guest` has joined; return whether rank 0 found everything fit."""
    with contextlib.ExitStack() as doors:
        actions: dict[str, Callable[[Any], dict[str, Any]]] = {
            "checks": lambda _: {"checks": [check.to_dict() for check in own_checks()]},
            "ping": lambda _: {"at": time.time(), "listings": guest.listings.facts()},
            "claim": lambda arguments: {"won": _create(arguments["paths"], rank)},
            "listen": lambda arguments: open_door(doors, rank, arguments["peers"], guest.token),
            "connect": lambda arguments: try_doors(rank, arguments["doors"]),
            "end": lambda _: {},
        }
        for do, arguments in guest.steps():
            if do not in actions:
                raise DoctorError(f"rank 0 asks for {do!r}; install the same version on all nodes")
            guest.answer(actions[do](arguments))
            if do == "end":
                return arguments["fit"]
    return False


# ---- ports


def open_door(doors: contextlib.ExitStack, rank: int, peers: Mapping[str, Any], token: str) -> dict[str, Any]:
    """Listen where `rank` would for training, until `doors` closes: {"ip", "port", "interface", "problem"}.

    `peers`: the addresses that each rank publishes. A program that connects gets the token; nothing is read.
    """
    own_peer = Peer.from_dict(peers[str(rank)])
    peers_elsewhere = [Peer.from_dict(peer) for key, peer in peers.items() if key != str(rank)]
    try:
        ip = network.address_towards(own_peer, peers_elsewhere)
        interface = network.interface_towards(ip)
        server = _Doorkeeper((ip, 0), token)
    except (network.NetworkError, OSError) as error:
        return {"ip": "", "port": 0, "interface": "", "problem": str(error)}
    doors.callback(server.stop)
    return {"ip": ip, "port": server.server_address[1], "interface": interface, "problem": ""}


class _Doorkeeper(socketserver.TCPServer):
    """Sends its token to every program that connects."""

    def __init__(self, address: tuple[str, int], token: str) -> None:
        super().__init__(address, socketserver.BaseRequestHandler)
        self._token = token.encode()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.sendall(self._token)

    def stop(self) -> None:
        """Close the port."""
        self.shutdown()
        self._thread.join()
        self.server_close()


def try_doors(rank: int, doors: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Connect to the door of each other rank; return what went wrong there, an empty text if nothing did."""
    doors_elsewhere = {key: door for key, door in doors.items() if key != str(rank)}
    with ThreadPoolExecutor(max_workers=max(1, len(doors_elsewhere))) as pool:
        return dict(zip(doors_elsewhere, pool.map(_knock, doors_elsewhere.values()), strict=True))


def _knock(door: Mapping[str, Any]) -> str:
    try:
        with socket.create_connection((door["ip"], door["port"]), CONNECT_S) as connection:
            heard = connection.makefile("rb").read()
    except TimeoutError:
        return f"no answer in {CONNECT_S:.0f} s"
    except OSError as error:
        return str(error.strerror or error)
    return "" if heard.decode(errors="replace") == door["token"] else "another program answers there"
