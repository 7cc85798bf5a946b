"""Build the settings: defaults, then a file, then options, then `key=value`; an unknown key is an error.

The master publishes the tree in each epoch record, and a worker reads it from there. What a worker is given
itself must agree with the tree.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from coordinator.settings import suggestions
from coordinator.settings.node_groups import GroupSettings, refuse_absent
from coordinator.settings.setting_names import as_typed, checked, fields, known_keys, show
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.settings.wrong_values import advice_on
from rollout.eval_settings import EvalSetSettings
from rollout.settings import TINY, joined
from trainer.source_settings import SourceSettings

TINY_DEFAULTS: dict[str, Any] = {
    "iterations": 16,
    "rollout.max_tokens": 8,
    "eval.interval": 5,
    "trainer.learning_rate": 3e-4,
    "trainer.warmup_steps": 5,
    "trainer.global_batch_size": 256,
    "trainer.max_tokens_per_microbatch": 2048,
}
"""Defaults for builtin:tiny, in place of the general ones: the demo's recipe."""
_SECRET = re.compile(r"(^|[._-])(token|key|secret|password)$", re.IGNORECASE)
OPEN = (
    *("engine.args", "rollout.ratio", "rollout.chat_template", "cluster.groups"),
    *("columns", "eval.columns", "eval.sets", "trainer.sources", "rollout.teachers"),
    "rollout.rewards",
)
"""Settings whose keys the user chooses: arguments of the server, classes of tasks, variables of the chat
template, groups of nodes, fields of a task, sets of evaluation tasks, sources of tasks (the last three)."""
TABLES = {
    "cluster.groups": (GroupSettings, "a group", "nodes", "the ranks of the group, e.g. {}=2,4-7"),
    "eval.sets": (EvalSetSettings, "a set", "tasks", "the tasks of the set, e.g. {}=test.jsonl"),
    "trainer.sources": (SourceSettings, "a source", "weight", "what its samples count, e.g. {}=0.5"),
}
"""The OPEN settings that hold tables: what a table has, its word, and the setting that each needs."""
ENV = re.compile(r"cluster\.groups\.[^.]+\.env\.", re.ASCII)
"""How the name of a variable begins that a group of nodes is given: its value is a text, whatever it is."""


def parse_override(text: str) -> tuple[str, Any]:
    """Split `key=value` into (key, value); the value is JSON where it parses as such, else a string."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise SettingsError(f"'{text}' is neither an option nor key=value, e.g. trainer.learning_rate=1e-6")
    key = key.strip()
    return key, value if ENV.match(key) else parse_value(value)


def parse_value(value: str) -> Any:
    """Parse a value that a person typed: JSON where it parses as such, `2,1,1` as a list, Python's True and
    False, else the string.
    """
    value = {"True": "true", "False": "false"}.get(value, value)
    for text in (value, f"[{value}]"):
        try:
            return json.loads(text)
        except ValueError:
            continue
    return value


def items(text: str) -> list[str]:
    """Return what a list holds that may have lost its quotes, or brackets, in a shell: `[a, b]`."""
    return [item for part in text.strip("[] ").split(",") if (item := part.strip(" '\""))]


def as_list(text: str) -> str:
    """Return such a list as it is typed inside of quotes."""
    return "[" + ",".join(f'"{item}"' for item in items(text)) + "]"


def build(overrides: Mapping[str, Any]) -> RunSettings:
    """Build settings from dotted keys over the defaults (builtin:tiny has its own); else SettingsError."""
    refuse_unknown(overrides)
    base = TINY_DEFAULTS if overrides.get("model", TINY) == TINY else {}
    settings = _validate({**base, **overrides})
    try:  # not by the settings themselves: a crew of the run has fewer nodes
        refuse_absent(settings.cluster.groups, settings.cluster.num_nodes)
        _refuse_clip_bounds(settings)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    return settings


def overlay(published: RunSettings, overrides: Mapping[str, Any]) -> RunSettings:
    """Put `overrides` over what the master published; that is the result if nothing contradicts."""
    refuse_unknown(overrides)
    settings = _validate({**dict(flatten(published.model_dump(mode="json"))), **overrides})
    bounds = ("trainer.clip", "trainer.engine_correction", "trainer.algorithm", "trainer.sources")
    if any(key.startswith(bounds) for key in overrides):
        try:
            _refuse_clip_bounds(settings)
        except ValueError as error:
            raise SettingsError(str(error)) from None
    return settings


def _refuse_clip_bounds(settings: RunSettings) -> None:
    for each in settings.trainer.of_all_sources:
        each.refuse_clip_bounds()


def contradictions(published: RunSettings, overrides: Mapping[str, Any]) -> list[str]:
    """List what a worker was given that differs from what the master published, one line each."""
    actual = dict(flatten(published.model_dump(mode="json")))
    for name in OPEN:
        actual |= _by_name(actual[name], f"{name}.")
    return [
        f"{option_name(key)} is {show(given_here)} here, but the master published {show(actual.get(key))}"
        for key, given_here in check_each(overrides).items()
        if given_here != actual.get(key)
    ]


def _by_name(tree: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Return the values of a tree by dotted name, its inner trees too."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        values[f"{prefix}{key}"] = value
        if isinstance(value, Mapping):
            values |= _by_name(cast("Mapping[str, Any]", value), f"{prefix}{key}.")
    return values


def check_each(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Check each given setting by itself and return it as the settings hold it; SettingsError if it is wrong.

    A worker uses this before it knows the other settings, to refuse what no master can have published.
    """
    refuse_unknown(overrides)
    by_name = dict(fields(RunSettings))
    return {
        key: _as_held(key, value) if _opened(key) else _check_one(key, by_name[key], value)
        for key, value in overrides.items()
    }


