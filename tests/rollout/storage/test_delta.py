"""A delta gives the second file byte for byte, or says that it cannot."""

import io
import tracemalloc
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.storage import delta
from rollout.storage.delta import BLOCK_BYTES, DamagedDelta

ANY = 1e9
"""A delta of this size is still worth it."""


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
    pairs=st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=1, max_size=50),
    size=st.integers(1, 60),
    other=st.integers(1, 60),
)
def test_any_file_is_made_of_any_other_of_its_size(
    pairs: list[tuple[int, int]], size: int, other: int
) -> None:
    before, after = (bytes(pair[k] for pair in pairs) for k in (0, 1))
    change = delta.encode(cut(before, size), cut(after, other), ANY)
    assert change is not None
    assert applied(before, change, size) == after


@pytest.mark.parametrize("extra", [0, 1, 7])
def test_files_of_several_blocks_come_in_pieces_of_any_size(extra: int) -> None:
    before, after = weights(BLOCK_BYTES + 1000, 0.01)
    before, after = before + bytes(extra), after + b"x" * extra
    change = delta.encode(cut(before, 3 * BLOCK_BYTES), cut(after, BLOCK_BYTES - 5), ANY)
    assert change is not None
    assert applied(before, change, 1000) == after


def test_few_changed_numbers_make_a_small_delta_and_equal_files_hardly_any() -> None:
    for changed, most in ((0.0, 0.0005), (0.02, 0.016), (0.1, 0.05)):
        before, after = weights(1 << 20, changed)
        change = delta.encode([before], [after], ANY)
        assert change is not None and len(change) < most * len(after)


@pytest.mark.parametrize("count", [1, 1 << 10, 1 << 24], ids=["a word", "a block", "many blocks"])
def test_delta_that_is_not_worth_it_is_not_made(count: int) -> None:
    before, after = weights(count, 0.1)
    share = len(delta.encode([before], [after], ANY) or b"") / len(after)
    assert delta.encode([before], [after], 1.01 * share) is not None
    assert delta.encode([before], [after], 0.99 * share) is None


def test_delta_is_given_up_as_soon_as_it_shows_that_it_is_not_worth_it() -> None:
    read = 0

    def pieces(data: bytes) -> Iterator[bytes]:
        nonlocal read
        for piece in cut(data, BLOCK_BYTES):
            read += len(piece)
            yield piece

    before, after = weights(1 << 24, 0.01)
    assert delta.encode(cut(before, BLOCK_BYTES), pieces(before[::-1]), 0.25) is None
    assert read < len(before) / 4
    # The first blocks, where nothing is as it was, are only a small part of the file.
    begins_otherwise = before[: 3 * BLOCK_BYTES][::-1] + after[3 * BLOCK_BYTES :]
    assert delta.encode(cut(before, BLOCK_BYTES), pieces(begins_otherwise), 0.25) is not None


def test_files_of_different_sizes_have_no_delta() -> None:
    assert delta.encode([b"abcd"], [b"abc"], ANY) is None
    assert delta.encode([], [b"abc"], ANY) is None
    assert delta.encode([bytes(BLOCK_BYTES)], [bytes(2 * BLOCK_BYTES)], ANY) is None


def test_damaged_delta_is_refused_or_gives_other_bytes() -> None:
    before, after = weights(1 << 19, 0.05)
    change = delta.encode([before], [after], ANY)
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


@pytest.mark.parametrize(
    ("listed", "said"),
    [
        ((5).to_bytes(4, "little") + bytes(15), "it lists 5 words of 2"),
        (b"\xff" * 4 + bytes(1 << 20), "it lists 4294967295 words of 2"),
        ((2).to_bytes(4, "little") + bytes([0, 1, 0, 0, 0, 0]), "it lists word 2 of 2"),
    ],
)
def test_delta_of_another_file_is_refused(listed: bytes, said: str) -> None:
    with pytest.raises(DamagedDelta, match=said):
        applied(b"abcd", zlib.compress(listed))


def test_delta_that_unpacks_to_far_more_than_it_should_takes_no_memory() -> None:
    bomb = zlib.compress((1).to_bytes(4, "little") + bytes(1 << 26))
    tracemalloc.start()
    assert applied(b"abc", bomb) == b"abc"
    assert tracemalloc.get_traced_memory()[1] < 1 << 24
    tracemalloc.stop()
