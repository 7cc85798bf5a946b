"""Every command and block of README, CONTRIBUTING and docs/ is run, or named with the test that runs it."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli import main
from coordinator.console.commands.parse import COMMANDS
from coordinator.machine import run_command
from coordinator.settings.loading import build, flatten
from coordinator.start.rank import NODES_VARIABLE, RANK_VARIABLES
from tests.commands import ask_forked
from tests.coordinator.console.plan.planned_run import write_run
from tests.models import make_model
from tests.scripts.documented_run import make_run
from tests.scripts.pages import PAGES, REPOSITORY, blocks, commands

Here = Callable[[str], list[str]]
SERVE = "tests/scripts/test_serve_page.py"
ELSEWHERE = {
    r"run trainer\.algorithm=reinforce --dry-run": "tests/trainer/test_algorithms_page.py",
    r"run doctor .*--peers .*": "tests/cluster/test_doctor.py",
    r"hf upload .*": "tests/coordinator/test_gpus_page.py",
    r"(\S+=1 )?vllm serve .*--logprobs-mode processed_logprobs": "tests/rollout/engines/test_kinds.py",
    r"vllm serve .*--enable-lora .*": "tests/coordinator/test_gpus_page.py",
    r"\.venv-trl/bin/python scripts/bench/\w+\.py": "tests/scripts/test_benchmarks.py",
    r"(\.venv/bin/)?python -m pytest tests/gpu -s": "tests/gpu/test_gpu_training.py",
    r"python scripts/settings_page\.py": "tests/coordinator/test_settings_page.py",
    r"(\.venv/bin/)?python -m scripts\.models.*": "tests/scripts/test_models.py",
    r"python -m trainer\.checkpoint\.merge .*": "tests/trainer/checkpoint/test_merge.py",
    r"python -m scripts\.real_model": "tests/real/test_real_model.py",
    r"python scripts/bench/(overlap|asynchrony|protocol|recipes)\.py .*": "tests/scripts/test_benchmarks.py",
    r"python scripts/bench/self_distillation\.py .*": "tests/scripts/test_benchmarks.py",
    r"python -m tests\.simulation\.many_nodes .*": "tests/simulation/test_many_nodes.py",
    r"vllm serve Qwen/Qwen3-8B --port 8000": "tests/engines/test_generation.py",
    r"vllm serve HUB_ID": "tests/rollout/engines/test_vllm_worker.py",
    r"run guest .*": "tests/cluster/test_guests.py",
    r"(sbatch|scancel) .*": "tests/scripts/test_slurm.py",
    r"kubectl .*": "tests/scripts/test_k8s.py",
    r"sky (launch|logs|down) .*": "tests/scripts/test_sky.py",
    r"ray (start|job) .*": "tests/cluster/test_ray_launch.py",
    r"run --config scripts/recipes/.*": "tests/cluster/test_recipes.py",
    r"run profile .*": "tests/cluster/test_profile.py",
    r"run verify .*": "tests/cluster/test_verify.py",
    r"run export --merge.*": "tests/coordinator/console/commands/test_export.py",
    r"run eval .*": "tests/cluster/test_eval_sets.py",
    r"run with-ray .*": "tests/cluster/test_ray_launch.py",
    r"docker (build|push) .*": "tests/packaging/test_dockerfile.py",
    r"run (serve|submit|jobs|overwatch|stop|resume|fetch|logs --server)( .*)?": SERVE,
    r"(python scripts/flagpost_client\.py|export FLAGPOST_SERVER=|ssh -N -L).*": SERVE,
    r"python -m build": "tests/packaging/test_distributions.py",
}
"""What is not run here, and the test that does; `doctor` alone: tests/coordinator/console/doctor."""
NOT_IN_CI = {"vllm-cpu", "demo"}
"""What `.ci/run` does not name: below."""
PAGES_WITH_TESTS = {
    *("README.md", "docs/tasks.md", "docs/algorithms.md", "docs/serve.md"),
    "docs/environments.md",
}
"""Their Python blocks are run by tests/coordinator/test_readme.py, tests/rollout/test_docs.py,
tests/rollout/test_docs_tools.py, tests/trainer/test_algorithms_page.py, tests/scripts/test_serve_page.py,
and
test_verifiers.py, test_text_gym.py, test_openenv.py and test_python_tool.py in tests/rollout/environments.
"""
ALL = sorted({command for page in PAGES for command in commands(page)})


ENVIRONMENT = r"^([A-Z_]+=\S* )+"
"""What stands before a command for its environment."""


def kind(command: str) -> str:
    """How a command is run here; empty for one that nothing knows."""
    if any(re.fullmatch(pattern, command) for pattern in ELSEWHERE):
        return "elsewhere"
    first, _, rest = re.sub(ENVIRONMENT, "", command).partition(" ")
    if first == "run":
        word = rest.partition(" ")[0]
        return word if word in COMMANDS else "start"
    if first in {"cat", "head", "tail"}:
        return "read"
    if first in {"make", "bash"}:
        return first
    return "extras" if re.fullmatch(r"\.venv/bin/pip install -e '\.\[\w+\]'", command) else ""


def of(*kinds: str) -> list[str]:
    return [command for command in ALL if kind(command) in kinds]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """Makes the words of a command ones that hold in an empty current directory."""
    monkeypatch.chdir(tmp_path)
    for variable in ("RUN_LOG_PATH", "MASTER_ADDR", NODES_VARIABLE, *RANK_VARIABLES):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')

    def words(command: str) -> list[str]:
        return shlex.split(re.sub(r"(?<![\w/])/shared/", f"{tmp_path}/", re.sub(r"\bDIR\b", "made", command)))

    return words


def run_of(words: list[str], place: Path) -> Path:
    """The run directory, below `place`, that a command is about."""
    if "--log-path" in words:
        return Path(words[words.index("--log-path") + 1])
    file = Path(words[-1])
    if file.is_absolute():
        return Path(file.relative_to(place).parts[0])
    return Path(*file.parts[:2]) if words[0] != "run" else Path("runs/default")


def run(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """`main` with these words, of which the first ones may be for the environment."""
    while "=" in words[0]:
        monkeypatch.setenv(*words[0].split("=", 1))
        words = words[1:]
    monkeypatch.setattr("sys.argv", words)
    return main()


def test_every_command_is_of_a_kind_that_is_tested() -> None:
    assert [command for command in ALL if not kind(command)] == []
    assert len(ALL) > 60 and len(of("start")) > 20


def test_what_is_tested_elsewhere_is_tested_there() -> None:
    used = {
        pattern: path for pattern, path in ELSEWHERE.items() if any(re.fullmatch(pattern, c) for c in ALL)
    }
    assert [path for path in used.values() if not (REPOSITORY / path).is_file()] == []
    files = [
        word
        for command in of("elsewhere")
        if not command.startswith("run ")  # it names files of the user
        for word in command.split()
        if re.search(r"\.(py|sh|sbatch|yaml)$", word)
    ]
    assert [file for file in files if not (REPOSITORY / file).is_file()] == []


@pytest.mark.parametrize("command", of("start"))
def test_command_that_starts_nodes_is_understood(
    command: str, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = here(command)
    if words[1:] in (["--help"], ["--version"]):
        assert run(words, monkeypatch) == 0
        return
    if "--num-nodes" in words and not {"--master", "local"} & {*words}:
        monkeypatch.setenv("RANK", "1")  # as a platform does that runs one command on every machine
    assert run([*words, "--settings-only"], monkeypatch) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["cluster"]["num_nodes"] >= 1


@pytest.mark.parametrize("command", of("launch"))
def test_launch_says_what_it_would_start(
    command: str, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = here(command)
    if "--ray" in words:
        hosts = [f"rank {rank}" for rank in range(int(words[words.index("--num-nodes") + 1]))]
    else:
        hosts = words[words.index("--hosts") + 1].split(",")
        words += ["--ssh", sys.executable]
    monkeypatch.setattr(run_command, "ask_run", ask_forked)
    assert run([*words, "--dry-run"], monkeypatch) == 0, capsys.readouterr().err
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == hosts


@pytest.mark.parametrize("command", of("status", "report", "logs", "export", "cleanup", "fork", "read"))
def test_command_about_a_run_works_on_one(
    command: str,
    here: Here,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = here(command)
    root = tmp_path / run_of(words, tmp_path)
    named = int(words[words.index("--iteration") + 1]) if "--iteration" in words else 3
    make_run(root, finished=named - (kind(command) in {"cleanup", "fork"}))
    if kind(command) == "read":
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr
        return
    follows = {"--watch", "-f", "--follow"} & {*words}
    if follows:
        monkeypatch.setattr("time.sleep", interrupt)
    monkeypatch.setattr("coordinator.console.commands.cleanup.patience_s", lambda _cluster: 0.06)
    assert run(words, monkeypatch) == (130 if follows else 0), capsys.readouterr().err
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("command", of("plan"))
def test_plan_is_made_of_a_run_or_of_a_model(
    command: str, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = here(command)
    if "--model" in words:
        make_model(Path(words[words.index("--model") + 1]), seed=0)
    else:
        write_run(Path(words[words.index("--log-path") + 1]), [2, 2], [250.0, 250.0], train_s=8.0)
    assert run(words, monkeypatch) == 0, capsys.readouterr().err
    assert ("training takes" if "--model" in words else "--place") in capsys.readouterr().out


def interrupt(_seconds: float) -> None:
    """Ctrl+C."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", of("doctor") + [c for c in of("elsewhere") if c.startswith("run doctor")])
