"""The setting that a person meant."""

import pytest

from coordinator.settings.loading import known_keys
from coordinator.settings.suggestions import ALIASES, meant

KNOWN = known_keys()


def test_other_names_are_of_settings_and_are_no_settings_themselves() -> None:
    assert set(ALIASES.values()) <= set(KNOWN)
    leaves = {name.rpartition(".")[2] for name in KNOWN}
    assert not ALIASES.keys() & leaves, "never looked up: the setting of that name comes first"


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("lr", "trainer.learning_rate"),
        ("trainer.lr", "trainer.learning_rate"),
        ("learning-rate", "trainer.learning_rate"),
        ("LearningRate", "trainer.learning_rate"),
        ("batch_size", "trainer.global_batch_size"),
        ("max_new_tokens", "rollout.max_tokens"),
        ("num_generations", "rollout.samples_per_task"),
        ("epochs", "iterations"),
        ("temperature", "rollout.temperature"),
        ("--temprature", "rollout.temperature"),
        ("rollot.seed", "rollout.seed"),
        ("trainr", "trainer"),
    ],
)
def test_setting_is_found_by_the_names_of_the_field_and_by_its_spelling(typed: str, found: str) -> None:
    assert meant(typed, KNOWN) == f"did you mean {found}?"


def test_section_is_answered_with_what_is_in_it() -> None:
    assert meant("trainer.lora", KNOWN).endswith(
        "a setting in it: trainer.lora.rank, trainer.lora.alpha, trainer.lora.targets?"
    )
    assert meant("trainer", KNOWN).endswith(", ...?")


def test_nothing_is_made_up_for_a_word_like_no_other() -> None:
    assert meant("xyzzy", KNOWN) == "run --dry-run shows all settings"
