"""The settings of the last start hold on where the next start says nothing of them.

Kept is what was given, not what came of it: a default that follows from another setting (a preset of
trainer.algorithm, the recipe of builtin:tiny) follows from that setting at every start.
"""

import socket
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from coordinator.protocol.records import EpochRecord, GivenSettings
from coordinator.settings import loading
from coordinator.settings.loading import flatten, option_name, show
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import NODE_LOCAL

ALL = "all"
"""`--reset-settings` without a name."""
GO_WITH = {
    ("cluster.num_nodes", 1): {"cluster.rank_weights", "cluster.expect_gpus"},
    ("rl_phase", "both"): {"rollout_split"},
}
"""By setting (and its default), those that count for its value alone: with another one they are not kept."""


class SettingChange(NamedTuple):
    """A setting that is not what it was at the last start, as a person types it."""

    name: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} is {self.now}, at the last start it was {self.then}"


def with_kept(
    overrides: Mapping[str, Any], last: EpochRecord | None, reset: Collection[str]
) -> dict[str, Any]:
    """Return the settings that this start is given, over those that the last one was given.

    `reset`: settings, or sections, that go back to their defaults; ALL: every one. What says something of one
    machine is kept on that machine alone. Raises SettingsError if the two do not fit together.
    """
    last_given = last.given if last and last.given else GivenSettings(host="", settings={})
    _refuse_unknown(reset, last_given.settings)
    is_here = last_given.host == socket.gethostname()
    kept_values = {
        key: value
        for key, value in last_given.settings.items()
        if not _is_named(key, reset) and not _is_named(key, overrides) and (is_here or key not in NODE_LOCAL)
    }
    for (name, default), followers in GO_WITH.items():
        now = {**kept_values, **overrides}.get(name, default)
        if str(now) != str(last_given.settings.get(name, default)):
            kept_values = {key: value for key, value in kept_values.items() if key not in followers}
    merged = {**kept_values, **overrides}
    try:
        loading.build(merged)
    except SettingsError as error:
        raise SettingsError(f"{error}{_whose(str(error), kept_values)}") from None
    return merged


def _is_named(key: str, names: Collection[str]) -> bool:
    """Return whether `names` has the setting itself, or a section or table that it is in."""
    parts = key.split(".")
    return ALL in names or any(".".join(parts[:length]) in names for length in range(1, len(parts) + 1))


def _refuse_unknown(reset: Collection[str], last_given: Mapping[str, Any]) -> None:
    """Raise SettingsError for a name to reset that is no setting, no section, and was not given either."""
    known = [*last_given, *loading.known_keys()]
    for name in reset:
        if name != ALL and not any(_is_named(key, [name]) for key in known):
            loading.refuse_unknown({name: None})


def _whose(text: str, kept_values: Mapping[str, Any]) -> str:
    """Say which of the settings that an error names were not typed this time; an empty text for none."""
    named = [key for key in kept_values if option_name(key) in text]
    if not named:
        return ""
    resets = " ".join(f"--reset-settings {key}" for key in named)
    names = ", ".join(map(option_name, named))
    sign = "\n  " if "\n" in text else " "  # behind a list of lines it is one of its own
    return f"{sign}({names}: as at the last start; {resets} goes back to the default)"


def changes(last: EpochRecord | None, settings: RunSettings) -> Sequence[SettingChange]:
    """List the settings that differ from those of the last start, defaults of this version included.

    `trainer.save_interval` and the default of `rollout.max_tokens` are fitted to the model at a start: until
    then they are not other ones.
    """
    last_settings = dict(flatten(last.settings)) if last else {}
    if settings.trainer.save_interval is None:
        last_settings.pop("trainer.save_interval", None)
    is_default = settings.rollout.max_tokens == RunSettings().rollout.max_tokens
    if is_default and not (last and last.given and "rollout.max_tokens" in last.given.settings):
        last_settings.pop("rollout.max_tokens", None)
    return [
        SettingChange(option_name(key), show(last_settings[key]) or "empty", show(now) or "empty")
        for key, now in flatten(settings.model_dump(mode="json"))
        if key in last_settings and last_settings[key] != now
    ]
