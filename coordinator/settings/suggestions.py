"""Answer settings that are none here with the setting, and the value, that a person meant."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coordinator.settings.advice_elsewhere import ANSWERS
from coordinator.settings.joint_elsewhere import OFF, joint_answer
from coordinator.settings.metrics import SINKS
from coordinator.settings.names_elsewhere import ALIASES
from coordinator.settings.near_names import known_as, pair_of, plain, spelled_like
from coordinator.settings.setting_names import as_typed, choices_of, default_of, takes
from coordinator.settings.values_elsewhere import BY_SAMPLES, BY_VALUE, COUNTED, SAME_NUMBER, VALUES
from rollout.settings import RolloutSettings
from trainer.loss_settings import ELSEWHERE

SHOWN = 4
"""So many settings of a section are named."""
NONE: Mapping[str, Any] = MappingProxyType({})
LOW_AND_HIGH = ("eps_clip_low_high", "vllm_is_truncated_threshold")
"""Settings of others that are two numbers."""
_NOT_HERE = (
    *(
        "critic",
        "reward_model",
        "ref",
        "qat",
        "sandbox_fusion",
        "profiler",
        "global_profiler",
        "transfer_queue",
    ),
    *("ray_kwargs", "ray_init", "slurm"),
)
"""Sections of others that have no equal, whatever is in them."""
_OF_CODE = ("rollout.reward", "rollout.environment")
"""Settings that name code, which is called otherwise elsewhere."""
MANY = 60
"""From so many unknown settings on, as a whole configuration has them, only those that change something are
listed.
"""
ALL_SHOWN = "run --dry-run shows all settings"
LEFT_OUT = "what you leave out gets the defaults here; docs/migration.md has commands with TRL's and verl's"


def near_setting(typed: str, known: Sequence[str], values: Mapping[str, Any] = NONE) -> str:
    """Return the end of a sentence about an unknown setting: `did you mean trainer.learning_rate?`. `values`:
    the values of all settings that were given, by name.
    """
    inside = [name for name in known if name.startswith(f"{plain(typed)}.")]
    if inside:
        more = ", ..." if len(inside) > SHOWN else ""
        return f"did you mean a setting in it: {', '.join(inside[:SHOWN])}{more}?"
    if instead := answer(typed, values):
        return instead
    suggestion = known_as(typed, known) or spelled_like(typed, known)
    if not suggestion:
        return ALL_SHOWN
    settings, note = translated(suggestion, typed, values)
    return f"did you mean {' '.join(settings) or suggestion}?{note}"


def translated(setting: str, typed: str, values: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return what is typed here for a setting of theirs and its value, none if that is not known; and the end
    of the sentence that says it. `values`: the values of all settings that were given, by name.
    """
    value: Any = values.get(typed)
    leaf, note = plain(typed).rpartition(".")[2], counted(typed, values)
    pair = _as_list(value)
    if leaf in LOW_AND_HIGH and len(pair) != 2:
        return [], note
    if setting in ("tasks", "eval_tasks") and (files := _files(value)):
        return ([f"{setting}={files[0]}"], "") if len(files) == 1 else ([], _as_pattern(files))
    if setting == "trainer.engine_correction_cap" and len(pair) == 2:
        return [f"{setting}={as_typed(pair[1])}"], note
    if setting == "trainer.clip_low" and len(pair) == 2:
        return [f"{setting}={as_typed(pair[0])}", f"trainer.clip_high={as_typed(pair[1])}"], ""
    if setting == "trainer.clip_low" and note and type(value) is float:
        upper = "trainer.clip_high"
        is_one = all(known_as(name, (setting, upper)) != upper for name in values)
        return [f"{name}={value:g}" for name in ((setting, upper) if is_one else (setting,))], ""
    if setting == "trainer.dual_clip" and type(value) in (int, float):
        return ["trainer.clip=dual", f"{setting}={value:g}"], ""
    if setting == "rollout.chat_template" and note and value is not None:
        return [f"{setting}.{leaf}={as_typed(value)}"], ""
    if setting == "metrics.sinks" and value is not None:
        names = [name for name in SINKS if name in re.findall(r"\w+", str(value))]
        return ([f"{setting}={','.join(names)}"], "") if names else ([], note)
    if setting == "engine.url" and isinstance(value, str) and value.startswith("http://"):
        return [f"{setting}={value.rstrip('/').removesuffix('/v1')}"], ""
    if setting == "trainer.lora.targets" and len(pair) > 1:
        return [f"{setting}={','.join(str(name).strip(', ') for name in pair)}"], ""
    if isinstance(value, str) and value.lower() in choices_of(setting):
        value = value.lower()
    if setting == "trainer.algorithm" and takes(setting, value):
        return [f"{setting}={value}"], ""
    if (translation := value_here(setting, value)) is not None:
        return [f"{setting}={translation}"], ""
    if by_samples := _by_samples(typed, values):
        number_of = "rollout.tasks_per_iteration" if leaf == "batch_size" else setting
        same = [f"{setting}={value}"] if leaf == "batch_size" else []
        return [*same, *([f"{number_of}={by_samples[0]:g}"] if takes(number_of, by_samples[0]) else [])], note
    if setting in ("tasks", "eval_tasks") and isinstance(value, str):
        is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", value) and not re.search(r"\.[a-z]+$", value)
        is_data_set = "data" in leaf and "." not in value
        value = f"hf:{value}" if is_name else None if is_data_set else value
    is_same = (
        not note or (type(value) in (int, float) and value == 0) or note.strip(" (").startswith(SAME_NUMBER)
    )
    is_code = setting in _OF_CODE and leaf != setting.rpartition(".")[2]
    if value is None or not is_same or is_code or isinstance(value, Mapping):
        return [], note
    if takes(setting, value):
        return [shlex.quote(f"{setting}={_words(value)}")], note
    choices = choices_of(setting) if isinstance(value, str) and not note else []
    return [], f" (there is no {value}, but {', '.join(choices)})" if choices else note


