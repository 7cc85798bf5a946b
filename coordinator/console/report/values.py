"""Take numbers from files that may hold anything. Odd values are left out, and never fail the page. Pure."""

from collections.abc import Mapping
from typing import Any

from coordinator.console.views import status_text
from coordinator.console.views.heartbeats import is_number
from coordinator.protocol.phase import spent_s


def seconds_of(line: Mapping[str, Any], name: str) -> float:
    """Return a field that holds seconds; 0.0 if it holds anything else."""
    value = line.get(name)
    return max(0.0, float(value)) if value is not None and is_number(value) else 0.0


def phases_s(line: Mapping[str, Any]) -> float:
    """Return the seconds of an iteration's phases on the master, without those of its interruptions."""
    return spent_s(numbers(line, "phase_seconds"), numbers(line, "idle_seconds"))


def duration(seconds: float) -> str:
    """`4.1 s`: many phases take less than a second."""
    return status_text.duration(seconds, digits=1)


def numbers(line: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the numbers in a field that maps names to numbers; {} if it is missing."""
    field: Any = line.get(name)
    if not isinstance(field, dict):
        return {}
    return {str(key): float(value) for key, value in field.items() if is_number(value)}  # pyright: ignore
