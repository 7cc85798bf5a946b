"""`run logs`: which files are shown, how much of them, and what is followed."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.console.views.crew_status import crew_dirs
from coordinator.console.views.logs import LogPrinter, show_logs, tail
from coordinator.directory.file_names import Beat
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement
from coordinator.settings.tree import SettingsError
from tests.coordinator.examples import run_dir_at, write_json


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path)
    write_json(made.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    for rank in (0, 1):
        made.logs(rank).mkdir()
        write(made, rank, f"node.{100 + rank}.log", f"first of rank {rank}\nlast of rank {rank}\n")
    return made


def write(run_dir: RunDir, rank: int, name: str, text: str, age_s: float = 0.0) -> Path:
    """Append to a log; its last change was `age_s` ago."""
    path = run_dir.logs(rank) / name
    with path.open("a") as file:
        file.write(text)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))
    return path


def shown(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], rank: int | None = None, lines: int = 9
) -> str:
    show_logs(run_dir.root, rank, lines, follow=False)
    return capsys.readouterr().out


class Followed:
    """What a printer has printed since it was last asked."""

    def __init__(self, run_dir: RunDir, rank: int | None = None) -> None:
        self._out = io.StringIO()
        self.printer = LogPrinter([run_dir], rank, self._out)

    def taken(self) -> str:
        text = self._out.getvalue()
        self._out.seek(0)
        self._out.truncate()
        return text

    def poll(self, look: bool = True) -> str:
        self.printer.poll(look)
        return self.taken()


def test_last_lines_of_every_nodes_log_are_shown_under_its_name(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(run_dir, capsys, lines=1) == (
        "==> logs/rank_0000/node.100.log <==\nlast of rank 0\n\n"
        "==> logs/rank_0001/node.101.log <==\nlast of rank 1\n"
    )


def test_of_one_rank_also_its_engine_and_its_trainer_are_shown(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("engine.101.9.log", "engine.101.10.log", "engine.7.11.log"):
        write(run_dir, 1, name, f"{name}\n")
    for name in ("trainer.e0002.i000009.3.log", "trainer.e0002.i000010.1.log", "nccl.e0001.txt"):
        write(run_dir, 1, name, f"{name}\n")
    heads = [line for line in shown(run_dir, capsys, rank=1).splitlines() if line.startswith("==>")]
    assert [head.split()[1].rpartition("/")[2] for head in heads] == [
        "node.101.log",
        "engine.101.10.log",
        "trainer.e0002.i000010.1.log",
    ]


def test_of_engines_with_one_pid_the_one_that_was_written_last_counts(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run_dir, 1, "engine.101.9.log", "of a process before, in a container\n", age_s=100)
    write(run_dir, 1, "engine.101.2.log", "of the newest process\n")
    assert shown(run_dir, capsys, rank=1).endswith("engine.101.2.log <==\nof the newest process\n")


def test_machine_with_a_node_in_both_crews_shows_the_logs_of_both(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_placement(run_dir.root, Placement(2, ("rollout=0", "train=1-2")))
    for machine, count in ((0, 2), (1, 1)):
        publish_devices(run_dir.root, machine, f"node-{machine}", count)
    rollout, train = crew_dirs(run_dir.root)
    for crew, rank, pid in ((rollout, 0, 7), (train, 0, 8), (train, 1, 9)):
        crew.logs(rank).mkdir()
        for number in (pid, 1000 + pid):
            write(crew, rank, f"node.{number}.log", f"{number}\n")
        for directory in crew.protocol:
            directory.mkdir(parents=True, exist_ok=True)
        write_json(crew.entry(Beat(2, rank, 1, 3)), {"pid": pid})
    write(train, 1, "trainer.e0002.i000010.1.log", "steps\n")
    heads = [line.split()[1] for line in shown(run_dir, capsys).splitlines() if line.startswith("==>")]
    assert heads == [
        "logs/rollout_0000/node.7.log",
        "logs/train_0000/node.8.log",
        "logs/train_0001/node.9.log",
    ], "the newest processes, and not what was there before the devices were placed"
    heads = [line for line in shown(run_dir, capsys, rank=0).splitlines() if line.startswith("==>")]
    assert [head.split("/")[1] for head in heads] == ["rollout_0000", "train_0000"]
    assert "steps" in shown(run_dir, capsys, rank=1)
    with pytest.raises(SettingsError, match="no logs of rank 2; there are logs of 0, 1"):
        show_logs(run_dir.root, 2, 9, follow=False)


def test_what_a_log_says_cannot_move_the_cursor(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, 1, "node.101.log", "\x1b[2J\x1b]0;title\x07\tgone\r\n")
    assert shown(run_dir, capsys, rank=1, lines=1).endswith("\n^[[2J^[]0;title^G\tgone\n")


def test_newest_process_is_the_one_that_beats(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, 1, "node.55.log", "of the newest process\n", age_s=100)
    write_json(run_dir.entry(Beat(2, 1, 7, 3)), {"pid": 55})
    assert "node.55.log" in shown(run_dir, capsys, rank=1)
    write_json(run_dir.entry(Beat(2, 1, 8, 0)), {"pid": 56})  # it has not logged yet
    assert "node.101.log" in shown(run_dir, capsys, rank=1)


def test_without_a_beat_the_log_that_was_written_last_counts(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run_dir, 1, "node.99.log", "older\n", age_s=100)
    text = shown(run_dir, capsys, rank=1)
    assert "node.101.log" in text and "older" not in text


@pytest.mark.parametrize("end", ["\n", ""])
@pytest.mark.parametrize("lines", [1, 3, 5000, 9000])
def test_tail_is_read_from_the_end(tmp_path: Path, lines: int, end: str) -> None:
    path = tmp_path / "log"
    written = [f"line {number} {'x' * (number % 90)}" for number in range(6000)]
    path.write_text("\n".join(written) + end)
    data, size = tail(path, lines)
    assert data.decode() == "\n".join(written[-lines:]) + end
    assert size == path.stat().st_size


def test_tail_of_a_large_file_reads_little_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.seek(2**40)  # a hole
        file.write(b"\nlast\n")
    assert tail(path, 1)[0] == b"last\n"


def test_last_line_without_an_end_is_shown(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(run_dir, 1, "node.101.log", "torn")
    assert shown(run_dir, capsys, rank=1, lines=2).endswith("last of rank 1\ntorn\n")


def test_rank_without_logs_is_refused_with_those_that_have_some(run_dir: RunDir) -> None:
    with pytest.raises(SettingsError, match="logs: no logs of rank 7; there are logs of 0, 1"):
        show_logs(run_dir.root, 7, 9, follow=False)


def test_run_without_logs_is_refused(tmp_path: Path) -> None:
    run_dir = run_dir_at(tmp_path)
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    with pytest.raises(SettingsError, match="no logs; no node has written any yet"):
        show_logs(run_dir.root, None, 9, follow=False)
    run_dir.logs(0).mkdir()
    with pytest.raises(SettingsError, match="rank_0000: no logs there yet"):
        show_logs(run_dir.root, None, 9, follow=False)


def test_follow_prints_what_comes_and_names_the_file_when_it_changes(run_dir: RunDir) -> None:
    followed = Followed(run_dir)
    followed.printer.begin(1)
    assert followed.taken().endswith("==> logs/rank_0001/node.101.log <==\nlast of rank 1\n")
    assert followed.poll() == ""
    write(run_dir, 1, "node.101.log", "one\ntwo\n")
    assert followed.poll() == "one\ntwo\n"
    write(run_dir, 0, "node.100.log", "three\n")
    assert followed.poll() == "\n==> logs/rank_0000/node.100.log <==\nthree\n"


def test_follow_prints_whole_lines(run_dir: RunDir) -> None:
    write(run_dir, 1, "node.101.log", "ha")
    followed = Followed(run_dir, rank=1)
    followed.printer.begin(1)
    assert "ha" not in followed.taken()
    write(run_dir, 1, "node.101.log", "lf")
    assert followed.poll() == ""
    write(run_dir, 1, "node.101.log", " and whole\n")
    assert followed.poll().endswith("half and whole\n")


def test_follow_takes_in_new_files_processes_and_ranks(run_dir: RunDir) -> None:
    followed = Followed(run_dir)
    followed.printer.begin(1)
    followed.taken()
    write(run_dir, 1, "node.300.log", "started anew\n", age_s=-10)
    run_dir.logs(2).mkdir()
    write(run_dir, 2, "node.102.log", "late\n")
    assert followed.poll(look=False) == ""
    assert followed.poll() == (
        "\n==> logs/rank_0001/node.300.log <==\nstarted anew\n\n==> logs/rank_0002/node.102.log <==\nlate\n"
    )


def test_file_that_cannot_be_read_for_a_moment_is_read_later(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(run_dir, rank=1)
    followed.printer.begin(1)
    followed.taken()
    path = write(run_dir, 1, "node.101.log", "later\n")
    path.rename(path.with_suffix(".away"))
    assert followed.poll() == ""
    path.with_suffix(".away").rename(path)
    assert followed.poll() == "later\n"


def test_output_that_nobody_reads_any_more_is_no_error(run_dir: RunDir) -> None:
    script = "import sys; from pathlib import Path; from coordinator.console.views.logs import show_logs"
    command = f"{script}; show_logs(Path(sys.argv[1]), None, 9, True)"
    reading, writing = os.pipe()
    os.close(reading)
    ended = subprocess.run(
        [sys.executable, "-c", command, str(run_dir.root)], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, b""), json.dumps(ended.stderr.decode())
