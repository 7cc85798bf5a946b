"""The first hour on a GPU runs to its end on a CPU, whatever fails in it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.imports import shared_imports
from tests.paths import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "gpu_hour.sh"


def measure(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the script on a CPU; return its exit code, and the figures of its steps."""
    argv = ["bash", str(SCRIPT), "--device", "cpu", "--out", str(out), *arguments]
    env = {**os.environ, **shared_imports(), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    figures = json.loads((out / "gpu_hour.json").read_text())
    assert figures["device"] == "cpu" and ended.stdout.count("\n") == len(figures["steps"]), ended.stderr
    return ended.returncode, figures["steps"]


@pytest.mark.timeout(900)
def test_steps_report_their_figures(tmp_path: Path) -> None:
    names = ("machine", "kernels", "sharded", "iterations")
    code, steps = measure(tmp_path, "--seconds", "800", "--steps", *names)
    assert code == 0, steps
    assert steps["machine"]["matrix_tflop_s"] >= 0 and steps["kernels"]["split"].startswith("works")
    assert steps["sharded"]["tokens_per_s"] > 0 and steps["sharded"]["to_device_then_s"] >= 0
    assert steps["sharded"]["checkpoint_gb"] > 0.1
    assert steps["iterations"]["load_s"] >= steps["iterations"]["proof_s"] > 0
    assert 0 <= steps["iterations"]["probe_differs"] < 1e-4 and steps["iterations"]["training_s"] > 0
    assert "| iterations |" in (tmp_path / "gpu_hour.md").read_text()


def test_step_that_hangs_or_fails_leaves_the_others_alone(tmp_path: Path) -> None:
    code, steps = measure(tmp_path, "--seconds", "0", "--steps", "machine", "tests")
    assert code == 1 and list(steps) == ["machine", "tests"]
    assert {step["error"] for step in steps.values()} == {"not done after 0 s"}


BEFORE = """
import torch.nn.attention.varlen as varlen
from torch.distributed.fsdp import FSDPModule

del FSDPModule.set_reduce_scatter_unused_params
varlen.varlen_attn = lambda query, *, scale: (query, scale)
import scripts.bench.torch_bridge
from trainer.model import attention

FSDPModule.set_reduce_scatter_unused_params(None, True)
assert attention.varlen_attn(1, scale=2, enable_gqa=True) == (1, 2)
"""


def test_bridge_gives_an_older_torch_what_one_gpu_needs() -> None:
    subprocess.run([sys.executable, "-c", BEFORE], cwd=REPOSITORY, check=True)
