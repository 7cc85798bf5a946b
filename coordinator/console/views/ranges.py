"""Numbers as people write them: those that follow each other as a range."""

from collections.abc import Iterable


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
