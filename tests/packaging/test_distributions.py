"""The wheel and the sdist hold what they should, and `run` works from the wheel, outside of any checkout."""

import json
import subprocess
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from coordinator.directory.layout import RunDir
from tests.coordinator import example_run
from tests.packaging.distributions import (
    MODULES,
    PACKAGES,
    Distributions,
    bare_variables,
    build,
    copy_of_checkout,
    environment,
    install,
)
from tests.paths import REPOSITORY

VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
FOR_A_PACKAGER = {
    *("README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "Dockerfile"),
    *("pyproject.toml", "constraints.txt", "requirements-vllm.txt", "docs/protocol.md", "docs/report.png"),
    *("scripts/node.sbatch", "scripts/demo.sh", "tests/conftest.py", "tests/packaging/distributions.py"),
}
SMALL = (
    *("--iterations", "1", "tiny.warmup_steps=0", "rollout.tasks_per_iteration=4"),
    *("rollout.samples_per_task=2", "trainer.global_batch_size=8", "eval.max_tasks=2", "cluster.beat_s=0.3"),
)
"""A run of seconds."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    place = tmp_path_factory.mktemp("built")
    return build(copy_of_checkout(place / "checkout"), place)


@pytest.fixture(scope="module")
def python(built: Distributions, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel in it."""
    interpreter = environment(tmp_path_factory.mktemp("installed") / "venv")
    install(interpreter, built.wheel)
    return interpreter


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sources() -> set[str]:
    """Every file of the packages, templates and the like included."""
    return {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_every_file_of_the_packages_and_nothing_else(built: Distributions) -> None:
    files = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert files == sources() | {f"{module}.py" for module in MODULES}
    assert {Path(name).suffix for name in files} == {".py", ".j2", ".html", ".css", ".js"}


def test_sdist_builds_the_same_wheel_as_the_checkout(built: Distributions) -> None:
    assert contents(built.wheel) == contents(built.wheel_of_checkout)


def test_sdist_holds_what_a_packager_needs(built: Distributions) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert FOR_A_PACKAGER - names == set()
    assert sources() | {f"scripts/{module}.py" for module in MODULES} <= names
    assert [name for name in names if name.endswith(".pyc")] == []


def test_metadata_names_licence_readme_and_command(built: Distributions) -> None:
    files = {name.partition(".dist-info/")[2]: data for name, data in contents(built.wheel).items()}
    metadata = Parser().parsestr(files["METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("flagpost", VERSION)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert files["licenses/LICENSE"] == (REPOSITORY / "LICENSE").read_bytes()
    assert metadata.get_payload() == (REPOSITORY / "README.md").read_text()
    assert "run = flagpost_command:main" in files["entry_points.txt"].decode()


def call(python: Path, here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`run` of the environment, in a directory that is no checkout."""
    command = [str(python.with_name("run")), *arguments]
    done = subprocess.run(
        command, cwd=here, env=bare_variables(here), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def test_what_is_imported_is_what_was_installed(python: Path, tmp_path: Path) -> None:
    names = (*MODULES, *PACKAGES, "trainer.model.tiny", "coordinator.console.report")
    script = f"from importlib.util import find_spec\nfor name in {names!r}: print(find_spec(name).origin)"
    done = subprocess.run(
        [str(python), "-c", script],
        cwd=tmp_path,
        env=bare_variables(tmp_path),
        capture_output=True,
        text=True,
    )
    origins = [Path(line) for line in done.stdout.splitlines()]
    assert len(origins) == len(names), done.stderr
    assert [path for path in origins if not path.is_relative_to(python.parents[1])] == []


def test_run_answers_from_an_installation(python: Path, tmp_path: Path) -> None:
    assert call(python, tmp_path, "--version").stdout.split() == ["flagpost", VERSION]
    assert "--rank-weights" in call(python, tmp_path, "--help").stdout
    settings = json.loads(call(python, tmp_path, "--master", "--dry-run").stdout)
    assert settings["cluster"]["num_nodes"] == 1 and list(tmp_path.iterdir()) == []


def test_report_is_made_from_an_installation(python: Path, tmp_path: Path) -> None:
    example_run.make_run(tmp_path / "exp1", iterations=3)
    call(python, tmp_path, "report", "--log-path", "exp1", "-o", "exp1.html")
    page = (tmp_path / "exp1.html").read_text()
    assert "<style>" in page and "<script>" in page and "<svg" in page


@pytest.mark.timeout(300)
def test_iteration_of_the_built_in_model_runs_from_an_installation(python: Path, tmp_path: Path) -> None:
    """Engine, trainer and reaper are child processes, which have to find the packages by themselves."""
    call(python, tmp_path, "--log-path", "exp1", *SMALL)
    run_dir = RunDir(tmp_path / "exp1")
    assert (run_dir.checkpoint(1) / "config.json").is_file()
    (line,) = [json.loads(line) for line in run_dir.metrics.read_text().splitlines()]
    assert line["samples"] == 8
