"""For all tests."""

import importlib.util
import signal


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
