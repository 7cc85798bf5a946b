"""tests/order.py: what several processes get to do, and in which order."""

from tests.order import LONGEST, longest_first
from tests.paths import REPOSITORY

LONG = [f"{name}::{number}" for name in sorted(LONGEST) for number in range(3)]
SHORT = [f"tests/short_{file}.py::{number}" for file in range(5) for number in range(40)]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def test_every_process_begins_with_whole_files_of_the_longest_and_has_as_many_tests() -> None:
    order = longest_first([*SHORT[:70], *LONG, *SHORT[70:]], file_of, 4)
    assert sorted(order) == sorted([*LONG, *SHORT])
    size = len(order) // 4
    begins = [order[number * size] for number in range(4)]
    assert [file_of(test) for test in begins] == [*LONGEST[:4]], "the four longest at once"
    for number in range(4):
        share = order[number * size : (number + 1) * size]
        long = [test for test in share if test in LONG]
        assert share[: len(long)] == long
        assert all([file_of(one) for one in long].count(file_of(test)) == 3 for test in long)
    assert [test for test in order if test in SHORT] == SHORT


def test_one_process_begins_with_the_longest_and_a_part_of_the_tests_is_dealt_out_too() -> None:
    assert longest_first(SHORT, file_of, 1) == longest_first(SHORT, file_of, 3) == SHORT
    assert longest_first([*SHORT, *LONG], file_of, 1)[0].startswith(LONGEST[0])
    few = LONG[:2]
    assert sorted(longest_first(few, file_of, 4)) == few


def test_the_longest_files_are_there() -> None:
    assert [name for name in LONGEST if not (REPOSITORY / name).is_file()] == []
    assert len({*LONGEST}) == len(LONGEST)
