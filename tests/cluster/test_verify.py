"""`run verify`: digests from the base model to the weights, and an iteration that is made again."""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coordinator.console.commands.export import export
from coordinator.console.commands.verify import _distance, verify
from coordinator.console.views.difference import logprobs_apart
from coordinator.directory import published
from coordinator.directory.chain import write_proof
from coordinator.directory.layout import RunDir
from coordinator.machine.children import FORKS
from coordinator.settings.tree import SettingsError
from rollout.engines.model_dir import policy_digest
from rollout.storage import hashing
from rollout.trajectory import Group, Sample
from tests.cluster.cluster import FAST, Cluster
from tests.coordinator.examples import tree
from tests.imports import shared_imports
from trainer.documents import PROOF


@pytest.fixture(scope="module")
def finished(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunDir]:
    """A run of three iterations; the last one was started with another learning rate."""
    place, patch = tmp_path_factory.mktemp("verified"), pytest.MonkeyPatch()
    cluster = Cluster(place / "run", cache, place)
    try:
        for name, value in {**shared_imports(), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"}.items():
            patch.setenv(name, value)
        common = (*FAST, "checkpoints.keep_last=4", "trainer.schedule=linear")
        assert cluster.run(1, *common, "--iterations", "2") == [0], cluster.everything_said()
        again = cluster.run(1, "--iterations", "3", "trainer.learning_rate=0.001")
        assert again == [0], cluster.everything_said()
        yield cluster.run_dir
    finally:
        cluster.close()
        patch.undo()


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_iteration_comes_out_again_as_it_was_trained_and_nothing_of_the_run_changes(
    finished: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.root.rglob("*") if path.is_file()}
    beside = tree(finished.root.parent)
    assert verify(finished.root, 2, files_only=False) == 0
    printed = capsys.readouterr().out
    assert "digests of checkpoints (1), batches (1), samples (1): each fits the next\n" in printed
    assert "iteration 2, made again here from its samples on: equal bit for bit\n" in printed
    assert {path: path.read_bytes() for path in before} == before
    assert tree(finished.root.parent) == beside


def test_iteration_comes_out_the_same_on_a_processor_that_rounds_in_another_way(
    finished: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.delenv(FORKS, raising=False)  # their server has chosen its kernels
    assert verify(finished.root, 2, files_only=False) == 0
    printed = capsys.readouterr().out
    if "equal bit for bit" not in printed:  # as on a machine that has no other kernels
        assert re.search(r"the weights lie \d\.\de-0[4-9] from those of the run, on a way of", printed)


def test_samples_that_differ_in_more_than_noise_are_others() -> None:
    def groups(logprob: float = -1.0, token: int = 5, reward: float = 1.0, slots: int = 2) -> list[Group]:
        return [
            Group(slot, "task", "", [
                Sample(np.array([3, token], np.int32), np.array([0, 1], np.uint8),
                       np.array([0, logprob], np.float32), "stop", "", reward)
            ])
            for slot in range(slots)
        ]  # fmt: skip

    assert logprobs_apart(groups(), groups()) == 0
    assert logprobs_apart(groups(), groups(logprob=-1.25)) == 0.25
    for other in (groups(token=6), groups(reward=0.0), groups(slots=1), groups(logprob=math.nan)):
        assert logprobs_apart(groups(), other) is None


def test_weights_that_no_training_has_made_are_found_although_every_digest_fits(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(shutil.copytree(finished.root, tmp_path / "run"))
    checkpoint = run_dir.checkpoint(3)
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if tensors[name].ndim == 2)
    tensors[name] = tensors[name] + np.float32(0.01)
    save_file(tensors, weights, metadata={"format": "pt"})
    result = published.read_result(checkpoint)
    facts = {**result.files, weights.name: hashing.file_facts(weights)}
    model = {name: one for name, one in facts.items() if published.is_part_of_model(name)}
    altered = result.model_copy(update={"files": facts, "policy": policy_digest(model)})
    (checkpoint / published.RESULT).write_bytes(altered.to_json())
    proof = json.loads((checkpoint / PROOF).read_text())
    write_proof(run_dir, proof["run_id"], proof["base_policy"], checkpoint)

    assert verify(run_dir.root, 3, files_only=False) == 1
    printed = capsys.readouterr().out
    assert "each fits the next" in printed
    assert f"1 of {len(tensors)} tensors of model.safetensors differ, the first is {name}" in printed
    assert "trained again here on its samples" in printed and "from those of the run, on a way of" in printed


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("checkpoints/iteration_000002/model.safetensors", "is missing or differs from result.json"),
        ("checkpoints/iteration_000002/trainer_state/*", "is missing or differs from result.json"),
        ("checkpoints/iteration_000002/proof.json", "has "),
        ("batches/iteration_000002/batch.safetensors", "has the digest"),
        ("train_trajectories/iteration_000002/*.safetensors", "differs from the manifest's checksum"),
        ("train_trajectories/iteration_000002/manifest.json", "has the digest"),
    ],
)
def test_a_flipped_bit_is_found_and_its_file_named(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, problem: str
) -> None:
    run_dir = RunDir(shutil.copytree(finished.root, tmp_path / "run"))
    damaged = sorted(run_dir.root.glob(file))[0]
    flip(damaged)
    assert verify(run_dir.root, None, files_only=True) == 1
    printed = capsys.readouterr().out
    assert "digests of" in printed and "NOT ALL FIT" in printed
    assert f"  iteration 2: {damaged} {problem}" in printed


