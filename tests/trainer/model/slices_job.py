"""Loads models of many families sharded, in each layout: `python slices_job.py DIR`.

DIR holds models/<name>/ and adapters/<name>/. Each rank compares its parts with what transformers loads
whole, bit for bit. DIR/<layout>_<rank>.json gets, for each model, what differs, and the bytes read.
"""

import json
import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.model.loading import build_scorer, count_parameters
from trainer.model.parallel import Layout, LayoutError
from trainer.progress import Progress
from trainer.settings import LoraSettings, TrainerSettings

CPU = torch.device("cpu")
LAYOUTS = {"fsdp": (3, 1), "tensor": (4, 2)}
"""Ranks, and how many share a layer, where adapters are not split; 3 divides hardly any dimension."""


class Counted(Progress):
    """Counts bytes."""

    bytes = 0

    def count_bytes(self, size: int) -> None:
        self.bytes += size


def settings_of(directory: Path, size: int = 1) -> TrainerSettings:
    lora = LoraSettings(rank=2 if directory.parent.name == "adapters" else 0)
    return TrainerSettings(layout="sharded", tensor_parallel_size=size, lora=lora)


def compared(directory: Path, alone: Any, size: int) -> dict[str, Any]:
    """What of a sharded model differs from `alone`, or that it is refused."""
    model_dir, settings = directory.parent.parent / "models" / directory.name, settings_of(directory, size)
    whole = dict(alone.named_parameters())
    try:
        layout = Layout.choose(count_parameters(model_dir), settings, CPU)
        counted = Counted()
        sharded = build_scorer(directory, CPU, settings, layout, torch.float32, model_dir, counted).model
    except LayoutError:
        return {"refused": True}
    differs = [*(whole.keys() ^ dict(sharded.named_parameters()).keys())]
    held = 0
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        held += parameter.to_local().nbytes
        other = whole[name]
        if parameter.requires_grad != other.requires_grad or parameter.dtype != other.dtype:
            differs.append(f"{name}: kind")
        if not torch.equal(parameter.full_tensor(), other):
            differs.append(name)
    buffers = dict(alone.named_buffers())
    for name, buffer in sharded.named_buffers():
        if not torch.equal(buffer, buffers[name]) or buffer.dtype != buffers[name].dtype:
            differs.append(name)
    conversions = [str(c) for c in getattr(sharded, "_weight_conversions", None) or []]
    if conversions != [str(c) for c in getattr(alone, "_weight_conversions", None) or []]:
        differs.append("what is undone when it is saved")
    return {"differs": differs, "held": held, "read": counted.bytes}


def run_rank(directory: Path, models: dict[Path, Any], layout: str, rank: int) -> None:
    ranks, size = LAYOUTS[layout]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting_{layout}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    found = {
        f"{path.parent.name}/{path.name}": compared(path, alone, size)
        for path, alone in models.items()
        if size == 1 or path.parent.name == "models"
    }
    (directory / f"{layout}_{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    """Load all whole, and fork the ranks of each layout; exit status 1 if one fails."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    directory, fork = Path(sys.argv[1]), multiprocessing.get_context("fork")
    models = {
        path: build_scorer(
            path, CPU, settings_of(path), Layout(), torch.float32, directory / "models" / path.name
        ).model
        for path in sorted(directory.glob("*/*"))
    }
    for layout, (ranks, _) in LAYOUTS.items():
        processes = [
            fork.Process(target=run_rank, args=(directory, models, layout, rank), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(150)
        if any(process.exitcode != 0 for process in processes):
            sys.exit(1)


if __name__ == "__main__":
    main()