def _words(value: Any) -> str:
    """Write a value as it is typed; texts of a list in quotes."""
    is_of_texts = any(isinstance(item, str) for item in _as_list(value))
    return json.dumps(value, separators=(",", ":")) if is_of_texts else as_typed(value)


def _files(value: Any) -> list[str]:
    """Return the files of a list, whose quotes a shell may have taken; nothing for another value."""
    text = value.strip() if isinstance(value, str) else ""
    parts = text.strip("[]").split(",") if text.startswith("[") and text.endswith("]") else _as_list(value)
    return [str(part).strip(" '\"") for part in parts]


def _as_pattern(files: Sequence[str]) -> str:
    folders, suffixes = {str(Path(name).parent) for name in files}, {Path(name).suffix for name in files}
    folder, suffix = (same.pop() if len(same) == 1 else "" for same in (folders, suffixes))
    pattern = str(Path(folder or "data", f"*{suffix or '.jsonl'}"))
    return f" (several files are given as a pattern, e.g. '{pattern}')"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []  # pyright: ignore[reportUnknownArgumentType]


def value_here(setting: str, value: Any) -> str | None:
    """Return what a value of theirs is for a setting here; None if it is no other one."""
    if setting == "trainer.kl" and type(value) in (int, float) and value > 0:  # theirs is a number alone
        return f"k3 trainer.kl_coefficient={value:g}"
    translation = VALUES.get(f"{setting.rpartition('.')[2]}={as_typed(value)}".lower())
    return translation.partition("=")[2] if translation else None


def by_value(typed: str, value: Any) -> str | None:
    """Return what to do with this value of a setting of theirs, where that differs from value to value."""
    word, of_value = plain(typed), f"={as_typed(value)}".lower()
    leaf = word.rpartition(".")[2]
    if text := BY_VALUE.get(pair_of(word) + of_value) or BY_VALUE.get(leaf + of_value):
        return text
    setting = ALIASES.get(pair_of(word)) or ALIASES.get(leaf)
    if setting == "trainer.algorithm" and not value_here(setting, value) and str(value).lower() in ELSEWHERE:
        return ELSEWHERE[str(value).lower()]
    is_switch = leaf in ("enable", "enabled") and bool({*word.split(".")} & {*ANSWERS, *ALIASES})
    is_theirs = setting or leaf in ANSWERS or pair_of(word) in ANSWERS
    if (
        value is False
        and value_here(setting or "", value) is None
        and (is_switch or "for true" in COUNTED.get(leaf, ""))
    ):
        return "leave it out: it is off"
    if str(value).startswith(("${", "???")):
        return f"leave it out: {value} stands for another setting"
    is_unset = value is None or (value == -1 and value_here(setting or "", value) is None)
    return f"leave it out: {as_typed(value)} sets nothing" if is_unset and is_theirs else None


