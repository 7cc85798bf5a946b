"""A user's files may be named like our packages, like the standard library, or like what is installed."""

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollout.module_search import is_installed
from tests.paths import REPOSITORY

SCORE = "def score(task, completion):\n    return {value}\n"
NAMES = ["rollout", "trainer", "coordinator", "queue", "types", "torch", "typer"]


def resolve(directory: Path, name: str) -> str:
    """What becomes of a reward's name in a process that is started in `directory`."""
    code = (
        "import sys; from rollout.rewards.resolve import RewardSettingError, resolve_reward\n"
        "try: print(resolve_reward(sys.argv[1]).name)\n"
        "except RewardSettingError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, name], cwd=directory, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_every_program_of_ours_starts_without_the_current_directory_first() -> None:
    """`python -m` alone would take a user's files for ours, or for the standard library's."""
    unsafe: list[str] = []
    for package in ("rollout", "trainer", "coordinator"):
        for file in sorted((REPOSITORY / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                words = getattr(node, "elts", None) or getattr(node, "args", None) or ()
                texts = [getattr(word, "value", None) for word in words] if isinstance(words, list) else []
                if "-m" in texts and "-P" not in texts[: texts.index("-m")]:
                    unsafe.append(f"{file}:{getattr(node, 'lineno', 0)}")
    assert not unsafe


def test_files_of_any_such_name_break_nothing(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemError('imported in place of another module')\n")
    (tmp_path / "my_rewards.py").write_text(SCORE.format(value=0.5))
    assert resolve(tmp_path, "my_rewards:score") == "my_rewards:score"
    for command in (["-m", "coordinator.cli"], ["-m", "trainer.job.agent"], ["-m", "trainer"]):
        argv = [sys.executable, "-P", *command, "--help"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_in_a_file_that_imports_do_not_find_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text(SCORE.format(value=0.5))
    text = resolve(tmp_path, f"{name}:score")
    assert text.startswith(f"{tmp_path / name}.py is hidden by ") and "another name" in text
    assert "\n" not in text


def test_a_reward_that_imports_from_a_hidden_file_is_told_which_one(tmp_path: Path) -> None:
    (tmp_path / "trainer.py").write_text("class Mine: pass\n")
    for text in ("from trainer import Mine\n", "import trainer\ntrainer.Mine\n"):
        (tmp_path / "my_rewards.py").write_text(text + SCORE.format(value=0.5))
        assert "trainer.py is hidden by Flagpost's own package" in resolve(tmp_path, "my_rewards:score")


def test_a_reward_that_cannot_be_imported_is_told_the_line_that_raises(tmp_path: Path) -> None:
    file = tmp_path / "my_rewards.py"
    file.write_text("\nimport no_such_package\n" + SCORE.format(value=0.5))
    text = resolve(tmp_path, "my_rewards:score")
    assert "No module named 'no_such_package'; install it for this Python" in text
    assert text.endswith(f" ({file}, line 2)")
    file.write_text("def score(task, completion)\n    return 1\n")
    assert resolve(tmp_path, "my_rewards:score").endswith("(my_rewards.py, line 1)")
    assert "(looked for in " in resolve(tmp_path, "no_rewards:score")


def test_a_module_inside_of_a_folder_that_is_hidden_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "rewards.py").write_text(SCORE.format(value=0.5))
    assert "trainer/rewards.py is hidden by" in resolve(tmp_path, "trainer.rewards:score")


def test_a_checkout_of_what_is_installed_hides_nothing(tmp_path: Path) -> None:
    """Its files are equal to those that imports find."""
    (tmp_path / "rollout").symlink_to(REPOSITORY / "rollout")
    assert "no such name" in resolve(tmp_path, "rollout.plugins:score")


@pytest.mark.parametrize("name", ["trainer", "rollout", "coordinator"])
def test_pythonpath_that_puts_such_a_file_before_ours_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    """In the command as pip makes it: what its script imports first is none of these names."""
    (tmp_path / f"{name}.py").touch()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["run"].partition(":")
    script = f"import sys; from {module} import {function}; sys.argv[1:] = ['status']; sys.exit({function}())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f":{REPOSITORY}:{REPOSITORY / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and f"{name}.py" in done.stderr and "off PYTHONPATH" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_folder_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()  # wandb makes it where a run was started
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("wandb")


def test_a_file_that_is_named_comes_before_one_of_that_name_in_the_current_directory(tmp_path: Path) -> None:
    """As of a run that is resumed from a directory with other rewards."""
    for directory in ("here", "there"):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "my_rewards.py").write_text(f"def {directory}(task, completion): return 1")
    name = f"{tmp_path}/there/my_rewards.py:there"
    assert resolve(tmp_path / "here", name) == name
    assert resolve(tmp_path / "here", "my_rewards:here") == "my_rewards:here"
