"""Write and load a checkpoint: a Hugging Face directory with a `trainer_state/` inside.

model.safetensors (or shards), config.json, tokenizer files ...   loads as it is in transformers and vLLM;
                                    if adapters are trained: what peft saves, see trainer.model.lora
.model.safetensors.delta            if wanted: what makes model.safetensors of the base's, see storage.delta
content.json                        sums of the tensors, by which an engine proves that it has them
probe.json                          a few tokens, and the logprobs that an engine must find with these weights
trainer_state/                      see `state`; with trainer.save_interval above 1 it is elsewhere
result.json                         TrainResult; written last, so its presence says that all of it is here
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rollout.engines.model_dir import (
    ADAPTER_CONFIG,
    CONTENT,
    FROZEN,
    INDEX,
    PROBE,
    check_model_dir,
    companions,
    policy_digest,
    weight_files,
)
from rollout.storage import files, hashing, known_files
from rollout.storage.hashing import FileFacts
from rollout.storage.writer import Writer, copy_of
from trainer.checkpoint import hub_files, state
from trainer.checkpoint.outputs import Outputs, finish_copy
from trainer.checkpoint.probe import probe_document
from trainer.checkpoint.rank_files import gather_json, local_rank_and_world, rank_and_world
from trainer.checkpoint.restore import read_document, restore
from trainer.checkpoint.retrain import StateBefore, train_again
from trainer.checkpoint.state import CheckpointError, StateSaver
from trainer.documents import (
    PROOF,
    RESULT,
    STATE_DIR,
    Resume,
    SavedState,
    TrainedBatch,
    TrainRequest,
    TrainResult,
)
from trainer.model.learner import Learner, build_learner
from trainer.model.parallel import local_part
from trainer.progress import SILENT, Progress
from trainer.resume import saves_in_background
from trainer.settings import TrainerSettings

AT_HAND = Resume()
"""The trainer state is the base's own, if it has one."""

logger = logging.getLogger(__name__)


def load(
    base_dir: Path,
    policy: str,
    device: torch.device,
    settings: TrainerSettings,
    resume: Resume = AT_HAND,
    repeat: Callable[[Learner, TrainedBatch], object] | None = None,
    *,
    model_dir: Path | None = None,
    progress: Progress = SILENT,
) -> Learner:
    """Load the policy of `base_dir`, with its optimizer if there is a trainer state.

    Collective. `model_dir`: see build_learner. If `resume` names batches, the state belongs to an earlier
    policy, and `repeat` trains the learner on each batch. Raises CheckpointError unless the weights have the
    digest `policy`, the state belongs to them, and the repeated training has led back to them. Raises
    rollout.engines.model_dir.WeightsError for a directory that is not a whole model.
    """
    check_model_dir(base_dir)
    checksums = _checksums_of_weights(base_dir, progress)
    digest = policy_digest(checksums)
    if digest != policy:
        raise CheckpointError(
            f"{base_dir} holds policy {digest}, the request wants {policy}; name its checkpoint"
        )
    learner = build_learner(base_dir, device, settings, model_dir, progress)
    dtype = save_dtype(settings, device)
    if (frozen := checksums.get(FROZEN)) and not settings.lora.rank:
        is_ours = hub_files.holds_frozen(learner, base_dir / FROZEN, dtype)
        learner.frozen_file = frozen if is_ours else None
    if resume.from_start:
        assert repeat is not None and model_dir is not None, "batches to repeat need both"
        go_back = partial(_start_again, learner, model_dir, settings)
        begin = StateBefore(go_back, f"{model_dir}", "trained.json beside their batches")
        train_again(learner, begin, resume.repeat, repeat, dtype)
        return learner
    names = files.listing(base_dir)
    if resume.state_dir is None and STATE_DIR not in names:
        # A model that was never trained has none.
        if RESULT in names and rank_and_world()[0] == 0:
            logger.info("%s has no trainer state: a fresh optimizer goes on from it", base_dir)
        return learner
    state_dir = Path(resume.state_dir or base_dir / STATE_DIR)
    document = read_document(state_dir)
    state_policy = resume.state_policy or policy
    if document.policy != state_policy:
        raise CheckpointError(
            f"{state_dir} belongs to policy {document.policy}, the weights to go on from are {state_policy}; "
            f"restore the pair, or remove {state_dir} to start with a fresh optimizer"
        )
    go_back = partial(restore, learner, state_dir, document, progress)
    if resume.repeat:
        assert repeat is not None, "batches to repeat need it"
        begin = StateBefore(go_back, f"{state_dir}", f"{state_dir}")
        train_again(learner, begin, resume.repeat, repeat, dtype)
    else:
        go_back()
    return learner


