"""The content of heartbeats, for those who only look on: whatever lies in the files, the types are right."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import RunDir
from coordinator.protocol.heartbeat import read_beat

Count = Annotated[int, Field(ge=0, lt=2**53)]
Number = Annotated[float, Field(ge=0, le=1e15)]
HUGE = 1e100
"""Larger values are no measurements and cannot be drawn."""


class _Gpu(BaseModel):
    name: str = ""
    used_bytes: Number = 0
    total_bytes: Number = 0
    busy: Number | None = None


class _ShownHeartbeat(BaseModel):
    """The fields of a heartbeat that views show."""

    model_config = ConfigDict(allow_inf_nan=False)

    host: str = ""
    pid: Annotated[int, Field(gt=0, lt=2**31)] = 1
    pid_space: str = ""
    monotonic_s: Number = 0.0
    address: str = ""
    gpu_count: Count = 0
    gpus: list[_Gpu] = []
    state: str = ""
    iteration: Count = 0
    phase: str = ""
    done: Count = 0
    total: Count = 0
    samples: Count = 0
    samples_total: Count = 0
    waiting_for: list[Count] = []
    waits_for: str = ""
    work: str = ""
    work_s: Number = 0.0
    row_s: Number = 0.0
    waiting_s: Number = 0.0
    tokens_per_s: Number | None = None
    left_s: Number | None = None
    silent_s: dict[Count, Number] = {}


def heartbeat_values(run_dir: RunDir, beat: Beat) -> dict[str, Any]:
    """Return the fields that a beat has; {} if it is gone or damaged."""
    try:
        return _ShownHeartbeat.model_validate(read_beat(run_dir, beat)).model_dump(exclude_unset=True)
    except (ValidationError, RecursionError):  # the latter: of deeply nested JSON
        return {}


def is_number(value: Any) -> bool:
    """Return whether a value can be shown. JSON of Python may hold NaN and infinity."""
    return isinstance(value, int | float) and abs(value) <= HUGE
