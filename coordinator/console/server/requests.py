"""Read what a request says, and answer one that is refused, in one line."""

import json
from typing import Any

from aiohttp import web

from coordinator.console.server import submission
from coordinator.settings.tree import SettingsError

SMALL_BODY = 1 << 16
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
"""Headers of every answer."""


def number_of(request: web.Request, key: str, otherwise: int) -> int:
    text = request.query.get(key, str(otherwise))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise SettingsError(f"{key}={text[:40]}: give a number from 0")
    return int(text)


async def body_of(request: web.Request, most: int) -> bytes:
    """Return the body of a JSON request; 413 or 415 if it is too large or something else."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="give Content-Type: application/json")
    body, size = bytearray(), request.content_length or 0
    while size <= most and (piece := await request.content.readany()):
        body += piece
        size = max(size, len(body))
    if size > most:
        raise web.HTTPRequestEntityTooLarge(most, size, text=f"the body has more than {most} bytes")
    return bytes(body)


def refusal(status: int, text: str) -> web.Response:
    line = " ".join(text.split())
    return web.Response(
        text=json.dumps({"error": line}), status=status, content_type="application/json", headers=HEADERS
    )


async def object_of(request: web.Request, *keys: str) -> dict[str, Any]:
    """Return the JSON object that is the body of a small request, with no other keys than these."""
    return submission.parse_object(await body_of(request, SMALL_BODY), {*keys})


async def number_after(request: web.Request, advice: str) -> int:
    """Return `after`, which makes that asking twice is asking once; SettingsError says what it should be."""
    after = (await object_of(request, "after")).get("after")
    if not isinstance(after, int) or isinstance(after, bool):
        raise SettingsError(f"after: {advice}")
    return after
