"""For all tests."""

import importlib.util
import os
import signal

import pytest

from tests.order import longest_first


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and children would inherit that:
    those that are to be interrupted would not hear it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if importlib.util.find_spec("hypothesis"):  # the environment with TRL has none
        from hypothesis import settings

        # No test times its examples: on a busy machine one takes longer than hypothesis allows.
        settings.register_profile("flagpost", deadline=None)
        settings.load_profile("flagpost")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests out to the processes of pytest-xdist; see order.py."""
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        items[:] = longest_first(items, lambda item: item.nodeid.partition("::")[0], processes)
