"""`run with-ray`: a Ray cluster for one command, on machines that a platform starts with MASTER_ADDR.

The same command on every machine: the one that MASTER_ADDR names starts a head, the others join it. The
head waits for the others, runs the command, and ends; then the others end. Ray runs as a child, so nothing of
it outlives this process, and other Rays of the machine are left alone (`ray stop` would end them too).
"""

import ipaddress
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.launch import say, show
from coordinator.console.commands.ray_cluster import NO_RAY, connect, machines, refuse_deaf
from coordinator.journal.control_characters import plain
from coordinator.machine.child import Child
from coordinator.machine.children import ChildError, Children
from coordinator.machine.network import own_names
from coordinator.protocol.exits import Exit
from coordinator.settings.tree import SettingsError

LOOK_S = 0.2
PROBE_S = 1.0
"""How often a machine that has joined looks for the head."""
GONE = 3
"""So many looks in a row that find no head: it has ended."""
QUIET = {"RAY_USAGE_STATS_ENABLED": "0"}


def with_ray(command: Sequence[str], nodes: int, port: int, deadline_s: float) -> int:
    """Start Ray here, run `command` if this is the head, end Ray; return the exit code.

    The head waits for `nodes` machines, itself included. A machine returns 0 once the head that it has
    joined is gone. 3: the machines did not meet within `deadline_s` seconds, or Ray has ended before the
    command. SettingsError: nothing was started.
    """
    head = os.environ.get("MASTER_ADDR", "")
    if not head:
        raise SettingsError("run with-ray: set MASTER_ADDR, on every machine to the address of the same one")
    if not command or shutil.which(command[0]) is None:
        raise SettingsError(f"run with-ray: no program '{command[0] if command else ''}'; give one behind --")
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        raise SettingsError(NO_RAY)
    host = f"[{head}]" if ":" in head else head
    address, deadline_s = f"{host}:{port}", time.monotonic() + deadline_s
    start = [str(ray), "start", "--block", "--disable-usage-stats"]
    with Children() as children:
        if head in own_names():
            address_option = [f"--node-ip-address={head}"] if _is_ip(head) else []
            begun = children.start("ray", [*start, "--head", f"--port={port}", *address_option], env=QUIET)
            return _lead(children, begun, command, nodes, address, deadline_s)
        return _join(children, [*start, f"--address={address}"], address, deadline_s)


def _lead(
    children: Children, head: Child, command: Sequence[str], nodes: int, address: str, deadline_s: float
) -> int:
    """Wait for the others, then run the command and pass on signals; return its exit code."""
    if (count := _gather(head, nodes, address, deadline_s)) < nodes:
        hint = plain(head.tail(3)) if count == 0 else "start the same command on the others"
        say(f"with-ray: {count} of {nodes} machines are there at {address}; {hint}")
        return Exit.LOST
    interrupts = Interrupts()
    try:
        child = children.start("command", command, env={"RAY_ADDRESS": address}, echo=show)
    except ChildError as error:
        raise SettingsError(f"run with-ray: {error}") from None
    while (code := child.poll()) is None:
        if interrupts.has_new():
            os.kill(child.pid, interrupts.received[-1])
        if head.poll() is not None:
            say(f"with-ray: Ray has ended here before the command: {plain(head.tail(3))}")
            return Exit.LOST
        time.sleep(LOOK_S)
    return code if code >= 0 else 128 - code


def _gather(head: Child, nodes: int, address: str, deadline_s: float) -> int:
    """Wait until so many machines are there, the deadline or the end of the head; return their number."""
    while not _answers(address):
        if head.poll() is not None or time.monotonic() > deadline_s:
            return 0
        time.sleep(LOOK_S)
    ray = connect(address)
    try:
        while (count := len(machines(ray))) < nodes and time.monotonic() < deadline_s and head.poll() is None:
            time.sleep(LOOK_S)
    finally:
        ray.shutdown()
    return count


def _join(children: Children, start: Sequence[str], address: str, deadline_s: float) -> int:
    """Join the head, again and again until the deadline, and stay until it is gone."""
    interrupts = Interrupts()
    while not interrupts.received:
        if _answers(address):
            node, missed, probed_s = children.start("ray", start, env=QUIET), 0, time.monotonic()
            while node.poll() is None and missed < GONE and not interrupts.received:
                if time.monotonic() - probed_s >= PROBE_S:
                    probed_s = time.monotonic()
                    missed = 0 if _answers(address) else missed + 1
                time.sleep(LOOK_S)
            has_joined = "Ray runtime started" in node.tail(100)
            if interrupts.received:
                break
            if has_joined and (missed or not _answers(address)):
                return Exit.DONE
            say(f"with-ray: Ray has ended here: {plain(node.tail(3))}")
            if has_joined:
                return Exit.LOST
        if time.monotonic() > deadline_s:
            say(f"with-ray: no head at {address}; is the same command started on the machine of MASTER_ADDR?")
            return Exit.LOST
        time.sleep(1.0)
    return Exit.INTERRUPTED


def _answers(address: str) -> bool:
    try:
        refuse_deaf(address)
    except (OSError, ValueError):
        return False
    return True


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
