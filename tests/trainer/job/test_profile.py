"""What `StepProfiler` leaves, and that nothing that it fails at is a failure of the step in it."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.storage import files
from trainer.job.profile import StepProfiler


def step() -> torch.Tensor:
    return (torch.ones(64, 64) @ torch.ones(64, 64)).cos().sum()


def test_trace_is_there_before_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    publish = files.publish
    monkeypatch.setattr(
        files,
        "publish",
        lambda path, *given, **more: written.append(path.name) or publish(path, *given, **more),
    )
    with StepProfiler(tmp_path / "profile.i000001.0badcafe"):
        step()
    assert written == ["profile.i000001.0badcafe.json.gz", "profile.i000001.0badcafe.txt"]
    trace = json.loads(gzip.decompress((tmp_path / written[0]).read_bytes()))
    assert "aten::cos" in {event.get("name") for event in trace["traceEvents"]}
    assert "aten::cos" in (tmp_path / written[1]).read_text()


@pytest.mark.parametrize("call", ["start", "stop", "export_chrome_trace", "key_averages"])
def test_profiler_that_fails_is_an_answer_and_the_step_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    stop = torch.profiler.profile.stop

    def fail(profiler: torch.profiler.profile, *_: Any) -> None:
        if call == "stop":
            stop(profiler)  # one that goes on when the tests end crashes them
        raise RuntimeError("CUPTI is not there")

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, call, fail)
        with StepProfiler(tmp_path / "profile.i000001.0badcafe"):
            value = step()
    assert value.isfinite()
    answer = (tmp_path / "profile.i000001.0badcafe.txt").read_text()
    assert answer == "no trace: CUPTI is not there\n"
    assert not list(tmp_path.glob("*.json.gz"))
    with StepProfiler(tmp_path / "profile.i000002.0badcafe"):  # it can be asked again
        step()


def test_place_that_cannot_be_written_is_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "logs").touch()
    with StepProfiler(tmp_path / "logs" / "profile.i000001.0badcafe"):
        value = step()
    assert value.isfinite() and "no profile" in caplog.text


def test_error_of_the_step_comes_through_without_an_answer(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError), StepProfiler(tmp_path / "profile.i000001.0badcafe"):
        raise FloatingPointError
    assert os.listdir(tmp_path) == []
    assert not torch.autograd.profiler._is_profiler_enabled
