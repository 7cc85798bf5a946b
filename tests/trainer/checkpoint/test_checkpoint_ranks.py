"""Checkpoints that several ranks write together, and that other numbers of ranks continue."""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rollout.engines.model_dir import check_model_dir, model_files, policy_digest, tensor_names
from rollout.storage.delta import delta_name
from rollout.storage.hashing import checksums
from tests.paths import REPOSITORY
from tests.trainer.checkpoint.test_checkpoint import rebuilt
from tests.trainer.checkpoint.test_probe import logprobs_of
from trainer.batch.batch import Batch
from trainer.documents import SavedState, TrainRequest, TrainResult

JOB_TIMEOUT_S = 120.0
RANKS = 3


ROUNDED = 3e-5
"""How far weights may lie apart: a last bit may decide how one is rounded, and so change all
gradients a little. Without its moments AdamW would take steps of 1e-4 and more."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("job")


@pytest.fixture
def root(job: Path, make_request: Callable[..., TrainRequest], batch: Batch) -> Path:
    """The directory of the job of checkpoint_ranks.py, which has come to its end."""
    if not any(job.iterdir()):
        for k in (1, 2, 3):
            request = make_request(batch)
            # By default AdamW takes whole steps on the smallest gradients, whose signs rounding decides.
            more = {"save_dtype": "bfloat16", "eps": 0.1, "max_tokens_per_microbatch": 512}
            settings = request.settings.model_copy(update=more)
            (job / f"request_{k}.json").write_bytes(
                request.model_copy(update={"settings": settings}).to_json()
            )
        _run(job)
    return job


def _run(job: Path) -> None:
    child = Path(__file__).with_name("checkpoint_ranks.py")
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    with (job / "log").open("w+") as log:
        ranks = subprocess.Popen(
            [sys.executable, child, str(job)],
            env=os.environ | {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = ranks.wait(JOB_TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(ranks.pid, signal.SIGKILL)
            ranks.wait()
        assert code == 0, (job / "log").read_text()


def claim(root: Path, name: str) -> float:
    return json.loads((root / "claims" / f"{name}.json").read_text())


@pytest.mark.parametrize("other", ["two_2", "copies_2", "alone_2", "back_3", "hybrid_2", "after_hybrid_3"])
def test_run_goes_on_exactly_on_another_number_of_ranks_and_in_another_layout(root: Path, other: str) -> None:
    assert claim(root, other) <= ROUNDED


def test_nodes_that_hold_a_whole_model_each_share_the_writing_of_its_state(root: Path) -> None:
    states = sorted((root / "hybrid_2" / "trainer_state").glob("*.safetensors"))
    held = [load_file(path).keys() for path in states]
    assert len(held) == 2 and held[0] and held[1] and not held[0] & held[1]


def test_every_rank_writes_a_share_of_whole_tensors_that_transformers_loads(root: Path) -> None:
    directory = root / "main_1"
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    index = json.loads((directory / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == sum(
        2 * math.prod(shape) for _, shape in tensor_names(directory).values()
    )
    assert {dtype for dtype, _ in tensor_names(directory).values()} == {"BF16"}
    check_model_dir(directory)
    assert tensor_names(directory).keys() == tensor_names(root / "alone_2").keys()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    saved = load_file(directory / files[0])
    parameters = dict(model.named_parameters())
    assert saved and all(torch.equal(parameters[name], tensor) for name, tensor in saved.items())


def test_result_names_the_files_of_all_ranks(root: Path) -> None:
    directory = root / "main_1"
    result = TrainResult.from_json((directory / "result.json").read_bytes())
    found = checksums(directory)
    found |= {
        f"trainer_state/{name}": facts for name, facts in checksums(directory / "trainer_state").items()
    }
    assert {**result.files, "result.json": found["result.json"]} == found
    assert policy_digest(checksums(directory)) == result.policy


def test_each_rank_writes_the_delta_of_its_own_file(root: Path) -> None:
    names = [f"model-{k:05d}-of-00003.safetensors" for k in (1, 2, 3)]
    result = TrainResult.from_json((root / "main_2" / "result.json").read_bytes())
    assert {name for name in result.files if name.endswith(".delta")} == {delta_name(name) for name in names}
    for name in names:
        assert rebuilt(root / "main_1", root / "main_2", name) == (root / "main_2" / name).read_bytes()


def test_each_node_has_a_copy_of_the_new_policy_before_the_checkpoint_is_whole(root: Path) -> None:
    for iteration, nodes in ((2, (0, 1)), (3, (0,))):
        directory = root / f"main_{iteration}"
        model = checksums(directory, names=model_files(directory))
        del model["result.json"]
        said = [json.loads((root / f"copied_{iteration}.{rank}.json").read_bytes()) for rank in range(RANKS)]
        assert all(each["is_early"] for each in said)
        assert [each["files"] for each in said] == [model, model, model if 1 in nodes else None]
        for node in nodes:
            assert checksums(root / f"copy_{iteration}.{node}") == model
        check_model_dir(root / f"copy_{iteration}.0")


def test_ranks_write_only_their_part_of_the_trainer_state(root: Path) -> None:
    sizes = [path.stat().st_size for path in (root / "main_1" / "trainer_state").glob("*.safetensors")]
    whole = (root / "alone_2" / "trainer_state" / "state-00001-of-00001.safetensors").stat().st_size
    assert len(sizes) == RANKS and max(sizes) < 0.4 * whole
    assert sum(sizes) == pytest.approx(whole, rel=0.05)


def test_probe_of_a_sharded_model_holds_the_logprobs_of_the_weights_as_they_are_saved(root: Path) -> None:
    probe = json.loads((root / "main_1" / "probe.json").read_bytes())
    assert probe["logprobs"] == pytest.approx(logprobs_of(root / "main_1", probe["token_ids"]), abs=1e-5)


def test_state_is_saved_in_the_background_beside_the_checkpoint_of_its_iteration(root: Path) -> None:
    for iteration in (2, 3):
        result = TrainResult.from_json((root / f"main_{iteration}" / "result.json").read_bytes())
        assert not any("trainer_state" in name for name in result.files)
    document = SavedState.from_json((root / "state_2" / "state.json").read_bytes())
    found = checksums(root / "state_2")
    assert {**document.files, "state.json": found["state.json"]} == found
    assert (document.iteration, document.optimizer_step) == (2, 6)
    assert document.policy == policy_digest(checksums(root / "main_2"))


def test_iteration_without_a_state_is_trained_again_from_an_earlier_one(root: Path) -> None:
    assert claim(root, "repeated_3") <= ROUNDED
    log = (root / "log").read_text()
    assert log.count("training again on iteration 3") == 2, "the second time from the start of the run"
    assert re.search(r"iterations 3 to 3 were trained again .*single one at most .* on a way of", log)


def test_before_the_first_state_training_is_repeated_from_the_start_of_the_run(root: Path) -> None:
    assert claim(root, "from_start") <= 2 * ROUNDED


def test_training_again_that_ends_elsewhere_is_refused(root: Path) -> None:
    refusal = (root / "claims" / "refusal.txt").read_text()
    assert re.search(r"was not the same training. .* fresh optimizer, remove .*state_2", refusal)