def _checksums_of_weights(base_dir: Path, progress: Progress) -> dict[str, FileFacts]:
    """Size and sha256 of the weights' files as this node finds them. Collective: its ranks share the work."""
    rank, _ = rank_and_world()
    local_rank, ranks = local_rank_and_world()
    names = weight_files(base_dir)
    checksums = {
        name: known_files.file_facts(base_dir / name, progress.count_bytes)
        for name in names[local_rank::ranks]
    }
    shares = gather_json(checksums, f"reading {base_dir}")
    first = rank - local_rank
    return {name: facts for share in shares[first : first + ranks] for name, facts in share.items()}


def _start_again(learner: Learner, model_dir: Path, settings: TrainerSettings) -> None:
    """Put the weights that the run started from into `learner`, which has no optimizer state. Collective."""
    start = build_learner(model_dir, learner.device, settings, model_dir)
    with torch.no_grad():
        for name, parameter in learner.parameters.items():
            local_part(parameter).copy_(local_part(start.parameters[name]))


def save_dtype(settings: TrainerSettings, device: torch.device) -> torch.dtype:
    """Return the dtype in which the weights are served."""
    if settings.save_dtype == "auto":
        return getattr(torch, settings.computes_in(device.type == "cuda"))
    return getattr(torch, settings.save_dtype)


def write(
    learner: Learner,
    staging_dir: Path,
    request: TrainRequest,
    steps: int,
    metrics: dict[str, float],
    saver: StateSaver,
    probe: Sequence[int] = (),
    progress: Progress = SILENT,
    copied: Callable[[Mapping[str, FileFacts] | None], None] = lambda _files: None,
) -> TrainResult:
    """Write the whole checkpoint into the empty `staging_dir`, durably, and its result file last.

    Collective: every rank writes its share, and gets the result once the checkpoint is whole. `probe`: token
    ids whose logprobs are written with new weights. The trainer state goes into the checkpoint, or in the
    background with `saver` into request.state_dir (settings.save_interval): until `saver.finish` has
    returned, the learner must not change. The result has `metrics`, with `checkpoint_seconds` of this.

    With request.ahead new weights are copied to each node first, and then `copied` is called, with the files
    of this node's copy, or None if it has none. With request.offload the learner leaves its GPU before that.
    """
    begun_s = time.perf_counter()
    lead = rank_and_world()[0] == 0
    state_dir = _state_dir(request)
    inside = request.settings.state_interval == 1
    if lead and staging_dir.name not in files.listing(staging_dir.parent):
        raise CheckpointError(f"{staging_dir} is not there any more: a newer master has taken over")
    if lead and inside:
        files.make_directory(staging_dir / STATE_DIR)
    with Writer(staging_dir, progress.count_bytes) as writer, ExitStack() as stack:
        copy = None
        if steps and request.ahead and request.copy_dir is not None:
            copy = stack.enter_context(Writer(Path(request.copy_dir), progress.count_bytes, durable=False))
        weights = _write_parts(learner, Outputs(writer, copy), request, steps, probe)
        copy_files = finish_copy(copy) if steps and request.ahead else None
        if request.offload:  # the state is written from memory that is kept for it: fresh copies take long
            learner.to_host()
        if steps and request.ahead:
            copied(copy_files)
        if inside:
            if not state.lead_writes_all(learner):
                gather_json(None, "making the checkpoint's directories")
            state.write_pieces(state.pieces(learner), writer, f"{STATE_DIR}/")
        if steps and not request.delta:
            learner.written = {}
        elif steps:
            hub_files.write_deltas(learner, writer, weights)  # while all else is being written
        shares = gather_json(writer.finish(), "writing the checkpoint")
    written: dict[str, FileFacts] = {name: facts for share in shares for name, facts in share.items()}
    if steps:
        learner.frozen_file = written.get(FROZEN)
    document = SavedState(
        format=state.FORMAT,
        iteration=request.iteration,
        policy=policy_digest({name: facts for name, facts in written.items() if "/" not in name}),
        optimizer_step=learner.optimizer_step,
        entropy_control=learner.entropy_control,
        files={
            Path(name).name: facts
            for name, facts in sorted(written.items())
            if name.startswith(f"{STATE_DIR}/")
        },
    )
    if inside:
        data = document.to_json()
        written[f"{STATE_DIR}/{state.DOCUMENT}"] = hashing.facts_of(data)
        if lead:
            files.publish(staging_dir / STATE_DIR / state.DOCUMENT, data)
    result = TrainResult(
        iteration=request.iteration,
        policy=document.policy,
        base_policy=request.base_policy,
        batch_sha256=request.batch_sha256,
        files=dict(sorted(written.items())),
        steps=steps,
        optimizer_step=learner.optimizer_step,
        settings=request.settings,
        max_tokens=request.max_tokens,
        iterations=request.iterations,
        metrics=metrics | {"checkpoint_seconds": time.perf_counter() - begun_s},
    )
    if lead:
        files.publish(staging_dir / RESULT, result.to_json())
    gather_json(None, "waiting for the checkpoint's result file")
    if state_dir is not None:
        saver.start(learner, state_dir, document)
    return result


