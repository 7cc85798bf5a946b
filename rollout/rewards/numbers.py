# ruff: noqa: RUF001 - minus signs and spaces are what is read here
"""Read numbers as people and models write them: in prose, in typography, in LaTeX. Pure."""

import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from fractions import Fraction

_LONGEST = 400
"""Digits of a number; a longer one is none."""
_MINUS = (
    "-\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}\N{FIGURE DASH}\N{EN DASH}"
    "\N{SMALL HYPHEN-MINUS}\N{FULLWIDTH HYPHEN-MINUS}"
)
_SPACES = " \N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}\N{THIN SPACE}\N{FIGURE SPACE}\N{SIX-PER-EM SPACE}"
_VULGAR = "¼½¾⅐-⅞"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "lakh": 10**5, "crore": 10**7, "k": 10**3, "mn": 10**6, "m": 10**6, "bn": 10**9, "b": 10**9,
    "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8
}  # fmt: skip
_ASCII = {"．": ".", "，": ",", "٫": ".", "٬": ",", "／": "/"}
_RAISED = re.compile("(?<=[0-9)])[⁺⁻]?[⁰¹²³⁴-⁹]+")
_COMMA = r",|\{,\}|,\\!|\\,|\\[ ;:]|~"
_OTHER = rf"[{_SPACES}'’_]"
_HEAD = "[1-9][0-9]{0,2}"
_PLAIN = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_IN_FRACTION = rf"(?:{_HEAD}(?:(?:,|\{{,\}})[0-9]{{3}})+(?![0-9])|{_PLAIN})"
_GROUPED = (
    rf"(?:{_HEAD}(?P<comma>{_COMMA})[0-9]{{3}}(?:(?P=comma)[0-9]{{3}})*(?:\.[0-9]+)?(?![0-9]|(?P=comma)[0-9])"
    # India's: groups of two, and three digits at the end.
    rf"|[1-9][0-9]?(?P<lakh>{_COMMA})(?:[0-9]{{2}}(?P=lakh))+[0-9]{{3}}(?:\.[0-9]+)?(?![0-9]|(?P=lakh)[0-9])"
    rf"|{_HEAD}(?P<other>{_OTHER})[0-9]{{3}}(?:(?P=other)[0-9]{{3}})*(?:[.,][0-9]+)?(?![0-9])"
    rf"|{_HEAD}(?:\.[0-9]{{3}}){{2,}}(?:,[0-9]+)?(?![.,]?[0-9])"
    rf"|{_HEAD}(?:\.[0-9]{{3}})+,[0-9]{{1,2}}(?![.,]?[0-9]))"
)
_BRACES = r"\{(?:[^{}]|\{[^{}]{0,80}\}){0,200}\}"
_EXPRESSION = re.compile(
    "|".join(
        [
            # What holds digits and is no number: roots, dates, times, ratios, versions, exponents, indices.
            r"(?P<none>0[xX][0-9a-fA-F]+|[0-9.]*\\(?:overline|dot)\{[0-9]+\}|\\sqrt(?:\[[^\]]*\])?(?:\{[^{}]*\}|[0-9]+)|√\s*[0-9.]+"
            r"|[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}(?![0-9])|[0-9]+(?:[/⁄][0-9]+){2,}"
            rf"|{_PLAIN}(?::{_PLAIN})+)",
            r"(?P<mark>[\^_]\s*\{?\s*[-+−]?\s*[0-9.]+\s*\}?|\b(?:mm|cm|dm|km|m|ft|in|yd|mi)[23]\b)",
            rf"(?P<fraction>(?:(?P<whole>[0-9]+)\s*)?\\[dtc]?frac\s*"
            rf"(?:\{{\s*(?P<above>[-−]?\s?{_IN_FRACTION})\s*\}}\s*\{{\s*(?P<below>[-−]?{_IN_FRACTION})\s*\}}"
            r"|(?P<above1>[0-9])\s*(?P<below1>[0-9])))",
            rf"(?P<terms>\\[dtc]?frac\s*{_BRACES}\s*{_BRACES})",
            rf"(?P<mixed>(?:(?P<units>[0-9]{{1,9}})[{_SPACES}]?)?(?P<vulgar>[{_VULGAR}]))",
            r"(?P<mixed2>(?P<units2>[0-9]+)[ -](?P<top>[0-9]+)[/⁄](?P<bottom>[0-9]+)(?![/⁄]?[0-9]))",
            rf"(?P<grouped>{_GROUPED})",
            r"(?P<version>[0-9]+(?:\.[0-9]+){2,})",
            rf"(?P<list>{_PLAIN}(?:,{_PLAIN})+)",
            rf"(?P<plain>{_PLAIN}(?:[eE][-+−]?[0-9]{{1,3}}(?![0-9]))?)",
        ]
    )
)
_OVER = re.compile(rf"\s?[/⁄]\s?(?P<by>{_PLAIN})")
_SCALE = re.compile(
    rf"[-{_SPACES}]?(hundred|thousand|million|billion|trillion|lakh|crore|mn|bn)s?\b|([kK])\b|\s?([万萬亿億])"
)
_SCALE_OF_MONEY = re.compile("([kKmMbB])n?\\b")
"""Behind an amount with a currency's sign; elsewhere m is metres, M molar and B bytes."""
_CURRENCY = re.compile("[$€£¥₹]\\s?\\Z")
_FACTOR = re.compile(
    r"\s*(?:\\pi(?![a-z])|π|\\?sqrt|√)|[eixyz](?![a-zA-Z0-9])|[)\]}]+\s*(?:\^|\*\*)\s*\{?\s*[-0-9]"
)
"""What makes a term of the number before it, or a power of what is in brackets."""
_TERM = re.compile(r"(?:(?:\\pi|π|\b[xyz])\s*/|±|\\pm|(?:\\|\b)(?:sqrt|ln|log|sin|cos|tan|exp)\s?[({]*)\s*$")
"""What makes another number of the one behind it, or two."""
_NAME = re.compile(r"(?<![A-Za-z\\])(?!(?:[A-Z]{3}|Rs)[0-9]|(?<=[0-9.])[eE])[A-Za-z]+-?[0-9]")
"""A name with digits in it (H2O, COVID-19), unless it is a currency's with an amount, or an exponent."""
_TITLE = re.compile(r"\s*(?:[A-Z][a-z]+ )+[0-9]+\s*")
_BEFORE_AMOUNTS = re.compile(
    r"\s*(?:Rs|About|Around|Roughly|Exactly|Nearly|Almost|Only|Answer|Total|[A-Z][a-z]+ly) "
)
"""What a text that is no title, but a word and an amount, begins with."""
_SIGN_WORD = re.compile(
    r"(?:\bnegative|(?:\A|[=:≈({*$]|\b(?:is|be|are|was|equals|answer|of|to|by|at))\s*\bminus)\s+[$€£¥₹]?\Z",
    re.IGNORECASE,
)
_BEFORE_SIGN = re.compile(r"(?:[=≈{(]|(?<!\S)\$)\s*\Z")
"""What stands before a sign that a space parts from its number, as sympy writes LaTeX."""
_LATEX_DECIMAL = re.compile(r"(?<=[0-9])\{,\}(?=[0-9]{1,2}(?![0-9]|\{,\})|[0-9]{4})")
_DECIMAL_COMMA = re.compile(
    r"(?<![0-9.,])(?![1-9][0-9]{0,2},[0-9]{3}(?![0-9]))([0-9]{1,30}),([0-9]{1,30})(?![0-9]|[.,][0-9])"
)
"""What may be a decimal comma: before three digits it groups."""
_POWER = re.compile(
    r"\s*(?:\\times|\\cdot|[×*·x])\s*10\s*(?:\^|\*\*)\s*\{?\s*([-−]?\s?[0-9]{1,3})\s*\}?"
    r"|\s*(?P<own>(?:\^|\*\*)\s*\{?\s*([-−]?\s?[0-9]{1,2})\s*\}?)"
)


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, with its sign, its grouping and its fraction; None if there is none,
    or if what comes last holds digits and is none (a time, a date, a root). Of a list it is the last.
    """
    return next(iter(deque(_expressions(text), maxlen=1)), [None])[-1]


def with_decimal_commas(text: str) -> str:
    """Return a text in which `2,5` is 2.5, as most of Europe writes it. Elsewhere it is a list of two."""
    return _DECIMAL_COMMA.sub(r"\1.\2", text)


def single_number(text: str) -> Fraction | None:
    """Return the number that a text gives: the only one in it, or behind its last `####`, or in its last
    `\\boxed{...}`. None if it gives several, or something else that holds digits (H2O, Apollo 11).
    """
    text = text.rpartition("####")[2].rpartition("\\boxed{")[2]
    values = [value for values in _expressions(text) for value in values]
    is_title = _TITLE.fullmatch(text) and not _BEFORE_AMOUNTS.match(text)
    return values[0] if len(values) == 1 and not _NAME.search(text) and not is_title else None


def _expressions(text: str) -> Iterator[list[Fraction | None]]:
    """Yield the value of each expression of a text, in order: a number, the numbers of a list, or None."""
    text = _LATEX_DECIMAL.sub(".", _with_ascii_digits(text))
    at = 0
    while match := _EXPRESSION.search(text, at):
        at = match.end()
        if match["mark"]:
            continue
        sign = _sign(text, match.start())
        if match["list"]:
            parts = match["list"].split(",")
            has_zeros = any(re.match("0[0-9]", part) for part in parts)
            yield [None] if has_zeros else [_read(part) for part in parts]
            continue
        value = _value(match)
        if value is not None and (match["plain"] or match["grouped"]):
            if fraction := _OVER.match(text, at):
                at = fraction.end()
                by = _read(fraction["by"])
                value = value / by if by else None
            elif power := _POWER.match(text, at):
                at = power.end()
                base = value if power["own"] else Fraction(10)
                exponent = int((power[1] or power[3]).replace("−", "-").replace(" ", ""))
                is_huge = abs(exponent) > 99 or len(str(base)) > 20 or (not base and exponent < 0)
                value = None if is_huge else base**exponent * (1 if power["own"] else value)
        is_money = _CURRENCY.search(text[max(0, match.start() - 2) : match.start()])
        scale = _SCALE.match(text, at) or (_SCALE_OF_MONEY.match(text, at) if is_money else None)
        if value is not None and scale:
            at = scale.end()
            value *= _SCALES[next(filter(None, scale.groups())).lower()]
        is_term = _FACTOR.match(text, at) or _TERM.search(text[max(0, match.start() - 12) : match.start()])
        yield [None if value is None or is_term else sign * value]


def _with_ascii_digits(text: str) -> str:
    """Return a text in which the digits of all scripts are ASCII's, and raised ones behind them powers."""
    if text.isascii():
        return text
    text = "".join(str(unicodedata.decimal(char, _ASCII.get(char, char))) for char in text)
    return _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)


