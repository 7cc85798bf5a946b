"""Measure how long an engine waits for new weights, with and without fetching ahead; and what deltas save.

    .venv/bin/python scripts/bench/prefetch.py [--parameters 1e8] [--rates 1e-6 1e-5 1e-3] [--rounds 3]

Trains a random Qwen3 with random gradients (AdamW, two steps a checkpoint), writes bfloat16 checkpoints as a
training rank does, and loads them into an embedded engine as a node does. The directory of the run counts as
shared, though it is on this machine and in its page cache. Prints one JSON line:

served    seconds from "checkpoint published" to "the engine serves it", median over the rounds:
          `crew of all rows` reads all of the checkpoint, copies the model and loads it; `crew that generates`
          copies and loads; with `delta` the copy is made of the one before; `fetched` has the copy already
          (`fetch_s`: how long that took beside the run, in as many threads as a node takes)
deltas    for each learning rate: the fraction of changed values, and the size of the delta over that of the
          weights; seconds to make and to apply it in one thread; seconds to write a checkpoint without it and
          with it
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from large import make_model

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.machine import store
from coordinator.machine.children import Children
from coordinator.machine.engine import EngineHost
from coordinator.machine.filesystems import Mount
from coordinator.machine.store import Store
from coordinator.node.policies import Policies
from coordinator.node.prefetch import THREADS
from coordinator.settings.loading import build
from rollout.engines.model_dir import model_files, policy_digest
from rollout.settings import EngineSettings
from rollout.storage import delta, known_files
from rollout.storage.files import unheard
from trainer.checkpoint import checkpoint, hub_weights
from trainer.checkpoint.state import StateSaver
from trainer.documents import TrainRequest, TrainResult
from trainer.model.model import Learner, build_learner
from trainer.settings import TrainerSettings

ENGINE = EngineSettings(kind="torch", start_timeout_s=300.0)
WARM_UP, STEPS = 3, 2
"""Optimizer steps before the first checkpoint, and between two."""
WEIGHTS = "model.safetensors"


class Trainer:
    """Trains by random gradients, and writes checkpoints as the only rank of a job."""

    def __init__(self, model: Path, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self.learner: Learner = build_learner(
            model, torch.device("cpu"), TrainerSettings(layout="replicated")
        )
        self._base, self._policy = model, policy_digest(known_files.checksums(model, model_files(model)))

    def write(self, iteration: int, rate: float, steps: int) -> float:
        """Take steps and write the checkpoint; returns the seconds for writing."""
        optimizer = self.learner.optimizer
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(steps):
            self.learner.gradients.normal_()
            optimizer.step()
            self.learner.optimizer_step += 1
        directory = self.run_dir.checkpoint(iteration)
        directory.mkdir(parents=True)
        asked = TrainRequest(
            iteration=iteration, epoch=1, batch_file="", batch_sha256="", base_dir=str(self._base),
            base_policy=self._policy, model_dir=str(self._base), model_name="", staging_dir=str(directory),
            delta=True, rank_weights=(1.0,), seed=0, max_tokens=1,
            settings=TrainerSettings(save_dtype="bfloat16", learning_rate=rate),
        )  # fmt: skip
        began_s = time.perf_counter()
        result: TrainResult = checkpoint.write(self.learner, directory, asked, steps, {}, StateSaver(60.0))
        self._base, self._policy = directory, result.policy
        return time.perf_counter() - began_s


def measure_delta(trainer: Trainer, rate: float, iteration: int) -> dict[str, Any]:
    """Write two checkpoints, and compare their weights."""
    trainer.learner.written = {}
    alone_s = trainer.write(iteration, rate, WARM_UP)
    both_s = trainer.write(iteration + 1, rate, STEPS)
    before, after = (
        (trainer.run_dir.checkpoint(number) / WEIGHTS).read_bytes() for number in (iteration, iteration + 1)
    )
    began_s = time.perf_counter()
    change = delta.encode([before], [after], worth=1.0)
    made_s = time.perf_counter() - began_s
    assert change is not None
    began_s = time.perf_counter()
    delta.apply(BytesIO(before), [change], lambda _piece: None)
    applied_s = time.perf_counter() - began_s
    end = len(after) - len(after) % 2
    changed = np.frombuffer(before[:end], np.uint16) != np.frombuffer(after[:end], np.uint16)
    return {
        "rate": rate,
        "changed": round(float(changed.mean()), 4),
        "size": round(len(change) / len(after), 4),
        "is_written": len(change) <= hub_weights.WORTH * len(after),
        "made_s": round(made_s, 2),
        "applied_s": round(applied_s, 2),
        "checkpoint_s": [round(alone_s, 2), round(both_s, 2)],
    }


def policies_of(run_dir: RunDir, crew: Any, below: Path) -> Policies:
    """Return the policies of a node that has no copies yet."""
    below.mkdir()
    identity: Any = SimpleNamespace(
        run_dir=RunDir(run_dir.root, crew), settings=build({}), inputs=SimpleNamespace(model_files={})
    )
    return Policies(identity, Store(str(below)))


def measure_served(run_dir: RunDir, directory: Path, rounds: int) -> dict[str, Any]:
    """Load the second of two checkpoints after the first, in each of the ways."""
    ways: dict[str, tuple[Any, bool, bool]] = {
        "crew of all rows": ("main", False, False),
        "crew that generates": ("rollout", False, False),
        "crew that generates, delta": ("rollout", True, False),
        "fetched": ("rollout", False, True),
        "fetched, delta": ("rollout", True, True),
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    run_dir.logs(0).mkdir(parents=True)
    with Children() as children:
        engine = EngineHost(children, run_dir, 0, lambda _what, **_more: None)
        for turn in range(rounds):
            for way, (crew, by_delta, ahead) in ways.items():
                policies = policies_of(run_dir, crew, directory / f"{turn} {way}")
                first = policies.hold(policies.of(1), unheard)
                engine.ensure(first, ENGINE, lambda: None)
                (run_dir.checkpoint(2) / published.VERIFIED).unlink(missing_ok=True)
                if not by_delta:
                    setattr(policies, "_files_before", lambda *_: {})  # noqa: B010
                fetched_s = timed(lambda p=policies: p.fetch(2, unheard, THREADS)) if ahead else 0.0
                seconds[way].append((timed(lambda p=policies: serve(p, engine)), fetched_s))
    return {
        way: {
            "seconds": round(statistics.median(served_s for served_s, _ in found), 3),
            "fetch_s": round(statistics.median(fetched_s for _, fetched_s in found), 3),
        }
        for way, found in seconds.items()
    }


def serve(policies: Policies, engine: EngineHost) -> None:
    """Do what rows 0 and 2 do with a policy that is new."""
    policies.verify(2)
    engine.ensure(policies.hold(policies.of(2), unheard), ENGINE, lambda: None)


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that `act` takes."""
    began_s = time.perf_counter()
    act()
    return time.perf_counter() - began_s


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-6, 1e-5, 1e-3])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as made:
        directory = Path(made)
        parameters = make_model(directory / "model", options.parameters)
        torch.set_default_dtype(torch.float32)
        run_dir = RunDir(directory / "run")
        run_dir.checkpoints.mkdir(parents=True)
        # What counts as local is not copied.
        store.find_mount = lambda path: Mount(
            "nfs4" if path.is_relative_to(run_dir.root) else "ext4", "", "/"
        )
        trainer = Trainer(directory / "model", run_dir)
        deltas = [measure_delta(trainer, rate, 1 + 2 * k) for k, rate in enumerate(options.rates)]
        size = {
            name: facts["bytes"] for name, facts in published.read_result(run_dir.checkpoint(2)).files.items()
        }
        line = {
            "parameters": parameters,
            "cores": os.cpu_count(),
            "weights_gb": round(size[WEIGHTS] / 1e9, 3),
            "checkpoint_gb": round(sum(size.values()) / 1e9, 3),
            "served": measure_served(run_dir, directory, options.rounds),
            "deltas": deltas,
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
