"""The second process of `run doctor`: it does things on the directory that the first one observes.

Times are of the monotonic clock, which all processes of one machine share.
"""

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from rollout.processes.killable_process import CallFailed, CallLost, DeadlinePassed
from rollout.processes.pool import ProcessPool
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
        self._pool = ProcessPool(f"{__name__}:make_partner", size=1, say=_pass_on)
        self._begun: Future[Any] = Future()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Let it do something and return its answer; PartnerError if it fails."""
        self.tell(do, **arguments)
        return self.answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Let it begin; `answer` takes the result. An earlier result that was not taken is dropped."""
        self._begun = self._pool.submit(do, arguments, deadline_s=ANSWER_S)

    def is_done(self) -> bool:
        """Return whether `answer` would return at once."""
        return self._begun.done()

    def answer(self) -> Any:
        """Return the result of what it was told to do; PartnerError if that failed or took too long."""
        try:
            result, error_text = self._begun.result()
        except DeadlinePassed:
            raise PartnerError(
                f"a second process on this directory has not answered for {ANSWER_S:.0f} s"
            ) from None
        except (CallFailed, CallLost) as error:
            raise PartnerError(f"a second process on this directory failed: {error}") from None
        if error_text is not None:
            raise PartnerError(error_text)
        return result


def _pass_on(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- in the second process


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


def make_partner() -> Callable[[str, Mapping[str, Any]], tuple[Any, str | None]]:
    """Make (name of an action, its arguments) -> its result, and the text of an error of the directory."""

    def act(do: str, arguments: Mapping[str, Any]) -> tuple[Any, str | None]:
        try:
            return ACTIONS[do](**arguments), None
        except OSError as error:
            return None, str(error)

    return act
