import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from rollout.engines.content import saved_sums
from rollout.engines.model_dir import CONTENT, WeightsError, check_model_dir, policy_digest, tensor_names
from rollout.storage import delta, hashing, retry, writer
from rollout.storage.hashing import checksums
from rollout.storage.writer import Writer
from tests.faultfs import FaultFs, unavailable
from trainer import progress
from trainer.batch.batch import Batch
from trainer.batch.building import build_batch
from trainer.checkpoint import checkpoint, hub_files, outputs, state
from trainer.checkpoint.checkpoint import CheckpointError
from trainer.checkpoint.restore import read_document
from trainer.checkpoint.state import StateSaver
from trainer.documents import Resume, SavedState, TrainRequest, TrainResult
from trainer.model.learner import Learner, build_learner
from trainer.progress import NOT_SAVED
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
WORTH = hub_files.WORTH


def run_phase(learner: Learner, batch: Batch, request: TrainRequest) -> TrainResult:
    """Train as a single rank does, and write."""
    stats = train(learner, batch, request.settings, max_tokens=32, report=lambda line: None)
    saver = StateSaver(timeout_s=60)
    result = checkpoint.write(learner, Path(request.staging_dir), request, len(stats), {"loss": 0.0}, saver)
    saver.finish()
    return result


def with_settings(request: TrainRequest, **changes: Any) -> TrainRequest:
    return request.model_copy(update={"settings": request.settings.model_copy(update=changes)})


def load_base(request: TrainRequest) -> Learner:
    return checkpoint.load(Path(request.base_dir), request.base_policy, CPU, request.settings)


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.parameters.items()}


Trained = tuple[Learner, TrainRequest, TrainResult]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[Learner, TrainResult]]]:
    """What the first of the tests that need a training has written, and its learner."""
    return tmp_path_factory.mktemp("once") / "staging", []


@pytest.fixture
def trained(
    batch: Batch,
    make_request: Callable[..., TrainRequest],
    once: tuple[Path, list[tuple[Learner, TrainResult]]],
) -> Trained:
    """A learner, which is to stay as it is, and a copy of what it has written."""
    request, (written, done) = make_request(batch), once
    if not done:
        learner = load_base(request)
        done.append((learner, run_phase(learner, batch, request)))
        shutil.copytree(request.staging_dir, written)
    else:
        shutil.copytree(written, request.staging_dir, dirs_exist_ok=True)
    return done[0][0], request, done[0][1]


