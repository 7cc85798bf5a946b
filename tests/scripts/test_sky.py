"""scripts/sky.yaml: its fields are SkyPilot's, and its script does on each node what it says."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from coordinator.cli import main

FILE = Path(__file__).parents[2] / "scripts" / "sky.yaml"
TASK = yaml.safe_load(FILE.read_text())
FIELDS = {
    *(
        "name",
        "workdir",
        "num_nodes",
        "resources",
        "envs",
        "secrets",
        "file_mounts",
        "volumes",
        "setup",
        "run",
    ),
    *("config", "service", "experimental", "pool", "inputs", "outputs"),
}
"""Fields of a task, in SkyPilot's reference of the format; another one is an error there."""
STUB = """\
#!/usr/bin/env bash
echo "$RANK $*" >> {said}
(($(wc -l < {said}) <= {kills})) && kill -9 $$
exit {code}
"""


def carry_out(place: Path, rank: int, code: int = 0, kills: int = 0) -> tuple[int, list[str]]:
    """Run the script as SkyPilot does on one node; its exit code, and `RANK WORDS` of each start of `run`."""
    program, said = place / ".venv" / "bin" / "run", place / "said"
    program.parent.mkdir(parents=True)
    program.write_text(STUB.format(said=said, kills=kills, code=code))
    program.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_RANK": str(rank)}
    environment["SKYPILOT_NUM_NODES"] = str(TASK["num_nodes"])
    done = subprocess.run(["bash", "-e", "-c", TASK["run"]], cwd=place, env=environment, timeout=30)
    return done.returncode, said.read_text().splitlines()


def test_fields_are_those_of_a_task_and_of_their_type() -> None:
    assert set(TASK) <= FIELDS
    types: dict[str, Any] = {"name": str, "workdir": str, "num_nodes": int, "setup": str, "run": str}
    assert all(isinstance(TASK[field], kind) for field, kind in types.items())
    accelerator, _, count = TASK["resources"]["accelerators"].partition(":")
    assert accelerator and int(count) > 0 and TASK["num_nodes"] > 1


def test_all_nodes_write_the_volume() -> None:
    (mount,) = TASK["volumes"]
    words = TASK["run"].split()
    assert Path(words[words.index("--log-path") + 1]).is_relative_to(mount)


@pytest.mark.parametrize("rank", range(3))
def test_every_node_starts_one_run_with_its_rank(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (start,) = carry_out(tmp_path, rank)
    given, *words = start.split()
    assert (code, given) == (0, str(rank))
    monkeypatch.setenv("RANK", given)
    monkeypatch.setattr("sys.argv", ["run", *words, "--settings-only"])
    assert main() == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["cluster"]["num_nodes"] == TASK["num_nodes"]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 130])
def test_run_that_ended_by_itself_is_not_started_again(tmp_path: Path, code: int) -> None:
    assert carry_out(tmp_path, 1, code) == (code, ["1 --num-nodes 3 --log-path /shared/exp1"])


def test_killed_run_is_started_again(tmp_path: Path) -> None:
    code, starts = carry_out(tmp_path, 1, kills=2)
    assert (code, len(starts)) == (0, 3)
