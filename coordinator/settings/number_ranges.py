"""Numbers as a person types and reads them: `0-3,8`."""

from collections.abc import Iterable

MOST = 1_000_000
"""No number is higher: a slip of the pen would fill the memory."""


def parse_ranges(text: str, noun: str) -> list[int]:
    """Return the numbers of `0-3,8`, ranges inclusive, in this order; ValueError says what is wrong.

    `noun`: what they number, for messages: devices.
    """
    numbers: list[int] = []
    for item in text.split(","):
        first, dash, last = (part.strip() for part in item.partition("-"))
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise ValueError(f"'{item}' is not a range of {noun}; e.g. 0-5, or 6,7")
        end = int(last) if dash else int(first)
        if end > MOST:
            raise ValueError(f"there are no {end} {noun}; the first one is number 0")
        if end < int(first):
            raise ValueError(f"'{item}' ends before it begins; e.g. {end}-{first}")
        numbers += range(int(first), end + 1)
    return numbers


def ranges(numbers: Iterable[int], between: str = "-") -> list[str]:
    """Return ascending numbers as `1-4`, `7`; `between`: what stands between the ends of a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}{between}{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]


def listed(numbers: Iterable[int]) -> str:
    """Return ascending numbers in words: `1 to 4, 7`; `none`."""
    return ", ".join(ranges(numbers, " to ")) or "none"


def iterations_text(numbers: Iterable[int]) -> str:
    """Name iterations: `iterations 1 to 4, 7`, `iteration 5`."""
    text = listed(numbers)
    return f"iteration{'' if text.isdecimal() else 's'} {text}"