def test_checkpoint_loads_with_transformers_and_holds_the_trained_weights(trained: Trained) -> None:
    learner, request, _ = trained
    model = AutoModelForCausalLM.from_pretrained(request.staging_dir, dtype="auto")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == learner.parameters.keys()
    for name, parameter in learner.parameters.items():
        torch.testing.assert_close(loaded[name], parameter, rtol=0, atol=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in tensor_names(request.staging_dir)
    tokenizer = AutoTokenizer.from_pretrained(request.staging_dir)
    assert tokenizer.decode(tokenizer.encode("27+58=")) == "27+58="
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(request.base_dir).chat_template


OWN = ("additional_chat_templates/tool_use.jinja", "preprocessor_config.json", "own_code.py", "tekken.json")
FOREIGN = ("consolidated.safetensors", "original/params.json", "onnx/model.onnx", "pytorch_model.bin")


@pytest.mark.parametrize("trains", [True, False])
def test_all_that_goes_with_the_weights_is_in_the_checkpoint_and_nothing_foreign(
    trains: bool, batch: Batch, make_request: Callable[..., TrainRequest], tmp_path: Path
) -> None:
    request = make_request(batch)
    base_dir = Path(shutil.copytree(request.base_dir, tmp_path / "with_more"))
    for name in (*OWN, *FOREIGN):
        (base_dir / name).parent.mkdir(exist_ok=True)
        (base_dir / name).write_text(name)
    request = request.model_copy(update={"base_dir": str(base_dir)})
    learner, staging_dir = load_base(request), Path(request.staging_dir)
    if trains:
        result = run_phase(learner, batch, request)
    else:
        result = checkpoint.write(learner, staging_dir, request, 0, {}, StateSaver(timeout_s=60))
        assert result.policy == request.base_policy
    assert all((staging_dir / name).read_text() == name for name in OWN) and set(OWN) < set(result.files)
    assert not any((staging_dir / name).exists() or name in result.files for name in FOREIGN)
    assert all(name.startswith("state-") for name in read_document(staging_dir / "trainer_state").files)
    check_model_dir(staging_dir)


def test_result_names_every_file_with_its_checksum_and_the_new_policy(trained: Trained) -> None:
    _, request, result = trained
    staging_dir = Path(request.staging_dir)
    assert TrainResult.from_json((staging_dir / "result.json").read_bytes()) == result
    on_disk = {str(path.relative_to(staging_dir)) for path in staging_dir.rglob("*") if path.is_file()}
    assert on_disk == {*result.files, "result.json"}
    top = {name: facts for name, facts in checksums(staging_dir).items() if name != "result.json"}
    assert {name: facts for name, facts in result.files.items() if "/" not in name} == top
    check_model_dir(staging_dir)
    assert result.policy == policy_digest(top) != request.base_policy
    assert (result.steps, result.optimizer_step, result.iteration) == (3, 3, 1)
    assert (result.base_policy, result.batch_sha256) == (request.base_policy, request.batch_sha256)


def test_result_is_written_after_everything_else_is_durable(
    batch: Batch, make_request: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = make_request(batch)
    staging_dir = Path(request.staging_dir)
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), staging_dir)
        synced.append(re.sub(r"\.(\w.*)\.\w+\.tmp$", r"\1", path))
        assert not (staging_dir / "result.json").exists() or synced[-1] == "."
        real_fsync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    result = run_phase(load_base(request), batch, request)
    *before, state_document, state_dir, last_file, last = synced
    assert {*before, state_document} == set(result.files) and len(before) == len(set(before))
    assert (state_document, state_dir) == ("trainer_state/state.json", "trainer_state")
    assert (last_file, last) == ("result.json", ".")


def test_every_file_has_the_mode_of_an_ordinary_one(trained: Trained) -> None:
    _, request, result = trained
    modes = {
        (Path(request.staging_dir) / name).stat().st_mode & 0o777 for name in [*result.files, "result.json"]
    }
    assert len(modes) == 1


def test_resumed_training_and_adapted_entropy_bonus_go_on_bit_by_bit(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    given = {"entropy_target": 5.0, "entropy_bonus": 0.01, "entropy_step": 0.003, "learning_rate": 1e-3}
    first = with_settings(make_request(batch), **given)
    uninterrupted = load_base(first)
    run_phase(uninterrupted, batch, first)
    second = with_settings(make_request(batch, base=Path(first.staging_dir)), **given)
    resumed = load_base(second)
    assert resumed.optimizer_step == 3
    steps = [
        train(learner, batch, second.settings, max_tokens=32, report=lambda line: None)
        for learner in (uninterrupted, resumed)
    ]
    assert [step.entropy_bonus for step in steps[0]] == pytest.approx([0.019, 0.022, 0.025])
    assert [step.entropy_bonus for step in steps[0]] == [step.entropy_bonus for step in steps[1]]
    assert resumed.entropy_control == uninterrupted.entropy_control
    torch.testing.assert_close(weights(resumed), weights(uninterrupted), rtol=0, atol=0)


def test_large_state_is_several_files_which_are_read_as_one(
    batch: Batch, make_request: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "FILE_BYTES", 1 << 20)
    request = make_request(batch)
    result = run_phase(learner := load_base(request), batch, request)
    names = [name for name in result.files if name.endswith(".safetensors") and "/" in name]
    assert names == [f"trainer_state/state-00001-of-00001-{k}.safetensors" for k in range(1, len(names) + 1)]
    assert len(names) > 3 and max(result.files[name]["bytes"] for name in names) < 1.5 * (1 << 20)
    again = checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings)
    moments = [mine.optimizer.state_dict()["state"] for mine in (learner, again)]
    torch.testing.assert_close(*moments, rtol=0, atol=0)
    torch.testing.assert_close(weights(again), weights(learner), rtol=0, atol=0)


