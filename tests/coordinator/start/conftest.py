"""Checks of models are forks of one process, as those of the nodes of `run local` are."""

import pytest

from tests.imports import shared_imports


@pytest.fixture(autouse=True)
def forked_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in shared_imports().items():
        monkeypatch.setenv(name, value)
