"""The live view of a run at the bottom of a terminal, below all other output.

One thread reads the run directory, which may hang for minutes. Only one other thread writes to the terminal,
which may accept no output (Ctrl+S, or a program behind it that no longer reads). Neither a log line nor the
end of the process waits for them. The view never hides the cursor or changes a mode of the terminal, so a
killed process leaves nothing to restore: the cursor is at the beginning of an empty line below the view.
"""

import contextlib
import io
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, Self, TextIO, cast

from rich.console import Console
from rich.text import Text

from coordinator.console.views.status import StatusReader
from coordinator.console.views.terminal_lines import ASCII, UNICODE, filled_columns, rows_of, view
from coordinator.journal.control_characters import one_line, plain
from coordinator.settings.tree import SettingsError

READ_S = 0.5
"""Pause between two readings; longer where a reading takes long."""
PAINT_S = 0.25
OLD_S = 5.0
"""After this long the view says that the directory does not answer."""
PATIENCE_S = 2.0
"""How long the end may wait for a terminal that accepts no output."""
QUEUE_TEXTS = 10_000
"""At most this many texts wait for the terminal; further ones are dropped."""
BATCH_TEXTS = 1_000
"""At most this many texts are written at once."""


def is_terminal(file: TextIO) -> bool:
    """Return whether `file` can show a view: it is a terminal that can move its cursor."""
    return file.isatty() and os.environ.get("TERM", "dumb") not in {"dumb", "unknown"}


class _Readings:
    """Read the status of a run in a thread, one reading at a time, and keep the newest."""

    def __init__(self, root: Path) -> None:
        self.newest: tuple[dict[str, Any], list[dict[str, Any]]] | None = None
        """(status, lines of metrics.jsonl); always replaced together."""
        self.asked_s: float | None = None
        """When the current reading began; None between two readings."""
        self.error = ""
        self._reader = StatusReader(root)
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="live view: read", daemon=True).start()

    def end(self) -> None:
        """Begin no further reading; do not wait for the current one."""
        self._ended.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._ended.wait(pause_s):
            self.asked_s = started_s = time.monotonic()
            try:
                status = self._reader.read()
                self.newest, self.error = (status, self._reader.lines), ""
            except SettingsError as error:
                is_there = os.path.exists(self._reader.run_dir.run_json)
                self.error = str(error) if is_there else ""  # there may be no run yet
            except (OSError, ValueError) as error:
                self.error = str(error)
            self.asked_s = None
            pause_s = max(READ_S, 10 * (time.monotonic() - started_s))