def test_without_trainer_state_the_optimizer_starts_afresh(
    batch: Batch, make_request: Callable[..., TrainRequest], trained: Trained
) -> None:
    shutil.rmtree(Path(trained[1].staging_dir) / "trainer_state")
    learner = load_base(make_request(batch, base=Path(trained[1].staging_dir)))
    assert learner.optimizer_step == 0
    assert not learner.optimizer.state


def test_lower_precision_checkpoint_keeps_the_master_weights(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    request = with_settings(make_request(batch), save_dtype="bfloat16")
    learner = load_base(request)
    result = run_phase(learner, batch, request)
    staging_dir = Path(request.staging_dir)
    assert {dtype for dtype, _ in tensor_names(staging_dir).values()} == {"BF16"}
    assert "lm_head.weight" not in tensor_names(staging_dir)
    assert json.loads((staging_dir / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(staging_dir, dtype="auto").dtype == torch.bfloat16
    resumed = checkpoint.load(staging_dir, result.policy, CPU, request.settings)
    for name, parameter in weights(learner).items():
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(resumed.parameters[name].detach(), parameter, rtol=0, atol=0)
        assert resumed.parameters[name].grad is not None


def test_empty_batch_leaves_the_weights_byte_for_byte_and_the_digest(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    empty = build_batch([], manifest_sha256="m", policy="p", temperature=1.0, seed=0)
    base = with_settings(make_request(batch), save_dtype="bfloat16")
    learner = load_base(base)
    run_phase(learner, batch, base)
    request = make_request(empty, base=Path(base.staging_dir))
    result = run_phase(learner, empty, request)
    assert result.policy == request.base_policy
    assert (result.steps, result.optimizer_step) == (0, 3)
    before, after = checksums(Path(base.staging_dir)), checksums(Path(request.staging_dir))
    assert before.keys() == after.keys()
    assert {name for name in before if before[name] != after[name]} == {"result.json"}
    resumed = checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings)
    assert resumed.optimizer_step == 3
    for name, parameter in weights(learner).items():
        torch.testing.assert_close(resumed.parameters[name].detach(), parameter, rtol=0, atol=0)


def rebuilt(before: Path, directory: Path, name: str = "model.safetensors") -> bytes:
    """What the delta in a checkpoint makes of the file in the one before."""
    found: list[bytes] = []
    change = (directory / delta.delta_name(name)).read_bytes()
    delta.apply(io.BytesIO((before / name).read_bytes()), [change], found.append)
    return b"".join(found)


def deltas(directory: str) -> list[str]:
    return sorted(name for name in os.listdir(directory) if name.endswith(".delta"))


def asked_for_delta(request: TrainRequest, **settings: Any) -> TrainRequest:
    """Updates that bfloat16 hardly shows."""
    quiet = {"learning_rate": 1e-6, "save_dtype": "bfloat16", **settings}
    return with_settings(request, **quiet).model_copy(update={"delta": True})


@pytest.mark.parametrize("save_dtype", ["bfloat16", "float32"])
def test_delta_makes_the_weights_of_those_before_and_stands_in_the_result(
    batch: Batch, make_request: Callable[..., TrainRequest], save_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if save_dtype == "float32":  # nearly every number changes
        monkeypatch.setattr(hub_files, "WORTH", 1.0)
    first = asked_for_delta(make_request(batch), save_dtype=save_dtype)
    learner = load_base(first)
    run_phase(learner, batch, first)
    assert not deltas(first.staging_dir), "nothing was written before"
    second = asked_for_delta(make_request(batch, base=Path(first.staging_dir)), save_dtype=save_dtype)
    result = run_phase(learner, batch, second)
    before, after = Path(first.staging_dir), Path(second.staging_dir)
    assert deltas(second.staging_dir) == [".model.safetensors.delta"]
    assert rebuilt(before, after) == (after / "model.safetensors").read_bytes()
    assert (before / "model.safetensors").read_bytes() != (after / "model.safetensors").read_bytes()
    facts = hashing.file_facts(after / ".model.safetensors.delta")
    assert result.files[".model.safetensors.delta"] == facts
    share = facts["bytes"] / result.files["model.safetensors"]["bytes"]
    assert share < 0.1 if save_dtype == "bfloat16" else share > WORTH
    assert checkpoint.load(after, result.policy, CPU, second.settings).optimizer_step == 6


def test_delta_follows_an_iteration_without_a_step_and_is_not_carried_along(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    empty = build_batch([], manifest_sha256="m", policy="p", temperature=1.0, seed=0)
    done = [asked_for_delta(make_request(batch))]
    learner = load_base(done[0])
    run_phase(learner, batch, done[0])
    for trained_on in (batch, empty, batch):
        done.append(asked_for_delta(make_request(trained_on, base=Path(done[-1].staging_dir))))
        run_phase(learner, trained_on, done[-1])
    assert [len(deltas(request.staging_dir)) for request in done] == [0, 1, 0, 1]
    before, after = Path(done[2].staging_dir), Path(done[3].staging_dir)
    assert rebuilt(before, after) == (after / "model.safetensors").read_bytes()


def test_no_delta_is_written_that_is_not_wanted_or_not_worth_it_or_has_nothing_before_it(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    first = asked_for_delta(make_request(batch))
    learner = load_base(first)
    run_phase(learner, batch, first)
    unwanted = asked_for_delta(make_request(batch, base=Path(first.staging_dir)))
    unwanted = unwanted.model_copy(update={"delta": False})
    run_phase(learner, batch, unwanted)
    after_it = asked_for_delta(make_request(batch, base=Path(unwanted.staging_dir)))
    run_phase(learner, batch, after_it)
    large = asked_for_delta(make_request(batch, base=Path(after_it.staging_dir)), learning_rate=0.01)
    run_phase(learner, batch, large)
    loaded = asked_for_delta(make_request(batch, base=Path(large.staging_dir)))
    run_phase(load_base(loaded), batch, loaded)
    for request in (unwanted, after_it, large, loaded):
        assert not deltas(request.staging_dir), request.staging_dir


def test_weights_with_another_digest_are_refused(base_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds policy \w+, the request wants 0123"):
        checkpoint.load(base_dir, "0123", CPU, TrainerSettings())


def test_trainer_state_is_read_where_one_call_in_five_fails(trained: Trained, tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    learner, request, result = trained
    with FaultFs(tmp_path / "fs", 1) as shared:
        state = shutil.copytree(Path(request.staging_dir) / "trainer_state", shared.backing / "state")
        shared.set(error_rate=0.2, errors=("EIO", "ESTALE"))
        resume = Resume(state_dir=str(shared[0].path / state.name))
        after = checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings, resume)
    assert after.optimizer_step == learner.optimizer_step > 0
    moments = [
        [each.optimizer.state[p]["exp_avg"] for p in each.parameters.values()] for each in (learner, after)
    ]
    assert all(torch.equal(one, other) for one, other in zip(*moments, strict=True))


def test_trainer_state_of_other_weights_is_refused(base_dir: Path, tmp_path: Path, trained: Trained) -> None:
    mixed = shutil.copytree(base_dir, tmp_path / "mixed")
    shutil.copytree(Path(trained[1].staging_dir) / "trainer_state", mixed / "trainer_state")
    with pytest.raises(
        CheckpointError, match=r"belongs to policy .* restore the pair, or remove .*/mixed/trainer_state"
    ):
        checkpoint.load(mixed, trained[1].base_policy, CPU, TrainerSettings())


def test_trainer_state_of_another_model_is_refused(trained: Trained) -> None:
    _, request, result = trained
    directory = Path(request.staging_dir) / "trainer_state"
    path = directory / "state-00001-of-00001.safetensors"
    with safe_open(path, framework="pt") as saved:
        names, metadata = sorted(saved.keys()), saved.metadata()
        save_file({name: saved.get_tensor(name) for name in names[1:]}, path, metadata)
    document = SavedState.from_json((directory / "state.json").read_bytes())
    files = document.model_copy(update={"files": {path.name: checksums(directory)[path.name]}})
    (directory / "state.json").write_bytes(files.to_json())
    with pytest.raises(
        CheckpointError, match=rf"is not the trainer state of this model, e.g. \['{names[0]}'"
    ):
        checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings)


def test_damaged_trainer_state_is_refused(trained: Trained) -> None:
    _, request, result = trained
    path = Path(request.staging_dir) / "trainer_state" / "state-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"00001.safetensors .* differs .* fresh optimizer"):
        checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings)


def test_trainer_state_of_an_older_format_is_refused(trained: Trained) -> None:
    _, request, result = trained
    document = {"format": 1, "policy": result.policy, "optimizer_step": 3}
    (Path(request.staging_dir) / "trainer_state" / "state.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"format 1, this version reads 2; remove .*trainer_state"):
        checkpoint.load(Path(request.staging_dir), result.policy, CPU, request.settings)


def test_directory_that_is_no_whole_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError):
        checkpoint.load(tmp_path, "0123", CPU, TrainerSettings())


def test_state_that_cannot_be_saved_in_the_background_is_named_and_training_goes_on(
    trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.1)
    learner, _, result = trained
    saver = StateSaver(timeout_s=60)
    document = SavedState(format=2, iteration=1, policy=result.policy, optimizer_step=3, files={})
    saver.start(learner, tmp_path / "missing", document)
    saver.finish()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(NOT_SAVED) and "No such file" in said and "missing" in said


def test_iteration_whose_state_is_due_needs_a_directory_for_it(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    request = with_settings(make_request(batch), save_interval=1 + make_request(batch).iteration)
    request = request.model_copy(update={"iteration": request.settings.save_interval})
    with pytest.raises(CheckpointError, match="has no state_dir"):
        run_phase(load_base(request), batch, request)
    assert not any(Path(request.staging_dir).iterdir())


def test_merged_experts_are_shared_out_under_the_names_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Qwen3MoeConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=32,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "base")
    learner = build_learner(tmp_path / "base", CPU, TrainerSettings())
    (tmp_path / "shares").mkdir()
    monkeypatch.setattr(hub_files, "WHOLE_BYTES", 0)
    for rank in range(3):
        for module in (hub_files, outputs):
            monkeypatch.setattr(module, "rank_and_world", lambda rank=rank: (rank, 3))
        with Writer(tmp_path / "shares") as written:
            hub_files.write_weights(learner, outputs.Outputs(written), torch.float32, tmp_path)
            written.finish()
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "shares")
    found = tensor_names(tmp_path / "shares")
    assert found == tensor_names(tmp_path / "base")
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in found
    sizes = [path.stat().st_size for path in (tmp_path / "shares").glob("*.safetensors")]
    assert len(sizes) == 3 and max(sizes) < 0.5 * sum(sizes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "shares").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded[name], tensor)


@pytest.mark.parametrize("save_dtype", ["float32", "bfloat16"])
def test_sums_of_the_weights_are_written_beside_them_and_beside_no_others(
    batch: Batch, make_request: Callable[..., TrainRequest], save_dtype: str
) -> None:
    first = with_settings(make_request(batch), save_dtype=save_dtype)
    result = run_phase(load_base(first), batch, first)
    directory = Path(first.staging_dir)
    written = saved_sums(directory, torch.float32)
    (directory / CONTENT).rename(directory / "sums")
    assert CONTENT in result.files and policy_digest(checksums(directory)) == result.policy
    assert written == saved_sums(directory, torch.float32) and len(written) > 10
    (directory / "sums").rename(directory / CONTENT)
    shutil.rmtree(directory / "trainer_state")
    adapters = with_settings(make_request(batch, base=directory), lora=LoraSettings(rank=2))
    assert CONTENT not in run_phase(load_base(adapters), batch, adapters).files


def test_adapters_are_written_as_peft_does_and_go_on_with_their_state(
    batch: Batch, make_request: Callable[..., TrainRequest]
) -> None:
    first = with_settings(make_request(batch), lora=LoraSettings(rank=2))
    learner = load_base(first)
    result = run_phase(learner, batch, first)
    names = {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "trainer_state/state.json"}
    assert names <= result.files.keys() and "config.json" not in result.files
    second = make_request(batch, base=Path(first.staging_dir)).model_copy(update={"settings": first.settings})
    resumed = load_base(second)
    assert resumed.optimizer_step == 3
    for name, parameter in weights(learner).items():
        assert torch.equal(resumed.parameters[name], parameter)
    assert (
        run_phase(resumed, batch, second).files["adapter_config.json"] == result.files["adapter_config.json"]
    )


def test_rank_that_wakes_after_its_staging_directory_has_gone_makes_no_other(trained: Trained) -> None:
    learner, request, _ = trained
    staging = Path(request.staging_dir)
    shutil.rmtree(staging)
    with pytest.raises(CheckpointError, match="is not there any more"):
        checkpoint.write(learner, staging, request, 3, {}, StateSaver(timeout_s=60))
    assert not staging.exists()


def test_what_is_hashed_read_and_written_is_progress(
    batch: Batch, make_request: Callable[..., TrainRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for module in (hashing, writer):
        monkeypatch.setattr(module, "CHUNK_BYTES", 10_000)
    monkeypatch.setattr(progress, "PART_BYTES", 10_000)
    said: list[tuple[int, int]] = []
    moving = progress.Progress(lambda done, total: said.append((done, total)))
    request = make_request(batch)
    base_dir = Path(request.base_dir)
    size = sum(path.stat().st_size for path in base_dir.glob("*.safetensors"))
    learner = checkpoint.load(base_dir, request.base_policy, CPU, request.settings, progress=moving)
    hashed = len(said)
    assert hashed >= size // 10_000 > 20, "one for each part, not one for all"
    train(learner, batch, request.settings, max_tokens=32, report=lambda line: None)
    saver = StateSaver(timeout_s=60)
    result = checkpoint.write(learner, Path(request.staging_dir), request, 1, {}, saver, progress=moving)
    written = sum(facts["bytes"] for facts in result.files.values())
    assert len(said) - hashed >= written // 10_000 - 2 > hashed
    assert said == sorted(said) and all(done <= total for done, total in said)


def test_ranks_of_a_node_hash_a_share_each_and_learn_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"model-{number}.safetensors" for number in range(5)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    index = {"weight_map": dict(zip("abcde", names, strict=True))}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    hashed: list[str] = []
    real = hashing.file_facts
    monkeypatch.setattr(
        hashing, "file_facts", lambda path, moved: hashed.append(path.name) or real(path, moved)
    )
    nodes = [0, 0, 0, 1, 1]  # three ranks on one node, two on the other
    shares: dict[int, Any] = {}

    def gather(mine: Any, _doing: str) -> list[Any]:
        shares[rank] = mine
        return [shares.get(other, {}) for other in range(len(nodes))]

    monkeypatch.setattr(checkpoint, "gather_json", gather)
    for turn in (1, 2):  # the first fills the shares
        for rank, node in enumerate(nodes):
            monkeypatch.setenv("LOCAL_RANK", str(rank - nodes.index(node)))
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(nodes.count(node)))
            monkeypatch.setattr(checkpoint, "rank_and_world", lambda rank=rank: (rank, len(nodes)))
            found = checkpoint._checksums_of_weights(tmp_path, progress.SILENT)
            assert turn == 1 or found == {name: hashing.facts_of(name.encode()) for name in names}
        if turn == 1:
            assert sorted(hashed) == sorted(names * 2), "once a node"
