"""The second process of `run doctor`'s checks: what a second handle on the directory sees and does.

    python -m coordinator.commands.doctor.partner      one JSON line in, {"do": NAME, ...}; one JSON line out

It ends at end of file, so it does not outlive the doctor. Times are of the monotonic clock, which the
processes of one machine share.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollout.storage import files

ANSWER_S = 120.0
"""How long one call may take, retries of the shared directory included."""
LINE = 1024


class PartnerError(OSError):
    """What the second process tried has failed, or it is gone."""


def versioned(number: int) -> bytes:
    """16 KiB that say `number` all over, so that a part of it is recognised."""
    return b"%015d\n" % number * LINE


class Partner:
    """The doctor's end: ask it to do something, or tell it to and do something else meanwhile."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "coordinator.commands.doctor.partner"]
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
        """What it answers; PartnerError if it fails."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Let it begin; `answer` takes the result. What it was told before, and nobody asked for, is over."""
        if self._is_asked:
            self._read()
        self._is_asked = True
        with contextlib.suppress(BrokenPipeError):  # `answer` says so
            self._to.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self._to.flush()

    def is_done(self) -> bool:
        """Whether `answer` has something to take."""
        return bool(select.select([self._from], [], [], 0)[0])

    def answer(self) -> Any:
        """The result of what it was told to do; PartnerError if that failed or took too long."""
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
        """End it; it is killed if it does not end by itself."""
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it sits in a mount that hangs
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
    """Rename new versions over `path` for `seconds`; how many."""
    until_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < until_s:
        number += 1
        files.publish(Path(path), versioned(number), durable=False)
    return number


def _move(source: str, target: str) -> float:
    """Rename, back, and again: the fewest seconds that one took, as a busy disk delays one of them."""
    taken: list[float] = []
    for old, new in ((source, target), (target, source), (source, target)):
        started_s = time.monotonic()
        files.rename(Path(old), Path(new))
        taken.append(time.monotonic() - started_s)
    return min(taken)


def _create(path: str) -> bool:
    return files.create_once(Path(path), b"the second process")


ACTIONS: dict[str, Callable[..., Any]] = {
    "publish": _publish,
    "remove": _remove,
    "replace": _replace,
    "move": _move,
    "create": _create,
}


def main() -> None:
    """Do what is asked, line by line."""
    os.umask(0o007)
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"result": ACTIONS[arguments.pop("do")](**arguments)}
        except OSError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
