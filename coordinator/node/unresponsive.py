"""End a node that does not react: what has ended its row must end it too. User code does not let go of it, or
it waits in a call on a mount that hangs.
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Generator
from types import FrameType

from coordinator.machine.children import Children
from coordinator.node.flags import Flags
from coordinator.node.identity import Identity
from coordinator.node.messages import Messages
from coordinator.node.row_endings import RowEndings
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.watch import Watch
from rollout.blocking import frame_of, is_on_directory
from rollout.storage.retry import under_way

log = logging.getLogger(__name__)

REACT_S = 30.0
"""How long user code may go on after a verdict or a signal."""
HANGS_S = 5.0
"""How long a call on the directory may go on after a signal, before the node's children are killed."""
LOOK_S = 1.0
TELL_S = 5.0
"""How long the end waits for the shared directory, and for the log."""
OURS = ("rollout", "coordinator", "asyncio")


class Unresponsive:
    """Looks after the main thread while it runs user code, and after the children once a signal has come."""

    def __init__(
        self, identity: Identity, watch: Watch, messages: Messages, row_endings: RowEndings, flags: Flags
    ) -> None:
        self._identity = identity
        self._watch = watch
        self._messages = messages
        self._row_endings = row_endings
        self._flags = flags

    def begin_to_end(self, number: int, children: Children) -> None:
        """Kill `children`, which hold the accelerator, if a call on the directory hangs after a signal. The
        thread that is in this call cannot be ended: the process goes once the call has returned.
        """
        arguments = (number, children)
        threading.Thread(target=self._look_at_calls, args=arguments, name="unresponsive", daemon=True).start()

    def _look_at_calls(self, number: int, children: Children) -> None:
        began_s = time.monotonic()
        while True:
            time.sleep(LOOK_S)
            longest = min(list(under_way.values()), key=lambda call: call.began_s, default=None)
            if longest is not None and time.monotonic() - max(longest.began_s, began_s) >= HANGS_S:
                break
        children.end_now()
        log.error("%s", self._messages.hangs(number, longest))

    @contextlib.contextmanager
    def guarding(self, children: Children, is_writing: Callable[[], bool]) -> Generator[None]:
        """End this process if the block goes on for REACT_S after its row has ended, `children` first: they
        hold the accelerator. What waits in a call on the directory is spared: it ends with the call. So is a
        block that waits for a thread of its own while that `is_writing` there.
        """
        over = threading.Event()
        arguments = (threading.get_ident(), over, children, is_writing)
        threading.Thread(target=self._look, args=arguments, name="unresponsive", daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _look(
        self, thread: int, over: threading.Event, children: Children, is_writing: Callable[[], bool]
    ) -> None:
        ignored_s = 0.0
        while ignored_s < REACT_S:
            if over.wait(LOOK_S):
                return
            spared = is_on_directory(frame_of(thread)) or is_writing()
            ends = self._watch.stop.is_set() and not spared
            ignored_s = ignored_s + LOOK_S if ends else 0.0
        frame = frame_of(thread)
        children.kill_groups()
        log.error("%s", "".join(traceback.format_stack(frame)))
        code: list[int] = []
        telling = threading.Thread(target=lambda: code.append(self._tell(frame)), daemon=True)
        telling.start()
        telling.join(TELL_S)
        os._exit(code[0] if code else Exit.LOST)

    def _tell(self, frame: FrameType | None) -> int:
        """Tell the others and the person why this node ends; returns its exit code."""
        end = Ended(Exit.LOST, "its row has ended", "left")
        try:
            self._row_endings.check()
        except Ended as error:
            end = error
        except Exception:
            pass  # what only a main thread can follow, e.g. into a new epoch
        me = self._identity
        text = self._messages.failure(
            RuntimeError(
                f"user code ({_place(frame)}) has held the node for {REACT_S:.0f} s after this: {end.text}. "
                f"The node is ended: let the code await what is slow, or make the reward a sync function. "
                f"{self._messages.repair(me.rank)}"
            )
        )
        log.error("%s", text, extra={"event": {"what": "exit", "code": int(end.code)}})
        if end.tell is not None and not self._watch.fence.tripped:
            self._flags.tell(end.tell, text)
        threading.Event().wait(LOOK_S)  # other threads write the log
        return end.code


def _place(frame: FrameType | None) -> str:
    """Return file, line and function of the innermost frame that is not of this program."""
    found = frame
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in OURS:
            found = frame
            break
        frame = frame.f_back
    if found is None:
        return "unknown"
    return f"{found.f_code.co_filename}:{found.f_lineno}, {found.f_code.co_name}"
