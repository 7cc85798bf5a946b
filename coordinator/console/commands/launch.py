"""`run launch`: start a node on each of several machines, in one terminal.

The launcher starts nothing before it has understood the options and every machine has answered. The nodes
then work as if each was started by hand: they tell each other how the run goes, and a person may bring a lost
node back by hand. The launcher passes on signals and output, and ends nodes that wait for one that cannot
come. How it reaches the machines: `launch_ssh` and `launch_ray`, beside this file.
"""

import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol

from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.ssh import FLUSH_S, GRACE_S, LOST_CODE, NO_PROGRAM_CODE
from coordinator.console.commands.typos import part_of_value
from coordinator.directory.layout import MASTER
from coordinator.machine.run_command import settings_of
from coordinator.protocol.exits import Exit
from coordinator.settings.tree import SettingsError

POLL_S = 0.1
PING_S = 10.0
"""How often the launcher tells the machines that it is still there."""
ANSWER_S = 60.0
"""How long a machine may take until its shell answers."""
CUT_OFF_S = 5.0
"""How long ssh may take, beyond GRACE_S, to report that a node was killed."""
GIVEN = {"--master", "--worker", "--num-nodes", "--log-path", "cluster.num_nodes", "--version"}
"""What --hosts and --ray decide, and what does not start a node."""


class RemoteNode(Protocol):
    """A node on another machine, from the connection to its exit code; `RemoteProgram` of `ssh` says
    what each name means.
    """

    name: str

    @property
    def is_ready(self) -> bool: ...
    @property
    def words(self) -> str: ...
    @property
    def is_ending(self) -> bool: ...
    def poll(self) -> int | None: ...
    def tell(self, word: str) -> None: ...
    def cut_off(self) -> None: ...
    def kill(self) -> None: ...
    def flush(self, timeout_s: float) -> None: ...