def counted(typed: str, values: Mapping[str, Any] = NONE) -> str:
    """Return how a setting of theirs is counted here, as the end of a sentence, or an empty text. `values`:
    the values of all settings that were given, by name.
    """
    word = plain(typed)
    leaf = word.rpartition(".")[2]
    note = COUNTED.get(pair_of(word)) or COUNTED.get(leaf)
    if leaf == "warmup_steps" and isinstance(values.get(typed), float):  # as TRL takes a share, too
        note = COUNTED["warmup_ratio"]
    if by_samples := _by_samples(typed, values):
        note = f"{note}: {by_samples[1]}"
    return f" ({note})" if note else ""


def _by_samples(typed: str, values: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return what a number of theirs is here by `rollout.samples_per_task`, and how; None for others."""
    word, value = plain(typed), values.get(typed)
    leaf = word.rpartition(".")[2]
    if (
        leaf not in BY_SAMPLES
        or type(value) is not int
        or (pair_of(word) != leaf and pair_of(word) in COUNTED)
    ):
        return None
    samples = _given("rollout.samples_per_task", values) or RolloutSettings().samples_per_task
    number = value * samples if BY_SAMPLES[leaf] == "x" else value / samples
    return number, f"{value} {BY_SAMPLES[leaf]} {samples} = {number:g}"


def _given(setting: str, values: Mapping[str, Any]) -> int | None:
    """Return the number above 0 that was given for a setting, by whatever name."""
    numbers = (number for key, number in values.items() if known_as(key, [setting]) == setting)
    return next((number for number in numbers if type(number) is int and number > 0), None)


def meant_each(unknown: Sequence[str], known: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a sentence about an unknown setting among those of `values`; of several, a line for each."""
    values = {name: _as_number(value) for name, value in values.items()}
    meanings = {name: near_setting(name, known, values) for name in unknown}
    if len(unknown) > 1:
        words = [pair_of(plain(name)) for name in unknown]
        is_theirs = sum(bool({word, word.rpartition(".")[2]} & {*ALIASES, *ANSWERS}) for word in words) > 1
        return listed("settings", meanings) + (f"\n  {LEFT_OUT}" if is_theirs else "")
    return f"unknown setting {unknown[0]}; {meanings[unknown[0]]}"


def _as_number(value: Any) -> Any:
    """Return the number that YAML takes for a text: 1e-3."""
    return float(value) if re.fullmatch(r"-?\d+(\.\d*)?[eE][-+]?\d+", str(value)) else value


def listed(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a line for each meaning of unknown words of a kind, and a last one for those that are like no
    other.
    """
    names = {text: [name for name in meanings if meanings[name] == text] for text in meanings.values()}
    nowhere = names.pop(ALL_SHOWN, [])
    if len(meanings) >= MANY:
        telling = {text: same for text, same in names.items() if _changes(text)}
        idle = len(meanings) - sum(map(len, telling.values()))
        lines = [f"{', '.join(same[:3])}: {text}" for text, same in telling.items()]
        lines.append(f"the other {idle}: leave them out; they say what holds here anyway, or have no equal")
        return "\n  ".join([f"{len(meanings)} unknown {kind}; those that change something here:", *lines])
    lines = [f"{', '.join(same)}: {text}" for text, same in names.items()]
    if nowhere:
        lines.append(f"{ALL_SHOWN}, none is like {', '.join(nowhere)}")
    return "\n  ".join([f"{len(meanings)} unknown {kind}; change or remove each of them:", *lines])


def answer(typed: str, values: Mapping[str, Any] = NONE) -> str | None:
    """Return the advice for a setting, or a section, of others that is none here; else None. `values`: the
    values of all settings that were given, by name.
    """
    word = plain(typed)
    section = next((part for part in word.split(".")[:-1] if part in _NOT_HERE), None)
    if section and not (pair_of(word) in ANSWERS or re.search("overlong_buffer|reward_manager", word)):
        is_off = values.get(typed, True) in (False, None)
        return "leave it out: it is off" if is_off else ANSWERS[section]
    if entry := re.fullmatch(r"(.+\.(?:env|source))\.(?:\d+\.)?(?:id|name)", word):  # of a list of them
        return answer(entry[1], {entry[1]: {"id": values.get(typed, "NAME")}})
    if word == "dtype" and values.get(typed) in ("bfloat16", "float32"):
        settings = f"trainer.compute_dtype={values[typed]} engine.args.dtype={values[typed]}"
        return f"did you mean {settings}? (the trainer's, and vLLM's; on a GPU they are bfloat16 anyway)"
    if typed in values and (of_all := joint_answer(typed, values)):
        return of_all
    if typed in values and (of_value := by_value(typed, values[typed])):
        return of_value
    if typed in values and (of_default := _as_default(typed, values)):
        return of_default
    if pair_of(word) in ALIASES:  # closer than what holds for its whole section
        return None
    if word == "generation_kwargs":
        return "give each by its own name: rollout.top_p, rollout.top_k, rollout.min_p, rollout.stop"
    if word == "dtype":
        return "did you mean trainer.compute_dtype and engine.args.dtype? (the trainer's, and vLLM's)"
    if word == "delta" and not isinstance(values.get(typed), bool):  # TRL's bound, no checkpoints.delta
        bound = values.get(typed)
        return f"set trainer.clip=dual and trainer.dual_clip{'' if bound is None else f'={bound}'}"
    parts = (pair_of(word), *reversed(word.split(".")))
    instead = next((ANSWERS[part] for part in parts if part in ANSWERS), "")
    value, coefficient = values.get(typed), "trainer.kl_coefficient"
    if instead.startswith("set") and coefficient in instead and value in (False, 0):
        return OFF
    if instead.startswith("set") and isinstance(value, int | float) and not isinstance(value, bool):
        instead = instead.replace(coefficient, f"{coefficient}={value:g}")
    return _filled(instead, word.rpartition(".")[2], value) or None


def _filled(text: str, leaf: str, value: Any) -> str:
    """Put what was typed in the place of what stands in braces."""
    if text.endswith(f"columns.{value}={{COLUMN}}"):
        return f"leave it out: {value} is what it is called here"
    identities = re.findall(r"'taskset': {'id': '([^']+)'|'(?:id|name)': '([^']+)'", str(value))
    identity = next((name for name, _other in identities if name), identities[0][1] if identities else "NAME")
    names = {"NAME": leaf, "ENVIRONMENT": identity}
    typed = shlex.quote(as_typed(value)) if isinstance(value, str | int | float) else ""
    return re.sub(r"{(.*?)}", lambda match: names.get(match[1]) or typed or match[1], text)


def _changes(text: str) -> bool:
    """Return whether an answer says to type something that is not the default."""
    settings = re.findall(r"([a-z_]+(?:\.\w+)*)=([^\s?]+)", text)
    is_default = settings and all(as_typed(default_of(name)) == value for name, value in settings)
    is_told = text.startswith(("did you mean", "set ", "give ", "take ", "name "))
    return is_told and not is_default and not text.endswith("needs no equal)")


def _as_default(typed: str, values: Mapping[str, Any]) -> str | None:
    """Return the answer to a truth of theirs which says what holds here anyway; else None."""
    word = plain(typed)
    setting = ALIASES.get(pair_of(word)) or ALIASES.get(word.rpartition(".")[2])
    if setting is None or not isinstance(values[typed], bool):
        return None
    default = f"{setting}={as_typed(default_of(setting))}"
    return (
        f"leave it out: {default} is the default"
        if translated(setting, typed, values)[0] == [default]
        else None
    )
