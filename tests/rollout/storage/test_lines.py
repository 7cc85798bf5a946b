"""Lines are appended once and whole."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.storage.lines import append_line
from tests.rollout.storage.failing_calls import failing

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "metrics.jsonl"


def test_lines_are_appended(lines: Path) -> None:
    for number in range(3):
        append_line(lines, json.dumps({"iteration": number}))
    assert [json.loads(line)["iteration"] for line in lines.read_text().splitlines()] == [0, 1, 2]


def test_torn_last_line_spoils_no_other(lines: Path) -> None:
    lines.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    append_line(lines, '{"a": 3}')
    assert lines.read_bytes() == b'{"a": 1}\n{"a": 2, "b\n{"a": 3}\n'


def test_line_is_whole_after_the_filesystem_failed_once(lines: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "fsync", errno.EIO, times=1)
    append_line(lines, '{"a": 1}')
    assert set(lines.read_text().splitlines()) == {'{"a": 1}'}
