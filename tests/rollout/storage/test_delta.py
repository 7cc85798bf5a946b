"""A delta gives the second file byte for byte, or says that it cannot."""

import io
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.storage import delta
from rollout.storage.delta import BLOCK_BYTES, DamagedDelta

LIMIT = 1 << 30


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[begin : begin + size] for begin in range(0, len(data), size))


def applied(before: bytes, change: bytes, size: int = 1 << 16) -> bytes:
    """What a delta that comes in pieces of `size` bytes makes of `before`."""
    found: list[bytes] = []
    delta.apply(io.BytesIO(before), cut(change, size), found.append)
    return b"".join(found)


def weights(count: int, changed: float) -> tuple[bytes, bytes]:
    """Numbers of two bytes, and the same with the last bit of a fraction of them turned over."""
    draw = np.random.default_rng(0)
    before = draw.integers(0, 1 << 16, count, dtype=np.uint16)
    return before.tobytes(), (before ^ (draw.random(count) < changed)).tobytes()


@given(
    pairs=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=50),
    size=st.integers(1, 60),
    other=st.integers(1, 60),
)
def test_any_file_is_made_of_any_other_of_its_size(
    pairs: list[tuple[int, int]], size: int, other: int
) -> None:
    before, after = (bytes(pair[k] for pair in pairs) for k in (0, 1))
    change = delta.encode(cut(before, size), cut(after, other), LIMIT)
    assert change is not None
    assert applied(before, change, size) == after


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_files_of_several_blocks_come_in_pieces_of_any_size(extra: int) -> None:
    before, after = weights(BLOCK_BYTES + 1000, 0.01)
    before, after = before + bytes(extra), after + b"x" * extra
    change = delta.encode(cut(before, 3 * BLOCK_BYTES), cut(after, BLOCK_BYTES - 5), LIMIT)
    assert change is not None
    assert applied(before, change, 1000) == after


def test_few_changed_numbers_make_a_small_delta_and_equal_files_hardly_any() -> None:
    for changed, most in ((0.0, 0.002), (0.02, 0.02), (0.1, 0.09)):
        before, after = weights(1 << 20, changed)
        change = delta.encode([before], [after], LIMIT)
        assert change is not None and len(change) < most * len(after)


def test_delta_above_the_limit_is_not_made() -> None:
    before, after = weights(1 << 20, 0.1)
    size = len(delta.encode([before], [after], LIMIT) or b"")
    assert delta.encode([before], [after], size) is not None
    assert delta.encode([before], [after], size - 1) is None
    short = delta.encode([b"ab"], [b"cd"], LIMIT)
    assert short is not None and delta.encode([b"ab"], [b"cd"], len(short) - 1) is None


def test_files_of_different_sizes_have_no_delta() -> None:
    assert delta.encode([b"abcd"], [b"abc"], LIMIT) is None
    assert delta.encode([], [b"abc"], LIMIT) is None
    assert delta.encode([bytes(BLOCK_BYTES)], [bytes(2 * BLOCK_BYTES)], LIMIT) is None


def test_damaged_delta_is_refused_or_gives_other_bytes() -> None:
    before, after = weights(1 << 19, 0.05)
    change = delta.encode([before], [after], LIMIT)
    assert change is not None
    with pytest.raises(DamagedDelta, match="ends too early"):
        applied(before, change[: len(change) // 2])
    with pytest.raises(DamagedDelta, match="ends too early"):
        applied(before + after, change)
    with pytest.raises(DamagedDelta, match="ends too early"):
        applied(before, b"")
    with pytest.raises(DamagedDelta, match="cannot be unpacked"):
        applied(before, b"no delta at all")
    assert applied(after, change) != after


def test_delta_that_unpacks_to_far_more_than_it_should_takes_no_memory() -> None:
    import tracemalloc

    bomb = delta.encode([bytes(1 << 28)], [bytes(1 << 28)], LIMIT)
    assert bomb is not None and len(bomb) < 1 << 20
    tracemalloc.start()
    assert applied(b"abc", bomb) == b"abc"
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
