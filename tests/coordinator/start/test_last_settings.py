"""What a start takes over from the last one, what it does not, and what it says of that."""

import socket
from typing import Any

import pytest

from coordinator.protocol.records import EpochRecord, GivenSettings
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from coordinator.start.last_settings import ALL, SettingChange, changes, with_kept
from tests.coordinator.examples import record

HERE = socket.gethostname()


def start(given: dict[str, Any], host: str = HERE) -> EpochRecord:
    """The record of a start that was given this."""
    made = record(settings=build(given))
    return made.model_copy(update={"given": GivenSettings(host=host, settings=given)})


def kept(given: dict[str, Any], last: dict[str, Any], *reset: str, host: str = HERE) -> dict[str, Any]:
    return with_kept(given, start(last, host), reset)


def test_what_is_not_given_stays_as_it_was() -> None:
    last = {"rollout.reward": "numeric", "rollout.max_tokens": 64, "iterations": 5}
    assert kept({"rollout.max_tokens": 32}, last) == {**last, "rollout.max_tokens": 32}
    assert with_kept({"iterations": 3}, None, ()) == {"iterations": 3}, "a first start"


def test_defaults_that_follow_from_a_setting_follow_from_the_new_one() -> None:
    last = {"trainer.algorithm": "grpo", "model": "/models/m"}
    settings = build(kept({"trainer.algorithm": "rloo"}, last))
    assert settings == build({**last, "trainer.algorithm": "rloo"})
    assert settings.trainer.advantage != build(last).trainer.advantage


@pytest.mark.parametrize(
    ("reset", "left"),
    [
        (["trainer.learning_rate"], {"trainer.lora.rank", "engine.args.seed", "model"}),
        (["trainer"], {"engine.args.seed", "model"}),
        (["trainer.lora", "model"], {"trainer.learning_rate", "engine.args.seed"}),
        (["engine.args"], {"trainer.learning_rate", "trainer.lora.rank", "model"}),
        (["engine.args.seed"], {"trainer.learning_rate", "trainer.lora.rank", "model"}),
        ([ALL], set()),
    ],
)
def test_reset_goes_back_to_the_default_of_a_setting_a_section_or_all(
    reset: list[str], left: set[str]
) -> None:
    last = {"trainer.learning_rate": 1, "trainer.lora.rank": 2, "engine.args.seed": 3, "model": "/m"}
    assert kept({}, last, *reset).keys() == left
    assert kept({"trainer.learning_rate": 5}, last, *reset)["trainer.learning_rate"] == 5


def test_reset_of_no_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingsError, match=r"unknown setting trainr; did you mean trainer\?"):
        kept({}, {}, "trainr")


def test_setting_that_is_gone_from_this_version_is_refused_until_it_is_reset() -> None:
    last = record().model_copy(update={"given": GivenSettings(host=HERE, settings={"rollout.gone": 1})})
    with pytest.raises(SettingsError, match=r"rollout.gone.*--reset-settings rollout.gone goes back"):
        with_kept({}, last, ())
    assert with_kept({}, last, ["rollout.gone"]) == {}


def test_what_says_something_of_one_machine_stays_on_that_machine() -> None:
    last = {"data_path": "/data", "engine.url": "http://127.0.0.1:8000", "rollout.seed": 3}
    assert kept({}, last) == last
    assert kept({}, last, host="another") == {"rollout.seed": 3}


@pytest.mark.parametrize("per_node", [{"cluster.rank_weights": "2,1,1"}, {"cluster.expect_gpus": [8, 8, 4]}])
def test_what_counts_nodes_goes_with_their_number(per_node: dict[str, Any]) -> None:
    last = {"cluster.num_nodes": 3, **per_node}
    assert kept({"cluster.num_nodes": "3"}, last).keys() == last.keys()
    assert kept({"cluster.num_nodes": "2"}, last) == {"cluster.num_nodes": "2"}
    assert kept({}, last, "cluster.num_nodes") == {}
    given = {"cluster.num_nodes": 2, "cluster.rank_weights": "2,1"}
    assert kept(given, last) == given


def test_table_that_is_given_replaces_the_one_that_was() -> None:
    last = {"engine.args": {"seed": 1}, "engine.args.dtype": "half"}
    assert build(kept({"engine.args.seed": 2}, last)).engine.args == {"seed": 2, "dtype": "half"}
    assert build(kept({"engine.args": {"seed": 2}}, last)).engine.args == {"seed": 2}


def test_setting_that_does_not_fit_a_kept_one_is_told_of_it() -> None:
    last = {"trainer.schedule": "cosine", "iterations": 9, "rollout.seed": 3}
    with pytest.raises(SettingsError) as refused:
        kept({"iterations": None}, last)
    assert str(refused.value).endswith(
        "leave it out (trainer.schedule: as at the last start; --reset-settings trainer.schedule goes back "
        "to the default)"
    )


def test_kept_setting_has_a_line_of_its_own_behind_a_list_of_them() -> None:
    unknown: dict[str, Any] = dict.fromkeys(("num_train_epochs", "total_epochs", "beta", "bogus", "lambd"), 1)
    with pytest.raises(SettingsError) as refused:
        kept(unknown, {"iterations": 9})
    assert str(refused.value).splitlines()[-1].startswith("  (--iterations: as at the last start; ")


def test_part_of_the_rollout_goes_with_the_phase() -> None:
    last = {"rl_phase": "rollout", "rollout_split": "train-only"}
    assert kept({"rl_phase": "update"}, last) == {"rl_phase": "update"}
    assert kept({"rl_phase": "rollout"}, last) == last


def test_changes_name_the_setting_as_it_is_typed_and_both_values() -> None:
    last = {"iterations": 2, "cluster.num_nodes": 2, "cluster.rank_weights": "2,1", "rollout.stop": ["a"]}
    now = build(kept({"cluster.num_nodes": 3}, last, "rollout.stop"))
    assert changes(start(last), now) == [
        SettingChange("--num-nodes", "2", "3"),
        SettingChange("--rank-weights", "2,1", "not set"),
        SettingChange("rollout.stop", "a", "empty"),
    ]
    assert str(SettingChange("a", "1", "2")) == "a is 2, at the last start it was 1"
    assert changes(start(last), build(last)) == changes(None, now) == []
