"""Check and open pictures. A picture is a file named by its sha256; all else is a function of its bytes."""

import base64
import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # nothing loads Pillow unless there is a picture
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
MAX_BYTES = 20 * 2**20
MAX_PIXELS = 25_000_000
MIN_SIDE = 4
"""Fewest pixels of a side: of a smaller picture some processors take the side for the colours."""
LONGEST_SIDE = 100
"""How many times longer than the other one a side may be."""
_TURNED = 0x0112
"""The EXIF tag that says how a camera was held. Some programs turn the picture by it and others do not."""
_DIGEST = re.compile("[0-9a-f]{64}")


class PictureError(ValueError):
    """A picture cannot be used; the message says why, without its place."""


def digest_of(data: bytes) -> str:
    """Return the name of a picture."""
    return hashlib.sha256(data).hexdigest()


def check_picture(data: bytes) -> None:
    """Raise PictureError unless all of the picture decodes, within the limits, and in one way only."""
    if len(data) > MAX_BYTES:
        raise PictureError(f"{len(data)} bytes, and at most {MAX_BYTES} are taken; make it smaller")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damage that is refused, or matters to nobody
            with _opened(data) as picture:
                _check_kind(picture)
                picture.load()
            with _opened(data) as picture:
                picture.verify()  # checksums, which loading does not need
    except PictureError:
        raise
    except Exception as error:  # of a decoder of damaged bytes: OSError, SyntaxError, struct.error, ...
        raise PictureError(f"does not decode: {_one_line(error)}; save it again") from error


def open_picture(data: bytes) -> "Image":
    """Return a checked picture in RGB; what is transparent is white."""
    from PIL import Image

    with _opened(data) as picture:
        if picture.mode in ("LA", "PA", "RGBA") or "transparency" in picture.info:
            shown = picture.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
        return picture.convert("RGB")


def image_url(data: bytes) -> dict[str, Any]:
    """Return the part of a message that shows a picture, as the OpenAI API has it."""
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"  # which format: its bytes say
    return {"type": "image_url", "image_url": {"url": url}}


def size_of(data: bytes) -> tuple[int, int]:
    """Return width and height of a checked picture."""
    with _opened(data) as picture:
        return picture.size


def side_by_side(pictures: Sequence[bytes], side: int) -> "Image":
    """Return checked pictures in one, each `side` pixels wide and high at most."""
    from PIL import Image

    shown = [open_picture(data) for data in pictures]
    for picture in shown:
        picture.thumbnail((side, side))
    image = Image.new("RGB", (sum(p.width for p in shown), max(p.height for p in shown)), "white")
    for number, picture in enumerate(shown):
        image.paste(picture, (sum(p.width for p in shown[:number]), 0))
    return image


def thumbnail(data: bytes, side: int) -> str:
    """Return a checked picture, `side` pixels wide and high at most, as a `data:` URI."""
    picture, small = open_picture(data), io.BytesIO()
    picture.thumbnail((side, side))
    picture.save(small, "PNG")
    return f"data:image/png;base64,{base64.b64encode(small.getvalue()).decode()}"


def _opened(data: bytes) -> "Image":
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():  # of a size that the limit refuses
        warnings.simplefilter("ignore")
        try:
            return Image.open(io.BytesIO(data), formats=FORMATS)
        except UnidentifiedImageError as error:
            raise PictureError(f"is no {', '.join(FORMATS)}; save it as one") from error
        except Image.DecompressionBombError as error:
            raise PictureError(f"has far more pixels than {MAX_PIXELS}; make it smaller") from error


def _check_kind(picture: "Image") -> None:
    """Raise PictureError by what its header says, before anything is decoded."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise PictureError(f"{width}x{height} pixels, and at most {MAX_PIXELS} are taken; make it smaller")
    if min(width, height) < MIN_SIDE or max(width, height) > LONGEST_SIDE * min(width, height):
        raise PictureError(
            f"{width}x{height} pixels: a side needs at least {MIN_SIDE}, and at most {LONGEST_SIDE} times "
            "the other side; cut it or fill it up"
        )
    if getattr(picture, "n_frames", 1) > 1:
        raise PictureError("it is animated, or holds several pictures; give one of them")
    if picture.mode not in MODES:
        raise PictureError(f"its colours are {picture.mode}; save it as RGB")
    if picture.getexif().get(_TURNED, 1) != 1:
        raise PictureError("its EXIF says that it is to be turned; save it upright, without that")


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.200}"


def pictures_in(messages: Any) -> list[str]:
    """Return the digests of the pictures that messages of a task show, in order."""
    if not isinstance(messages, Sequence):
        return []
    return [part["image"] for message in messages for part in _parts(message) if is_digest(part.get("image"))]


def _parts(message: Any) -> Iterator[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, list):
        yield from (part for part in content if isinstance(part, Mapping))


def is_digest(value: Any) -> bool:
    """Return whether a value is the name of a picture."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def shown_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the content of a message for people: of a picture the beginning of its name."""
    if isinstance(content, str):
        return content
    return "".join(
        f"[image {part['image'][:8]}]" if part["type"] == "image" else part["text"] for part in content
    )
