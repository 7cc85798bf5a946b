"""What is known of a model directory without torch."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollout.engines.model_dir import WeightsError, check_model_dir, is_adapter, policy_digest, tensor_names
from rollout.storage.files import checksums


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    tensors = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.ones(4, np.float16),
        "empty": np.zeros((0, 3), np.int64),
    }
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def split_in_two(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    safetensors.numpy.save_file({"a": np.zeros(2)}, directory / "model-1.safetensors")
    safetensors.numpy.save_file({"b": np.zeros(2)}, directory / "model-2.safetensors")


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_named_with_dtype_and_shape(directory: Path) -> None:
    assert tensor_names(directory) == {"a": ("F32", (2, 3)), "b": ("F16", (4,)), "empty": ("I64", (0, 3))}


def test_directory_written_by_transformers_is_whole(model_dir: Path) -> None:
    check_model_dir(model_dir)
    assert tensor_names(model_dir)["model.norm.weight"] == ("F32", (64,))


def test_sharded_directory_with_a_true_index_is_whole(directory: Path) -> None:
    split_in_two(directory)
    write_index(directory, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    assert set(tensor_names(directory)) == {"a", "b"}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "model-1.safetensors"}, "leaves out 1 tensors that are there, e.g. 'b'"),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, "'b' should be in model-1.safetensors"),
        ({"a": "model-1.safetensors", "c": "model-3.safetensors"}, "it is in no file"),
        (None, "has no `weight_map`"),
    ],
)
def test_index_that_does_not_fit_the_files_is_refused(
    directory: Path, weight_map: object, reason: str
) -> None:
    split_in_two(directory)
    write_index(directory, weight_map)
    with pytest.raises(WeightsError, match=reason):
        check_model_dir(directory)


def test_what_is_missing_is_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="is no directory"):
        check_model_dir(tmp_path / "none")
    (directory / "model.safetensors").rename(directory / "elsewhere")
    with pytest.raises(WeightsError, match=r"holds no \*\.safetensors file"):
        check_model_dir(directory)
    (directory / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json: is missing"):
        check_model_dir(directory)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config_is_refused(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        check_model_dir(directory)


def test_tensor_in_two_files_is_refused(directory: Path) -> None:
    safetensors.numpy.save_file({"a": np.zeros(1)}, directory / "other.safetensors")
    with pytest.raises(WeightsError, match=r"'a' is in model\.safetensors already"):
        check_model_dir(directory)


def test_every_truncation_is_refused(directory: Path) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    for end in range(len(data)):
        file.write_bytes(data[:end])
        with pytest.raises(WeightsError, match=r"model\.safetensors"):
            check_model_dir(directory)
    file.write_bytes(data + b"\0")
    with pytest.raises(WeightsError, match="its header describes"):
        check_model_dir(directory)


def test_altered_header_is_refused_or_tells_of_other_tensors_but_never_crashes(directory: Path) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    before = tensor_names(directory)
    rng = random.Random(0)
    for position in range(data.rindex(b"}") + 1):
        altered = bytearray(data)
        altered[position] ^= 1 << rng.randrange(8)
        file.write_bytes(altered)
        try:
            names = tensor_names(directory)
        except WeightsError:
            continue
        # What is left: another name, another dtype of the same size, a shape of the same product.
        assert names != before


def test_checksums_cover_the_files_of_the_directory_alone(directory: Path) -> None:
    (directory / "trainer_state").mkdir()
    (directory / "trainer_state" / "x").write_text("x")
    found = checksums(directory)
    assert set(found) == {"config.json", "model.safetensors"}
    data = (directory / "model.safetensors").read_bytes()
    assert found["model.safetensors"] == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_digest_names_the_weights_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    digest = policy_digest(checksums(directory))
    assert len(digest) == 16 and int(digest, 16) >= 0
    (directory / "config.json").write_text('{"other": 1}')
    assert policy_digest(checksums(directory)) == digest
    shutil.copy(directory / "model.safetensors", directory / "more.safetensors")
    assert policy_digest(checksums(directory)) != digest
    with pytest.raises(WeightsError, match="a policy is its weights"):
        policy_digest({})


def test_adapter_is_a_directory_with_an_adapters_configuration_and_no_models(
    directory: Path, tmp_path: Path
) -> None:
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert not is_adapter(directory) and not is_adapter(tmp_path / "nowhere")
    (directory / "config.json").unlink()
    assert is_adapter(directory)
    assert set(tensor_names(directory)) == {"a", "b", "empty"}
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"adapter_config\.json: is not JSON"):
        check_model_dir(directory)
