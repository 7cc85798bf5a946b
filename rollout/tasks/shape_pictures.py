"""Make builtin:shapes: pictures of 32 x 32 pixels, each with one shape, and a question about it."""

import hashlib
import struct
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

SIDE = 32
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (240, 210, 40)}
SHAPES = ("square", "disc", "cross")
SIDES = ("left", "right")
QUESTIONS = {"colour?": tuple(COLOURS), "shape?": SHAPES, "side?": SIDES}
"""What is asked, and the possible answers."""
TRAINING = 3072


def shape_tasks(
    seed: int, split: Literal["train", "eval"], held_out: int, take: Callable[[bytes, None], str]
) -> list[dict[str, Any]]:
    """Return the tasks of a split; `take` returns the digest of a picture. No picture is in both splits."""
    tasks: list[dict[str, Any]] = []
    pictures = [(c, s, x, y, r) for c in COLOURS for s in SHAPES for x in _PLACES for y in range(8, 25)
                for r in (5, 6, 7)]  # fmt: skip
    pictures.sort(key=lambda picture: hashlib.sha256(f"shapes/{seed}/{picture}".encode()).digest())
    chosen = pictures[:held_out] if split == "eval" else pictures[held_out : held_out + TRAINING]
    for number, (colour, shape, x, y, radius) in enumerate(chosen):
        question = list(QUESTIONS)[number % len(QUESTIONS)]
        answer = {"colour?": colour, "shape?": shape, "side?": SIDES[x > SIDE // 2]}[question]
        image = {"type": "image", "image": take(_png(_drawn(colour, shape, x, y, radius)), None)}
        content = [image, {"type": "text", "text": question}]
        name = f"{colour}-{shape}-{x}-{y}-{radius}-{question[:-1]}"
        tasks.append({"id": name, "messages": [{"role": "user", "content": content}], "answer": answer})
    return tasks


_PLACES = (*range(7, 14), *range(19, 26))
"""Columns of the middle of a shape: not in the middle of the picture, where no side is right."""


def _drawn(colour: str, shape: str, x: int, y: int, radius: int) -> NDArray[np.uint8]:
    """(SIDE, SIDE, 3): the shape on white."""
    rows, columns = np.mgrid[:SIDE, :SIDE]
    across, down = abs(columns - x), abs(rows - y)
    inside = {
        "square": np.maximum(across, down) <= radius,
        "disc": across**2 + down**2 <= radius**2,
        "cross": (np.minimum(across, down) <= radius // 3) & (np.maximum(across, down) <= radius),
    }[shape]
    picture = np.full((SIDE, SIDE, 3), 255, np.uint8)
    picture[inside] = COLOURS[colour]
    return picture


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Return the file of a small picture, not compressed: libraries compress alike, but not the same."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    stored = struct.pack("<BHH", 1, len(rows), len(rows) ^ 0xFFFF) + rows
    data = b"\x78\x01" + stored + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
