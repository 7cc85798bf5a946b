"""The user's modules are loaded in a process of their own; a node learns what they are, or why not."""

import os
import sys
from pathlib import Path

import pytest

from coordinator.settings.tree import SettingsError
from coordinator.start.user_functions import load_functions
from rollout.environments.environment import resolve_environment
from rollout.loaded_code import code_of
from rollout.rewards.resolve import resolve_reward
from rollout.settings import RolloutSettings

SOURCE = """
import os
from pathlib import Path

Path("loaded_by").write_text(str(os.getpid()))
print("a line of the user's")

def score(task, completion):
    return 1

def other(task, completion):
    return 1

async def play(task, policy, sampling):
    return []

async def given(task, policy, sampling):
    return []

given.demonstrates = True
"""


def write(directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """Write a module of the user's into the current directory."""
    monkeypatch.chdir(directory)
    (directory / f"{name}.py").write_text(text)


def test_node_learns_what_names_stand_for_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, monkeypatch, "learnt_code", SOURCE)
    loaded = load_functions("learnt_code:score=0.5 + exact", "learnt_code:given")
    assert "learnt_code" not in sys.modules and str(tmp_path) not in sys.path
    assert int((tmp_path / "loaded_by").read_text()) != os.getpid()
    assert loaded.demonstrates and loaded.sources["learnt_code"] == (str(tmp_path / "learnt_code.py"), SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    assert loaded.reward == resolve_reward("learnt_code:score=0.5 + exact").code
    assert loaded.environment == code_of("learnt_code:given", resolve_environment("learnt_code:given"))
    sys.modules.pop("learnt_code")


def test_reward_of_a_source_is_refused_by_its_own_setting() -> None:
    for given, text in (
        ({"rewards": {"math": "mth"}}, "rollout.rewards.math=mth: reward 'mth': did you mean math?"),
        ({"rewards": {"math": "math=x"}}, "rollout.rewards.math=math=x: the weight 'x'"),
        (
            {"rewards": {"math": "math"}, "reward": "exat"},
            "--reward exat: reward 'exat': did you mean",
        ),
    ):
        with pytest.raises(SettingsError) as refused:
            load_functions(RolloutSettings.model_validate(given).scoring, "single_turn")
        assert str(refused.value).startswith(text)


def test_module_is_read_once_whatever_its_file_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, monkeypatch, "read_once", SOURCE)
    before = load_functions("read_once:score", "read_once:play")
    write(tmp_path, monkeypatch, "read_once", f"{SOURCE}\nMORE = 1\n")
    after = load_functions("read_once:other", "read_once:play")
    assert after.reward.digest == before.reward.digest and after.sources == before.sources


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import os; os._exit(3)", r"while it is loaded: it crashed its process \(exit code 3\)"),
        ("raise SystemExit(3)", r"it raised SystemExit\(3\); what a script does, put below"),
        ("1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    ],
)
def test_module_that_cannot_be_loaded_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    write(tmp_path, monkeypatch, "cannot_load", text)
    with pytest.raises(SettingsError, match=f"^--reward cannot_load:score: .*{why}") as refused:
        load_functions("cannot_load:score", "single_turn")
    assert "\n" not in str(refused.value)
    with pytest.raises(SettingsError, match=rf"^eval.sets.hard.environment=cannot_load:play: .*{why}"):
        load_functions("exact", "cannot_load:play", "eval.sets.hard")


def test_script_of_a_trainer_that_is_not_installed_is_answered_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "grpo_script.py"
    file.write_text(f"from trl_of_theirs import GRPOTrainer\n{SOURCE}")
    with pytest.raises(
        SettingsError, match="or keep the function in a file that does not import trl_of_theirs"
    ):
        load_functions(f"{file}:score", "single_turn")


def test_reward_that_takes_json_away_harms_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"import json\njson.dumps = json.loads = None\n{SOURCE}"
    write(tmp_path, monkeypatch, "sets_json", text)
    assert load_functions("sets_json:score", "single_turn").reward.name == "sets_json:score"
