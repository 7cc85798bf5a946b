"""`run doctor` on one node: what it measures, says and leaves, on directories fit and unfit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from coordinator.console.doctor import probe, run
from coordinator.console.doctor.checks import Check
from coordinator.console.doctor.partner import Partner, PartnerError
from coordinator.console.doctor.report import Report
from coordinator.start.rank import RANK_VARIABLES
from tests.commands import run_forked
from tests.coordinator.examples import run_dir_at, tree, write_json
from tests.coordinator.typed_command import lose_privileges
from tests.paths import REPOSITORY

ALONE = [
    *("directory", "filesystem", "free space", "free inodes", "atomic rename", "create once", "visibility"),
    *("stale listing", "stale lookup", "flags", "listing", "write speed", "big rename", "address"),
    *("machine", "GPUs", "versions"),
]
IMPORTED = (run,)
"""What the command imports, so that its fork need not."""
LOADED = """
import sys
from coordinator.cli import main
code = main()
print("LOADED", code, *({"torch", "transformers", "vllm"} & sys.modules.keys()))
"""


def environment() -> dict[str, str]:
    """Without what a scheduler says."""
    return {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES} | {
        "COLUMNS": "120"
    }


def doctor(root: Path, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """`run doctor`, to its end."""
    words = ["doctor", "--log-path", str(root), *arguments]
    if not more:
        return run_forked(words, REPOSITORY, environment())
    command = [sys.executable, *more.pop("command", ("-m", "coordinator.cli")), *words]
    how: dict[str, Any] = {"cwd": REPOSITORY, "env": environment(), "capture_output": True, "text": True}
    return subprocess.run(command, timeout=120, **how, **more)


def rows(ended: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    """The checks of `--json` by name."""
    return {check["check"]: check for check in json.loads(ended.stdout)["checks"]}


# ---- measuring


def test_gpus_are_what_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771'\necho 'NVIDIA GB10, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check = probe.check_gpus()
    assert check.figure == "1 x NVIDIA H200, 140.4 GiB; 1 x NVIDIA GB10, shared memory"
    tool.write_text("#!/bin/sh\necho 'the driver is not loaded'\nexit 9\n")
    assert probe.check_gpus().figure == "nvidia-smi: the driver is not loaded"


def test_partner_fails_in_words_and_goes_on(tmp_path: Path) -> None:
    with Partner() as partner:
        with pytest.raises(PartnerError, match="absent"):
            partner.ask("move", source=str(tmp_path / "absent"), target=str(tmp_path / "a"))
        partner.tell("replace", path=str(tmp_path / "a"), seconds=0.01)  # nobody asks what came of it
        assert partner.ask("create", path=str(tmp_path / "b")) is True
        assert partner.ask("create", path=str(tmp_path / "a")) is False


def test_partner_that_is_gone_is_told(tmp_path: Path) -> None:
    with Partner() as partner:
        partner.ask("remove", path="/nowhere/a")  # so it has begun to be the program it will be
        children = psutil.Process().children()
        alive = (each for each in children if each.status() != psutil.STATUS_ZOMBIE)
        child = next(
            each for each in alive if "coordinator.console.doctor.partner:make_partner" in each.cmdline()
        )
        partner.tell("replace", path=str(tmp_path / "a"), seconds=600)
        while not (tmp_path / "a").exists():
            time.sleep(0.01)
        child.kill()
        with pytest.raises(PartnerError, match="failed: its process was killed"):
            partner.answer()


# ---- the command


def test_fit_directory_passes_every_check_and_nothing_is_left(tmp_path: Path) -> None:
    started_s = time.monotonic()
    words = ("doctor", "--log-path", str(tmp_path / "a" / "run"), "--json")
    ended = run_forked(words, tmp_path, environment())
    assert ended.returncode == 0, ended
    assert time.monotonic() - started_s < 60
    said, found = json.loads(ended.stdout), rows(ended)
    assert (said["log_path"], said["fit"], said["nodes"]) == (str(tmp_path / "a" / "run"), True, 1)
    assert list(found) == ALONE
    assert not [row for row in found.values() if row["verdict"] == "fail"]
    assert tree(tmp_path) == set()
    values = {name: row["values"] for name, row in found.items()}
    umask = os.umask(0o077)
    os.umask(umask)
    mode, file_mode = (f"{mode & ~(umask | 0o007):04o}" for mode in (0o770, 0o660))
    assert values["directory"] == {"made": True, "mode": mode, "file_mode": file_mode}
    assert values["free space"]["free_bytes"] < values["free space"]["total_bytes"]
    assert values["atomic rename"]["reads"] > 0 and values["atomic rename"]["renames"] > 0
    assert values["atomic rename"]["torn"] == values["atomic rename"]["missing"] == 0
    assert values["create once"]["hard_links"] is True
    assert 0 < values["visibility"]["p50_s"] <= values["visibility"]["max_s"] < 30
    assert 0 < values["flags"]["p50_s"] <= values["flags"]["p99_s"]
    assert 0 < values["listing"]["names"] <= 500
    assert 0 < values["write speed"]["bytes"] <= 64 * 2**20
    assert values["big rename"]["partial_sizes"] == 0
    assert values["versions"]["torch"]


def test_directory_below_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ended = doctor(tmp_path / "a" / "run")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"there is no directory {tmp_path / 'a'}; is it mounted here?" in ended.stderr
    assert tree(tmp_path) == set()


def test_table_is_aligned_and_ends_in_a_verdict_and_a_run_that_lies_there_is_not_touched(
    tmp_path: Path,
) -> None:
    run_dir = run_dir_at(tmp_path)
    write_json(run_dir.run_json, {"run_id": "abc"})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    ended = doctor(tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    header, *lines, blank, verdict = ended.stdout.splitlines()
    assert header.split("  ")[0] == "check"
    column = header.index("verdict")
    named = [line for line in lines if not line.startswith(" ")]
    assert [line[: header.index("figure")].strip() for line in named] == ALONE
    assert {line[column : column + 7].strip() for line in named} <= {"ok", "slow", "warn"}
    assert max(map(len, ended.stdout.splitlines())) <= 120
    assert blank == "" and verdict.startswith(f"{tmp_path} can carry a run")


def test_doctor_loads_no_torch(tmp_path: Path) -> None:
    ended = doctor(tmp_path, command=("-c", LOADED))
    assert ended.stdout.splitlines()[-1] == "LOADED 0", ended.stderr


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_path_that_is_a_file_is_refused_in_one_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    ended = doctor(tmp_path / path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"run: --log-path {tmp_path / path}: {tmp_path / 'file'} is a file; give a directory\n"
    )


def test_path_that_is_not_writable_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    ended = doctor(tmp_path / "locked", preexec_fn=lose_privileges)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.endswith("is not writable for this user\n") and ended.stderr.count("\n") == 1


def test_check_that_a_signal_ends_leaves_no_partner_that_goes_on_writing(tmp_path: Path) -> None:
    """Its directory is removed next, while the exception still holds the frames of the checks."""
    ended: list[str] = []

    def interrupted() -> list[Check]:
        raise KeyboardInterrupt

    def checks() -> Generator[tuple[str, Callable[[], list[Check]]]]:
        try:
            yield "atomic rename", interrupted
        finally:
            ended.append("partner")

    with pytest.raises(KeyboardInterrupt) as held:
        Report(tmp_path, 1, prints=False).take(checks())
    assert ended == ["partner"], held


def test_interrupted_doctor_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "doctor", "--log-path", str(tmp_path / "run")]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment(), stdout=subprocess.DEVNULL)
    deadline_s = time.monotonic() + 60
    partners: list[psutil.Process] = []
    while not (partners and list(tmp_path.glob("run/doctor/*.work/replaced"))):
        assert time.monotonic() < deadline_s and process.poll() is None
        partners = psutil.Process(process.pid).children()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 130
    assert tree(tmp_path) == set()
    assert not [partner for partner in partners if partner.is_running()]


def test_what_another_doctor_left_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "doctor" / "5d0c41f2.work").mkdir(parents=True)
    found = rows(doctor(tmp_path, "--json"))
    assert found["leftovers"]["verdict"] == "warn"
    assert found["leftovers"]["what_to_do"].endswith(f"rm -r {tmp_path}/doctor")
    assert tree(tmp_path) == {"doctor", "doctor/5d0c41f2.work"}
