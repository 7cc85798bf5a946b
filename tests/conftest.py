"""For all tests."""

import gc
import importlib.util
import os
import signal
from collections.abc import Iterator

import pytest

from tests.order import longest_first


def pytest_configure() -> None:
    """Undo what a shell in the background, or nohup, has the tests inherit: signals which are ignored by
    their children too.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if importlib.util.find_spec("hypothesis"):  # the environment with TRL has none
        from hypothesis import HealthCheck, settings

        # No test times its examples: on a busy machine one takes longer than hypothesis allows. Each run
        # tries the same ones: what fails fails again.
        settings.register_profile(
            "flagpost", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("flagpost")


def pytest_collectstart() -> None:
    """Leave the garbage while tests are collected: a third of that was to look for some."""
    gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests out to the processes of pytest-xdist; see order.py."""
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = longest_first(items, lambda item: item.nodeid.partition("::")[0], processes)


def pytest_collection_finish() -> None:
    """Have the garbage collector pass over what lasts as long as the tests: they and all that is imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _same_directory() -> Iterator[None]:
    """A test that leaves its process in another directory would fail others, in some orders."""
    here = os.getcwd()
    yield
    assert os.getcwd() == here
