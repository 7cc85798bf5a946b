"""Calls of the system that fail, in place of those of os."""

import os
from collections.abc import Callable
from typing import Any

import pytest


def failing(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    number: int,
    times: int = 1_000_000,
    *,
    after: bool = False,
    when: Callable[..., bool] = lambda *_: True,
) -> list[int]:
    """Let `os.name` fail `times` times; `after`: it works all the same. The list grows with each call."""
    real = getattr(os, name)
    calls: list[int] = []

    def call(*arguments: Any, **more: Any) -> Any:
        if not when(*arguments):
            return real(*arguments, **more)
        calls.append(1)
        if len(calls) > times:
            return real(*arguments, **more)
        if after:
            real(*arguments, **more)
        raise OSError(number, os.strerror(number), arguments[0])

    monkeypatch.setattr(os, name, call)
    return calls
