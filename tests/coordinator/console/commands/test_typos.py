"""Words that are no setting."""

from pathlib import Path

import pytest

from coordinator.console.commands.typos import part_of_value, say_what_is_given_twice, settings_of
from coordinator.settings.tree import SettingsError


def test_settings_are_read_and_a_run_directory_is_answered_with_its_option(tmp_path: Path) -> None:
    assert settings_of(["iterations=3", "rollout.stop=[]"]) == {"iterations": 3, "rollout.stop": []}
    (tmp_path / "run.json").touch()
    with pytest.raises(SettingsError, match=f"; a run directory is given as --log-path {tmp_path}$"):
        settings_of(["iterations=3", str(tmp_path)])


@pytest.mark.parametrize(
    ("typed", "word", "advice"),
    [
        ("rollout.stop=[a, b, c] iterations=2", "b,", """quote it: 'rollout.stop=["a","b","c"]'"""),
        ("rollout.system_prompt=Be brief --iterations 2", "brief", "'rollout.system_prompt=Be brief'"),
        ("--reward exact numeric", "numeric", "give each for itself: --reward exact --reward numeric"),
        ("--reward=exact numeric", "numeric", "give each for itself: --reward exact --reward numeric"),
        ("--iterations 3 --hosts a,b c", "c", "write commas without spaces: --hosts a,b,c"),
        ("--rank-weights 2 1", "1", "--rank-weights 2,1"),
        ("iterations=3 trian", "trian", ""),
        ("--reward exact", "exact", ""),
        ("--dry-run trian", "trian", ""),
        ("trian", "trian", ""),
    ],
)
def test_word_behind_a_whole_value_is_answered_as_a_part_of_it(typed: str, word: str, advice: str) -> None:
    text = part_of_value(word, typed.split(" "))
    assert text.endswith(advice) and bool(text) == bool(advice)


def test_setting_with_two_values_is_said_with_the_one_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["iterations=5", "rollout.max_tokens=8", "rollout.max_tokens=8"]
    say_what_is_given_twice(
        words, ["--iterations", "3", "--iterations=4", "--reward", "a", "--reward=b", *words]
    )
    assert capsys.readouterr().err.splitlines() == [
        "run: --iterations is given twice, as 3 and as 4: 4 counts",
        "run: --iterations is given twice, as 4 and as 5: 5 counts",
    ]
