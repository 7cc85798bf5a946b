"""Tasks of which a node holds only where they are: a private copy of their text, in a file if it is large."""

import json
import os
import tempfile
import weakref
from array import array
from collections.abc import Sequence
from typing import Any

KEEP_BYTES = 64 * 2**20
"""A longer text of the tasks is in a temporary file, which has no name: it ends with the process."""
_BUFFER_BYTES = 2**20


class SomeTasks(Sequence[dict[str, Any]]):
    """The tasks of a sequence that have the given indices."""

    def __init__(self, tasks: Sequence[dict[str, Any]], indices: Sequence[int]) -> None:
        self._tasks = tasks
        self._indices = array("Q", indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._tasks[number] for number in self._indices[index]]
        return self._tasks[self._indices[index]]


class StoredTasks(Sequence[dict[str, Any]]):
    """Tasks that are read when they are asked for, 8 bytes in memory for each. What happens to the file that
    they are from has no effect on them. Each access gives a new object.
    """

    def __init__(self, directory: str | None = None) -> None:
        """`directory`: where the temporary file is; None: where the system has such files ($TMPDIR)."""
        self._directory = directory
        self._ends = array("Q")
        self._text = bytearray()
        """The text that is not in the file."""
        self._file: Any = None

    def append(self, task: dict[str, Any]) -> None:
        """Add a task, made of JSON values. ValueError for a number that JSON does not have."""
        text = json.dumps(task, allow_nan=False).encode()
        self._ends.append((self._ends[-1] if self._ends else 0) + len(text))
        self._text += text
        if len(self._text) > (KEEP_BYTES if self._file is None else _BUFFER_BYTES):
            self._spill()

    def finish(self) -> None:
        """Write what is still to be written; no task may be asked for before, and none added after."""
        if self._file is not None:
            self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        view = memoryview(self._text)
        while view:
            view = view[self._file.write(view) :]
        view.release()
        self._text = bytearray()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        begin = self._ends[index - 1] if index else 0
        return json.loads(self._read(begin, self._ends[index]))

    def _read(self, begin: int, end: int) -> bytes:
        if self._file is None:
            return bytes(self._text[begin:end])
        data = b""
        while begin + len(data) < end:  # pread: the place in the file is shared with forked processes
            piece = os.pread(self._file.fileno(), end - begin - len(data), begin + len(data))
            if not piece:
                raise OSError("the temporary copy of the tasks has been cut short")
            data += piece
        return data
