"""About 300 pictures that are damaged, odd or not there: each is refused in one line, or opens."""

import base64
import contextlib
import io
import itertools
import json
import os
import re
import socket
import struct
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout.pictures import MAX_BYTES, open_picture, pictures_in
from rollout.tasks.task_set import TaskError, load_tasks


def saved(mode: str = "RGB", size: tuple[int, int] = (24, 16), kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture = Image.linear_gradient("L").resize(size).convert("RGB")
    picture = Image.new(mode, size) if mode in ("I;16", "I", "CMYK", "F", "LAB") else picture.convert(mode)
    picture.save(out, kind, **options)
    return out.getvalue()


def turned(kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(kind=kind, exif=exif)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def header(width: int, height: int, depth: int = 8, colours: int = 2) -> bytes:
    return PNG[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colours, 0, 0, 0))


PNG = saved()
FRAMES: dict[str, Any] = {"save_all": True, "append_images": [Image.new("RGB", (24, 16), "blue")]}
SOUND = {
    "PNG": PNG,
    "grey PNG": saved("L"),
    "one bit PNG": saved("1"),
    "palette PNG": saved("P"),
    "palette PNG with transparency": saved("P", transparency=bytes([0, 128] * 128)),
    "RGB PNG with transparency": saved(transparency=(0, 0, 0)),
    "RGBA PNG": saved("RGBA"),
    "grey and alpha PNG": saved("LA"),
    "JPEG": saved(kind="JPEG"),
    "grey JPEG": saved("L", kind="JPEG"),
    "progressive JPEG": saved(kind="JPEG", progressive=True),
    "WEBP": saved(kind="WEBP"),
    "lossless WEBP": saved("RGBA", kind="WEBP", lossless=True),
    "GIF": saved("P", kind="GIF"),
    "4x400 PNG": saved(size=(4, 400)),
}
CUT = (0, 1, 4, 8, 12, 20, 30)
WRONG: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "is no PNG"),
    "text": (b"dog.png", "is no PNG"),
    "zeros": (bytes(1000), "is no PNG"),
    "pointer of LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is no PNG"),
    "page": (b"<!DOCTYPE html><html>404</html>", "is no PNG"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg' width='8' height='8'/>", "is no PNG"),
    "PDF": (b"%PDF-1.7\n", "is no PNG"),
    "archive": (b"PK\x03\x04" + bytes(60), "is no PNG"),
    **{kind: (saved(kind=kind), "is no PNG") for kind in ("BMP", "TIFF", "PPM", "ICO", "TGA")},
    "16 bit grey": (saved("I;16"), "its colours are I;16; save it as RGB"),
    "CMYK JPEG": (saved("CMYK", kind="JPEG"), "its colours are CMYK; save it as RGB"),
    **{f"animated {kind}": (saved(kind=kind, **FRAMES), "animated") for kind in ("GIF", "WEBP", "PNG")},
    "several in a JPEG": (saved(kind="MPO", **FRAMES), "holds several pictures"),
    **{f"turned {kind}": (turned(kind), "EXIF says that it is") for kind in ("JPEG", "PNG", "WEBP")},
    **{
        f"{w}x{h}": (saved(size=(w, h)), f"{w}x{h} pixels: a side needs at least 4")
        for w, h in ((1, 1), (3, 3), (4, 401), (401, 4), (8, 3))
    },
    **{
        f"says it is {w}x{h}": (header(w, h) + PNG[33:], "pixels")
        for w, h in ((60_000, 60_000), (2**31 - 1, 2**31 - 1), (5001, 5000), (25_000_001, 1))
    },
    "bomb in a text chunk": (
        PNG[:33] + chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**21))) + PNG[33:],
        "does not decode",
    ),
    "other colours": (header(24, 16, 8, 3) + PNG[33:], "does not decode"),
    "too large": (PNG + bytes(MAX_BYTES), f"bytes, and at most {MAX_BYTES} are taken; make it smaller"),
}


