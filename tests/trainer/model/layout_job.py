"""Trains one model in several layouts and over several worlds: `python layout_job.py DIR`.

DIR holds models, reference/, batch and cases.json, a list of {name, model, ranks, rank_weights, settings},
and where there are several nodes `on_node`, how many processes the node of each rank has.
For each case DIR/<name>.safetensors gets the whole parameters, and DIR/<name>.json the statistics of the
steps, or why the model was refused. The ranks are forked, which saves importing torch in each.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import asdict
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import peft  # noqa: F401 - each rank would import it, which takes longer than its cases
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from trainer.batch.batch import Batch
from trainer.model import attention
from trainer.model.learner import build_learner
from trainer.model.parallel import LayoutError, local_part
from trainer.model.pictures import RunPictures
from trainer.settings import TrainerSettings
from trainer.update.step import train

CPU = torch.device("cpu")
LIMIT_S = 120.0
"""For ranks that wait for one another."""
JOB_LIMIT_S = 270.0
"""For all cases, which take a minute of CPU time."""


def run_rank(directory: Path, rank: int) -> None:
    """All cases that this rank is in, one after the other."""
    torch.set_num_threads(1)
    attention.SPLIT_FROM = 1  # so short rows, too, are computed by another kernel than in the test's process
    batch = Batch.decode((directory / "batch").read_bytes())
    for case in json.loads((directory / "cases.json").read_text()):
        if rank >= case["ranks"]:
            continue
        if "on_node" not in case:
            run_case(directory, rank, batch, case)
        # torch remembers groups of an equal mesh after they were destroyed, whatever names they had.
        elif (pid := os.fork()) == 0:
            run_case(directory, rank, batch, case)
            os._exit(0)
        elif os.waitpid(pid, 0)[1]:
            sys.exit(1)


def run_case(directory: Path, rank: int, batch: Batch, case: dict[str, Any]) -> None:
    """Train in the layout of a case, in a process group of its own."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting_{case['name']}",
        rank=rank,
        world_size=case["ranks"],
        timeout=timedelta(seconds=LIMIT_S),
    )
    os.environ["LOCAL_WORLD_SIZE"] = str(case.get("on_node", [case["ranks"]] * case["ranks"])[rank])
    settings = TrainerSettings(**case["settings"])
    try:
        learner = build_learner(directory / case["model"], CPU, settings)
    except LayoutError as error:
        (directory / f"{case['name']}.json").write_text(json.dumps({"refused": str(error)}))
        dist.destroy_process_group()
        return
    layout = learner.layout
    if layout.node or (rank and not layout.sharded):  # a machine of another kind, whose copy has drifted
        with torch.no_grad():
            local_part(next(iter(learner.parameters.values()))).view(-1)[rank] += 0.5
    if batch.pictures:
        pictures = RunPictures(directory / case["model"], directory / "images")
        learner.see(pictures, settings.share_prompts)
    learner.take_over_lead()
    if settings.kl != "off":
        learner.load_reference(directory / "reference", settings)
    stats = train(
        learner,
        batch,
        settings,
        max_tokens=24,
        rank_weights=case["rank_weights"],
        report=lambda line: None,
    )
    whole = {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().contiguous()
        for name, value in learner.parameters.items()
    }
    if rank == 0:
        held = sum(v.to_local().numel() for v in learner.parameters.values() if isinstance(v, DTensor))
        save_file(whole, directory / f"{case['name']}.safetensors")
        packed = learner.arrangement.packing.several
        about = {
            "attention": [kernel.value for kernel in learner.arrangement.works],
            "sharded": learner.layout.sharded,
            "held": held,
            "packed": packed,
            "steps": [asdict(s) for s in stats],
        }
        (directory / f"{case['name']}.json").write_text(json.dumps(about))
    dist.destroy_process_group()


def main() -> None:
    """Fork the ranks and wait for them; exit status 1 if one fails."""
    directory = Path(sys.argv[1])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = max(case["ranks"] for case in json.loads((directory / "cases.json").read_text()))
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=run_rank, args=(directory, rank), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = list(processes)
    while running and not any(process.exitcode for process in processes):
        if not wait([process.sentinel for process in running], JOB_LIMIT_S):
            sys.exit(f"the ranks were not done within {JOB_LIMIT_S} s")
        running = [process for process in running if process.exitcode is None]
    sys.exit(any(process.exitcode for process in processes))  # ends those that wait for a failed one


if __name__ == "__main__":
    main()
