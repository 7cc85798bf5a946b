"""What a node says of its GPUs, with a driver that is made up."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.machine import gpus
from coordinator.machine.gpus import GpuSampler

UUIDS = ("GPU-aa11", "GPU-aa22", "GPU-bb33")


def test_gpus_are_counted_by_the_driver_where_nvidia_smi_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus.shutil, "which", lambda _tool: None)
    monkeypatch.setattr(gpus, "DRIVER", str(tmp_path / "gpus"))
    assert gpus.count_gpus() == 0
    for address in ("0000:17:00.0", "0000:65:00.0"):
        (tmp_path / "gpus" / address).mkdir(parents=True)
    assert gpus.count_gpus() == 2


class DriverError(Exception):
    """In place of pynvml.NVMLError."""


class Driver:
    """In place of the module `pynvml`: three GPUs, and a part of one; a handle is the GPU's number."""

    NVMLError = DriverError

    def __init__(self, has_driver: bool = True) -> None:
        self._has_driver = has_driver
        self.silent: set[int] = set()
        self.used = 1000
        self.threads: set[int] = set()

    def nvmlInit(self) -> None:
        self.threads.add(threading.get_ident())
        if not self._has_driver:
            raise DriverError("driver not loaded")

    def nvmlDeviceGetCount(self) -> int:
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "MIG-cc44":
            raise DriverError("not found")
        return 3

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return UUIDS[handle]

    def nvmlDeviceGetName(self, handle: int) -> str:
        if handle in self.silent:
            raise DriverError("GPU is lost")
        return f"gpu {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        self.threads.add(threading.get_ident())
        return SimpleNamespace(used=self.used + handle, total=5000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle == 3:
            raise DriverError("not supported")
        return SimpleNamespace(gpu=25)


def sampled(driver: Any) -> list[dict[str, Any]]:
    """What a sampler has seen at last, once its thread has looked or has ended."""
    before = set(threading.enumerate())
    sampler = GpuSampler(3600.0, driver)
    (thread,) = set(threading.enumerate()) - before or {threading.Thread()}
    deadline_s = time.monotonic() + 60.0
    while not sampler.latest and thread.is_alive() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    return sampler.latest


def names(driver: Any) -> list[str]:
    return [said["name"] for said in sampled(driver)]


def test_each_gpu_is_told_with_memory_and_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver()
    first, *rest = sampled(driver)
    assert first == {"name": "gpu 0", "used_bytes": 1000, "total_bytes": 5000, "busy": 0.25}
    assert [said["used_bytes"] for said in rest] == [1001, 1002]
    assert threading.get_ident() not in driver.threads, "it may hang: only the sampler's thread calls it"


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", []),
        ("-1", []),
        ("2,0", ["gpu 2", "gpu 0"]),
        ("GPU-bb33,GPU-aa11", ["gpu 2", "gpu 0"]),
        ("GPU-b", ["gpu 2"]),
        ("GPU-aa", []),
        ("1,7,0", ["gpu 1"]),
        ("1, -1,0", ["gpu 1"]),
        ("MIG-cc44", ["gpu 3"]),
        ("MIG-absent", []),
    ],
)
def test_gpus_are_those_that_cuda_shows(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert names(Driver()) == expected


def test_part_of_a_gpu_has_memory_and_no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cc44")
    assert sampled(Driver()) == [{"name": "gpu 3", "used_bytes": 1003, "total_bytes": 5000, "busy": 0.0}]


def test_lost_gpu_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver = Driver()
    driver.silent = {1}
    assert names(driver) == ["gpu 0", "gpu 2"]


def test_it_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    driver = Driver()
    moments: list[float] = []

    def sleep(seconds: float) -> None:
        moments.append(seconds)
        if len(moments) == 3:
            threading.Event().wait()
        driver.used += 1

    monkeypatch.setattr(gpus, "time", SimpleNamespace(sleep=sleep))
    sampler = GpuSampler(2.5, driver)
    deadline_s = time.monotonic() + 60.0
    while len(moments) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert (moments, sampler.latest[0]["used_bytes"]) == ([2.5] * 3, 1002)


def test_without_a_driver_the_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sampled(Driver(has_driver=False)) == []


def test_without_the_package_there_is_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "find_spec", lambda _name: None)
    started: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", started.append)
    assert GpuSampler(0.001).latest == []
    assert not [thread for thread in started if thread.name == "gpus"]


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        ("0,1", 2),
        (" 3 ", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("void", 0),
        ("0,-1,1", 1),
        ("GPU-8f,GPU-9", 2),
        ("MIG-x", 1),
        ("MIG-x,MIG-y", 1),  # CUDA shows a process one part of a divided GPU
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    monkeypatch: pytest.MonkeyPatch, visible: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus.count_gpus() == count


@pytest.mark.parametrize(
    ("words", "listed", "problem"),
    [
        ("echo 'GPU 0: H100 (UUID: GPU-1), 81559'", 1, ""),
        ("sleep 1000 & echo 'GPU 0: H100 (UUID: GPU-1), 81559'", 1, ""),  # a child keeps the output open
        ("echo 'GPU 0: H100 (UUID: GPU-1), 81559'; echo 'WARNING: infoROM is corrupted'; exit 14", 1, ""),
        ("true", 0, ""),
        ("echo rubbish", 0, "its answer is not a list of GPUs: rubbish"),
        ("echo 'cannot talk to the driver'; exit 9", 0, "cannot talk to the driver"),
        ("echo 'NVML failed, reboot'; exit 9", 0, "NVML failed, reboot"),
        ("exit 9", 0, "exit code 9"),
        ("exec sleep 1000", 0, "no answer in 0.2 s"),
    ],
)
def test_whatever_nvidia_smi_does_is_bounded_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    words: str, listed: int, problem: str
) -> None:  # fmt: skip
    monkeypatch.setattr(logging.getLogger("coordinator"), "propagate", True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool, pids = tmp_path / "nvidia-smi", tmp_path / "pids"
    tool.write_text(f"#!/bin/bash\n{words}\njobs -p >> {pids}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(gpus, "ANSWER_S", 0.2 if "exec" in words else 60.0)
    assert [gpus.count_gpus(), len(gpus.list_gpus()[0]), gpus.list_gpus()[1]] == [listed, listed, problem]
    assert gpus.count_gpus() == listed, "it is asked once, and its silence is said once"
    told = "this machine counts as one without GPUs; repair the driver, or set CUDA_VISIBLE_DEVICES"
    assert [told in text for text in caplog.messages] == [True] * problem.startswith("no answer")
    for pid in pids.read_text().split() if pids.exists() else ():
        os.kill(int(pid), signal.SIGKILL)


def test_nvidia_smi_that_is_no_program_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.list_gpus() == ([], f"{tmp_path}/nvidia-smi cannot be started: Exec format error")
