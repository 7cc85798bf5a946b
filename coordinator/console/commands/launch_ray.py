"""`run launch --ray`: the machines are those of a Ray cluster.

Ray carries no data here. It says which machines are there, starts an actor on each, and says when one dies.
The actor (`coordinator.console.commands.relay`) runs the same script that ssh starts on a host
(`coordinator.console.commands.ssh`), so signals, the end of a launcher and exit codes are the same for both.
A placement group holds a machine for each rank. Ray finds another one for a rank whose machine has died, and
the launcher starts the rank there.
"""

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.console.commands import relay
from coordinator.console.commands.launch import RemoteNode, launch, say, show
from coordinator.console.commands.ray_cluster import SEEN_S, Cluster, machines
from coordinator.console.commands.ssh import IS_OF_A_NODE, READY, script
from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal.control_characters import plain
from coordinator.protocol.exits import Exit

READ_S = 0.25
"""How long the actor waits for output in one call; a word to the node waits for the next call."""
LOOK_S = 0.2
STILL_HERE = "0"
"""What the launcher tells every node now and then."""
SAY_AGAIN_S = 30.0
UNREACHED_S = 300.0
"""After so long an actor that Ray cannot reach counts as dead."""
MAX_RESTARTS = 10
"""How often a rank is started again, on whatever machine."""


def launch_ray(
    address: str,
    nodes: int,
    root: Path,
    words: Sequence[str],
    gpus: str | None = None,
    cpus: str | None = None,
    program: str | None = None,
) -> int:
    """Start a node on each of `nodes` machines of the Ray cluster at `address`; returns and raises what
    `launch` does. `gpus`, `cpus`: what a node asks for, one number or one for each node.
    """
    return launch(_Machines(address, nodes, gpus, cpus), root, words, program)


class _Machines(Cluster):
    """The machines of `--ray`, as `launch` takes them."""

    def start(self, rank: int, command: Sequence[str]) -> RemoteNode:
        """Start a rank on the machine that was found for it."""
        return RayNode(self, rank, command, self.relays[rank])


