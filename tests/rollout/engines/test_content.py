"""Sums of what tensors hold: they add up whatever a server fuses, and no change leaves them as they were."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rollout.engines.content import (
    Proof,
    WrongContent,
    check_adapter,
    content_document,
    content_sum,
    differences,
    saved_sums,
)
from rollout.engines.model_dir import CONTENT

MODULUS = 2**64
Q, K, V, GATE, UP = (torch.randn(shape, 6) * 0.02 for shape in (8, 4, 4, 10, 10))
EMBED, NORM = torch.randn(12, 6), torch.ones(6)
SAVED = {
    "model.embed_tokens.weight": EMBED,
    "model.layers.0.self_attn.q_proj.weight": Q,
    "model.layers.0.self_attn.k_proj.weight": K,
    "model.layers.0.self_attn.v_proj.weight": V,
    "model.layers.0.input_layernorm.weight": NORM,
    "model.layers.1.mlp.experts.0.gate_proj.weight": GATE,
    "model.layers.1.mlp.experts.0.up_proj.weight": UP,
    "model.norm.weight": NORM,
}
SERVED = {
    "model.embed_tokens.weight": [content_sum(EMBED[:7]), content_sum(EMBED[7:])],  # two ranks
    "model.lm_head.weight": [content_sum(EMBED)],  # tied, and packed for itself
    "model.layers.0.self_attn.qkv_proj.weight": [content_sum(torch.cat([Q, K, V]))],
    "model.layers.0.input_layernorm.weight": [content_sum(NORM), content_sum(NORM)],  # on both ranks
    "model.layers.1.mlp.experts.w13_weight": [content_sum(torch.cat([GATE, UP]).T)],
    "model.norm.weight": [content_sum(NORM)],
}


def total(*tensors: torch.Tensor) -> int:
    return sum(map(content_sum, tensors)) % MODULUS


def saved(**changes: torch.Tensor) -> dict[str, int]:
    return {name: content_sum(changes.get(name, tensor)) for name, tensor in SAVED.items()}


def with_bit(tensor: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    """A copy with one bit of one element turned over."""
    changed = tensor.clone()
    integers = changed.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    integers[index] ^= -(2**bit) if bit == 8 * tensor.element_size() - 1 else 2**bit
    return changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parts_of_a_fused_tensor_add_up_whatever_their_order_and_padding(dtype: torch.dtype) -> None:
    q, k, v = (tensor.to(dtype) for tensor in (Q, K, V))
    padding = torch.zeros(3, 6, dtype=dtype)
    fused = torch.cat([k, padding, q.flip(0), v])
    assert content_sum(fused) == content_sum(fused.T) == total(q, k, v)
    assert content_sum(padding) == 0 != content_sum(q)


def test_sum_is_what_files_of_earlier_versions_hold() -> None:
    """A server compares sums with those in files, which other versions may have written."""

    def by_definition(values: torch.Tensor) -> int:
        z = values.float().view(torch.int32).tolist()
        return sum(k * (-0x61C8864680B583EC * k + 0x2545F4914F6CDD1D) for k in z)

    assert content_sum(torch.tensor([1.0, -0.5])) == 0xC621DCB454800000
    for values in (Q.flatten(), Q.flatten().bfloat16()):
        assert content_sum(values) == by_definition(values) % MODULUS
    exact = torch.randn(50, dtype=torch.float64)
    rest = exact - exact.float().double()
    assert content_sum(exact) == (by_definition(exact) + 3 * by_definition(rest)) % MODULUS
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e300, 0.0], dtype=torch.float64)
    rest = (odd - odd.float().double()).nan_to_num(nan=0.0)
    assert content_sum(odd) == (by_definition(odd) + 3 * by_definition(rest)) % MODULUS


def test_tensor_of_many_chunks_has_the_sum_of_its_parts() -> None:
    long = torch.randn(200_001)
    assert content_sum(long) == total(long[:70_000], long[70_000:])


def test_values_have_the_same_sum_in_a_wider_dtype() -> None:
    for narrow in (torch.bfloat16, torch.float16):
        values = Q.to(narrow)
        assert content_sum(values) == content_sum(values.float()) == content_sum(values.double())
    assert content_sum(Q.bfloat16()) != content_sum(Q)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    values = (torch.randn(50) * 0.02).to(dtype)
    bits = 8 * values.element_size()
    changed = {content_sum(with_bit(values, 7, bit)) for bit in range(bits)}
    assert len(changed | {content_sum(values)}) == bits + 1


def test_bits_of_float64_count_within_the_range_of_float32() -> None:
    values = torch.randn(50, dtype=torch.float64)
    bits = [*range(8, 59), 63]
    changed = {content_sum(with_bit(values, 7, bit)) for bit in bits}
    assert len(changed | {content_sum(values)}) == len(bits) + 1


def test_what_one_element_loses_and_another_gains_does_not_cancel() -> None:
    values = torch.tensor([0.5, 0.25, -0.125])
    more = values.view(torch.int32) + torch.tensor([5, -5, 0], dtype=torch.int32)
    assert content_sum(more.view(torch.float32)) != content_sum(values)
    signs = torch.tensor([-0.5, 0.25, 0.125])
    assert content_sum(signs) != content_sum(values)


def test_server_that_fuses_ties_shards_and_replicates_has_the_same_content() -> None:
    assert differences(saved(), SERVED) == {}


STEP = 1e-6
"""What a step of this learning rate changes at most."""


@pytest.mark.parametrize("name", sorted(SAVED))
def test_any_one_tensor_that_is_older_by_a_step_is_found_in_its_block(name: str) -> None:
    tensor = SAVED[name]
    newer = tensor + STEP * torch.sign(tensor)
    assert not torch.equal(newer, tensor)
    ((block, text),) = differences(saved(**{name: newer}), SERVED).items()
    assert block == ("outside of the layers" if ".layers." not in name else name[6:14])
    if name in SERVED:
        assert f"{name} is {content_sum(tensor):016x}, should be {content_sum(newer):016x}" in text


@pytest.mark.parametrize("name", ["model.lm_head.weight", "model.layers.0.input_layernorm.weight"])
def test_stale_copy_of_a_tensor_is_found_beside_a_fresh_one(name: str) -> None:
    stale = content_sum(SAVED.get(name, EMBED) + STEP)
    assert differences(saved(), {**SERVED, name: [*SERVED[name][1:], stale]})


def test_tensor_that_a_server_lacks_or_has_too_much_is_found() -> None:
    lacks = {name: sums for name, sums in SERVED.items() if name != "model.norm.weight"}
    assert [*differences(saved(), lacks)] == ["outside of the layers"]
    assert [*differences(saved(), {**SERVED, "model.layers.1.extra": [5]})] == ["layers.1"]


def test_block_that_the_server_changes_when_it_loads_it_is_left_out_until_it_agrees_once() -> None:
    proof = Proof()
    changes = {**SERVED, "model.layers.0.input_layernorm.weight": [content_sum(NORM + 1)]}
    proof.begin(saved(), changes)
    assert proof.unproved == ["layers.0"]
    proof.check(saved(), changes)
    with pytest.raises(WrongContent, match=r"other weights: layers\.1: all its tensors are"):
        proof.check(saved(), {**changes, "model.layers.1.extra": [5]})
    proof.check(saved(), SERVED)
    assert proof.unproved == []
    with pytest.raises(WrongContent, match=r"layers\.0: model\.layers\.0\.input_layernorm\.weight is"):
        proof.check(saved(), changes)


def test_module_that_a_server_does_not_have_leaves_nothing_else_unproved() -> None:
    """vLLM has neither the last layers of a tower of which an earlier one is looked at, nor its last norm."""
    tower = {
        "tower.layers.1.fc.weight": UP,
        "tower.layers.1.fc.bias": K,
        "tower.norm.weight": V,
        "tower.norm.bias": Q,
    }
    expected = saved() | {name: content_sum(tensor) for name, tensor in tower.items()}
    proof = Proof()
    proof.begin(expected, SERVED)
    assert proof.unproved == []
    proof.check(expected, SERVED)
    for name in SAVED:
        with pytest.raises(WrongContent):
            proof.check({**expected, name: expected[name] + 1}, SERVED)
    with pytest.raises(WrongContent):
        proof.check(expected, {**SERVED, "tower.norm.bias": [content_sum(K)]})
    alike = expected | {"tower.norm.weight": content_sum(NORM), "tower.norm.bias": 0}  # as it is initialised
    proof = Proof()
    proof.begin(alike, SERVED)
    proof.check({**alike, "tower.norm.weight": content_sum(V)}, SERVED)
    with pytest.raises(WrongContent):
        proof.check({**alike, "model.norm.weight": content_sum(V)}, SERVED)


def test_nothing_is_left_out_of_a_server_that_was_not_asked_at_its_start() -> None:
    with pytest.raises(WrongContent):
        Proof().check(saved(), {**SERVED, "model.norm.weight": [1]})


def test_adapter_must_be_in_one_of_the_slots() -> None:
    check_adapter({"layers.0.a": 3, "layers.0.b": 4}, [{"layers.0.a": [1]}, {"layers.0.ab": [3, 4]}])
    with pytest.raises(WrongContent, match=r"layers\.0"):
        check_adapter({"layers.0.a": 3, "layers.0.b": 4}, [{"layers.0.ab": [3, 5]}])
    with pytest.raises(WrongContent, match="no adapter"):
        check_adapter({"layers.0.a": 3}, [])


def model_dir(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A directory with the tensors in two files, beside the same in another layout."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    names = sorted(tensors)
    index: dict[str, str] = {}
    for number, part in enumerate((names[:3], names[3:])):
        index |= dict.fromkeys(part, f"model-{number}.safetensors")
        save_file({name: tensors[name].clone() for name in part}, path / f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    save_file({"output.weight": torch.ones(3)}, path / "consolidated.safetensors")
    return path


def test_sums_of_files_are_those_of_the_values_that_are_served(tmp_path: Path) -> None:
    directory = model_dir(tmp_path / "model", {**SAVED, "mask": torch.ones(3, dtype=torch.bool)})
    assert saved_sums(directory, torch.float32) == saved_sums(directory, torch.float64) == saved()
    rounded = saved(**{name: tensor.bfloat16() for name, tensor in SAVED.items()})
    assert saved_sums(directory, torch.bfloat16) == rounded != saved()
    shares = [saved_sums(directory, torch.float32, (reader, 3)) for reader in range(3)]
    assert sum(map(len, shares)) == len(SAVED)
    assert {name: number for share in shares for name, number in share.items()} == saved()


def test_written_sums_stand_for_the_files_unless_they_are_rounded(tmp_path: Path) -> None:
    directory = model_dir(tmp_path / "model", SAVED)
    (directory / CONTENT).write_bytes(content_document({"written": 2**64 - 1}, torch.float32))
    assert (
        saved_sums(directory, torch.float32) == saved_sums(directory, torch.float64) == {"written": 2**64 - 1}
    )
    assert saved_sums(directory, torch.float32, (1, 2)) == {}
    for narrower in (torch.bfloat16, torch.float16):
        assert saved_sums(directory, narrower).keys() == SAVED.keys()
    (directory / CONTENT).write_text(json.dumps({"dtype": "bfloat16", "tensors": {}}))
    assert saved_sums(directory, torch.bfloat16) == {}
    assert saved_sums(directory, torch.float16).keys() == SAVED.keys()


@pytest.mark.parametrize(
    "text",
    [
        "chapter one",
        "[1, 2]",
        "{}",
        '{"dtype": "bfloat16", "tensors": {}, "title": "ours has no title"}',
        '{"dtype": "load", "tensors": {}}',
        '{"dtype": "float32", "tensors": ["embed.weight"]}',
        '{"dtype": "float32", "tensors": {"embed.weight": "a picture of it"}}',
        '{"dtype": 32, "tensors": {"embed.weight": 1}}',
    ],
)
def test_file_of_the_users_with_that_name_is_left_alone(tmp_path: Path, text: str) -> None:
    directory = model_dir(tmp_path / "model", SAVED)
    (directory / CONTENT).write_text(text)
    assert saved_sums(directory, torch.float32) == saved()
