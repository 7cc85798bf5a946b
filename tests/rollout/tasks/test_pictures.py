"""Pictures in tasks: every way to give one is the same task, and each that cannot be used is one line."""

import base64
import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rollout.pictures import MAX_BYTES, digest_of, open_picture, pictures_in, shown_text
from rollout.tasks.pictures import PictureError, TaskPictures
from rollout.tasks.task_set import TaskError, TaskSet, load_tasks


def png(colour: str = "red", size: tuple[int, int] = (8, 8), **options: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, **{"format": "PNG", **options})
    return out.getvalue()


RED, BLUE = png("red"), png("blue")
ASK = {"type": "text", "text": "What colour?"}


def load(directory: Path, *rows: dict[str, Any], **columns: str) -> TaskSet:
    file = directory / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_tasks(str(file), seed=0, split="train", columns=columns)


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_however_a_picture_is_given_the_task_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    ways = [
        {"messages": user({"type": "image", "image": "red.png"}, ASK)},
        {"messages": user({"type": "image", "image": str(tmp_path / "red.png")}, ASK)},
        {"messages": user({"type": "image_url", "image_url": {"url": uri(RED)}}, ASK)},
        {"messages": user({"type": "image"}, ASK), "images": ["red.png"]},
        {"messages": user({"type": "text", "text": "<image>What colour?"}), "images": [uri(RED)]},
        {"prompt": [{"role": "user", "content": "What colour?"}], "images": "red.png"},
    ]
    sets = [load(tmp_path, way) for way in ways]
    assert {tasks.digest for tasks in sets} == {sets[0].digest}
    assert sets[0].tasks[0]["messages"] == user({"type": "image", "image": digest_of(RED)}, ASK)
    for tasks in sets:
        assert tasks.pictures is not None and tasks.pictures.read(digest_of(RED)) == RED
    (tmp_path / "red.png").write_bytes(BLUE)  # it is another task now, though its text is the same
    assert load(tmp_path, ways[0]).digest != sets[0].digest


def test_columns_of_bytes_as_datasets_writes_them(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    messages = [{"role": "user", "content": "<image> and <image>?"}]
    shown = [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b.png"}]
    table = pyarrow.table({"messages": [messages], "photos": [shown], "blob": [b"1"]})
    parquet.write_table(table, tmp_path / "t.parquet")
    tasks = load_tasks(str(tmp_path / "t.parquet"), seed=0, split="train", columns={"images": "photos"})
    (task,) = tasks.tasks
    assert pictures_in(task["messages"]) == [digest_of(RED), digest_of(BLUE)]
    assert set(task) == {"id", "messages"}
    assert shown_text(task["messages"][0]["content"]) == (
        f"[image {digest_of(RED)[:8]}] and [image {digest_of(BLUE)[:8]}]?"
    )


def test_tasks_without_pictures_have_none(tmp_path: Path) -> None:
    tasks = load(tmp_path, {"prompt": "1+1="}, {"messages": user(ASK)}, {"prompt": "1", "images": None})
    assert tasks.pictures is None and tasks.tasks[1]["messages"][0]["content"] == "What colour?"


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return png(format="JPEG", exif=exif)


def moving() -> bytes:
    return png(format="GIF", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")])


def bomb() -> bytes:
    """A few bytes that say they are 60,000 x 60,000 pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return RED[:12] + header + struct.pack(">I", zlib.crc32(header)) + RED[33:]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: RED[:-20], "does not decode"),
        (lambda: RED[:60], "does not decode"),
        (lambda: b"", "is no PNG"),
        (lambda: b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is no PNG, JPEG, WEBP, GIF"),
        (lambda: png(format="BMP"), "is no PNG"),
        (bomb, "60000x60000 pixels, and at most|far more pixels"),
        (lambda: png(size=(1, 1)), "1x1 pixels: a side needs"),
        (lambda: png(size=(4, 900)), "4x900 pixels"),
        (moving, "animated"),
        (turned, "EXIF"),
        (lambda: RED + bytes(MAX_BYTES), "bytes, and at most"),
        (lambda: _cmyk(), "colours are CMYK"),
    ],
)
def test_bad_picture_is_one_line(tmp_path: Path, make: Callable[[], bytes], reason: str) -> None:
    (tmp_path / "bad.png").write_bytes(make())
    with pytest.raises(TaskError, match=rf"tasks.jsonl:2: .*bad\.png: .*({reason})") as error:
        load(tmp_path, {"prompt": "1"}, {"messages": user({"type": "image", "image": "bad.png"}, ASK)})
    assert "\n" not in str(error.value)


def _cmyk() -> bytes:
    out = io.BytesIO()
    Image.new("CMYK", (8, 8)).save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": user({"type": "image", "image": "none.png"}, ASK)}, "none.png: No such file"),
        ({"messages": user({"type": "image", "image": "pipe"}, ASK)}, "pipe: is not a file"),
        ({"messages": user({"type": "image", "image": "https://a.b/c.png"}, ASK)}, "nothing is fetched"),
        ({"messages": user({"type": "image", "image": "data:image/png,abc"}, ASK)}, "data URI must be"),
        ({"messages": user({"type": "image", "image": 7}, ASK)}, "must be a path, bytes"),
        ({"messages": user({"type": "image"}, ASK)}, "a picture that is not there"),
        (
            {"messages": user({"type": "image"}, ASK), "images": ["red.png"] * 2},
            "2 pictures, and .* 1 places",
        ),
        ({"prompt": "What?", "images": ["red.png"]}, "`images` need `messages`"),
        (
            {"messages": [{"role": "system", "content": [{"type": "image", "image": "red.png"}]}]},
            "a picture in a message of the system",
        ),
    ],
)
def test_what_is_no_picture_is_one_line(tmp_path: Path, row: dict[str, Any], reason: str) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match=f"tasks.jsonl:1: .*{reason}"):
        load(tmp_path, row)


def test_picture_is_published_once_under_its_digest_and_a_changed_one_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(RED)
    pictures, images = TaskPictures(), tmp_path / "run" / "images"
    red, blue = pictures.take("red.png", tmp_path), pictures.take(BLUE, None)
    pictures.publish(blue, images)
    pictures.publish(blue, images)
    assert {path.name: path.read_bytes() for path in images.iterdir()} == {blue: BLUE}
    (tmp_path / "red.png").write_bytes(BLUE)
    with pytest.raises(PictureError, match=r"red\.png: has changed since this node was started"):
        pictures.publish(red, images)
    (images / blue).write_bytes(RED)
    with pytest.raises(PictureError, match="does not hold the picture that its name says"):
        other = TaskPictures()
        other.publish(other.take(BLUE, None), images)


def test_transparent_is_white() -> None:
    out = io.BytesIO()
    Image.new("RGBA", (8, 8), (255, 0, 0, 0)).save(out, "PNG")
    assert open_picture(out.getvalue()).getpixel((0, 0)) == (255, 255, 255)


def test_shapes_are_the_same_bytes_everywhere_and_no_picture_is_in_both_splits() -> None:
    training, evaluation = (load_tasks("builtin:shapes", seed=0, split=split) for split in ("train", "eval"))
    assert training.digest == "cc23f84f1085b94d5f494596527621ff495f464833c90de9b851ba92598aed97"
    shown = [{digest for task in tasks.tasks for digest in pictures_in(task["messages"])}
             for tasks in (training, evaluation)]  # fmt: skip
    assert len(shown[0]) == 3072 and len(shown[1]) == 512 and not shown[0] & shown[1]
