"""The second process of `run doctor`: it does things on the directory that the first one observes.

    python -m coordinator.console.doctor.partner      one JSON line in, {"do": NAME, ...}; one JSON line out

It ends at end of file, so it does not outlive the doctor. Times are of the monotonic clock, which all
processes of one machine share.
"""

import contextlib
import json
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout.storage import files, once

ANSWER_S = 120.0
"""How long one call may take, retries of the shared directory included."""
LINE = 1024


class PartnerError(OSError):
    """The second process has failed at what it was asked, or is gone."""


def versioned(number: int) -> bytes:
    """Return 16 KiB that repeat `number`, so that a reader recognises a mixture of two versions."""
    return b"%015d\n" % number * LINE


class Partner:
    """The second process as the doctor sees it: `ask` waits for the answer, `tell` does not."""

    def __init__(self) -> None:
        command = [sys.executable, "-P", "-m", "coordinator.console.doctor.partner"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        self._is_asked = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Let it do something and return its answer; PartnerError if it fails."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Let it begin; `answer` takes the result. An earlier result that was not taken is dropped."""
        if self._is_asked:
            self._read()
        self._is_asked = True
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            self._to.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._to.flush()

    def is_done(self) -> bool:
        """Return whether `answer` would return at once."""
        return bool(select.select([self._from], [], [], 0)[0])

    def answer(self) -> Any:
        """Return the result of what it was told to do; PartnerError if that failed or took too long."""
        answer = self._read()
        if "error" in answer:
            raise PartnerError(answer["error"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        if not select.select([self._from], [], [], ANSWER_S)[0]:
            raise PartnerError(f"a second process on this directory has not answered for {ANSWER_S:.0f} s")
        self._is_asked = False
        line = self._from.readline()  # one answer to one question: the line comes whole
        if not line:
            raise PartnerError(f"a second process on this directory ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End it; kill it if it does not end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the mount
                self._process.wait(5.0)
        self._from.close()


# The second process's side.


def _publish(path: str) -> float:
    files.publish(Path(path), Path(path).name.encode(), durable=False)
    return time.monotonic()


def _remove(path: str) -> float:
    files.remove(Path(path))
    return time.monotonic()


def _replace(path: str, seconds: float) -> int:
    """Rename new versions over `path` for `seconds`; return how many."""
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        number += 1
        files.publish(Path(path), versioned(number), durable=False)
    return number


def _move(source: str, target: str) -> float:
    """Rename there, back, and there again; return the shortest time, since a busy disk may delay one."""
    seconds: list[float] = []
    for old, new in ((source, target), (target, source), (source, target)):
        started_s = time.monotonic()
        files.rename(Path(old), Path(new))
        seconds.append(time.monotonic() - started_s)
    return min(seconds)


def _create(path: str) -> bool:
    return once.create_once(Path(path), b"the second process")


ACTIONS: dict[str, Callable[..., Any]] = {
    "publish": _publish,
    "remove": _remove,
    "replace": _replace,
    "move": _move,
    "create": _create,
}


def main() -> None:
    """Answer requests, line by line."""
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"result": ACTIONS[arguments.pop("do")](**arguments)}
        except OSError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
