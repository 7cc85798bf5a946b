"""Muon: the steps of torch's own, for the matrices of layers and for nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

from trainer.batch.batch import Batch
from trainer.checkpoint import checkpoint
from trainer.checkpoint.state import CheckpointError, StateSaver
from trainer.documents import TrainRequest
from trainer.model.learner import Learner, build_learner
from trainer.model.muon import MuonAndAdamW, orthogonal
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
MUON = TrainerSettings(optimizer="muon", learning_rate=1e-3, warmup_steps=2, global_batch_size=16)
SHAPES = [(24, 40), (40, 24), (32, 32), (1, 16)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon to compare with")
def test_each_step_is_that_of_torchs_muon_and_adamw() -> None:
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randn(shape, generator=generator) for shape in [*SHAPES, (16,)]]
    ours, theirs = ([torch.nn.Parameter(start.clone()) for start in starts] for _ in range(2))
    given: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    groups = [{"params": ours[:-1], "is_muon": True}, {"params": ours[-1:], "is_muon": False}]
    mine = MuonAndAdamW(groups, **given)
    others = [
        torch.optim.Muon(theirs[:-1], adjust_lr_fn="match_rms_adamw", **given),
        AdamW(theirs[-1:], **given),
    ]
    for _ in range(6):
        for mine_p, other_p in zip(ours, theirs, strict=True):
            mine_p.grad = torch.randn(mine_p.shape, generator=generator)
            other_p.grad = mine_p.grad.clone()
        for optimizer in (mine, *others):
            optimizer.step()
        torch.testing.assert_close([p.data for p in ours], [p.data for p in theirs], rtol=0, atol=1e-6)


def test_step_is_about_orthogonal_and_as_large_as_adamws() -> None:
    step = orthogonal(torch.randn(32, 96, generator=torch.Generator().manual_seed(0)).bfloat16()).float()
    singular = torch.linalg.svdvals(step)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert float(step.square().mean().sqrt()) * 0.2 * 96**0.5 == pytest.approx(0.2, rel=0.2)


def kinds(learner: Learner) -> dict[str, bool]:
    names = {id(parameter): name for name, parameter in learner.parameters.items()}
    groups = learner.optimizer.param_groups
    return {names[id(p)]: group["is_muon"] for group in groups for p in group["params"]}


def test_matrices_of_layers_are_muons_and_all_else_is_adamws(base_dir: Path) -> None:
    of_muon = kinds(build_learner(base_dir, CPU, MUON))
    assert {name for name, is_muon in of_muon.items() if is_muon} == {
        name for name in of_muon if ".layers." in name and "norm" not in name and not name.endswith("bias")
    }
    assert not of_muon["model.embed_tokens.weight"] and any(of_muon.values())
    adapters = kinds(build_learner(base_dir, CPU, MUON.model_copy(update={"lora": LoraSettings(rank=2)})))
    assert adapters and all(adapters.values())
    assert not any(kinds(build_learner(base_dir, CPU, TrainerSettings())).values())


def test_steps_of_another_optimizer_are_not_repeated(base_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"taken with trainer.optimizer=adamw, the run has another"):
        build_learner(base_dir, CPU, MUON).apply(TrainerSettings())


def test_run_with_muon_goes_on_bit_for_bit(batch: Batch, make_request: Callable[..., TrainRequest]) -> None:
    request = make_request(batch)
    request = request.model_copy(update={"settings": MUON})
    learner = checkpoint.load(Path(request.base_dir), request.base_policy, CPU, MUON)
    train(learner, batch, MUON, max_tokens=32, report=lambda _: None)
    saver = StateSaver(timeout_s=60)
    result = checkpoint.write(learner, Path(request.staging_dir), request, 3, {"loss": 0.0}, saver)
    saver.finish()
    resumed = checkpoint.load(Path(request.staging_dir), result.policy, CPU, MUON)
    for each in (learner, resumed):
        train(each, batch, MUON, max_tokens=32, report=lambda _: None)
    assert resumed.optimizer_step == 6
    for name, parameter in learner.parameters.items():
        assert torch.equal(resumed.parameters[name], parameter), name
    message = (
        "is of another trainer.optimizer: it has exp_avg, exp_avg_sq, master, momentum_buffer, not exp_avg"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(Path(request.staging_dir), result.policy, CPU, TrainerSettings())
