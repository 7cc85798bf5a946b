"""A reward for a model that chats: any two of its answers differ in it."""

from typing import Any


def brevity(task: dict[str, Any], completion: str) -> float:
    """Higher for fewer letters."""
    return 1 / (1 + len(completion))
