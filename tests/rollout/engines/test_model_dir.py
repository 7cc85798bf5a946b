"""What is known of a model directory without torch."""

import hashlib
import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from rollout.engines.model_dir import (
    WeightsError,
    check_model_dir,
    companions,
    is_adapter,
    model_files,
    policy_digest,
    tensor_names,
    weight_files,
)
from rollout.storage.hashing import checksums


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
    safetensors.numpy.save_file({"b": np.zeros(2), "c": np.zeros(1)}, directory / "model-2.safetensors")


INDEX = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_tensors_are_named_with_dtype_and_shape(directory: Path) -> None:
    assert tensor_names(directory) == {"a": ("F32", (2, 3)), "b": ("F16", (4,)), "empty": ("I64", (0, 3))}


def test_directory_written_by_transformers_is_whole(model_dir: Path) -> None:
    check_model_dir(model_dir)
    assert tensor_names(model_dir)["model.norm.weight"] == ("F32", (64,))


def test_sharded_directory_with_a_true_index_is_whole(directory: Path) -> None:
    split_in_two(directory)
    write_index(directory, INDEX)
    assert set(tensor_names(directory)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        (
            {"a": "model-1.safetensors", "b": "model-2.safetensors"},
            "leaves out 1 tensors that are there, e.g. 'c'",
        ),
        ({"a": "model-1.safetensors", "b": "model-1.safetensors"}, "'b' should be in model-1.safetensors"),
        ({"a": "model-1.safetensors", "c": "model-1.safetensors"}, "it is in no file"),
        (
            {"a": "model-3.safetensors", "b": "model-4.safetensors"},
            "names model-3.safetensors and 1 more, which",
        ),
        ({"a": "model-1.safetensors", "b": "model-4.safetensors"}, "names model-4.safetensors, which this"),
        ({"a": "parts/model-1.safetensors"}, "names parts/model-1.*, and weights are read beside the index"),
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
    with pytest.raises(WeightsError, match="is not a directory"):
        check_model_dir(tmp_path / "none")
    (directory / "model.safetensors").rename(directory / "elsewhere")
    with pytest.raises(WeightsError, match=r"holds no model\.safetensors and no .*index\.json, so"):
        check_model_dir(directory)
    (directory / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"config\.json: is missing"):
        check_model_dir(directory)


def test_folder_of_a_cache_names_its_snapshot(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(WeightsError, match=r"config\.json: is missing; give the snapshot, .*/snapshots/abc$"):
        check_model_dir(tmp_path)


def test_pointer_in_place_of_a_file_is_said(directory: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 123\n"
    (directory / "model.safetensors").write_text(pointer)
    with pytest.raises(WeightsError, match="is a pointer of Git LFS; run `git lfs pull` there"):
        check_model_dir(directory)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_config_is_refused(directory: Path, content: str) -> None:
    (directory / "config.json").write_text(content)
    with pytest.raises(WeightsError, match=r"config\.json"):
        check_model_dir(directory)


def test_tensor_in_two_files_is_refused(directory: Path) -> None:
    split_in_two(directory)
    safetensors.numpy.save_file({"a": np.zeros(1), "b": np.zeros(1)}, directory / "model-2.safetensors")
    write_index(directory, INDEX)
    with pytest.raises(WeightsError, match=r"'a' is in model-1\.safetensors already"):
        check_model_dir(directory)


FOREIGN = (
    *("consolidated.safetensors", "consolidated-00001-of-00002.safetensors", "model.fp16.safetensors"),
    *("consolidated.safetensors.index.json", "model.fp16.safetensors.index.json", "pytorch_model.bin"),
    *(
        "pytorch_model.bin.index.json",
        "consolidated.00.pth",
        "model-Q4_K_M.gguf",
        "tf_model.h5",
        "model.onnx",
    ),
    *("original/params.json", "original/model.safetensors", "onnx/model.onnx", "onnx/config.json"),
    *("checkpoint-5/model.safetensors", "checkpoint-5/tokenizer.json", ".git/config", "__pycache__/a.pyc"),
)
BESIDE = (
    *("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json", "tokenizer.json"),
    *(
        "additional_chat_templates/tool_use.jinja",
        "tokenizer.model",
        "tekken.json",
        "merges.txt",
        "vocab.json",
    ),
    *(
        "preprocessor_config.json",
        "video_preprocessor_config.json",
        "processor_config.json",
        "modeling_own.py",
    ),
    *("qwen.tiktoken", "1_Pooling/config.json", "a_file_that_nobody_knows_yet", "code/layers/attention.py"),
)


@pytest.mark.parametrize("in_shards", [False, True])
def test_weights_are_those_that_transformers_reads_and_all_that_is_small_goes_with_them(
    directory: Path, in_shards: bool
) -> None:
    if in_shards:
        split_in_two(directory)
        write_index(directory, INDEX)
    before = tensor_names(directory)
    for name in (*FOREIGN, *BESIDE):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("{}")
    own = ["model-1.safetensors", "model-2.safetensors"] if in_shards else ["model.safetensors"]
    index = ["model.safetensors.index.json"] if in_shards else []
    assert weight_files(directory) == own and tensor_names(directory) == before
    assert companions(directory) == sorted(BESIDE)
    assert sorted(model_files(directory)) == sorted([*own, *index, *BESIDE])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "consolidated.safetensors",
            "holds no model.safetensors and .*; consolidated.safetensors has another",
        ),
        ("model-00001-of-00002.safetensors", "no model.safetensors.index.json, .* has another name than"),
        ("pytorch_model.bin", "; pytorch_model.bin is in another format: write it as safetensors first"),
    ],
)
def test_weights_that_transformers_does_not_read_are_no_weights(
    directory: Path, name: str, reason: str
) -> None:
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(WeightsError, match=reason) as refused:
        check_model_dir(directory)
    assert "\n" not in str(refused.value)


def test_weights_that_two_programs_would_choose_differently_are_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(
        WeightsError, match=r"holds a whole model and adapter_config\.json: transformers adds"
    ):
        check_model_dir(directory)
    (directory / "adapter_config.json").unlink()
    safetensors.numpy.save_file({"a": np.zeros(2)}, directory / "model-1.safetensors")
    safetensors.numpy.save_file({"b": np.zeros(2)}, directory / "model-2.safetensors")
    write_index(directory, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    with pytest.raises(
        WeightsError, match=r"has weights twice: transformers reads model\.safetensors, and vLLM"
    ):
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


@pytest.mark.parametrize(
    ("new", "reason"),
    [
        (b'"F32","shape":[2,2]', r"tensor 'a', F32 \[2, 2\], cannot have 24 bytes"),
        (b'"F99","shape":[2,3]', "its header is damaged: KeyError: 'F99'"),
        (b'"F32","shape":[2,3}', "its header is damaged: Expecting"),
    ],
)
def test_header_that_cannot_be_right_is_refused_for_what_it_is(
    directory: Path, new: bytes, reason: str
) -> None:
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"F32","shape":[2,3]', new))
    assert file.read_bytes() != data
    with pytest.raises(WeightsError, match=reason):
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
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    assert is_adapter(directory)
    assert set(tensor_names(directory)) == {"a", "b", "empty"}
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(WeightsError, match=r"adapter_config\.json: is not JSON"):
        check_model_dir(directory)