def damaged() -> Iterator[tuple[str, bytes]]:
    for name, data in SOUND.items():
        for end in sorted({*CUT, *(len(data) * k // 7 for k in range(1, 7)), len(data) - 13}):
            yield f"{name} cut at {end} of {len(data)}", data[:end]


def flipped() -> Iterator[tuple[str, bytes]]:
    for name, data in SOUND.items():
        for at in (1, 9, 17, 25, len(data) // 2, len(data) - 6):
            changed = bytearray(data)
            changed[at] ^= 0xFF
            yield f"{name} with another byte {at}", bytes(changed)
        yield f"{name} and something behind", data + b"something" * 9


def shown(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Which?"}], "images": [value]}


class Folder:
    """A task file whose second row shows a picture."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def digest(self, value: Any) -> str:
        rows = [{"prompt": "1"}, shown(value)]
        (self.directory / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        tasks = load_tasks(str(self.directory / "t.jsonl"), seed=0, split="train")
        return pictures_in(tasks.tasks[1]["messages"])[0]

    def refusal(self, name: str, value: Any) -> str:
        before = sorted(os.listdir(self.directory))
        with pytest.raises(TaskError) as refusal:
            self.digest(value)
            pytest.fail(f"{name} was taken")
        text = str(refusal.value)
        assert text.startswith(f"{self.directory}/t.jsonl:2: `images`: "), (name, text)
        assert text.isprintable() and len(text) < 900 and re.search(r"; \w+ |must be", text), (name, text)
        assert sorted(os.listdir(self.directory)) == before, name
        return text


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    (tmp_path / "t.jsonl").touch()
    (tmp_path / "bad").touch()
    return Folder(tmp_path)


def test_files_that_are_no_sound_picture(folder: Folder) -> None:
    file = folder.directory / "bad"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, (data, reason) in WRONG.items():
            file.write_bytes(data)
            assert reason in (text := folder.refusal(name, "bad")), (name, text)
        for name, data in damaged():
            file.write_bytes(data)
            assert f"{file}: " in folder.refusal(name, "bad")


def test_what_is_changed_within_is_refused_in_one_line_or_opens(folder: Folder) -> None:
    taken = 0
    for name, data in itertools.chain(SOUND.items(), flipped()):
        (folder.directory / "bad").write_bytes(data)
        try:
            folder.digest("bad")
        except TaskError:
            assert name not in SOUND
            folder.refusal(name, "bad")
        else:
            assert open_picture(data).mode == "RGB", name
            taken += 1
    assert taken > 2 * len(SOUND)  # so nothing is refused for what is behind it


def test_what_is_no_file_or_no_text_of_one(folder: Folder) -> None:
    there = folder.directory
    os.mkfifo(there / "pipe")
    (there / "folder").mkdir()
    (there / "dangling").symlink_to("nowhere")
    (there / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as listening, contextlib.chdir(there):  # the path of a socket is short
        listening.bind("socket")
    encoded = base64.b64encode(PNG).decode()
    values: dict[str, Any] = {
        **{name: name for name in ("pipe", "folder", "dangling", "loop", "socket", "none.png", "t.jsonl")},
        **{name: name for name in ("bad/a.png", "..", "/dev/null", "/dev/zero", "a\0b")},
        "long name": "a" * 300,
        "long path": "a/" * 5000,
        "base64 alone": encoded * 200,
        "base64 of the few": {"bytes": encoded, "path": None},
        "text in another form": f"data:image/png,{encoded}",
        "no comma": "data:image/png;base64",
        "nothing in it": "data:image/png;base64,",
        "cut": f"data:image/png;base64,{encoded[:-3]}",
        "wrong characters": f"data:image/png;base64,{encoded[:40]}!{encoded[40:]}",
        "no ASCII": f"data:image/png;base64,{encoded}\N{LATIN SMALL LETTER E WITH ACUTE}",
        "lines": f"data:image/png;base64,{encoded[:40]}\n{encoded[40:]}",
        "another type": f"data:text/plain;base64,{base64.b64encode(b'dog').decode()}",
        "half a picture": f"data:image/png;base64,{base64.b64encode(PNG[:60]).decode()}",
        **{f"{kind}": f"{kind}://a.b/c.png" for kind in ("http", "https", "s3", "gs", "file", "hf")},
        "address within": {"url": "https://a.b/c.png"},
        **{f"{value!r}": value for value in (7, 0, True, False, 1.5, [], {}, [[137, 80]], {"bytes": 3})},
        "empty": "",
        "nulls": {"bytes": None, "path": None},
        "null": None,
    }
    for name, value in values.items():
        folder.refusal(name, value)


def test_links_are_followed(folder: Folder) -> None:
    """As in the cache of the Hub, where each file of a data set is one."""
    outside = folder.directory.with_name("elsewhere.png")
    outside.write_bytes(PNG)
    (folder.directory / "link.png").symlink_to(outside)
    assert folder.digest("link.png") == folder.digest("../elsewhere.png") == folder.digest(str(outside))
