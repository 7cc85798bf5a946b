"""This node's GPUs: how many there are, and how they are used now.

The use is read through NVML, which may hang where a driver is broken. So one thread alone calls it, and
nobody ever waits for that thread.
"""

import contextlib
import logging
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

log = logging.getLogger(__name__)

_GPU = re.compile(r"\d+|(GPU|MIG)-.+")
"""How CUDA_VISIBLE_DEVICES names one; Slurm sets it to NoDevFiles for a job without GPUs."""
_LISTED = re.compile(r",\s*(\d+|\[.*\])\s*\Z")
"""How nvidia-smi ends a line with a GPU's memory."""
ANSWER_S = 30.0
"""How long nvidia-smi may take."""
KILLED_S = 1.0
NO_ANSWER = "no answer"
DRIVER = "/proc/driver/nvidia/gpus"
"""Where NVIDIA's driver has a directory for each GPU."""


def count_devices() -> int:
    """Return how many devices this machine has: its GPUs, or itself."""
    return max(1, count_gpus())


def count_gpus() -> int:
    """Count the GPUs that this process may use, without importing torch. nvidia-smi is asked once."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        items = [item.strip() for item in visible.split(",")]
        shown = list(takewhile(_GPU.fullmatch, items))  # CUDA ignores what stands behind a bad one
        # A process can have one part of a divided GPU, and then nothing else.
        return 1 if any(item.startswith("MIG-") for item in shown) else len(shown)
    tool = shutil.which("nvidia-smi")
    if tool is None:  # slim containers may lack it
        return len(os.listdir(DRIVER)) if os.path.isdir(DRIVER) else 0
    return _count(tool)


def list_gpus() -> tuple[list[dict[str, Any]], str]:
    """Return each GPU of this machine as its driver lists it, {"name", "memory_bytes"} (None if it shares the
    machine's memory), and what is wrong with the driver.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [], ""
    listed, problem = _ask(tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    fields = [line.rpartition(",") for line in listed if _LISTED.search(line)]
    if not fields:
        return [], problem or next((f"its answer is not a list of GPUs: {line:.80}" for line in listed), "")
    return [
        # A GPU that shares the machine's memory says [N/A].
        {"name": name.strip(), "memory_bytes": int(mib) * 2**20 if mib.strip().isdigit() else None}
        for name, _, mib in fields
    ], ""


@cache
def _count(tool: str) -> int:
    listed, problem = _ask(tool, "-L")
    if problem.startswith(NO_ANSWER):
        log.warning("nvidia-smi: %s: this machine counts as one without GPUs; repair the driver, or set "
                    "CUDA_VISIBLE_DEVICES", problem)  # fmt: skip
    return sum(line.startswith("GPU ") for line in listed)


def _ask(tool: str, *options: str) -> tuple[list[str], str]:
    """Return the lines that nvidia-smi prints, and what is wrong with it. Where a driver is broken it hangs,
    maybe so that nothing can kill it; and what it has started may keep its output open. It may list all GPUs
    and end with 14, because of something in one of them that nobody needs (infoROM).
    """
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                [tool, *options], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        except OSError as error:
            return [], f"{tool} cannot be started: {error.strerror}"
        try:
            code = process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILLED_S)
            return [], f"{NO_ANSWER} in {ANSWER_S:g} s"
        output.seek(0)
        lines = output.read().decode("utf-8", "replace").splitlines()
    return lines, next(iter(lines), f"exit code {code}") if code else ""


def least_gpu_bytes() -> float | None:
    """Return the memory of this machine's smallest GPU; None where it is not known."""
    return min((gpu["memory_bytes"] for gpu in list_gpus()[0] if gpu["memory_bytes"]), default=None)


class GpuSampler:
    """Looks at this node's GPUs every `period_s`; no thread stays where there is no driver, or no package."""

    def __init__(self, period_s: float, nvml: Any = None) -> None:
        """`nvml`: in place of the module `pynvml`."""
        self.latest: list[dict[str, Any]] = []
        """Each GPU that CUDA_VISIBLE_DEVICES shows: {"name", "used_bytes", "total_bytes", "busy"}, `busy` a
        fraction of the last moment (0.0 for a part of a GPU, of which the driver does not say it)."""
        if nvml is not None or find_spec("pynvml"):
            arguments = (period_s, nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
            threading.Thread(target=self._run, args=arguments, name="gpus", daemon=True).start()

    def _run(self, period_s: float, nvml: Any, visible: str | None) -> None:
        if nvml is None:
            import pynvml as nvml  # pyright: ignore
        try:
            nvml.nvmlInit()
            handles = _visible_gpus(nvml, visible)
        except nvml.NVMLError:  # no driver
            return
        while handles:
            self.latest = [sample for handle in handles if (sample := _sample(nvml, handle))]
            time.sleep(period_s)


def _visible_gpus(nvml: Any, visible: str | None) -> list[Any]:
    """Return the handles of what CUDA_VISIBLE_DEVICES shows: indices, UUIDs or how these begin, until a bad
    one.
    """
    gpus = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    if visible is None:
        return gpus
    handles: list[Any] = []
    for item in (text.strip() for text in visible.split(",")):
        if item.startswith("MIG-"):
            handles.append(nvml.nvmlDeviceGetHandleByUUID(item))
            continue
        named = [gpu for index, gpu in enumerate(gpus) if item == str(index)]
        if item.startswith("GPU-"):
            named = [gpu for gpu in gpus if nvml.nvmlDeviceGetUUID(gpu).startswith(item)]
        if len(named) != 1:  # as CUDA does
            break
        handles += named
    return handles


def _sample(nvml: Any, handle: Any) -> dict[str, Any]:
    """One GPU as it is now; {} if it does not answer."""
    try:
        name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:
        return {}
    try:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
    except nvml.NVMLError:
        busy = 0.0
    return {"name": name, "used_bytes": memory.used, "total_bytes": memory.total, "busy": busy}
