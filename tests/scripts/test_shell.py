"""The shell scripts work whatever a user's shell exports."""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

STUB = '#!/bin/sh\necho "$PWD" "$0" "$@"\n'


def checkout(at: Path) -> Path:
    """A project with our scripts, whose `run` says how it was called, and with the run of an earlier demo."""
    shutil.copytree(REPOSITORY / "scripts", at / "scripts", ignore=lambda _, names: {*names} - {*SCRIPTS})
    (at / ".venv" / "bin").mkdir(parents=True)
    (at / ".venv" / "bin" / "run").write_text(STUB)
    (at / ".venv" / "bin" / "run").chmod(stat.S_IRWXU)
    (at / "runs" / "demo").mkdir(parents=True)
    return at


SCRIPTS = ("demo.sh", "run.sh")


@pytest.mark.parametrize("exported", ["CDPATH", "function", "SHELLOPTS", "BASH_ENV"])
def test_the_demo_removes_the_run_of_its_own_project_alone(tmp_path: Path, exported: str) -> None:
    ours, other = checkout(tmp_path / "ours"), checkout(tmp_path / "other")
    (tmp_path / "env").write_text(f"cd() {{ builtin cd {other}; }}\nCDPATH={other}\n")
    environments = {
        "CDPATH": {"CDPATH": f"{other}:."},
        "function": {"BASH_FUNC_cd%%": f"() {{  builtin cd {other}; }}"},
        "SHELLOPTS": {"SHELLOPTS": "noclobber:physical", "CDPATH": str(other)},
        "BASH_ENV": {"BASH_ENV": str(tmp_path / "env")},
    }
    env = {**os.environ, **environments[exported]}
    for script in SCRIPTS:
        done = subprocess.run(
            ["bash", f"scripts/{script}"], cwd=ours, env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.startswith(f"{ours} ") and done.stdout.count("\n") == 1
    assert (other / "runs" / "demo").exists() and not (ours / "runs" / "demo").exists()
