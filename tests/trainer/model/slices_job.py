"""Loads models of many families sharded: `python slices_job.py DIR RANKS TENSOR_PARALLEL_SIZE`.

DIR holds models/<name>/, or models/<name>/ and adapters/<name>/. Each rank compares its parts with what
transformers loads whole, bit for bit. DIR/<rank>.json gets, for each model, what differs, and the bytes read.
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


class Counted(Progress):
    """Counts bytes."""

    bytes = 0

    def count_bytes(self, size: int) -> None:
        self.bytes += size


def compared(directory: Path, rank: int, ranks: int, size: int) -> dict[str, Any]:
    model_dir = directory.parent.parent / "models" / directory.name
    lora = LoraSettings(rank=2 if directory.parent.name == "adapters" else 0)
    settings = TrainerSettings(layout="sharded", tensor_parallel_size=size, lora=lora)
    alone = build_scorer(directory, CPU, settings, Layout(), torch.float32, model_dir)
    whole = dict(alone.model.named_parameters())
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
    buffers = dict(alone.model.named_buffers())
    for name, buffer in sharded.named_buffers():
        if not torch.equal(buffer, buffers[name]) or buffer.dtype != buffers[name].dtype:
            differs.append(name)
    conversions = [str(c) for c in getattr(sharded, "_weight_conversions", None) or []]
    if conversions != [str(c) for c in getattr(alone.model, "_weight_conversions", None) or []]:
        differs.append("what is undone when it is saved")
    return {"differs": differs, "held": held, "read": counted.bytes}


def run_rank(directory: Path, rank: int, ranks: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    found = {
        f"{path.parent.name}/{path.name}": compared(path, rank, ranks, size)
        for path in sorted(directory.glob("*/*"))
        if path.is_dir()
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


def main() -> None:
    """Fork the ranks and wait for them; exit status 1 if one fails."""
    directory, ranks, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=run_rank, args=(directory, k, ranks, size), daemon=True) for k in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(150)
    sys.exit(any(process.exitcode != 0 for process in processes))


if __name__ == "__main__":
    main()
