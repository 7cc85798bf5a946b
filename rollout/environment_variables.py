"""Variables of the environment that others have set, read as their owners read them; no imports of ours."""

import os
from collections.abc import Mapping, MutableMapping
from typing import Any

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def cores() -> int:
    """Return how many cores this process may use: its share of the machine's, where it has one."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no shares
        return os.cpu_count() or 1


def omp_threads(environment: Mapping[str, str]) -> int | None:
    """Return the threads that OMP_NUM_THREADS gives a process, as OpenMP reads it: the first of a list, which
    has a number for each level of nesting. None if it is not set, or no such number.
    """
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) > 0 else None


def is_utf8(path: object) -> bool:
    """Return whether a path is written in UTF-8, as libraries in other languages read it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def need_utf8_folder(environment: MutableMapping[str, str]) -> None:
    """Have this process and its children put temporary files elsewhere if TMPDIR is not written in UTF-8:
    engines' sockets lie there, and their names are parts of addresses.
    """
    for name in ("TMPDIR", "TEMP", "TMP"):
        if not is_utf8(environment.get(name, "")):
            del environment[name]


def need_no_proxy(environment: MutableMapping[str, str]) -> None:
    """Have every client of this process and of its children go to this machine's own addresses without the
    proxy of the cluster.
    """
    names = ("no_proxy", "NO_PROXY")
    if any(name.lower().endswith("_proxy") for name in environment.keys() - {*names}):
        hosts = next(filter(None, map(environment.get, names)), "").split(",")
        both = ",".join(dict.fromkeys([*filter(None, map(str.strip, hosts)), *LOOPBACK]))
        environment.update(dict.fromkeys(names, both))


def proxy_of(url: str) -> str | None:
    """Return the proxy through which the environment has clients go to a URL, as curl does; None without."""
    import urllib.parse  # here, because the command line imports this module
    import urllib.request

    parts = urllib.parse.urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    bypasses: Any = getattr(urllib.request, "proxy_bypass_environment")  # noqa: B009  (without a stub)
    if parts.hostname in LOOPBACK or bypasses(parts.netloc, proxies):
        return None
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"
