"""What one client remembers of the server."""

import os
import posixpath
import threading
import time
from collections.abc import Callable

from tests.faultfs.faults import Faults

Listing = list[tuple[str, int]]
"""(name, st_mode) of each entry."""


class ClientCache:
    """Attributes, "no such file" and listings, each for as long as the faults say.

    What an NFS client promises (close-to-open), and so does this one:
    - what it changed itself it sees at once, and changing a directory makes it ask again for everything
      that it remembers of that directory's names;
    - opening a file asks the server for its attributes, so who opens after another one's close reads all;
    - opening a directory asks the server whether it has changed, and if so "no such file" is forgotten for
      its names. `listing_s` takes this away, as `nocto` and object-store mounts do: others' changes then
      show that much later. `stubborn` takes away the forgetting alone;
    - a bare look-up (stat, or open of a remembered absence) asks nobody until the time is over.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, tuple[float, os.stat_result | None]] = {}
        self._listings: dict[str, tuple[float, Listing]] = {}

    def attributes(self, path: str, faults: Faults, ask: Callable[[], os.stat_result]) -> os.stat_result:
        """The attributes of `path`; FileNotFoundError as remembered or as the server says."""
        now_s = time.monotonic()
        with self._lock:
            until_s, found = self._found.get(path, (0.0, None))
        if until_s <= now_s:
            try:
                found = ask()
            except FileNotFoundError:
                found = None
            with self._lock:
                for_s = faults.negative_s if found is None else faults.attributes_s
                self._found[path] = (now_s + for_s, found)
        if found is None:
            raise FileNotFoundError(2, "no such file", path)
        return found

    def listing(self, path: str, faults: Faults, ask: Callable[[], Listing]) -> Listing:
        """The entries of a directory."""
        now_s = time.monotonic()
        with self._lock:
            until_s, names = self._listings.get(path, (0.0, []))
        if until_s <= now_s:
            names = ask()
            with self._lock:
                self._listings[path] = (now_s + faults.listing_s, names)
                if not faults.stubborn:
                    self._forget_absences(path)
        return names

    def opened(self, path: str) -> None:
        """The file was opened, or written: its attributes are asked for again."""
        with self._lock:
            self._found.pop(path, None)

    def changed(self, path: str, listed: tuple[str, int] | None, faults: Faults) -> None:
        """We have made, removed or renamed `path`; `listed`: its entry now."""
        directory, name = posixpath.split(path)
        with self._lock:
            for known in (self._found, self._listings):
                for key in [key for key in known if key == path or key.startswith(f"{path}/")]:
                    del known[key]
            self._found.pop(directory, None)
            until_s, entries = self._listings.pop(directory, (0.0, []))
            if faults.keeps_listing and until_s:
                others = [entry for entry in entries if entry[0] != name]
                self._listings[directory] = until_s, others + ([listed] if listed else [])
            self._forget_absences(directory)

    def _forget_absences(self, directory: str) -> None:
        now_s = time.monotonic()
        for key, (until_s, found) in list(self._found.items()):
            if until_s <= now_s or (found is None and posixpath.dirname(key) == directory):
                del self._found[key]
