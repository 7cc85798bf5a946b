"""The part file: what goes in comes out, and nothing but a whole part is ever taken for one."""

import json
import random
import struct
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.origin import Code, Sampling
from rollout.part_file import DamagedPart, PartHeader, decode_part, encode_part
from rollout.trajectory import Group, Picture, Sample, Turn, line_for_people, unfit


def make_sample(length: int, *, text: str = "ab", reward: float | None = 0.5, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    return Sample(
        token_ids=rng.integers(0, 150_000, length).astype(np.int32),
        loss_mask=(np.arange(length) >= length // 2).astype(np.uint8),
        logprobs=rng.normal(size=length).astype(np.float32),
        finish_reason="stop",
        text=text,
        reward=reward,
        metrics={"digits": 2.0},
    )


GROUPS = [
    Group(3, "a1", "1+2=", [make_sample(5), make_sample(9, text="ünï \ud800 \0", reward=None, seed=1)]),
    Group(0, "b", 'quote " and\nnewline', [], given_up='reward "x" failed: "header_sha256":"' + "0" * 64),
    Group(7, "c", "", [make_sample(0)]),
]


HEADER = PartHeader(
    kind="train",
    iteration=5,
    rank=1,
    epoch=2,
    part=3,
    policy="0" * 16,
    policy_iteration=4,
    sampling=Sampling(n=2, max_tokens=9, temperature=0.7, top_p=0.9, stop=("\n", '"')),
    reward=Code("my_rewards:score", "1" * 16),
    environment=Code("single_turn", "2" * 16),
)


def encode(groups: list[Group]) -> bytes:
    return encode_part(groups, HEADER)


def same(one: Group, two: Group) -> bool:
    flat = [(group.slot, group.task_id, group.prompt, group.given_up) for group in (one, two)]
    return flat[0] == flat[1] and all(
        np.array_equal(a.token_ids, b.token_ids)
        and np.array_equal(a.loss_mask, b.loss_mask)
        and np.array_equal(a.logprobs, b.logprobs)
        and (a.finish_reason, a.text, a.reward, a.metrics) == (b.finish_reason, b.text, b.reward, b.metrics)
        for a, b in zip(one.samples, two.samples, strict=True)
    )


def test_part_round_trips_with_its_header_and_tombstones() -> None:
    data = encode(GROUPS)
    header, groups = decode_part(data)
    assert all(map(same, GROUPS, groups))
    assert header == HEADER


def test_conversation_survives_a_part_and_is_read_turn_by_turn() -> None:
    sample = make_sample(9)
    sample.turns = [
        Turn("assistant", "<<1+2>>", 4, 7, "stop"),
        Turn("environment", "=3"),
        Turn("assistant", "3", 8, 9, "length"),
        Turn("assistant", "", 9, 9, "length"),
    ]
    sample.loss_mask[5:7] = 0
    (group,) = decode_part(encode([Group(3, "a1", "1+2=", [sample])]))[1]
    assert group.samples[0].turns == sample.turns
    line = json.loads(line_for_people(group, rank=1, model_version="d1"))
    assert line["samples"][0]["turns"] == [
        {"role": "assistant", "text": "<<1+2>>", "tokens": 3, "trained": 1, "finish_reason": "stop"},
        {"role": "environment", "text": "=3"},
        {"role": "assistant", "text": "3", "tokens": 1, "trained": 1, "finish_reason": "length"},
        {"role": "assistant", "text": "", "tokens": 0, "trained": 0, "finish_reason": "length"},
    ]


def test_rewards_of_turns_survive_a_part_and_are_left_out_where_there_are_none() -> None:
    sample = make_sample(9)
    sample.turns = [Turn("assistant", "a", 4, 6, "stop"), Turn("user", "b"), Turn("assistant", "c", 8, 9)]
    assert b'"finish_reason": null, "reward"' not in encode([Group(3, "a1", "", [sample])])
    sample.reward_turns([0.25, None], [None, "door 2"])
    (group,) = decode_part(encode([Group(3, "a1", "", [sample])]))[1]
    assert [turn.reward for turn in group.samples[0].turns] == [0.25, None, None]
    assert [turn.state for turn in group.samples[0].turns] == [None, None, "door 2"]
    shown = json.loads(line_for_people(group, rank=1, model_version="d1"))["samples"][0]["turns"]
    assert [turn.get("reward") for turn in shown] == [0.25, None, None]
    states: list[Any] = [1, None]
    sample.reward_turns([0.25, None], states)
    assert unfit(sample, demonstrated=False) == "the state of a turn is 1, expected a string that names it"
    sample.turns[0] = Turn("assistant", "a", 4, 6, "stop", reward=float("nan"))
    assert (
        unfit(sample, demonstrated=False)
        == "the reward of a turn is nan, expected a finite number up to 1e+15"
    )


def test_part_of_single_turns_is_what_it_was_before_there_were_conversations() -> None:
    data = encode(GROUPS)
    assert b'"turns"' not in data
    assert [sample.turns for group in decode_part(data)[1] for sample in group.samples] == [[]] * 3


def test_decoded_arrays_have_their_types_and_are_writable() -> None:
    sample = decode_part(encode(GROUPS))[1][0].samples[1]
    for array, dtype in (
        (sample.token_ids, "int32"),
        (sample.loss_mask, "uint8"),
        (sample.logprobs, "float32"),
    ):
        assert array.dtype == dtype
        array[:] = 1


def test_empty_part_round_trips() -> None:
    assert decode_part(encode([])) == (HEADER, [])


def test_equal_groups_make_equal_bytes_and_others_do_not() -> None:
    assert encode(GROUPS) == encode(GROUPS)
    assert encode(GROUPS) != encode(GROUPS[:2])


def test_part_is_a_safetensors_file_to_the_library() -> None:
    arrays = safetensors.numpy.load(encode(GROUPS))
    assert set(arrays) == {"token_ids", "loss_mask", "logprobs", "offsets", "records"}
    assert np.array_equal(arrays["offsets"], [0, 5, 14, 14])
    assert np.array_equal(arrays["token_ids"][:5], GROUPS[0].samples[0].token_ids)


def test_arrays_are_written_as_the_format_says_whatever_their_type_in_memory() -> None:
    sample = make_sample(4)
    sample.token_ids = sample.token_ids.astype(">i8")[::-1]
    assert np.array_equal(
        decode_part(encode([Group(0, "a", "", [sample])]))[1][0].samples[0].token_ids, sample.token_ids
    )


def test_sample_with_arrays_of_different_length_is_refused() -> None:
    sample = make_sample(4)
    sample.logprobs = sample.logprobs[:3]
    with pytest.raises(ValueError, match="differ in length"):
        encode([Group(0, "a", "", [sample])])


def test_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError):
        encode([Group(0, "a", "", [make_sample(4, reward=float("nan"))])])


def test_every_truncation_is_damage() -> None:
    data = encode(GROUPS)
    for end in range(len(data)):
        with pytest.raises(DamagedPart):
            decode_part(data[:end])
    with pytest.raises(DamagedPart, match="its header says"):
        decode_part(data + b"\0")


def test_every_flipped_bit_is_damage() -> None:
    data = encode(GROUPS)
    rng = random.Random(0)
    for position in range(len(data)):
        altered = bytearray(data)
        altered[position] ^= 1 << rng.randrange(8)
        with pytest.raises(DamagedPart):
            decode_part(bytes(altered))


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_garbage_is_damage(garbage: bytes, length: int) -> None:
    for data in (garbage, struct.pack("<Q", length) + garbage, struct.pack("<Q", len(garbage)) + garbage):
        with pytest.raises(DamagedPart):
            decode_part(data)


@settings(max_examples=300)
@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda s: st.dictionaries(st.text(), s) | st.lists(s))
)
def test_other_json_in_the_header_is_damage(value: object) -> None:
    for header in (
        value,
        {"__metadata__": value},
        {"__metadata__": {"header_sha256": value, "data_sha256": value}},
    ):
        text = json.dumps(header).encode()
        with pytest.raises(DamagedPart):
            decode_part(struct.pack("<Q", len(text)) + text)