def _as_held(key: str, value: Any) -> Any:
    """Return an entry of a table as the settings hold it: several rewards are one text."""
    return joined(value) if key.startswith("rollout.rewards.") else value


def _check_one(key: str, field: FieldInfo, value: Any) -> Any:
    try:
        return checked(field, value)
    except PydanticCustomError as error:
        raise SettingsError(f"{option_name(key)}={show(value)}: {error}") from None
    except ValidationError as error:
        raise SettingsError(_line(error.errors()[0], key)) from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a nested tree as (dotted key, value); an OPEN setting is one value."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in OPEN:
            yield from flatten(value, f"{name}.")  # pyright: ignore[reportUnknownArgumentType]
        else:
            yield name, value


OPTIONS = {
    "model": "--model PATH_OR_ID",
    "tasks": "--tasks FILE",
    "eval_tasks": "--eval-tasks FILE",
    "data_path": "--data-path DIR",
    "rollout.reward": "--reward NAME[=WEIGHT]",
    "rollout.environment": "--environment NAME",
    "iterations": "--iterations",
    "eval.interval": "--eval-interval",
    "rl_phase": "--rl-phase",
    "rollout_split": "--rollout-split",
    "engine.kind": "--engine",
    "engine.url": "--engine-url URL",
    "cluster.num_nodes": "--num-nodes",
    "cluster.rank_weights": "--rank-weights",
    "cluster.expect_gpus": "--expect-gpus",
    "cluster.place": "--place HALF=DEVICES",
    "cluster.max_async_level": "--max-async-level",
    "cluster.on_node_failure": "--on-node-failure",
    "cluster.node_timeout_s": "--node-timeout",
    "cluster.rejoin_timeout_s": "--rejoin-timeout",
}
"""Settings that have an option, in the order of `run --help`; the second word names a value that is a text.

`coordinator.console.commands.options` takes everything else from the settings.
"""


REPEATED = ("rollout.reward",)
"""Texts whose option may be given several times; the setting joins them."""


def _opened(key: str) -> str:
    """Return the OPEN setting that `key` belongs to, or an empty text."""
    return next((name for name in OPEN if key.startswith(f"{name}.")), "")


def option_name(key: str) -> str:
    """Return the name that a user types for a setting: its option, else its dotted name."""
    return OPTIONS.get(key, key).partition(" ")[0]


