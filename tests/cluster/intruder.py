"""Another user of the machine, who tries every socket and file of a running node."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

NOBODY = 65534
TRY = """
import json, os, socket, sys
uid, (files, sockets, ports) = int(sys.argv[1]), json.loads(sys.argv[2])
if uid:
    os.setgroups([]), os.setgid(uid), os.setuid(uid)
got_in = []
for path in files:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").close()
        got_in.append(path)
    except OSError:
        pass
for family, places in ((socket.AF_UNIX, sockets), (socket.AF_INET, ports)):
    for place in places:
        with socket.socket(family) as asking:
            asking.settimeout(2.0)
            try:
                asking.connect(place if isinstance(place, str) else tuple(place))
                if isinstance(place, str):  # whoever can connect can also talk to it
                    got_in.append(place)
                asking.sendall(b"GET /health HTTP/1.0\\r\\n\\r\\n")
                if asking.recv(5) == b"HTTP/":
                    got_in.append(place)
            except OSError:
                pass
print(json.dumps(got_in))
"""


def gets_in(user: int, found: tuple[list[str], list[str], list[tuple[str, int]]]) -> list[object]:
    """Return which of these files, Unix sockets and ports (only if HTTP answers there) `user` gets into."""
    argv = [sys.executable, "-c", TRY, str(user), json.dumps(found)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)


def offered_by(
    nodes: Sequence[int], directories: Iterable[Path]
) -> tuple[list[str], list[str], list[tuple[str, int]]]:
    """Return the files below `directories`; the Unix sockets and the TCP ports that the nodes with these pids
    listen on, and their children.
    """
    files = [str(path) for directory in directories for path in [directory, *directory.rglob("*")]]
    processes = [process for pid in nodes for process in [psutil.Process(pid), *_below(pid)]]
    sockets: list[str] = []
    ports: list[tuple[str, int]] = []
    for process in processes:
        try:
            for found in process.net_connections("all"):
                if found.family == socket.AF_UNIX and str(found.laddr).startswith("/"):
                    sockets.append(str(found.laddr))
                elif found.status == psutil.CONN_LISTEN:
                    ports.append((found.laddr.ip, found.laddr.port))
        except psutil.Error:  # it has just ended
            continue
    return [path for path in files if os.path.exists(path)], sorted(set(sockets)), sorted(set(ports))


def spools(node: int) -> set[Path]:
    """Return the node's directories in /tmp: where the sockets of its children are."""
    sockets = offered_by([node], [])[1]
    return {Path(path).parent for path in sockets if "/flagpost-" in path}


def _below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)
