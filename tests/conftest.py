"""For all tests."""

import signal


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and children would inherit that:
    those that are to be interrupted would not hear it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