def _state_dir(request: TrainRequest) -> Path | None:
    """Return where this iteration's trainer state goes in the background; None if it does not."""
    is_due = saves_in_background(request.iteration, request.settings.state_interval)
    if is_due and request.state_dir is None:
        raise CheckpointError(
            f"iteration {request.iteration} saves its trainer state (trainer.save_interval="
            f"{request.settings.state_interval}), and the request has no state_dir for it"
        )
    return Path(request.state_dir) if request.state_dir else None


def _write_parts(
    learner: Learner, outputs: Outputs, request: TrainRequest, steps: int, probe: Sequence[int]
) -> dict[str, dict[str, Tensor]]:
    """Write this rank's share of what serves the model, and return the new weights in it. Collective."""
    lead = rank_and_world()[0] == 0
    if not steps:
        if lead:
            _copy_model(Path(request.base_dir), outputs, learner.frozen_file)
        return {}
    dtype = save_dtype(request.settings, learner.device)
    weights = _write_model(learner, outputs, request, dtype)
    document = ""
    layout = learner.layout
    if probe and (layout.data_rank == 0 or layout.sharded):  # replicas would all compute the same
        document = probe_document(learner, probe)
    if probe:
        if request.ahead:  # the copies get what the checkpoint gets
            document, *_ = gather_json(document if lead else "", "sharing the probe")
        outputs.add(PROBE, document.encode())
    return weights


def _write_model(
    learner: Learner, outputs: Outputs, request: TrainRequest, dtype: torch.dtype
) -> dict[str, dict[str, Tensor]]:
    """Write the weights as `dtype`; everything else that serves the model is copied. Collective.

    Returns the tensors of a whole model's weights in this rank's share, by file.
    """
    adapters = hasattr(learner.model, "peft_config")
    weights: dict[str, dict[str, Tensor]] = {}
    if adapters:
        hub_files.write_adapter(learner, outputs, request.model_name, dtype)
    else:
        weights = hub_files.write_weights(learner, outputs, dtype, Path(request.base_dir))
    if not outputs.keeps(0):
        return weights
    base_dir = Path(request.base_dir)
    companion_names = [name for name in _companions(base_dir) if name not in {"config.json", PROBE, CONTENT}]
    if not adapters:
        # Copied where there is one: transformers refuses to save some that it has loaded.
        with_generation = "generation_config.json" not in companion_names
        hub_files.write_config(learner.model, outputs, dtype, with_generation)
    for name in companion_names:
        if not (adapters and name == ADAPTER_CONFIG):
            outputs.add(name, files.read(base_dir / name))
    return weights


def _copy_model(base_dir: Path, outputs: Outputs, frozen: FileFacts | None) -> None:
    """Copy the model as it is, byte for byte: no step was taken, so the digest must stay."""
    names = weight_files(base_dir)
    for name in [*names, INDEX] if INDEX in files.listing(base_dir) else names:
        if name == FROZEN and frozen is not None:
            outputs.link(name, base_dir / name, frozen)
        else:
            outputs.add(name, copy_of(base_dir / name))
    for name in _companions(base_dir):
        outputs.add(name, files.read(base_dir / name))


def _companions(base_dir: Path) -> list[str]:
    """Return the files of a model directory that go with its weights: configuration, tokenizer, probe."""
    names = [name for name in companions(base_dir) if name not in {RESULT, PROOF}]
    return [name for name in names if not name.startswith(f"{STATE_DIR}/")]
