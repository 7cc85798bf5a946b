"""Take pictures: those of tasks are checked once, and known by their digests until a node publishes them.
Those of environments are published at once.
"""

import base64
import io
import os
import stat
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.pictures import MAX_BYTES, PictureError, check_picture, digest_of, is_digest
from rollout.processes.killable_rewards import missing
from rollout.storage import files, once

_DATA = "data:"
_LONGEST_PATH = 1024
_MARK = "<image>"
"""What many data sets write into a text where a picture goes."""


class TaskPictures:
    """The pictures of a set of tasks. What was given as bytes is in a temporary file without a name."""

    def __init__(self, directory: str | None = None) -> None:
        """`directory`: of the temporary file; None: where the system has such files ($TMPDIR)."""
        self._directory = directory
        self._paths: dict[str, Path] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._file: Any = None
        self._digests: dict[Path, str] = {}
        """By path: a picture of many tasks is checked once."""
        self._published: set[str] = set()

    def __contains__(self, digest: str) -> bool:
        return digest in self._paths or digest in self._places

    def __len__(self) -> int:
        return len(self._paths.keys() | self._places.keys())

    def take(self, value: Any, folder: Path | None) -> str:
        """Return the digest of a picture: bytes, a data URI, a path, below `folder` if it does not begin with
        /, or {"bytes": ..., "path": ...} as `datasets` has it. Raises PictureError.
        """
        path = _given(value, folder)
        if isinstance(path, bytes):
            return self._take_bytes(path)
        if path not in self._digests:
            data = _read(path)
            try:
                check_picture(data)
            except PictureError as error:
                raise PictureError(f"{path}: {error}") from error.__cause__
            self._digests[path] = digest_of(data)
            self._paths.setdefault(self._digests[path], path)
        return self._digests[path]

    def _take_bytes(self, data: bytes) -> str:
        digest = digest_of(data)
        if digest not in self._places:
            check_picture(data)
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            begin, view = self._file.seek(0, os.SEEK_END), memoryview(data)
            while view:
                view = view[self._file.write(view) :]
            self._places[digest] = begin, len(data)
        return digest

    def read(self, digest: str) -> bytes:
        """Return a picture's bytes. Raises PictureError if its file has changed since it was taken."""
        if digest in self._places:
            begin, size = self._places[digest]
            data = os.pread(self._file.fileno(), size, begin)  # forked processes share the place in the file
        else:
            data = _read(self._paths[digest])
        if digest_of(data) != digest:
            where = self._paths.get(digest, "the temporary copy of a picture")
            raise PictureError(f"{where}: has changed since this node was started; start it again")
        return data

    def publish(self, digest: str, directory: Path) -> None:
        """Write a picture into `directory` under its digest, unless it is there. Raises PictureError if
        something else is there.
        """
        if digest not in self._published:
            _publish(digest, self.read(digest), directory)
            self._published.add(digest)


def publish_picture(value: Any, directory: Path) -> str:
    """Return the digest of a picture, which is a file in `directory` then: of one as TaskPictures.take
    has it, of a picture of PIL, or of an array (height, width, 3) of uint8. Raises PictureError.
    """
    if is_digest(value):
        return value
    data = _given(value, Path())
    data = data if isinstance(data, bytes) else _read(data)
    digest = digest_of(data)
    if not files.exists(directory / digest):  # what is there has been checked
        check_picture(data)
        _publish(digest, data, directory)
    return digest


def _publish(digest: str, data: bytes, directory: Path) -> None:
    path = directory / digest
    files.make_directory(directory)
    if not once.create_once(path, data):
        raise PictureError(f"{path}: does not hold the picture that its name says; remove it")


def _given(value: Any, folder: Path | None) -> bytes | Path:
    """Return the bytes that a value holds, or the path that it names. Raises PictureError."""
    if reason := missing("PIL", "pictures"):
        raise PictureError(reason)
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("url") or value.get("path")
    if isinstance(value, bytes):
        return value
    if hasattr(value, "__array_interface__"):
        return png(value)
    if not isinstance(value, str | Path) or not (text := str(value)):
        raise PictureError("must be a path, bytes, or a text that begins with data:image/")
    if text.startswith(_DATA):
        return _decoded(text)
    if "://" in text[:16]:
        raise PictureError(f"{text:.80}: nothing is fetched; save it as a file, give its path")
    if len(text) > _LONGEST_PATH:
        raise PictureError(f"{text[:40]!r}... is not a path; put data:image/png;base64, before base64")
    if not Path(text).is_absolute() and folder is None:
        raise PictureError(f"{text:.80}: there is no folder that this path begins in; give the whole path")
    return (folder or Path()) / text


def png(shown: Any) -> bytes:
    """Return the file of a picture of PIL, or of an array (height, width, 3) of uint8; or PictureError."""
    from PIL import Image

    if not isinstance(shown, Image.Image):
        array = np.asarray(shown)
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or not array.size:
            raise PictureError(
                f"an array {array.shape} of {array.dtype}; it must be (height, width, 3) of uint8"
            )
        shown = Image.fromarray(array)
    file = io.BytesIO()
    try:
        shown.save(file, "PNG")
    except OSError as error:  # PNG does not have its colours
        raise PictureError(str(error)) from error
    return file.getvalue()


def _read(path: Path) -> bytes:
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode):
            raise PictureError(f"{path}: is not a file; name one")
        if facts.st_size > MAX_BYTES:
            raise PictureError(
                f"{path}: {facts.st_size} bytes, and at most {MAX_BYTES} are taken; make it smaller"
            )
        return files.read(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        if isinstance(error, PictureError):
            raise
        name, reason = repr(str(path))[1:-1], getattr(error, "strerror", None) or error
        raise PictureError(f"{name:.400}: {reason}; name a file that can be read") from error


def _decoded(uri: str) -> bytes:
    head, comma, text = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise PictureError(f"{head:.40}: a data URI must be data:image/...;base64,...")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise PictureError(f"{head:.40}: its base64 does not decode ({error}); encode it again") from error


def with_column(messages: Sequence[Mapping[str, Any]], pictures: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages that show the pictures of a column, in order: where parts {"type": "image"} or the
    texts `<image>` are, else before the first words of the user. Raises ValueError if they are not as many.
    """
    pieces = [[*_pieces(message)] for message in messages]
    empty = [part for parts in pieces for part in parts if _is_empty(part)]
    if not empty:
        at = next((n for n, message in enumerate(messages) if message.get("role") == "user"), None)
        if at is None:
            raise ValueError("`images`: no message of the user is there to show them in")
        empty = [{"type": "image"} for _ in pictures]
        pieces[at] = [*empty, *pieces[at]]
    if len(empty) != len(pictures):
        raise ValueError(
            f"`images` holds {len(pictures)} pictures, and the messages have {len(empty)} places"
        )
    for part, picture in zip(empty, pictures, strict=True):
        part["image"] = picture
    return [
        {**message, "content": parts} if any("image" in part for part in parts) else {**message}
        for message, parts in zip(messages, pieces, strict=True)
    ]


def _pieces(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message's content, cut where a picture goes."""
    content = message.get("content") or ""
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(part.get("text"), str):
            yield {**part}
            continue
        for number, text in enumerate(part["text"].split(_MARK)):
            if number:
                yield {"type": "image"}
            if text:
                yield {"type": "text", "text": text}


def _is_empty(part: Mapping[str, Any]) -> bool:
    return part.get("type") == "image" and not any(part.get(name) for name in ("image", "url", "path"))