def _value(match: re.Match[str]) -> Fraction | None:
    """Return the number that an expression is."""
    if match["fraction"]:
        above, below = match["above"] or match["above1"], match["below"] or match["below1"]
        return _mixed(match["whole"], above, below)
    if match["mixed"]:
        part = Fraction(unicodedata.numeric(match["vulgar"])).limit_denominator(10)
        return Fraction(match["units"] or 0) + part
    if match["mixed2"]:
        return _mixed(match["units2"], match["top"], match["bottom"])
    if match["grouped"]:
        comma = match["comma"] or match["lakh"]
        digits = match["grouped"].replace(comma, "") if comma else match["grouped"]
        if match["other"]:
            digits = digits.replace(match["other"], "").replace(",", ".")
        elif not comma:
            digits = digits.replace(".", "").replace(",", ".")
        return _read(digits)
    return _read(match["plain"]) if match["plain"] else None


def _mixed(integer: str | None, above: str, below: str) -> Fraction | None:
    first, other, lower = (_read(re.sub(r"[{,}\s]", "", digits)) for digits in (integer or "0", above, below))
    return first + other / lower if first is not None and other is not None and lower else None


def _read(digits: str) -> Fraction | None:
    return None if len(digits) > _LONGEST else Fraction(digits.replace("−", "-"))


def _sign(text: str, begin: int) -> int:
    """Return the sign before a number: a minus that follows a digit, a letter or a bracket is an operator."""
    near = text[max(0, begin - 24) : begin]
    if _SIGN_WORD.search(near):
        return -1
    before = near.rstrip("$€£¥₹\\")
    if before.endswith(tuple(_MINUS)):
        return 1 if re.search(r"[\w)\]}%]$", before[:-1]) else -1
    bare = near.rstrip().removesuffix("}")  # of TeX's {-}
    is_first = bare.endswith(tuple(_MINUS)) and _BEFORE_SIGN.search(bare[:-1])
    return -1 if is_first else 1