def test_a_slot_that_is_there_twice_is_damage() -> None:
    with pytest.raises(DamagedPart, match="it has a slot twice"):
        decode_part(encode([*GROUPS, GROUPS[0]]))


def test_people_read_one_line_a_group() -> None:
    lines = [json.loads(line_for_people(group, rank=1, model_version="d1")) for group in GROUPS]
    assert [line["slot"] for line in lines] == [3, 0, 7]
    about = {"text": "ab", "reward": 0.5, "tokens": 3, "finish_reason": "stop", "metrics": {"digits": 2.0}}
    assert lines[0]["samples"][0] == about
    assert (lines[0]["task_id"], lines[0]["prompt"]) == ("a1", "1+2=")
    assert (lines[0]["rank"], lines[0]["model_version"]) == (1, "d1")
    assert lines[1]["samples"] == [] and lines[1]["given_up"] == GROUPS[1].given_up
    assert "given_up" not in lines[0]


def test_pictures_of_a_sample_come_back_and_a_part_without_any_says_nothing_of_them() -> None:
    shown = make_sample(9)
    shown.pictures = [Picture("a" * 64, 0, 2), Picture("b" * 64, 2, 4)]
    data = encode_part([Group(0, "a", "", [shown, make_sample(5)])], HEADER)
    (group,) = decode_part(data)[1]
    assert [sample.pictures for sample in group.samples] == [shown.pictures, []]
    assert b"pictures" not in encode_part([Group(0, "a", "", [make_sample(5)])], HEADER)


@pytest.mark.parametrize("place", [(-1, 2), (2, 2), (3, 6), (0, 99)])
def test_sample_whose_picture_is_not_in_its_prompt_is_unfit(place: tuple[int, int]) -> None:
    sample = make_sample(9)
    sample.pictures = [Picture("a" * 64, *place)]
    assert "its picture" in (unfit(sample, demonstrated=False) or "")


def test_sample_that_the_model_has_no_place_for_is_unfit() -> None:
    sample = make_sample(9)
    most, size = int(sample.token_ids.max()), len(sample.token_ids)
    assert unfit(sample, demonstrated=False, context=size, vocabulary=most + 1) is None
    assert "no positions" in (unfit(sample, demonstrated=False, context=size - 1) or "")
    assert f"it has the token {most}" in (unfit(sample, demonstrated=False, vocabulary=most) or "")