def _validate(flat: Mapping[str, Any]) -> RunSettings:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        name = _opened(key)
        *parents, leaf = [*name.split("."), key.removeprefix(f"{name}.")] if name else key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise SettingsError(f"{key}: {name}={show(node)} holds nothing by name; leave one of them out")
        node[leaf] = dict(value) if isinstance(value, Mapping) else value  # pyright: ignore
    try:
        return RunSettings.model_validate(tree)
    except ValidationError as error:
        # A value that may be of several types has an error for each: the first says enough.
        first = {_path(details): details for details in reversed(error.errors())}
        lines = list(dict.fromkeys(_line(details) for details in reversed(first.values())))
        several = f"{len(lines)} wrong values; change each of them:"
        raise SettingsError("\n  ".join([several, *lines]) if len(lines) > 1 else lines[0]) from None


def _path(details: ErrorDetails) -> str:
    """Return the dotted name of the setting that is wrong, or of the entry in its table."""
    key = ".".join(str(part) for part in details["loc"] if isinstance(part, str))
    names = (name for name in known_keys() if name not in TABLES and f"{key}.".startswith(f"{name}."))
    return next(names, key)


def _line(first: ErrorDetails, key: str = "") -> str:
    """Say what is wrong; `key` is the setting if it was validated alone."""
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])  # pyright: ignore[reportTypedDictNotRequiredAccess]
    if not key:
        key = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        table = TABLES.get(_opened(key))
        if table and first["type"] == "extra_forbidden":
            return f"unknown setting {key}; {table[1]} has {', '.join(table[0].model_fields)}"
        if table and first["type"] in ("missing", "model_type"):
            missing_key = key if first["type"] == "missing" else f"{key}.{table[2]}"
            return f"{missing_key} is missing; give {table[3].format(missing_key)}"
        key = key if key in known_keys() or table else key.rpartition(".")[0] or key
    typed = as_typed(first["input"])
    usual: Any = next((field.default for name, field in fields(RunSettings) if name == key), None)
    if first["type"] == "string_type" and key.endswith("tasks") and "," in typed:
        return f"{option_name(key)}={typed}: give files as a pattern, e.g. 'data/*.jsonl'"
    is_pair = (
        isinstance(usual, tuple) and usual != () and first["type"] in ("tuple_type", "too_long", "missing")
    )
    if is_pair or first["type"] == "tuple_type":
        example = (
            f"{key}={json.dumps(usual if is_pair else items(str(first['input'])), separators=(',', ':'))}"
        )
        return f"{option_name(key)}={typed}: give a list, e.g. {shlex.quote(example)}"
    if first["input"] == []:  # KEY=
        return f"{option_name(key)}= is empty (a variable that is not set?); give a value"
    if first["type"] in ("dict_type", "mapping_type") and key in OPEN:
        return f"{key}={typed}: it has entries; give each as {key}.NAME=VALUE"
    value = suggestions.value_here(key, first["input"])
    advice = suggestions.by_value(key, first["input"]) or (f"did you mean {value}?" if value else "")
    advice = f"; {advice}" if advice else ""
    return f"{option_name(key)}={typed}: {advice_on(cast('Mapping[str, Any]', first))}{advice}"


def refuse_unknown(overrides: Mapping[str, Any]) -> None:
    """Raise SettingsError for keys that are not settings; the text names those that were meant. Also for a
    secret, whose value it does not tell.
    """
    known, unknown = known_keys(), list[str]()
    for key, value in overrides.items():
        _refuse_secret(key, value)
        if key not in known and not _opened(key):
            unknown.append(key)
    if unknown:
        typed = dict(flatten({key: overrides[key] for key in unknown}))  # what a table of theirs holds
        raise SettingsError(suggestions.meant_each(list(typed) or unknown, known, {**overrides, **typed}))


def _refuse_secret(key: str, value: Any) -> None:
    """Raise SettingsError for an argument of the server, or a variable of a group, that is a secret."""
    if (key.startswith("engine.args.") or ENV.match(key)) and _SECRET.search(key):
        raise SettingsError(
            f"{key} is a secret: settings are published in the run directory, and `ps` shows the arguments "
            "of servers; set an environment variable on each node in its place, e.g. HF_TOKEN"
        )
    if key.startswith(("engine.args", "cluster.groups")) and isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, Any]", value).items():
            _refuse_secret(f"{key}.{name}", inner)
