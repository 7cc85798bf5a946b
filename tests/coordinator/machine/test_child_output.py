"""What a child prints: kept, shown, and written to its log, which does not fill the disk."""

import io
from pathlib import Path

import pytest

from coordinator.collector import echo
from coordinator.machine import child_output


def test_log_of_a_child_that_prints_without_end_stays_bounded_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child_output, "LOG_BYTES", 100)
    shown: list[str] = []
    path = tmp_path / "child.log"
    output = child_output.ChildOutput("child", io.BytesIO(b"0123456789\n" * 1000), path, shown.append)
    output.join(30.0)
    lines = path.read_text().splitlines()
    assert lines[:-1] == ["0123456789"] * 10 and "nothing more goes there" in lines[-1]
    assert len(shown) == 1000 and caplog.text.count("nothing more goes there") == 1


def test_flood_on_the_terminal_is_cut_and_its_log_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(echo.time, "monotonic", lambda: 7.0)
    show = echo.Echo(tmp_path / "collector.log")
    for number in range(1000):
        show(str(number))
    assert len(caplog.messages) == 1 + echo.LINES_A_SECOND
    assert caplog.messages[-1].endswith(f"the others are in {tmp_path}/collector.log alone)")