class RayNode:
    """A rank of the run, on one machine after the other; the names of `RemoteProgram` of `ssh`."""

    def __init__(self, cluster: Cluster, rank: int, command: Sequence[str], first: Any) -> None:
        """Begin on the machine of the actor `first`; a thread follows the rank to its end."""
        self.name = f"rank {rank}"
        self.is_ready = False
        self._cluster = cluster
        self._rank = rank
        self._argv = ["bash", "-c", script(), os.getcwd(), *command]
        self._actor = first
        self._code: int | None = None
        self._said: list[str] = []
        self._words: list[str] = []
        self._was_started = False
        self._has_begun = False
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    @property
    def words(self) -> str:
        """What the machine said instead of starting the program."""
        return "; ".join(line.strip() for line in self._said if line.strip()) or "no word"

    @property
    def is_ending(self) -> bool:
        """Whether something is left that can end in order."""
        return self.is_ready and self._code is None

    def poll(self) -> int | None:
        """Return the exit code with which the rank has ended for good; None while it runs or comes back."""
        return self._code

    def tell(self, word: str) -> None:
        """Send a command to the script on the machine; SIGINT and SIGTERM also end the wait for a machine."""
        self._was_started = self._was_started or word == "go"
        self._is_ending = self._is_ending or word in {"INT", "TERM"}
        self._words.append(word)

    def cut_off(self) -> None:
        """Send no more commands: the script ends the program."""
        self._is_ending = True
        self._words.append(relay.CUT_OFF)

    def kill(self) -> None:
        """End the actor; the script ends the program."""
        self._is_ending = True
        with contextlib.suppress(Exception):  # the cluster may be gone
            self._cluster.ray.kill(self._actor)

    def flush(self, timeout_s: float) -> None:
        """Wait for the last output."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        code: int | None = None
        try:
            code = self._live_on()
        except Exception as error:  # Ray's client raises ConnectionError and others
            self._said.append(str(error))
            say(f"{self.name}: {' '.join(str(error).split())}")
        finally:
            self._code = self._cluster.ended[self._rank] = Exit.LOST if code is None else code

    def _live_on(self) -> int | None:
        """Follow the rank from machine to machine; return its last exit code, None if its actor died."""
        restarts = 0
        while True:
            code = self._live()
            if code is None:
                self._cluster.down.add(self._rank)
            if not self._comes_back(code) or restarts == MAX_RESTARTS:
                return code
            restarts += 1
            reason = "its machine or its actor died" if code is None else f"it ended with {code}"
            say(f"{self.name}: {reason}; starting it again ({restarts} of {MAX_RESTARTS})")
            self._cluster.ray.kill(self._actor)
            self._has_begun = False
            self._words.clear()
            self._actor = self._cluster.relays[self._rank] = self._cluster.new_relay(self._rank)

    def _comes_back(self, code: int | None) -> bool:
        """Whether to start the rank again. Where a machine is missing, 3 means that nobody waits any more."""
        if not self._was_started or self._is_ending:
            return False
        if code == Exit.LOST:
            return not self._cluster.down
        return is_death(code)

    def _live(self) -> int | None:
        """Follow one actor; return the exit code of the program, None if the actor died before that."""
        ray = self._cluster.ray
        try:
            if (host := self._placed()) is None:
                return Exit.INTERRUPTED if self._is_ending else self._cluster.ended.get(MASTER, Exit.LOST)
            self.name = f"rank {self._rank}, {host}"
            ray.get(self._actor.start.remote(self._argv))
            self._cluster.down.discard(self._rank)
            reached_s = said_s = time.monotonic()
            while True:
                try:
                    words = list(self._words)
                    # the script ends at a first word that is not `go`
                    sent = [word for word in words if word != STILL_HERE or self._has_begun]
                    lines, code = ray.get(self._actor.exchange.remote(sent, READ_S))
                except ray.exceptions.ActorUnavailableError:  # not yet dead
                    now_s = time.monotonic()
                    if now_s - reached_s >= UNREACHED_S:
                        raise
                    if now_s - said_s >= SAY_AGAIN_S:
                        said_s = now_s
                        say(f"{self.name}: Ray has not reached its actor for {now_s - reached_s:.0f} s; "
                            f"waits until it answers or is dead, at most {UNREACHED_S:.0f} s")  # fmt: skip
                    time.sleep(LOOK_S)
                    continue
                reached_s = said_s = time.monotonic()
                del self._words[: len(words)]
                for line in lines:
                    self._take(plain(line))
                if code is not None:
                    return code
        except ray.exceptions.RayError as error:
            self._said.append(str(error).strip().partition("\n")[0])
            return None

    def _placed(self) -> str | None:
        """Wait until the rank has a machine that sees the run; return its name, None if the rank must end, or
        all others have.
        """
        cluster = self._cluster
        answer, said_s = self._actor.host.remote(), time.monotonic()
        while not cluster.ray.wait([answer], timeout=LOOK_S)[0]:
            alive = set(range(len(cluster.names))) - cluster.down
            is_over = bool(cluster.ended) and alive <= cluster.ended.keys()
            if self._is_ending or (self._was_started and is_over):
                return None
            if time.monotonic() - said_s >= SAY_AGAIN_S:
                said_s = time.monotonic()
                listing = ", ".join(map(str, machines(cluster.ray)))
                say(f"{self.name}: waits for a machine with {cluster.needs(self._rank)}; alive: {listing}")
        host, run_json = cluster.ray.get(answer), str(RunDir(cluster.root).run_json)
        # On the first machines the directory was tried before. A master that died early has made no run.
        if self._was_started and cluster.others_see(self._rank, run_json):
            while not cluster.ray.get(self._actor.sees.remote(run_json, SEEN_S)):
                if self._is_ending:
                    return None
                say(f"{self.name}: {host} does not see {run_json}; mount the shared directory there")
        return host

    def _take(self, line: str) -> None:
        """Take a line of output. What the machine says before READY is shown only with an error."""
        if self._has_begun:
            show(line if IS_OF_A_NODE.match(line) else f"[{self.name}] {line}")
        elif line == READY:
            self._has_begun = self.is_ready = True
            if self._was_started:
                self._words.append("go")
        else:
            self._said.append(line)


def is_death(code: int | None) -> bool:
    """Return whether a node has ended in a way after which a supervisor starts it again: its machine died
    (None), a signal killed it, or it has lost another node.
    """
    return code is None or code == Exit.LOST or code < 0 or code > Exit.INTERRUPTED
