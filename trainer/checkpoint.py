"""A Hugging Face directory and, inside it, `trainer_state/`: what it takes to go on training.

model.safetensors (or shards), config.json, tokenizer files ...   loads as it is in transformers and vLLM
probe.json                          a few tokens, and the logprobs that an engine must find with these weights
trainer_state/state.json            format, digest of the weights beside it, optimizer step
trainer_state/optimizer.safetensors AdamW's moments `exp_avg.<parameter>`, `exp_avg_sq.<parameter>`, and
                                    `master.<parameter>` in float32 where the model was saved in less
result.json                         TrainResult; written last, so its presence says that all of it is here
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig

from rollout.engine_admin import PROBE
from rollout.weights import check_model_dir, file_checksums, policy_digest
from trainer.model import Learner, load_model
from trainer.probe import write_probe
from trainer.request import FileInfo, TrainRequest, TrainResult

FORMAT = 1
RESULT = "result.json"
STATE_DIR = "trainer_state"

_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"}


class CheckpointError(RuntimeError):
    """A checkpoint is not what the request says, or its parts do not belong together."""


def load(base_dir: Path, policy: str, device: torch.device) -> Learner:
    """The policy of `base_dir`, ready to go on: with its optimizer where there is a `trainer_state/`.

    Raises CheckpointError unless the weights have the digest `policy` and the trainer state belongs to
    them, and rollout.weights.WeightsError for a directory that is not a whole model.
    """
    check_model_dir(base_dir)
    found = policy_digest(file_checksums(base_dir))
    if found != policy:
        raise CheckpointError(
            f"{base_dir} holds policy {found}, the request wants {policy}; name its checkpoint"
        )
    model = load_model(base_dir, device)
    state_dir = base_dir / STATE_DIR
    if not state_dir.is_dir():
        return Learner(model)
    about = json.loads((state_dir / "state.json").read_text())
    if about["format"] != FORMAT:
        raise CheckpointError(f"{state_dir} has format {about['format']}, this version reads {FORMAT}")
    if about["policy"] != policy:
        raise CheckpointError(
            f"{state_dir} belongs to policy {about['policy']}, the weights beside it are {policy}; "
            f"restore the pair, or remove {STATE_DIR} to start with a fresh optimizer"
        )
    learner = Learner(model, about["optimizer_step"])
    _restore(learner, state_dir / "optimizer.safetensors")
    return learner


def write(
    learner: Learner,
    staging_dir: Path,
    request: TrainRequest,
    steps: int,
    metrics: dict[str, float],
    dtype: torch.dtype | None = None,
    probe: Sequence[int] = (),
) -> TrainResult:
    """Write the whole checkpoint into the empty `staging_dir`, durably, and its result file last.

    The weights are saved as `dtype`, by default bfloat16 from a GPU and float32 from a CPU. `probe`: token
    ids whose logprobs are written with new weights.
    """
    base_dir = Path(request.base_dir)
    dtype = dtype or (torch.bfloat16 if learner.device.type == "cuda" else torch.float32)
    if steps:
        _write_model(learner, staging_dir, base_dir, dtype)
        if probe:
            write_probe(learner, probe, dtype, staging_dir)
    else:
        _copy_model(base_dir, staging_dir)
    files = file_checksums(staging_dir)
    policy = policy_digest(files)
    # A copied model may be in less than float32 too.
    _write_state(learner, staging_dir / STATE_DIR, policy, with_master=dtype != torch.float32 or not steps)
    files |= {f"{STATE_DIR}/{name}": info for name, info in file_checksums(staging_dir / STATE_DIR).items()}
    result = TrainResult(
        iteration=request.iteration,
        policy=policy,
        base_policy=request.base_policy,
        batch_sha256=request.batch_sha256,
        files={name: FileInfo(**facts) for name, facts in sorted(files.items())},
        steps=steps,
        optimizer_step=learner.optimizer_step,
        metrics=metrics,
    )
    for name in result.files:
        # safetensors makes files that nobody but their owner may read.
        shutil.copymode(staging_dir / "config.json", staging_dir / name)
        fsync_path(staging_dir / name)
    fsync_path(staging_dir / STATE_DIR)
    temporary = staging_dir / f".{RESULT}.tmp"
    temporary.write_bytes(result.to_json())
    fsync_path(temporary)
    temporary.replace(staging_dir / RESULT)
    fsync_path(staging_dir)
    return result


def _write_model(learner: Learner, staging_dir: Path, base_dir: Path, dtype: torch.dtype) -> None:
    """Save the weights as `dtype`; everything else that serves the model comes from `base_dir` unchanged."""
    model = learner.model
    if (base_dir / "generation_config.json").exists():
        # Copied below. Saving the loaded one fails where transformers finds the base model's inconsistent.
        model.generation_config = GenerationConfig()
    model.save_pretrained(staging_dir, state_dict=_cast(model.state_dict(), dtype))
    config_path = staging_dir / "config.json"
    config = json.loads(config_path.read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")  # save_pretrained names the master weights' type
    config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    for path in _companions(base_dir):
        if path.name not in {"config.json", PROBE}:
            shutil.copyfile(path, staging_dir / path.name)


def _cast(state_dict: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors as `dtype`, on the CPU. Tied ones stay one: save_pretrained knows them by their memory."""
    cast: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state_dict.values():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in cast:
            cast[key] = tensor.to("cpu", dtype if tensor.is_floating_point() else None)
    return {name: cast[tensor.data_ptr(), tensor.shape] for name, tensor in state_dict.items()}


