"""Numbers as a person types them: `0-3,8`."""

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
            raise ValueError(f"'{item}' is no range of {noun}; e.g. 0-5, or 6,7")
        end = int(last) if dash else int(first)
        if end > MOST:
            raise ValueError(f"there are no {end} {noun}; the first one is number 0")
        if end < int(first):
            raise ValueError(f"'{item}' ends before it begins; e.g. {end}-{first}")
        numbers += range(int(first), end + 1)
    return numbers
