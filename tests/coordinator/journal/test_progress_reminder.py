"""When a line says what goes on, with a clock of the test's own."""

import logging
import threading

import pytest

from coordinator.journal import progress_reminder as silence_module
from coordinator.journal.progress_reminder import ProgressReminder, progress_reminders


class Scene:
    """A silence, its clock, and what was said when."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.doing: tuple[object, str] = ("engine", "starting the engine")
        self.said: list[tuple[float, str]] = []
        self.silence = ProgressReminder(
            lambda: self.doing, lambda text: self.said.append((self.now_s, text)), lambda: self.now_s
        )

    def pass_by(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            self.silence.look()

    def hear(self) -> None:
        self.silence.handle(logging.makeLogRecord({"levelno": logging.INFO}))


def test_line_comes_after_ten_silent_seconds_and_ever_more_rarely_for_the_same() -> None:
    scene = Scene()
    scene.pass_by(300)
    assert [now_s for now_s, _ in scene.said] == [10.0, 30.0, 70.0, 130.0, 190.0, 250.0]
    assert {text for _, text in scene.said} == {"starting the engine"}


def test_line_that_others_have_logged_breaks_the_silence() -> None:
    scene = Scene()
    scene.pass_by(9)
    scene.hear()
    scene.pass_by(9)
    assert scene.said == []
    scene.pass_by(1)
    assert scene.said == [(19.0, "starting the engine")]


def test_what_has_begun_just_now_is_not_said_yet() -> None:
    scene = Scene()
    scene.pass_by(9)
    scene.doing = ("training", "training")
    scene.pass_by(3)
    assert scene.said == []
    scene.pass_by(1)
    assert scene.said == [(13.0, "training")]


def test_what_changes_all_the_time_is_said_too() -> None:
    scene = Scene()
    for number in range(40):
        scene.doing = (number, f"number {number}")
        scene.pass_by(1)
    assert [now_s for now_s, _ in scene.said] == [20.0, 40.0]


def test_something_else_that_goes_on_is_said_after_ten_seconds_again() -> None:
    scene = Scene()
    scene.pass_by(70)
    scene.doing = ("training", "training, 1 s so far")
    scene.pass_by(9)
    assert len(scene.said) == 3
    scene.pass_by(1)
    assert scene.said[-1] == (80.0, "training, 1 s so far")
    scene.doing = ("training", "training, 12 s so far")  # the same, further on
    scene.pass_by(19)
    assert len(scene.said) == 4


def test_it_is_said_as_a_log_line_while_the_block_lasts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(silence_module, "LOOK_S", 0.01)
    came = threading.Event()

    class Waits(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            came.set()

    handler = Waits()
    logging.getLogger().addHandler(handler)
    try:
        with progress_reminders(lambda: (1, "working"), first_s=0.01):
            assert came.wait(60.0)
    finally:
        logging.getLogger().removeHandler(handler)
    assert "working" in caplog.text
    assert not [one for one in threading.enumerate() if one.name == "silence"]
    assert not [one for one in logging.getLogger().handlers if isinstance(one, ProgressReminder)]
