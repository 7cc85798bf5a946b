"""Code of the user's, of which a process of tests has had some before, by the same names."""

import pytest

from rollout import loaded_code, module_search


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have modules of the user's found, read and run by new processes, whatever earlier tests have loaded."""
    monkeypatch.setattr(module_search, "_searched", list[str]())
    monkeypatch.setattr("rollout.processes.killable_rewards._pools", {})
    loaded_code._source.cache_clear()
