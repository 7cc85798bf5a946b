"""Ports for servers that tests start."""

import contextlib
import random
import socket

FIRST, END = 20_000, 32_000
"""Below those that the kernel gives to connections: a port that is free may be somebody's a moment later."""


def unused_port(address: str = "127.0.0.1") -> int:
    """Return a TCP port that nothing listens on."""
    while True:
        port = random.SystemRandom().randrange(FIRST, END)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