class LiveView:
    """Show a run at the bottom of a terminal from `start` to `stop`; `say` writes above it. For any thread.

    Without a terminal, `say` only writes.
    """

    def __init__(self, root: Path, file: TextIO, share: float = 0.5, keep: bool = False) -> None:
        """`share`: part of the terminal's height for the view; `keep`: leave the view there at the end."""
        self._root = root
        self._file = file
        self._share = share
        self._keep = keep
        self._console = Console(file=file, highlight=False, soft_wrap=True)
        self._signs = UNICODE if "utf" in (file.encoding or "").lower() else ASCII
        self._columns: set[str] = set()
        self._readings: _Readings | None = None
        self._painted: list[Text] = []
        """Lines on the terminal. Only the thread uses this and `_partial`."""
        self._partial = ""
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Pieces of text in order; None: the end."""
        self._dropped = 0
        """Lines dropped since the last note about dropped lines."""
        self._lock = threading.RLock()  # a signal handler may say something
        self._thread = threading.Thread(target=self._run, name="live view: write", daemon=True)

    def start(self) -> None:
        """Begin to read and to show, if the file is a terminal."""
        if is_terminal(self._file):
            self._file.flush()  # what follows does not use its buffer
            self._readings = _Readings(self._root)
            self._thread.start()

    def stop(self) -> bool:
        """Remove the view from the terminal, or leave its last state there (`keep`).

        False if the terminal has not accepted this, and what was said before, within PATIENCE_S.
        """
        if self._readings is None:
            return True
        self._readings.end()
        self._said.put(None)
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            return False
        with contextlib.suppress(OSError, ValueError):  # the terminal may have gone
            self.say("")
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """Write `text` above the view, with control characters spelled; an unfinished line waits for its end.

        If the terminal is too far behind, the text is dropped: a caller never waits. Without a view `text` is
        written at once; then OSError or ValueError are possible.
        """
        with self._lock:
            if not self._thread.is_alive():
                unwritten, _ = self._next(0.0)  # what was said while the thread ended
                self._file.write(unwritten + plain(self._partial + text))
                self._partial = ""
                self._file.flush()
            elif self._said.qsize() < QUEUE_TEXTS:
                self._said.put(text)
            else:
                self._dropped += text.count("\n")

    def say_line(self, line: str) -> None:
        """Say a line; see `say`."""
        self.say(f"{line}\n")

    def _run(self) -> None:
        due_s, ended = 0.0, False
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone: nothing to show
            while not ended:
                above, ended = self._next(max(0.0, due_s - time.monotonic()))
                lines = self._painted
                if ended:
                    lines = self._lines() if self._keep else []
                elif time.monotonic() >= due_s:
                    lines, due_s = self._lines(), time.monotonic() + PAINT_S
                if above or lines != self._painted:
                    self._write(lines, above)

    def _next(self, timeout_s: float) -> tuple[str, bool]:
        """Return (the complete lines that wait, "" if none came within `timeout_s`; whether `stop` was
        called)."""
        texts, ended = [self._partial], False
        with contextlib.suppress(queue.Empty):
            while len(texts) <= BATCH_TEXTS and not ended:
                text = self._said.get(timeout=0.0 if len(texts) > 1 else timeout_s)
                texts.append(text or "")
                ended = text is None
        with self._lock:  # dropped texts came after those that wait: note them when none waits
            missing = self._dropped if self._said.empty() else 0
            self._dropped -= missing
        text = "".join(texts)
        if (missing or ended) and not text.endswith("\n"):
            text += "\n" if text else ""
        if missing:
            text += f"[{missing} lines are missing here: the terminal did not take them]\n"
        lines, end, self._partial = text.rpartition("\n")
        return plain(lines + end), ended

    def _lines(self) -> list[Text]:
        """Return the lines to show now; none while a shell has the terminal, or before there is a run."""
        if self._readings is None or not _in_foreground(self._file):
            return []
        note = self._note(self._readings)
        if self._readings.newest is None:
            return [Text(one_line(note), "red")] if note else []
        status, metrics = self._readings.newest
        self._columns |= filled_columns(status)
        size = _size(self._file)
        return view(
            status,
            metrics,
            self._root,
            width=size.columns,
            height=int(size.lines * self._share) - 1,
            shown=self._columns,
            note=note,
            signs=self._signs,
        )

    def _note(self, readings: _Readings) -> str:
        asked_s = readings.asked_s
        since_s = 0.0 if asked_s is None else time.monotonic() - asked_s
        return f"no answer from {self._root} for {since_s:.0f} s" if since_s >= OLD_S else readings.error

    def _write(self, lines: list[Text], above: str = "") -> None:
        """Replace the view by `above`, which stays, and `lines`; one write, so that nothing flickers."""
        width = _size(self._file).columns
        # by the present width: a narrower terminal has folded the lines
        up = sum(rows_of(line, width) for line in self._painted)
        if up and not _in_foreground(self._file):  # do not erase what a shell has written
            up, lines = 0, []
        with self._console.capture() as capture:
            for line in lines:
                self._console.print(line)
        # Line by line: a terminal may move a screen that is cleared from its top to its scrollback.
        erase = "\r" + "\x1b[A\x1b[2K" * up if up else ""
        self._painted = lines
        data = (erase + above + capture.get()).encode(self._file.encoding or "utf-8", "replace")
        while data:  # not through the file's buffer: Python flushes that at its end, and would wait
            try:
                data = data[os.write(self._file.fileno(), data) :]
            except BlockingIOError:  # another program made the terminal non-blocking
                time.sleep(PAINT_S)


def _in_foreground(file: TextIO) -> bool:
    """Return whether this process is in the terminal's foreground; True if that is not known."""
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except OSError:
        return True


def _size(file: TextIO) -> os.terminal_size:
    with contextlib.suppress(OSError):
        size = os.get_terminal_size(file.fileno())
        if size.columns and size.lines:  # a serial line does not know its size
            return size
    return os.terminal_size((80, 24))


def show_until_interrupted(root: Path) -> None:
    """Show only the view of a run, on stdout, until KeyboardInterrupt; its last state stays there."""
    with LiveView(root, sys.stdout, share=1.0, keep=True):
        threading.Event().wait()


class _StreamAboveView(io.TextIOBase):
    """Replaces a stream of the process while a view is below its output."""

    def __init__(self, shown: LiveView, stream: TextIO) -> None:
        self._shown = shown
        self._stream = stream

    def write(self, text: str, /) -> int:
        self._shown.say(text)
        return len(text)

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()


@contextlib.contextmanager
def live_view(root: Path) -> Generator[None]:
    """Show the run below what this process logs and prints; without effect if stderr is not a terminal."""
    if not is_terminal(sys.stderr):
        yield
        return
    stdout, stderr = sys.stdout, sys.stderr
    shown = LiveView(root, stderr)
    above = _StreamAboveView(shown, stderr)
    handlers = _handlers_of(stderr)
    shown.start()
    for handler in handlers:
        handler.setStream(above)
    sys.stderr = above
    sys.stdout = _StreamAboveView(shown, stdout) if stdout.isatty() else stdout
    try:
        yield
    finally:
        if shown.stop():  # else later output must not wait for the terminal either
            sys.stdout, sys.stderr = stdout, stderr
            for handler in handlers:
                handler.setStream(stderr)


def _handlers_of(stream: TextIO) -> list[logging.StreamHandler[Any]]:
    handlers = [
        cast("logging.StreamHandler[Any]", handler)
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    return [handler for handler in handlers if handler.stream is stream]
