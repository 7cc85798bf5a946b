"""Log in full what happens for the first time, and then only how often it has happened again."""

import logging
import re
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

log = logging.getLogger(__name__)

MOST_KINDS = 8
"""So many kinds are told apart between two counts; what is of a further kind is counted as `others`."""
MOST_CHARACTERS = 300
"""How much of a message is repeated beside its count."""

# What differs between two messages of one kind: numbers, addresses, and what a task or a model has said.
_DETAIL = re.compile(r"""'[^'\n]*'|"[^"\n]*"|0x[0-9a-f]+|\d+(?:\.\d+)?""")
_SINGULAR = {"are": "is", "were": "was"}
_NOT_THE_USERS = ("rollout.", "asyncio", "concurrent.futures")
"""What the names of modules begin with whose frames lead to the user's code."""
_warned: set[str] = set()
"""Kinds of warnings that this process has logged once."""


@dataclass
class Tally:
    """Logs why samples and groups are lost. Two losses are of one kind if their reasons differ only in
    numbers and in quoted text. The first loss of a kind is logged, with its traceback where the process has
    not shown one; the next ones are counted until `say_counts`.
    """

    log: logging.Logger
    _explained: set[str] = field(default_factory=set[str])
    _first: dict[str, str] = field(default_factory=dict[str, str])
    _again: Counter[str] = field(default_factory=Counter[str])

    def note(self, lost: str, subject: str, reason: BaseException, cause: BaseException | None) -> None:
        """Log or count a loss. `lost`: samples or groups. `subject`: which one. `cause`: the error with the
        traceback that explains it; None if no traceback does.
        """
        text = str(reason)
        if not type(reason).__module__.startswith("rollout."):  # ours say it all; of KeyError this is the key
            text = f"{type(reason).__name__}: {text}"
        kind = f"{lost} {type(reason).__name__} {_DETAIL.sub('', str(reason))}"
        if kind not in self._first and len(self._first) >= MOST_KINDS:
            kind = f"{lost} others"
        if kind in self._first:
            self._again[kind] += 1
            return
        self._first[kind] = f"{lost} were lost like this: {text[:MOST_CHARACTERS]}"
        is_new = kind not in self._explained
        self._explained.add(kind)
        traceback = _users_traceback(cause) if is_new and cause else None
        # The frames of a call in another process are ours; its note has those of the user's code.
        notes: list[str] = getattr(cause, "__notes__", []) if is_new and traceback is None else []
        self.log.log(
            logging.ERROR if is_new else logging.WARNING,
            "%s",
            "\n".join([f"{subject}: {text}", *notes]),
            exc_info=traceback,
        )

    def say_counts(self) -> None:
        """Log how often each kind has happened again, and begin to count anew."""
        for kind, times in self._again.items():
            first = self._first[kind]
            if times == 1:
                first = first.replace("s were lost", " was lost", 1)
            self.log.warning("%d more %s", times, first)
        self._first.clear()
        self._again.clear()


def _users_traceback(
    error: BaseException,
) -> tuple[type[BaseException], BaseException, TracebackType | None] | None:
    """Return the part of an error to log: its traceback from the user's code on. None if it comes from this
    package alone: then its message says it all, or its note does.
    """
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_globals.get("__name__", "").startswith(_NOT_THE_USERS):
        frame = frame.tb_next
    return (type(error), error, frame) if frame else None


def amount(count: int, nouns: str, verb: str = "") -> str:
    """Return `1 group` or `3 groups` of `nouns`, "groups"; with the `verb` "are": `1 group is`."""
    if count != 1:
        return f"{count} {nouns} {verb}".rstrip()
    return f"1 {nouns.removesuffix('s')} {_SINGULAR.get(verb, verb)}".rstrip()


def warn_once(kind: str, message: str) -> None:
    """Log a warning once per kind and process: environments run thousands of times."""
    if kind not in _warned:
        _warned.add(kind)
        log.warning("%s (said once)", message)
