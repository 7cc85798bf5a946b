# ruff: noqa: RUF001 - minus signs and spaces are what is read here
"""Numbers in prose, in typography and in LaTeX."""

import time
from fractions import Fraction

import pytest

from rollout.rewards.numbers import last_number, single_number, with_decimal_commas


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The roots are 1,2,3,4", "4"),
        ("is −5.", "-5"),
        ("–5", "-5"),
        ("(-5)", "-5"),
        ("**-5**", "-5"),
        ("x=-3", "-3"),
        ("x = - 5", "-5"),
        ("– 5 apples", "5"),
        ("8-5", "5"),
        ("10 - 5", "5"),
        ("−$1,200", "-1200"),
        ("-$5", "-5"),
        ("$18.00", "18"),
        ("$1\\,200$", "1200"),
        ("1{,}200", "1200"),
        ("\\$1,200", "1200"),
        ("1,234,567.89", "1234567.89"),
        ("1 200,50", "1200.5"),
        ("1\u202f200", "1200"),
        ("1'200", "1200"),
        ("1.200.000", "1200000"),
        ("1.200,50", "1200.5"),
        ("12,345 and", "12345"),
        ("1,2,300", "300"),
        ("1,00,000", "100000"),
        ("₹12,34,567.50", "1234567.5"),
        ("12,34,56", "56"),
        ("1,234,56", "56"),
        ("7/4", "7/4"),
        ("-1/2", "-1/2"),
        ("3 1/2", "7/2"),
        ("1½", "3/2"),
        ("1,200/3", "400"),
        ("5/0", None),
        ("\\frac{3}{4}", "3/4"),
        ("$-\\dfrac12$", "-1/2"),
        ("1\\frac{3}{4}", "7/4"),
        ("1e3", "1000"),
        ("3 \\times 10^{4}", "30000"),
        ("3×10^-2", "3/100"),
        ("2^3", "8"),
        (".5", "1/2"),
        ("5.", "5"),
        ("50%", "50"),
        ("Rs500", "500"),
        ("25 cm^2", "25"),
        ("25 m2", "25"),
        ("25 m²", "25"),
        ("90^\\circ", "90"),
        ("x_1", None),
        ("\\sqrt{2}", None),
        ("12:30", None),
        ("3:4", None),
        ("2024-05-01", None),
        ("1/2/2024", None),
        ("1.2.3", None),
        ("", None),
        ("9" * 5000, None),
        ("5²", "25"),
        ("3·10⁵", "300000"),
        ("1.5 × 10⁻³", "3/2000"),
        ("25 m²", "25"),
        ("２，５００", "2500"),
        ("٤٢", "42"),
        ("2.5 million", "2500000"),
        ("$1.2M", "1200000"),
        ("£5m", "5000000"),
        ("€ 3bn", "3000000000"),
        ("1.2k", "1200"),
        ("5 lakhs", "500000"),
        ("100m", "100"),
        ("16GB", "16"),
        ("0x1F", None),
        ("0.3\\overline{3}", None),
        ("3万", "30000"),
        ("\\frac{1}{-2}", "-1/2"),
        ("\\frac{\\pi}{2}", None),
        ("\\frac{\\sqrt{3}}{2}", None),
        ("\\frac{1}{3}\\pi", None),
        ("3\\pi", None),
        ("2π", None),
        ("π/2", None),
        ("3i", None),
        ("\\ln 2", None),
        ("±5", None),
        ("(-2)^2", None),
        ("2.5:1", None),
        ("is 42!", "42"),
        ("$5/hour", "5"),
        ("3{,}5", "3.5"),
        ("12{,}34{,}567", "1234567"),
        ("The answer is minus 7.", "-7"),
        ("Negative 7", "-7"),
        ("8 minus 7", "7"),
        ("\\boxed{- \\frac{1}{2}}", "-1/2"),
        ("$- 3$", "-3"),
        ("$5$ - 3", "3"),
        ("{-}3", "-3"),
        ("7 m^{- 3}", "7"),
        ("10^{- 2}", "1/100"),
        ("\\frac{1,000}{3}", "1000/3"),
        ("\\frac{- 1}{2{,}000}", "-1/2000"),
        ("4.2e−2", "21/500"),
    ],
)
def test_last_number_is_read_as_it_is_written(text: str, number: str | None) -> None:
    assert last_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,2,3", None),
        ("(1, 2)", None),
        ("3-5", None),
        ("3–5", None),
        ("between 3 and 5", None),
        ("12:30", None),
        ("2024-01-02", None),
        ("72.0", "72"),
        ("2.5e6", "2500000"),
        ("5,5", None),
        ("5 km", "5"),
        ("x=5", "5"),
        ("1 200", "1200"),
        ("1/2", "1/2"),
        ("H2O", None),
        ("COVID-19", None),
        ("Apollo 11", None),
        ("Blade Runner 2049", None),
        ("Approximately 42", "42"),
        ("Rs 500", "500"),
        ("USD500", "500"),
        ("3 and 4 are #### 7", "7"),
        ("3 and 4 are \\boxed{7}", "7"),
    ],
)
def test_single_number_is_the_only_one_or_the_one_that_is_marked(text: str, number: str | None) -> None:
    assert single_number(text) == (None if number is None else Fraction(number))


def test_decimal_comma_is_one_where_it_can_group_no_thousands() -> None:
    text = "2,5 and 0,125 and 1,500 and 1,2,3 and 3.5,5"
    assert with_decimal_commas(text) == "2.5 and 0.125 and 1,500 and 1,2,3 and 3.5,5"


@pytest.mark.parametrize(
    "text", ["1,2" * 20_000, "1 " * 50_000, "1,000" * 20_000, "1.1" * 20_000, "9" * 60_000]
)
def test_long_texts_are_read_at_once(text: str) -> None:
    begin_s = time.monotonic()
    last_number(text)
    assert time.monotonic() - begin_s < 30
