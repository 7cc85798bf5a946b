"""Free the accelerator of a node whose call on the shared directory hangs after a signal."""

import logging
import threading
import time
from collections.abc import Callable

from coordinator.machine.children import Children
from rollout.storage.retry import DirectoryCall, under_way

log = logging.getLogger(__name__)

HANGS_S = 5.0
"""How long a call on the directory may go on after a signal, before the node's children are killed."""
LOOK_S = 1.0


def end_children_if_calls_hang(children: Children, describe: Callable[[DirectoryCall], str]) -> None:
    """From now on, kill `children` once a call on the directory has hung for HANGS_S. The thread that is in
    this call cannot be ended: the process goes once the call has returned. `describe` says so to a person.
    """
    arguments = (children, describe)
    threading.Thread(target=_look, args=arguments, name="hanging", daemon=True).start()


def _look(children: Children, describe: Callable[[DirectoryCall], str]) -> None:
    began_s = time.monotonic()
    while True:
        time.sleep(LOOK_S)
        longest = min(list(under_way.values()), key=lambda call: call.began_s, default=None)
        if longest is not None and time.monotonic() - max(longest.began_s, began_s) >= HANGS_S:
            break
    children.end_now()
    log.error("%s", describe(longest))