@pytest.mark.parametrize(
    ("file", "name", "problem"),
    [
        ("checkpoints/iteration_000002/result.json", "policy", "names the policy f00d, its weights are"),
        ("checkpoints/iteration_000002/result.json", "base_policy", "was trained from the policy f00d; that"),
        ("checkpoints/iteration_000002/result.json", "batch_sha256", "by the checkpoint it is f00d"),
        ("batches/iteration_000002/batch.json", "sha256", "has the digest f00d, by the checkpoint it is"),
        ("batches/iteration_000002/batch.json", "manifest_sha256", "by batch.json it is f00d"),
        ("checkpoints/iteration_000001/result.json", "base_policy", "that of iteration 0 is"),
        ("checkpoints/iteration_000001/proof.json", "base_policy", "proof.json has base_policy f00d, it is"),
        ("checkpoints/iteration_000002/proof.json", "samples_sha256", "has samples_sha256 f00d, it is"),
    ],
)
def test_a_document_that_names_another_digest_is_found(
    finished: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, name: str, problem: str
) -> None:
    run_dir = RunDir(shutil.copytree(finished.root, tmp_path / "run"))
    path = run_dir.root / file
    path.write_text(json.dumps({**json.loads(path.read_text()), name: "f00d"}))
    assert verify(run_dir.root, None, files_only=True) == 1
    assert problem in capsys.readouterr().out


def test_a_checkpoint_names_its_samples_after_these_are_gone(finished: RunDir, tmp_path: Path) -> None:
    run_dir = RunDir(shutil.copytree(finished.root, tmp_path / "run"))
    manifest = hashlib.sha256(run_dir.manifest("train", 2).read_bytes()).hexdigest()
    shutil.rmtree(run_dir.batch(2))
    shutil.rmtree(run_dir.trajectories("train", 2))
    assert verify(run_dir.root, 2, files_only=True) == 0
    export(run_dir.root, 2, tmp_path / "out")
    proof = json.loads((tmp_path / "out" / PROOF).read_text())
    assert proof["samples_sha256"] == manifest
    first = json.loads((run_dir.checkpoint(1) / PROOF).read_text())
    assert (first["trained_from"], first["policy"]) == (proof["base_policy"], proof["trained_from"])


def test_distance_is_over_numbers_of_every_type(tmp_path: Path) -> None:
    for name, shift in (("before", 0), ("theirs", 4), ("ours", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        tensors = {
            kind: np.array([1 + shift], kind) for kind in ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u1")
        }
        save_file(tensors, tmp_path / name / "model.safetensors")
    apart, way = _distance(tmp_path / "theirs", tmp_path / "ours", tmp_path / "before")
    assert (apart, way) == (pytest.approx(np.sqrt(8 * 3.0**2)), pytest.approx(np.sqrt(8 * 4.0**2)))


def test_what_is_not_there_is_refused(finished: RunDir, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--iteration 9: .* has no such checkpoint; there are 1, 2, 3$"):
        verify(finished.root, 9, files_only=True)
    with pytest.raises(SettingsError, match="no run there"):
        verify(tmp_path / "nothing", None, files_only=True)
