"""For all tests."""

import signal

import hypothesis


def pytest_configure() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, and children would inherit that:
    those that are to be interrupted would not hear it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # No test times its examples: on a busy machine one takes longer than hypothesis allows.
    hypothesis.settings.register_profile("flagpost", deadline=None)
    hypothesis.settings.load_profile("flagpost")
