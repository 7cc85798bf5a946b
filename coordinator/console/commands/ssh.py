"""Run a program on another host over ssh: it gets our signals, and it ends when we end, even by a kill.

ssh without a terminal forwards no signal, and sshd does not end a program whose connection is gone. So a bash
script there (`script`) reads commands from ssh's stdin, one per line, and passes them on as signals:

    go              become the program; until then nothing has happened there
    INT, TERM       the signal of this name to the program
    0               nothing: we are still here
    end of file, or no line for SILENCE_S
                    SIGTERM to the program, and SIGKILL if it is still there after GRACE_S; the reaper of a
                    node ends the node's children

The program replaces the shell that sshd started, so ssh has its exit code and its output. The script's loop
is a second process beside it. If our process is killed or crashes, ssh's stdin is closed; if ssh dies, stdin
is closed on the host. A host that is cut off gets neither: therefore the script also counts silence.
"""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence

from coordinator.journal.control_characters import plain
from coordinator.machine.child_output import ChildOutput

OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""ssh asks nothing at the terminal, and it notices a host that does not answer: within 10 s at the start,
within a minute later. These options follow the user's own; ssh takes the first of two."""
READY = "flagpost: ready"
"""The line with which a host says that it waits for `go`."""
SILENCE_S = 120
GRACE_S = 15
FLUSH_S = 1.0
"""How long to wait for the last output of an ssh that has ended."""
LOST_CODE = 255
"""ssh's own exit code, when there is no connection."""
NO_PROGRAM_CODE = 127
IS_OF_A_NODE = re.compile(r"\[rank \d+[ \]]")
"""The beginning of a line that already names its rank."""


def script(silence_s: int = SILENCE_S, grace_s: int = GRACE_S) -> str:
    """Return the script for bash, in one line, since not every login shell accepts a quoted line break.

    $0: the directory to work in, if it exists there; then the program and its arguments.
    """
    return (
        'command -v "$1" > /dev/null || { echo "no program $1 there; say where it is with --run PATH"; '
        f"exit {NO_PROGRAM_CODE}; }}; "
        'cd "$0" 2> /dev/null; '
        f'echo "{READY}"; read -r -t {silence_s} word; [ "$word" = go ] || exit 130; exec 3<&0; '
        f'{{ while read -r -t {silence_s} word && kill -"$word" $$; do :; done; kill -TERM $$; '
        f"for (( left = {grace_s}; left; left-- )); do kill -0 $$ || exit; sleep 1; done; kill -KILL $$; "
        "} <&3 > /dev/null 2>&1 & "
        'exec "$@" < /dev/null 3<&-'
    )


class RemoteProgram:
    """A program on a host, from the connection to its exit code; `tell("go")` starts it once `is_ready`."""

    def __init__(
        self,
        name: str,
        host: str,
        argv: Sequence[str],
        directory: str,
        ssh: Sequence[str],
        show: Callable[[str], None],
    ) -> None:
        """Connect. A thread passes each line of output to `show`, behind `name` unless the line names its
        rank."""
        self.name = name
        self.is_ready = False
        self._show = show
        self._said: list[str] = []
        command = shlex.join(["exec", "bash", "-c", script(), directory, *argv])
        self._process = subprocess.Popen(
            [*ssh, *OPTIONS, "--", host, command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # the terminal's Ctrl+C is not for ssh
        )
        stdout = self._process.stdout
        assert stdout is not None
        self._output = ChildOutput(name, stdout, None, self._take)

    @property
    def words(self) -> str:
        """What ssh, or the host, said instead of starting the program."""
        return "; ".join(line.strip() for line in self._said if line.strip()) or "no word"

    def poll(self) -> int | None:
        """Return ssh's exit code: the program's, or 255; None while it runs. The output was shown before."""
        if self._process.poll() is not None:
            self._output.join(FLUSH_S)
        return self._process.returncode

    def tell(self, word: str) -> None:
        """Send a command; without effect if the connection is gone."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            stdin.write(f"{word}\n".encode())

    def cut_off(self) -> None:
        """Send no more commands: the script ends the program."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()

    @property
    def is_ending(self) -> bool:
        """Whether ssh still runs, and the host has something that can end in order."""
        return self.is_ready and self._process.poll() is None

    def kill(self) -> None:
        """Cut it off and end ssh; the script ends the program."""
        self.cut_off()
        self._process.kill()
        self._process.wait()

    def flush(self, timeout_s: float) -> None:
        """Wait for the last output of an ssh that has ended; another process may keep its pipe open."""
        self._output.join(timeout_s)

    def _take(self, line: str) -> None:
        """Take a line of output. What a host says before READY (a banner) is shown only with an error."""
        line = plain(line)
        if self.is_ready:
            self._show(line if IS_OF_A_NODE.match(line) else f"[{self.name}] {line}")
        elif line.endswith(READY):  # behind what a profile has printed without a line end
            self.is_ready = True
        else:
            self._said.append(line)
