"""Read what others have set as its owner does: variables of the environment, and limits of control groups.
No imports of ours.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

LOOPBACK = ("localhost", "127.0.0.1", "::1")


_GROUPS_OF_THIS_PROCESS = Path("/proc/self/cgroup")
_CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cores() -> int:
    """Return how many cores this process may use: its share of the machine's, where it has one, and no more
    than the quota of its container allows (`docker --cpus 1.5`: 2).
    """
    try:
        most = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # macOS has no shares
        most = os.cpu_count() or 1
    quotas = [quota for folder in control_groups() if (quota := _cpu_quota(folder)) is not None]
    return max(1, min([most, *map(math.ceil, quotas)]))


def memory_bytes() -> float:
    """Return the memory of this machine, or less if its container may have less (`docker --memory 8g`)."""
    limits = [float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")]
    for folder in control_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):  # of each version
            with contextlib.suppress(OSError, ValueError):  # missing, or "max"
                limits.append(float((folder / name).read_text()))
    return min(limits)


def control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control groups (of both versions) and of those above them. In a
    container the folder may be missing, and one above it stands for it.
    """
    with contextlib.suppress(OSError):  # only Linux has them
        for line in _GROUPS_OF_THIS_PROCESS.read_text().splitlines():
            _number, controllers, path = line.split(":", 2)
            top = _CONTROL_GROUPS / controllers
            folder = top / path.lstrip("/")
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(top))


def _cpu_quota(folder: Path) -> float | None:
    """Return how many cores' time a control group may use; None without a limit, which is `max` or -1."""
    with contextlib.suppress(OSError, ValueError):
        if (new := folder / "cpu.max").exists():
            quota, period = map(int, new.read_text().split())
        else:
            quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else None
    return None


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


def need_quiet_python(environment: MutableMapping[str, str]) -> bool:
    """Have children print nothing of the interpreter's own, which would bury their errors, and end with their
    own exit codes. Return whether this process would not: with PYTHONINSPECT Python ends with 1 instead.
    """
    for name in ("PYTHONVERBOSE", "PYTHONPROFILEIMPORTTIME", "PYTHONMALLOCSTATS"):
        environment.pop(name, None)
    return bool(environment.pop("PYTHONINSPECT", ""))


def need_no_proxy(environment: MutableMapping[str, str]) -> None:
    """Have every client of this process and of its children go to this machine's own addresses without the
    proxy of the cluster.
    """
    names = ("no_proxy", "NO_PROXY")
    if any(name.lower().endswith("_proxy") for name in environment.keys() - {*names}):
        hosts = next(filter(None, map(environment.get, names)), "").split(",")
        all_hosts = ",".join(dict.fromkeys([*filter(None, map(str.strip, hosts)), *LOOPBACK]))
        environment.update(dict.fromkeys(names, all_hosts))


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
