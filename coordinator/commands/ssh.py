"""A program on another host, over ssh: it hears our signals, and ends when we end, however we end.

ssh without a terminal forwards no signal, and sshd leaves a program alone whose connection is gone. So a few
words of bash there (`script`) read commands from ssh's stdin, a line each, and pass them on as signals:

    go              become the program; until then nothing has happened there
    INT, TERM       the signal of this name to the program
    0               nothing: we are still here
    end of file, or no line for SILENCE_S
                    SIGTERM to the program, and SIGKILL to what is there after GRACE_S; a node's keeper
                    ends its children

The program takes the place of the shell that sshd has started: its exit code is ssh's, and it has ssh's
output. The words that read are a process beside it. Killed or crashed, our process closes ssh's stdin; so
does a dead ssh, there. Only a host that is cut off hears of nothing: it is why silence counts too.
"""

import contextlib
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence

from coordinator.machine.child_output import Output
from coordinator.views.status_text import plain

OPTIONS = (
    "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10",
    "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4",
)  # fmt: skip
"""No question at the terminal, and a host that does not answer is noticed: within 10 s at the start, a minute
later on. They stand behind the user's own, and of two the first holds."""
READY = "flagpost: ready"
"""The line with which a host says that it waits for `go`."""
SILENCE_S = 120
GRACE_S = 15
FLUSH_S = 1.0
"""How long the last output of an ended ssh may take."""
LOST_CODE = 255
"""ssh's own exit code, when there is no connection."""
NO_PROGRAM_CODE = 127
IS_OF_A_NODE = re.compile(r"\[rank \d+[ \]]")
"""How a line begins that says by itself whose it is."""


def script(silence_s: int = SILENCE_S, grace_s: int = GRACE_S) -> str:
    """What bash does there, in one line, since not every login shell takes a quoted line break.

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


class Remote:
    """A program on a host, from the connection to its exit code; `start` once `is_ready`."""

    def __init__(
        self,
        name: str,
        host: str,
        argv: Sequence[str],
        directory: str,
        ssh: Sequence[str],
        show: Callable[[str], None],
    ) -> None:
        """`show` gets each line of output, in a thread of its own, with `name` unless it says its rank."""
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
        self._output = Output(name, stdout, None, self._take)

    @property
    def words(self) -> str:
        """What ssh, or the host, has said instead of starting the program."""
        return "; ".join(line.strip() for line in self._said if line.strip()) or "no word"

    def poll(self) -> int | None:
        """ssh's exit code: the program's, or 255; None while it runs. Its output has come before."""
        if self._process.poll() is not None:
            self._output.join(FLUSH_S)
        return self._process.returncode

    def tell(self, word: str) -> None:
        """Send a command; one to a connection that is gone does nothing."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            stdin.write(f"{word}\n".encode())

    def cut_off(self) -> None:
        """No more commands: the program is ended there."""
        stdin = self._process.stdin
        assert stdin is not None
        stdin.close()

    @property
    def is_ending(self) -> bool:
        """Whether ssh still runs, and something has begun there that can end in order."""
        return self.is_ready and self._process.poll() is None

    def kill(self) -> None:
        """Cut it off, and end ssh: the host does the rest."""
        self.cut_off()
        self._process.kill()
        self._process.wait()

    def flush(self, timeout_s: float) -> None:
        """Wait for the last output of an ssh that has ended, which another process may hold open."""
        self._output.join(timeout_s)

    def _take(self, line: str) -> None:
        """A line of output. What a host says before READY (a banner) is only for an error."""
        line = plain(line)
        if self.is_ready:
            self._show(line if IS_OF_A_NODE.match(line) else f"[{self.name}] {line}")
        elif line == READY:
            self.is_ready = True
        else:
            self._said.append(line)
