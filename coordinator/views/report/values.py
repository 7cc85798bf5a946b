"""Numbers out of files that anything may stand in: one odd value is left out, and fails no page. Pure."""

from collections.abc import Mapping
from typing import Any

HUGE, TINY = 1e100, 1e-100
"""What is larger measures nothing and cannot be drawn; what is smaller is drawn as 0."""


def is_number(value: Any) -> bool:
    """Whether it can be drawn: JSON as Python writes it may hold NaN and infinity."""
    return isinstance(value, int | float) and abs(value) <= HUGE


def seconds_of(line: Mapping[str, Any], name: str) -> float:
    """A field that holds seconds; 0.0 for anything else."""
    value = line.get(name)
    return max(0.0, float(value)) if value is not None and is_number(value) else 0.0


def numbers(line: Mapping[str, Any], name: str) -> dict[str, float]:
    """A field that maps names to numbers, those that are some; {} if it is not there."""
    found: Any = line.get(name)
    if not isinstance(found, dict):
        return {}
    return {str(key): float(value) for key, value in found.items() if is_number(value)}  # pyright: ignore
