"""Whether this machine can ask the Hugging Face Hub at all."""

import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def why_unreachable() -> str | None:
    """Return that this machine cannot find the Hub's address, and what to do; None if it may reach it.

    The Hub's own libraries try five times, for 25 s, and say a name of theirs.
    """
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname or constants.ENDPOINT
    if getproxies().keys() & {"http", "https", "all"}:  # it may have `no` alone
        return None
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return f"this machine finds no {host}: without a network, fetch it elsewhere and give its directory"
    return None
