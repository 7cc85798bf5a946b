"""Where other rewards for samples that are there would change nothing, or too much."""

import re

import pytest

from coordinator.console.commands.rescore import _refuse
from coordinator.settings import loading
from coordinator.settings.tree import SettingsError

REFUSED = {
    "trainer.algorithm=sft": "trainer.algorithm=sft: its samples teach by themselves",
    "rollout.environment=verifiers:wordle": "--environment verifiers:wordle: it gives the rewards itself",
    "rollout.segment_tokens=4": "rollout.segment_tokens=4: samples of one iteration are scored in another",
    "trainer.engine_correction=off": "--last 6: .* rescore iteration 4 alone: --last 4",
    "trainer.max_off_policy_steps=1": "--last 6: .* that are 2 trainings old; rescore up to --last 5",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_other_rewards_cannot_help_is_refused(word: str) -> None:
    key, _, value = word.partition("=")
    settings = loading.build({"model": "any", "tasks": "tasks.jsonl", key: value})
    with pytest.raises(SettingsError) as caught:
        _refuse(settings, [4, 5, 6])
    assert re.match(REFUSED[word], str(caught.value)) and "\n" not in str(caught.value)
    if "last" in REFUSED[word]:
        _refuse(settings, [4])