def _copy_model(base_dir: Path, staging_dir: Path) -> None:
    """Take over the model as it is, byte for byte: no step was taken, so the digest must stay."""
    weights = [path for path in base_dir.iterdir() if path.suffix == ".safetensors"]
    indices = list(base_dir.glob("*.safetensors.index.json"))
    for path in [*weights, *indices, *_companions(base_dir)]:
        shutil.copyfile(path, staging_dir / path.name)


def _companions(base_dir: Path) -> list[Path]:
    """The files of a model directory that go with its weights: configuration, tokenizer, probe."""
    return [
        path
        for path in sorted(base_dir.iterdir())
        if path.is_file()
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.endswith(".index.json")
        and not path.name.startswith(".")
        and path.name != RESULT
    ]


def _write_state(learner: Learner, state_dir: Path, policy: str, with_master: bool) -> None:
    state_dir.mkdir()
    tensors: dict[str, Tensor] = {}
    for name, parameter in learner.parameters.items():
        moments = learner.optimizer.state.get(parameter, {})
        tensors |= {f"{key}.{name}": moments[key] for key in ("exp_avg", "exp_avg_sq") if key in moments}
        if with_master:
            tensors[f"master.{name}"] = parameter.detach()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, state_dir / "optimizer.safetensors"
    )
    about = {"format": FORMAT, "policy": policy, "optimizer_step": learner.optimizer_step}
    (state_dir / "state.json").write_text(json.dumps(about, indent=1) + "\n")


@torch.no_grad()
def _restore(learner: Learner, path: Path) -> None:
    """Put the saved moments and master weights into `learner`."""
    with safe_open(path, framework="pt", device=str(learner.device)) as saved:
        names = set(saved.keys())
        kinds = {name.partition(".")[0] for name in names}
        wanted = {f"{kind}.{name}" for kind in kinds for name in learner.parameters}
        if names != wanted or (learner.optimizer_step > 0 and not {"exp_avg", "exp_avg_sq"} <= kinds):
            odd = sorted(names ^ wanted)[:3] or sorted(names)[:3]
            raise CheckpointError(f"{path} is not the optimizer state of this model, e.g. {odd}")
        for name, parameter in learner.parameters.items():
            if "master" in kinds:
                parameter.copy_(saved.get_tensor(f"master.{name}"))
            if "exp_avg" in kinds:
                learner.optimizer.state[parameter] = {
                    "step": torch.tensor(float(learner.optimizer_step), device=learner.device),
                    "exp_avg": saved.get_tensor(f"exp_avg.{name}"),
                    "exp_avg_sq": saved.get_tensor(f"exp_avg_sq.{name}"),
                }


def fsync_path(path: Path) -> None:
    """Make a file's content, or a directory's entries, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