class Machines(Protocol):
    """Where the nodes of a run are started; one for each of `names`, the first is the master's."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def options(self) -> Sequence[str]:
        """The options of `run launch` that name them again."""
        ...

    def connect(self, root: Path) -> None:
        """Look whether all is there that the run in `root` needs; SettingsError says what is missing."""
        ...

    def start(self, rank: int, command: Sequence[str]) -> RemoteNode: ...

    def close(self) -> None:
        """Give back what `connect` took."""
        ...


def launch(machines: Machines, root: Path, words: Sequence[str], program: str | None = None) -> int:
    """Start a node on each machine and show their output; return the first exit code that is not 0.

    `words` are options of `run` and `key=value`. `program` is the path of `run` on the machines. After a
    SettingsError nothing was started.
    """
    number = len(machines.names)
    settings = _understood(words, number, root)
    typed = [word for word in words if word != "--dry-run"]
    commands = node_commands(program or _this_program(), number, root, typed)
    if "--dry-run" in words:
        for name, command in zip(machines.names, commands, strict=True):
            print(f"{name}: {shlex.join(command)}", file=sys.stderr)
        print(settings, end="")
        return Exit.DONE
    try:
        machines.connect(root)
        interrupts, nodes = Interrupts(), list[RemoteNode]()
        try:
            for rank, command in enumerate(commands):
                nodes.append(machines.start(rank, command))
            if code := _connect(nodes, interrupts):
                return code
            code = _follow(nodes, interrupts)
        finally:
            _close(nodes, interrupts)
    finally:
        machines.close()
    if code in {Exit.FAILED, Exit.LOST, Exit.INTERRUPTED}:
        again = ["--run", program or ""] * (program is not None)
        say(f"to resume: {shlex.join(['run', 'launch', *machines.options, '--log-path', str(root), *again])}")
    return code


def refuse_parts(words: Sequence[str]) -> None:
    """Raise SettingsError for a word that is a part of the value before it, which a shell has divided."""
    for word in words:
        if "=" not in word and not word.startswith("-") and (advice := part_of_value(word, sys.argv[1:])):
            raise SettingsError(f"run launch: '{word}' is not an option; {advice}")


def refuse_pipes(words: Sequence[str]) -> None:
    """Raise SettingsError for a `--config` that no other machine can read."""
    for word, following in pairwise([*words, ""]):
        option, _, value = word.partition("=")
        file = value or following
        if option == "--config" and (file.startswith("/dev/") or Path(file).is_fifo()):
            raise SettingsError(
                f"--config {file}: is a pipe, which no other machine can read; write the settings to a file"
            )


def _understood(words: Sequence[str], nodes: int, root: Path) -> str:
    """Return the settings of `words` as `run --dry-run` prints them; SettingsError if it refuses them."""
    refuse_parts(words)
    refuse_pipes(words)
    for word in words:
        if (name := word.partition("=")[0]) in GIVEN:
            raise SettingsError(
                f"run launch: leave {name} out; each machine has a node, the first the master"
            )
    return settings_of(["--master", "--num-nodes", str(nodes), "--log-path", str(root), *words])


def _this_program() -> str:
    """Return the path of `run` here; a shared home, or an equal installation, has it in the same place."""
    program = Path(sys.executable).with_name("run")
    return str(program if program.exists() else Path(sys.argv[0]).absolute())


def node_commands(program: str, nodes: int, root: Path, words: Sequence[str]) -> list[list[str]]:
    """Return the command for each host, in order of rank; workers read their settings from the master."""
    roles = [["--master", "--num-nodes", str(nodes)]] + [["--worker", str(rank)] for rank in range(1, nodes)]
    of_all = [word for word in words if word == "--allow-shared-dir"]
    return [
        [program, *role, "--log-path", str(root), *(of_all if rank else words)]
        for rank, role in enumerate(roles)
    ]


def _connect(nodes: Sequence[RemoteNode], interrupts: Interrupts) -> int:
    """Wait until every machine has answered, then start all nodes; return 0, or the exit code if not."""
    deadline_s = time.monotonic() + ANSWER_S
    while any(not node.is_ready and node.poll() is None for node in nodes) and time.monotonic() < deadline_s:
        if interrupts.received:
            return Exit.INTERRUPTED
        time.sleep(POLL_S)
    codes: list[int] = []
    for node in nodes:
        if not node.is_ready:
            codes.append(_exit_code(node.poll() or LOST_CODE))
            say(f"{node.name}: {node.words}")
    if codes:
        say("no node was started")
        return codes[0]
    for node in nodes:
        node.tell("go")
    return Exit.DONE


def _follow(nodes: Sequence[RemoteNode], interrupts: Interrupts) -> int:
    """Pass on signals until all nodes have ended; return the first exit code that is not 0.

    After SIGTERM from here a node has GRACE_S to end; then it is cut off.
    """
    codes: dict[int, int] = {}
    passed_on, over_s, told_s, pinged_s = False, None, None, float("-inf")
    while len(codes) < len(nodes) and not interrupts.end_waiting:
        if told_s is not None and time.monotonic() - told_s >= GRACE_S:
            break
        now_s = time.monotonic()
        _note_ended(nodes, codes)
        if interrupts.received and not passed_on:
            passed_on = True
            if MASTER in codes or interrupts.end_all:
                over_s = float("-inf")
            else:
                say("interrupted: the master ends the run on all nodes; once more ends every node at once")
                nodes[MASTER].tell("INT")
        if over_s is None and is_over(codes, passed_on):
            over_s = now_s
        hopeless = interrupts.end_all or Exit.USAGE in codes.values()
        if told_s is None and (hopeless or (over_s is not None and now_s - over_s >= GRACE_S)):
            told_s = now_s
            if interrupts.received:
                say(f"ending every node, which may take {GRACE_S} s; once more: without waiting for it")
            _tell(nodes, "TERM")
        if now_s - pinged_s >= PING_S:
            pinged_s = now_s
            _tell(nodes, "0")
        time.sleep(POLL_S)
    for rank, node in enumerate(nodes):
        if rank not in codes:
            waited = "is not waited for" if interrupts.end_waiting else f"has not ended within {GRACE_S} s"
            say(f"{node.name}: {waited} after SIGTERM, and is killed there")
            codes[rank] = Exit.LOST
    return next((code for code in codes.values() if code), Exit.DONE)


def _close(nodes: Sequence[RemoteNode], interrupts: Interrupts) -> None:
    """End the nodes that still run: all at once, so that their waits do not add up."""
    for node in nodes:
        node.cut_off()
    before, deadline_s = len(interrupts.received), time.monotonic() + GRACE_S + CUT_OFF_S
    while any(node.is_ending for node in nodes) and time.monotonic() < deadline_s:
        if interrupts.end_waiting or len(interrupts.received) > before:
            break
        time.sleep(POLL_S)
    for node in nodes:
        node.kill()
    deadline_s = time.monotonic() + FLUSH_S
    for node in nodes:
        node.flush(max(0.0, deadline_s - time.monotonic()))


def is_over(codes: Mapping[int, int], interrupted: bool) -> bool:
    """Return whether the run has ended for all nodes. They soon know it, unless they came too late to be
    told.

    `codes`: the exit code of each rank that has ended. A node that is lost (3) or was ended (130) decides
    nothing here: the others may wait for it.
    """
    return Exit.FAILED in codes.values() or (interrupted and MASTER in codes)


def _note_ended(nodes: Sequence[RemoteNode], codes: dict[int, int]) -> None:
    """Add the exit codes of nodes that have ended, and say what they could not say themselves."""
    for rank, node in enumerate(nodes):
        if rank in codes or (code := node.poll()) is None:
            continue
        codes[rank] = _exit_code(code)
        if codes[rank] == Exit.LOST and code != Exit.LOST:
            say(f"{node.name}: was killed, or the connection is lost (then it is ended there)")
        if codes[rank] == Exit.USAGE:
            say(f"{node.name}: cannot take part; the others are ended")


def _exit_code(code: int) -> int:
    """Turn an exit code of ssh or bash into one of `run`."""
    if code == LOST_CODE or code < 0:
        return Exit.LOST
    return Exit.USAGE if code in {126, NO_PROGRAM_CODE} else code


def _tell(nodes: Sequence[RemoteNode], word: str) -> None:
    for node in nodes:
        node.tell(word)


def say(text: str) -> None:
    """Print a line of the launcher itself."""
    print(f"run: {text}", file=sys.stderr, flush=True)


def show(line: str) -> None:
    """Print a line of a node; several threads call it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
