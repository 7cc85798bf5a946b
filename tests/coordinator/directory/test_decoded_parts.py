"""Parts that were decoded before."""

import hashlib

import pytest

from coordinator.directory import decoded_parts as module
from coordinator.directory.decoded_parts import DecodedParts
from rollout.part_file import DamagedPart, PartHeader, decode_part, encode_part
from tests.coordinator.examples import group, origin


def part(number: int) -> tuple[bytes, str]:
    header = PartHeader("train", 1, 0, 1, number, **vars(origin("p", 0)))
    data = encode_part([group(number)], header)
    return data, hashlib.sha256(data).hexdigest()


def test_equal_bytes_are_decoded_once_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def count(data: bytes) -> object:
        calls.append(data)
        return decode_part(data)

    monkeypatch.setattr(module, "decode_part", count)
    parts = [part(number) for number in range(3)]
    decoded = DecodedParts(kept_bytes=2 * len(parts[0][0]) + 10)
    for number in (0, 1, 0, 2, 0):  # 2 takes the place of 1
        header, groups = decoded(*parts[number])
        assert header.part == number and [one.slot for one in groups] == [number]
    assert calls == [parts[number][0] for number in (0, 1, 2)]
    decoded(*parts[1])
    assert calls[-1] == parts[1][0]
    decoded.forget()
    decoded(*parts[1])
    assert len(calls) == 5


def test_damaged_part_is_damaged_each_time() -> None:
    decoded, (data, _) = DecodedParts(), part(1)
    torn = data[:-1]
    for _attempt in range(2):
        with pytest.raises(DamagedPart):
            decoded(torn, hashlib.sha256(torn).hexdigest())
