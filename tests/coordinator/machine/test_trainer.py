"""What a node keeps of a training job that has failed."""

import sys
from pathlib import Path
from typing import cast

import pytest

from coordinator.machine.children import Children
from coordinator.machine.trainer import TrainerHost
from coordinator.protocol.exits import TrainerFailed
from tests.coordinator.made_up import run_dir_at
from trainer.documents import TrainRequest
from trainer.job import launch
from trainer.settings import TrainerSettings

FAILS = """
import os, sys
spool = os.environ["SPOOL"]
open(f"{spool}/nccl_trace_rank_3", "w").write("ALLREDUCE started, not ended")
open(f"{spool}/failed_000001.0", "w").write("Traceback\\nPeerLost: a peer is lost")
sys.stdin.read()
"""


def test_trace_of_a_collective_that_hung_is_kept_in_the_nodes_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = run_dir_at(tmp_path)
    run_dir.logs(1).mkdir()
    monkeypatch.setattr(launch, "argv", lambda _job: [sys.executable, "-c", FAILS])
    monkeypatch.setattr(launch, "environment", lambda job: {"SPOOL": str(job.spool)})
    request = TrainRequest(
        iteration=7, epoch=2, batch_file="", batch_sha256="", base_dir="", base_policy="", model_dir="",
        model_name="",        staging_dir="",
        rank_weights=(1.0,), seed=0, settings=TrainerSettings(), max_tokens=8,
    )  # fmt: skip
    config = {"job": "j", "address": "127.0.0.1", "port": 1, "processes": {"1": 1}, "node_ranks": {"1": 0}}
    with Children() as children:
        host = TrainerHost(children, run_dir, rank=1, say=lambda _what, **_more: None)
        host.ensure(config, processes=1, threads=1, settings=TrainerSettings())
        with pytest.raises(TrainerFailed, match="a peer is lost"):
            host.train(request, 1, lambda: None, lambda _done, _total: None)
        host.leave_epoch()
    kept = run_dir.logs(1) / "e0002.i000007.nccl_trace_rank_3"
    assert kept.read_text() == "ALLREDUCE started, not ended"


def test_flight_recorder_of_every_rank_is_on_and_writes_into_the_spool(tmp_path: Path) -> None:
    job = launch.Launch(1, 0, 1, "127.0.0.1", 1, "lo", tmp_path, 1, 1.0, 1.0)
    told = cast(dict[str, str], launch.environment(job))
    assert told["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and int(told["TORCH_FR_BUFFER_SIZE"]) > 0
    assert Path(told["TORCH_FR_DUMP_TEMP_FILE"]) == tmp_path / launch.TRACE
