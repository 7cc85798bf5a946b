"""Which code lies behind the name of a reward or an environment."""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.environments.environment import resolve_environment
from rollout.loaded_code import code_of
from rollout.plugins import PluginError, load_function
from rollout.processes.killable_rewards import LibraryReward
from rollout.rewards.resolve import BUILT_IN, IN_PROCESSES, resolve_reward

REWARD = "def score(task, completion):\n    return {value}\n"


def digest(directory: Path, name: str = "my_code:score") -> str:
    """The digest in a process of its own, started in another directory than the file's."""
    code = (
        "import sys; from rollout.rewards.resolve import resolve_reward;"
        f"print(resolve_reward({name!r}).code.digest)"
    )
    environment = {"PYTHONPATH": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(exist_ok=True)
    for name, text in files.items():
        (directory / f"{name}.py").write_text(text)
    return directory


def test_module_that_is_not_there_is_answered_with_a_file_called_almost_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write(tmp_path, my_near_rewards=REWARD.format(value=1)))
    with pytest.raises(PluginError, match=r"; did you mean my_near_rewards:score\?"):
        load_function("my_near_reward:score")
    with pytest.raises(PluginError, match=r"what is installed\)$"):
        load_function("other:score")


def test_digest_is_of_what_the_file_holds_wherever_it_is(tmp_path: Path) -> None:
    here = write(tmp_path / "here", my_code=REWARD.format(value=1))
    there = write(tmp_path / "there", my_code=REWARD.format(value=1))
    other = write(tmp_path / "other", my_code=REWARD.format(value=2))
    assert digest(here) == digest(there) == digest(here, f"{here}/my_code.py:score") != digest(other)
    assert len(digest(here)) == 16


def test_digest_covers_the_file_of_a_function_that_was_only_imported(tmp_path: Path) -> None:
    facade = "from elsewhere import score\n"
    one = write(tmp_path / "one", my_code=facade, elsewhere=REWARD.format(value=1))
    other = write(tmp_path / "other", my_code=facade, elsewhere=REWARD.format(value=2))
    assert digest(one) != digest(other)


def test_digest_is_of_what_was_loaded_not_of_what_the_file_has_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, edited_later=REWARD.format(value=1))
    monkeypatch.syspath_prepend(tmp_path)
    before = resolve_reward("edited_later:score").code
    write(tmp_path, edited_later=REWARD.format(value=2))
    assert resolve_reward("edited_later:score").code == before


def test_everything_that_is_built_in_has_a_digest_of_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = code_of("x", 3).digest
    for name in BUILT_IN:
        assert resolve_reward(name).code.digest != empty
    for name in ("single_turn", "calculator", "demonstration"):
        assert code_of(name, resolve_environment(name)).digest != empty
    in_processes = {code_of(name, IN_PROCESSES[name]).digest for name in IN_PROCESSES}
    assert len(in_processes) == 2 and code_of("x", LibraryReward).digest not in in_processes
    monkeypatch.setattr("importlib.metadata.version", lambda _library: "another")
    assert not {code_of(name, IN_PROCESSES[name]).digest for name in IN_PROCESSES} & in_processes


def test_wrapped_functions_are_known_by_what_they_wrap() -> None:
    @functools.wraps(resolve_reward)
    def wrapping() -> None: ...

    wanted = code_of("x", resolve_reward)
    assert code_of("x", functools.partial(functools.partial(resolve_reward, "a"))) == wanted
    assert (
        code_of("x", wrapping) == wanted != code_of("x", test_wrapped_functions_are_known_by_what_they_wrap)
    )
