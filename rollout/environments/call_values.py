"""Read the values in a model's tool calls: JSON, and two notations that resemble it. Pure."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

T = TypeVar("T")


class ParsedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    id: str | None = None
    """The call's id, if the model has written one."""


class NoCall(ValueError):
    """The text is no call."""


Found = tuple[str, list[ParsedCall | None]]
"""What the model says before the first call, and the calls: None for each that cannot be read."""


def calls_behind(
    text: str, mark: re.Pattern[str], read: Callable[[re.Match[str]], tuple[Sequence[ParsedCall | None], int]]
) -> Found:
    """Return the calls that `read` finds behind each mark; it returns where they end, or raises NoCall."""
    calls: list[ParsedCall | None] = []
    first = match = mark.search(text)
    while match is not None:
        end = match.end()
        try:
            some, end = read(match)
            calls += some
        except (ValueError, RecursionError):  # RecursionError: of JSON that is nested too deeply
            calls.append(None)
        match = mark.search(text, end)
    return text[: first.start()] if first else text, calls


def read_json(text: str, begin: int = 0) -> tuple[Any, int]:
    """Return the JSON value that is in a text at `begin`, behind spaces, and where it ends. Line breaks may
    stand in its strings as they are. Raises ValueError, also for NaN.
    """
    return _DECODER.raw_decode(text, cast("re.Match[str]", _SPACES.match(text, begin)).end())


def end_behind(text: str, mark: str, begin: int) -> int:
    """Return where a mark ends that comes next, behind spaces. Raises NoCall."""
    at = cast("re.Match[str]", _SPACES.match(text, begin)).end()
    if not text.startswith(mark, at):
        raise NoCall
    return at + len(mark)


def call_of(value: Any) -> ParsedCall:
    """Return the call that {"name": ..., "arguments" or "parameters": {...}} is. Without arguments, or with
    the text of a JSON object for them, or as the OpenAI API has it (`function`), too. Raises NoCall.
    """
    if not isinstance(value, dict):
        raise NoCall
    if "name" not in value:  # {"type": "function", "function": {...}}, or the function's name alone
        function = value.get("function")
        value = {**value, **(function if isinstance(function, dict) else {"name": function})}
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(source := arguments, str):
        arguments, end = read_json(source) if source.strip() else (None, len(source))
        if source[end:].strip():
            raise NoCall
    name, id = value.get("name"), value.get("id")
    is_elsewhere = arguments is None and any(
        isinstance(other, dict) for key, other in value.items() if key != "function"
    )
    is_object = isinstance(arguments, dict) or arguments in (None, [])
    if not isinstance(name, str) or is_elsewhere or not is_object:
        raise NoCall
    is_id = isinstance(id, str) and re.fullmatch("[a-zA-Z0-9]{9}", id)
    return ParsedCall(name, arguments if isinstance(arguments, dict) else {}, id if is_id else None)


class Reader:
    """Reads a text from its beginning on. Each method skips spaces, and raises NoCall for anything else."""

    def __init__(
        self,
        text: str,
        string: re.Pattern[str],
        *,
        unescape: Callable[[str], str] = str,
        key: re.Pattern[str] | None = None,
    ) -> None:
        """`string`: a string, whose group is what it says; `unescape`: reads that. `key`: a key of an object
        that is no string, if there are such.
        """
        self.text = text
        self.at = 0
        self._string = string
        self._unescape = unescape
        self._key = key

    def take(self, mark: str) -> bool:
        """Return whether the mark is next; if so, go behind it."""
        self.match(_SPACES)
        is_next = self.text.startswith(mark, self.at)
        self.at += len(mark) * is_next
        return is_next

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            raise NoCall

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Return the group of the pattern that matches here, or all of it, and go behind it."""
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[match.lastindex or 0]

    def name(self) -> str:
        """Return the name of a function or of an argument, up to what no name has."""
        self.take("")
        name = self.match(_NAME)
        if not name:
            raise NoCall
        return name

    def items(self, end: str, item: Callable[[], T]) -> list[T]:
        """Return the items between commas, up to the mark `end`."""
        items: list[T] = []
        if self.take(end):
            return items
        while True:
            items.append(item())
            if self.take(end):
                return items
            self.expect(",")

    def argument(self) -> tuple[str, Any]:
        """Return NAME=VALUE."""
        name = self.name()
        self.expect("=")
        return name, self.value()

    def value(self) -> Any:
        if self.take("{"):
            return dict(self.items("}", self._entry))
        if self.take("["):
            return self.items("]", self.value)
        quoted = self._quoted()
        if quoted is not None:
            return quoted
        word = self.match(_WORD) or ""
        if word in _CONSTANTS:
            return _CONSTANTS[word]
        if _NUMBER.fullmatch(word) is None:
            raise NoCall
        return json.loads(word)

    def _entry(self) -> tuple[str, Any]:
        key = self._quoted()
        if key is None and self._key is not None:
            key = self.match(self._key)
        if key is None:
            raise NoCall
        self.expect(":")
        return key.strip(), self.value()

    def _quoted(self) -> str | None:
        self.take("")
        quoted = self.match(self._string)
        return None if quoted is None else self._unescape(quoted)


def python_string(body: str) -> str:
    """Return the text of a Python literal. Characters that Python wants escaped may be there as they are:
    chat templates put texts between quotes and change nothing. Raises ValueError for half a character.
    """
    text = re.sub(r"\\(U[0-9a-fA-F]{8}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", _unescaped, body, flags=re.DOTALL)
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


def _unescaped(escape: re.Match[str]) -> str:
    code = escape[1]
    return chr(int(code[1:], 16)) if len(code) > 1 else _ESCAPES.get(code, escape[0])


def _refuse(constant: str) -> NoReturn:
    raise NoCall(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse, strict=False)
_SPACES = re.compile(r"\s*")
_NAME = re.compile(r"[^\s,:=(){}\[\]<>'\"]+")
_WORD = re.compile(r"[\w.+-]+")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_CONSTANTS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "'": "'", '"': '"', "\\": "\\"}
