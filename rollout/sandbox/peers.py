"""Two jails that talk: one has the code that nobody has read, the other the tests that call it.

    python -I main.py        stdin: a socket to the other one, one line of JSON each way

This file is main.py in both; the tests' has tests.json beside it, the other answer.py.

A test and what it tests do not share a process, because code can make any test pass in its own: by ending
the process, by objects that equal everything, by another `assert`. Here the code only ever sees the arguments
of its functions, and what comes back are plain values, which are compared where the code cannot reach.
Objects of other kinds stay with the code; a test has a `JailedObject` for each.

The jail of the tests prints a line for each test: 1 if it has raised nothing, else 0 and what it has raised.
"""

import builtins
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

_PLAIN = (type(None), bool, int, float, str)
_SEQUENCES: dict[str, Any] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "bytes": bytes, "bytearray": bytearray,
}  # fmt: skip


class JailedObject:
    """An object of the other jail. It can be called and looked at, but not compared: what it equals, only the
    other jail knows.
    """

    def __init__(self, peer: "Peer", number: int) -> None:
        self.__dict__.update(_peer=peer, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._peer.ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._peer.ask("get", self, (name,), {})

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.ask("set", self, (name, value), {})

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the answer's own class cannot be compared; compare its fields")

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__("__getitem__")(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__getattr__("__setitem__")(key, value)

    def __contains__(self, key: Any) -> bool:
        return bool(self.__getattr__("__contains__")(key))

    def __len__(self) -> int:
        return self.__getattr__("__len__")()

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return self.__getattr__("__iter__")()

    def __next__(self) -> Any:
        return self.__getattr__("__next__")()

    def __str__(self) -> str:
        return self.__getattr__("__str__")()


class Peer:
    """This end of the socket."""

    def __init__(self, channel: socket.socket, *, is_open: bool) -> None:
        """`is_open`: the other end may look into objects of this one; else it may only call functions that it
        was given.
        """
        self._lines = channel.makefile("rwb")
        self._is_open = is_open
        self._given: list[Any] = []

    def ask(
        self, request: str, remote: JailedObject | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Have the other end do something, and serve what it asks for meanwhile. Lists, dicts and sets among
        `args` are changed as there. Raises what was raised there if it is a built-in Exception, else a
        RuntimeError.
        """
        self._send({"do": request, "to": self._written(remote), "args": self._written([list(args), kwargs])})
        while "do" in (message := self._receive()):
            self.serve(message)
        for argument, changed in zip(args, self._read(message["args"]), strict=True):
            if isinstance(argument, list):
                argument[:] = changed
            elif isinstance(argument, (dict, set)):
                argument.clear()
                argument.update(changed)
        if "error" in message:
            raise _error(*message["error"])
        return self._read(message["value"])

    def serve(self, message: dict[str, Any]) -> None:
        """Do what the other end asks for, and answer."""
        args: list[Any] = []
        try:
            target, (args, kwargs) = self._read(message["to"]), self._read(message["args"])
            if message["do"] != "call" and not self._is_open:
                raise PermissionError("a test's function can only be called")
            do = {"call": _call, "get": getattr, "set": setattr}[message["do"]]
            value = do(target, *args, **kwargs)
            answer = {"value": self._written(value)}
        except BaseException as error:  # whatever it is, it is the caller's
            answer = {"error": [type(error).__name__, str(error)]}
        changed = [argument if isinstance(argument, (list, dict, set)) else None for argument in args]
        self._send({**answer, "args": self._written(changed)})

    def serve_all(self) -> None:
        """Serve until the other end is gone."""
        while True:
            self.serve(self._receive())

    def _send(self, message: dict[str, Any]) -> None:
        self._lines.write(json.dumps(message).encode() + b"\n")
        self._lines.flush()

    def _receive(self) -> dict[str, Any]:
        if not (line := self._lines.readline()).endswith(b"\n"):
            raise EOFError("the answer's process has ended")
        return json.loads(line)

    def _written(self, value: Any) -> Any:
        """Return a form of the value that JSON can hold; `_read` makes the value of it."""
        if isinstance(value, JailedObject):
            return {"yours": value.__dict__["_number"]}
        if hasattr(value, "tolist") and not isinstance(value, type):  # numpy's
            value = value.tolist()
        if isinstance(value, _PLAIN):
            return next((kind(value) for kind in (bool, int, float, str) if isinstance(value, kind)), None)
        items: Any = value
        for name, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                return {name: [self._written(item) for item in items]}
        if isinstance(value, dict):
            return {"dict": [[self._written(key), self._written(item)] for key, item in value.items()]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        self._given.append(value)
        return {"mine": len(self._given) - 1}

    def _read(self, written: Any) -> Any:
        if not isinstance(written, dict):
            return written
        ((name, content),) = written.items()
        if name == "mine":
            return JailedObject(self, content)
        if name == "yours":
            return self._given[content]
        if name == "complex":
            return complex(*content)
        if name == "dict":
            return {self._read(key): self._read(item) for key, item in content}
        return _SEQUENCES[name](self._read(item) for item in content)


def _call(target: Any, *args: Any, **kwargs: Any) -> Any:
    return target(*args, **kwargs)


def _error(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            pass  # one that takes more than a text
    return RuntimeError(f"{name}: {text}")


def answer(peer: Peer) -> None:
    """Run answer.py, and serve its names."""
    names: dict[str, Any] = {"__name__": "answer"}
    error: BaseException | None = None
    try:
        with open("answer.py", encoding="utf-8", errors="surrogatepass") as file:
            exec(compile(file.read(), "answer.py", "exec"), names)
    except BaseException as raised:
        error = raised

    def all_names() -> dict[str, Any]:
        if error is not None:
            raise error
        return names

    peer._given.append(all_names)  # number 0
    peer.serve_all()


def tests(peer: Peer, say: Callable[[str], None]) -> None:
    """Run the tests of tests.json, with the names of the answer."""
    with open("tests.json", encoding="utf-8") as file:
        setup, *all_tests = json.load(file)
    names: dict[str, Any] = {}

    def begin() -> None:
        for name, value in JailedObject(peer, 0)().items():
            if name[:2] != "__" and not hasattr(builtins, name):  # `abs` and `all` of a test are Python's
                names[name] = value
        names["__name__"] = "tests"
        exec(compile(setup, "setup", "exec"), names)

    def test(text: str) -> None:
        exec(compile(text, "test", "exec"), names)

    if (problem := _raised(begin)) is not None:
        all_tests = []
        say(f"0 {problem}")
    for text in all_tests:
        problem = _raised(test, text)
        say("1" if problem is None else f"0 {problem}")


def _raised(function: Callable[..., None], *arguments: str) -> str | None:
    try:
        function(*arguments)
    except BaseException as error:  # also SystemExit: a test ends here, not the tests
        return f"{type(error).__name__}: {error}"[:500]
    return None


def main() -> None:
    """Be one of the two."""
    sys.set_int_max_str_digits(0)
    channel = socket.socket(fileno=os.dup(0))
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="replace")
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nothing, number)
    if os.path.exists("tests.json"):
        tests(Peer(channel, is_open=False), lambda line: print(" ".join(line.split()), file=out))
    else:
        out.close()
        answer(Peer(channel, is_open=True))


if __name__ == "__main__":
    main()
