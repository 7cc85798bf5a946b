"""What a node keeps of a training job that has failed."""

import sys
from pathlib import Path
from typing import cast

import pytest

from coordinator.machine.children import Children
from coordinator.machine.oddities import oddities
from coordinator.machine.trainer import TrainerHost
from coordinator.protocol.exits import TrainerFailed
from tests.coordinator.examples import run_dir_at
from trainer.documents import TrainRequest
from trainer.job import launch
from trainer.job.rank import check_gpus
from trainer.model.parallel import LayoutError
from trainer.settings import TrainerSettings

FAILS = """
import os, sys, time
spool = os.environ["SPOOL"]
open(f"{spool}/full_000001.0", "w").write("waiting for free space on /shared")
while os.path.exists(f"{spool}/full_000001.0"):
    time.sleep(0.01)
open(f"{spool}/nccl_trace_rank_3", "w").write("ALLREDUCE started, not ended")
with open(f"{spool}/failed_000001.0.tmp", "w") as file:
    file.write("Traceback\\nPeerLost: a peer is lost")
os.rename(file.name, f"{spool}/failed_000001.0")
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
    full: list[str] = []
    with Children() as children:
        host = TrainerHost(children, run_dir, rank=1, say=lambda _what, **_more: None)
        host.ensure(config, processes=1, threads=1, settings=TrainerSettings())
        with pytest.raises(TrainerFailed, match="a peer is lost"):
            host.train(request, 1, lambda: None, lambda _done, _total: None, full.append)
        host.leave_epoch()
    kept = run_dir.logs(1) / "e0002.i000007.nccl_trace_rank_3"
    assert kept.read_text() == "ALLREDUCE started, not ended"
    assert full == ["waiting for free space on /shared"], "a trainer's wait is heard"


def test_users_own_interface_and_allocator_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    job = launch.Launch(1, 0, 1, "127.0.0.1", 1, "eth1", tmp_path, 1, 1.0, 1.0, gpus=8)
    told = launch.environment(job)
    ours = ["eth1", "=eth1", "expandable_segments:True"]  # "eth1" of NCCL's would be eth10 too
    assert [told[name] for name in names[:3]] == ours and told["FLAGPOST_GPUS"] == "8"
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth2"), (3, "ib0")])
    for name, value in zip(names, ("eth2", "ib", "", "backend:cudaMallocAsync"), strict=True):
        monkeypatch.setenv(name, value)
    told = launch.environment(job)
    assert [told[name] for name in names[:3]] == ["eth2", "ib", "backend:cudaMallocAsync"]


@pytest.mark.parametrize("variable", launch.INTERFACES)
@pytest.mark.parametrize(("value", "is_followed"), [("eth2", True), ("ens5", False), ("eth2,ens5", False)])
def test_interface_that_this_machine_lacks_is_not_followed_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, is_followed: bool
) -> None:
    """The profile of a cluster names the interface of its other machines."""
    monkeypatch.setattr("socket.if_nameindex", lambda: [(1, "lo"), (2, "eth2")])
    monkeypatch.setenv(variable, value)
    job = launch.Launch(1, 0, 1, "127.0.0.1", 1, "lo", tmp_path, 1, 1.0, 1.0)
    assert launch.environment(job)[variable].removeprefix("=") == (value if is_followed else "lo")
    is_said = f"{variable}={value} is not followed: this machine has no such network interface"
    assert (is_said in oddities()) is not is_followed


@pytest.mark.parametrize("counted", ["8", "0"])
def test_training_where_torch_sees_other_gpus_than_the_node_is_refused(
    counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    with pytest.raises(LayoutError, match=f"has {counted} GPUs by nvidia-smi .* sees 4: install"):
        check_gpus(counted)
    assert check_gpus("4") == check_gpus(None) == 4


def test_flight_recorder_of_every_rank_is_on_and_writes_into_the_spool(tmp_path: Path) -> None:
    job = launch.Launch(1, 0, 1, "127.0.0.1", 1, "lo", tmp_path, 1, 1.0, 1.0)
    told = cast(dict[str, str], launch.environment(job))
    assert told["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1" and int(told["TORCH_FR_BUFFER_SIZE"]) > 0
    assert Path(told["TORCH_FR_DUMP_TEMP_FILE"]) == tmp_path / launch.TRACE
