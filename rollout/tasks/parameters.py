"""Read what names generated tasks: NAME,PARAMETER=VALUE,..."""

import hashlib
import json
import re
from typing import Any

SIZE = "size"
"""A parameter of all of them: how many tasks there are, for training and evaluation together."""

HELD_OUT = 10
"""Where there are no splits, one task in 10 belongs to evaluation, by its hash: whatever else is asked for,
it is never trained on.
"""


def is_held_out(text: str) -> bool:
    """Return whether the task that `text` tells from the others belongs to evaluation."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % HELD_OUT == 0


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters; a VALUE is JSON or plain text. ValueError for a wrong SIZE."""
    name, *pairs = re.split(r",(?=[A-Za-z_][\w.-]*=)", text)
    parameters: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            parameters[key] = json.loads(value)
        except ValueError:
            parameters[key] = value
    size = parameters.get(SIZE, 1)
    if type(size) is not int or size < 1:
        raise ValueError(f"{SIZE}={size}: give a number above 0")
    return name, parameters