def test_doctor_is_asked_about_the_directory_as_one_of_the_nodes(
    command: str, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("coordinator.console.doctor.run.run_doctor", lambda *given: asked.append(given) or 0)
    assert run(here(command), monkeypatch) == 0, capsys.readouterr().err
    ((_root, nodes, rank, _limit_s, _json),) = asked
    assert 0 <= rank < nodes and (nodes > 1) == ("--peers" in command)


@pytest.mark.parametrize("command", of("make"))
def test_target_is_there_and_ci_makes_it(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    made = re.findall(r"^make (\S+)", (REPOSITORY / ".ci" / "run").read_text(), re.MULTILINE)
    assert target in {*NOT_IN_CI, *made}


def test_demo_is_a_run_of_three_nodes(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = (REPOSITORY / "scripts" / "demo.sh").read_text().splitlines()[-1]
    words = here(
        last.removeprefix("exec .venv/bin/").replace("$log_path", "runs/demo").replace("${SEED:-0}", "0")
    )
    assert run([*words, "--settings-only"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["cluster"]["num_nodes"] == 3


def test_options_behind_a_job_script_are_those_of_run(
    here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in [command for command in of("elsewhere") if command.startswith("sbatch scripts/")]:
        assert run(["run", *here(command)[2:], "--settings-only"], monkeypatch) == 0, capsys.readouterr().err


def test_jobs_have_the_name_that_the_page_gives_them() -> None:
    names = {
        name
        for command in of("elsewhere")
        if not command.startswith("ray ")
        for name in re.findall(r"(?:--name=|job/|job )([\w-]+)", command)
    }
    scripts = [REPOSITORY / "scripts" / script for script in ("node.sbatch", "k8s.yaml")]
    assert names and all(
        re.search(rf"name[=:] ?{name}$", script.read_text(), re.MULTILINE)
        for name in names
        for script in scripts
    )


@pytest.mark.parametrize("command", of("bash"))
def test_script_is_one_that_bash_reads(command: str) -> None:
    script = REPOSITORY / command.split()[1]
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert os.access(script, os.R_OK)


@pytest.mark.parametrize("command", of("extras"))
def test_extra_is_one_of_the_project(command: str) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (extra,) = re.findall(r"\[(\w+)\]", command)
    assert extra in project["optional-dependencies"]


BLOCKS = [block for page in PAGES for block in blocks(page) if block.kind]


def test_blocks_are_of_a_kind_that_is_tested() -> None:
    assert {block.kind for block in BLOCKS} <= {"json", "toml", "python", "sh", "yaml", "bash"}


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind in {"json", "toml"}], ids=lambda b: b.page)
def test_data_of_a_page_parses(block: Any) -> None:
    if block.kind == "toml":
        build(dict(flatten(tomllib.loads(block.text))))
    else:
        assert all(json.loads(line) for line in block.text.splitlines())


PYTHON = [b for b in BLOCKS if b.kind == "python" and b.page not in PAGES_WITH_TESTS]


@pytest.mark.parametrize("block", PYTHON, ids=lambda b: b.page)
def test_python_of_a_page_runs(block: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "exp1", finished=3)
    exec(block.text.replace("/shared/", f"{tmp_path}/"), {"__name__": block.page})
    assert capsys.readouterr().out
