"""One optimizer step under torch's profiler, for `run profile`. Training goes on without it too."""

import gzip
import logging
import shutil
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import profile

from rollout.storage import files
from rollout.storage.retry import waiting_for_space

logger = logging.getLogger(__name__)

SHOWN = 10
"""So many operators are named."""


class StepProfiler(AbstractContextManager[None]):
    """Profiles what is done in it, on the CPU and on the GPU if there is one.

    Publishes PLACE.json.gz, a Chrome trace (chrome://tracing, ui.perfetto.dev), and then PLACE.txt: the
    costliest operators, or why there is no trace. What raises is left to the caller, without an answer.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._profiler: profile | None = None

    def __enter__(self) -> None:
        try:
            profiler = profile()
            profiler.start()
            self._profiler = profiler
        except Exception as error:
            self.give_up(str(error))

    def __exit__(self, kind: type[BaseException] | None, *_about: object) -> None:
        if self._profiler is None:
            return
        try:
            self._profiler.stop()  # always: a process that ends while one goes on crashes
            if kind is not None:
                return
            text = costliest(self._profiler)
            with tempfile.TemporaryDirectory() as directory:
                trace, packed = Path(directory) / "trace.json", Path(directory) / "trace.json.gz"
                self._profiler.export_chrome_trace(str(trace))
                # A tenth of its size, and quickly: the peers wait. The trace itself may be gigabytes.
                with trace.open("rb") as trace_file, gzip.open(packed, "wb", compresslevel=3) as stream:
                    shutil.copyfileobj(trace_file, stream)
                self._publish(".json.gz", packed.read_bytes())
            self._publish(".txt", text.encode())
        except Exception as error:
            self.give_up(str(error))

    def give_up(self, why: str) -> None:
        """Answer that there is no trace."""
        logger.error("no profile: %s", why)
        try:
            self._publish(".txt", f"no trace: {why}\n".encode())
        except OSError:
            logger.exception("nor could that be said to who asked for it")

    def _publish(self, ending: str, data: bytes) -> None:
        with waiting_for_space(0.0):  # where the disk is full the others do not wait for this
            files.publish(self._place.with_name(self._place.name + ending), data, durable=False)


def costliest(profiler: profile) -> str:
    """Return a table of the operators that took most time themselves: on the GPU, where there is one."""
    on_gpu = torch.cuda.is_available()
    operators = [
        (event.self_device_time_total if on_gpu else event.self_cpu_time_total, event.count, event.key)
        for event in profiler.key_averages()
        # A kernel has an event of its own, but its time is also that of the operator that launched it.
        if event.device_type.name == "CPU"
    ]
    whole_us = sum(own_us for own_us, _, _ in operators) or 1.0
    lines = [f"{'GPU' if on_gpu else 'CPU'} ms  share   calls  operator"]
    for own_us, calls, name in sorted(operators, reverse=True)[:SHOWN]:
        lines.append(f"{own_us / 1e3:6.1f}  {own_us / whole_us:4.0%}  {calls:6}  {name}")
    return "\n".join(lines) + "\n"
