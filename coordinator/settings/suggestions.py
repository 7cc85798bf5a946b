"""Find the setting that a person meant: by what other trainers call it, by its last part, by its spelling."""

import difflib
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
from coordinator.settings.setting_names import as_typed, choices_of, default_of, takes
from coordinator.settings.values_elsewhere import BY_SAMPLES, BY_VALUE, COUNTED, SAME_NUMBER, VALUES
from rollout.settings import RolloutSettings
from trainer.loss_settings import ELSEWHERE

NEAR, NEARER = 0.75, 0.85
"""How alike two spellings must be, from 0 to 1, with up to two letters more or less, and with more: nobody
means `gpus` with `bogus`, or `batch_size` with `gen_batch_size`.
"""
NEAR_WORD = 0.6
"""So much must each word of a name be like that of the other, where they have equally many."""
SHORT = 4
"""The last part of a dotted name that has so many letters says too little: nobody means `dtype` with `type`.
"""
SHOWN = 4
"""So many settings of a section are named."""
NONE: Mapping[str, Any] = MappingProxyType({})
LOW_AND_HIGH = ("eps_clip_low_high", "vllm_is_truncated_threshold")
"""Settings of others that are two numbers."""
_NOT_HERE = ("critic", "reward_model")
"""Sections of others that have no equal, whatever is in them."""
_OF_CODE = ("rollout.reward", "rollout.environment")
"""Settings that name code, which is called otherwise elsewhere."""
ALL_SHOWN = "run --dry-run shows all settings"


def known_as(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting of that name, whatever its section and spelled with - or _, or by another name."""
    word = _plain(typed)
    leaf = word.rpartition(".")[2]
    if word in known:
        return word
    by_leaf = (name for name in known if name.rpartition(".")[2] == leaf)
    return ALIASES.get(word) or ALIASES.get(_pair(word)) or next(by_leaf, None) or ALIASES.get(leaf)


def spelled_like(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting, or section, whose name or last part is spelled most like what was typed."""
    word = _plain(typed)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    # Within a section only what follows must be alike: trainer.project_name is not trainer.betas.
    names = () if word.rpartition(".")[0] in sections else (*known, *sections)
    # Most of a long name of theirs is its sections, which all of them begin with.
    aliases = {name: setting for name, setting in ALIASES.items() if "." not in name}
    spellings = {**aliases, **leaves, **{name: name for name in names}}
    leaf = word.rpartition(".")[2]
    for part in (word, leaf) if len(leaf) > SHORT else (word,):
        for near in difflib.get_close_matches(part, spellings, n=3, cutoff=NEAR):
            likeness = _likeness(near, part)
            is_near = abs(len(near) - len(part)) <= 2 or likeness >= NEARER or near.startswith(part)
            if is_near and _is_like_by_word(near, part):
                return spellings[near]
    return None


def _is_like_by_word(near: str, typed: str) -> bool:
    """Return whether no word of a name is another one: packing_strategy is not sharding_strategy."""
    pairs = list(zip(near.split("_"), typed.split("_"), strict=False))
    return near.count("_") != typed.count("_") or all(_likeness(*pair) >= NEAR_WORD for pair in pairs)


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def near_setting(typed: str, known: Sequence[str], values: Mapping[str, Any] = NONE) -> str:
    """Return the end of a sentence about an unknown setting: `did you mean trainer.learning_rate?`. `values`:
    the values of all settings that were given, by name.
    """
    inside = [name for name in known if name.startswith(f"{_plain(typed)}.")]
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
    leaf, note = _plain(typed).rpartition(".")[2], counted(typed, values)
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
    if setting == "trainer.dual_clip" and note and type(value) in (int, float):
        return ["trainer.clip=dual", f"{setting}={value:g}"], ""
    if setting == "rollout.chat_template" and note and value is not None:
        return [f"{setting}.{leaf}={as_typed(value)}"], ""
    if setting == "metrics.sinks" and value is not None:
        names = [name for name in SINKS if name in re.findall(r"\w+", str(value))]
        return ([f"{setting}={','.join(names)}"], "") if names else ([], note)
    if setting == "engine.url" and isinstance(value, str) and value.startswith("http://"):
        return [f"{setting}={value.rstrip('/').removesuffix('/v1')}"], ""
    if setting == "trainer.algorithm" and takes(setting, value):
        return [f"{setting}={value}"], ""
    if (translation := value_here(setting, value)) is not None:
        return [f"{setting}={translation}"], ""
    if leaf in BY_SAMPLES and type(value) is int:
        samples = _given("rollout.samples_per_task", values) or RolloutSettings().samples_per_task
        number = _by_samples(leaf, value, samples)
        return ([f"{setting}={number:g}"] if takes(setting, number) else []), note
    if setting in ("tasks", "eval_tasks") and isinstance(value, str):
        is_name = re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", value) and not re.search(r"\.[a-z]+$", value)
        is_data_set = "data" in leaf and "." not in value
        value = f"hf:{value}" if is_name else None if is_data_set else value
    is_same = not note or note.strip(" (").startswith(SAME_NUMBER)
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
    word, of_value = _plain(typed), f"={as_typed(value)}".lower()
    leaf = word.rpartition(".")[2]
    if text := BY_VALUE.get(_pair(word) + of_value) or BY_VALUE.get(leaf + of_value):
        return text
    setting = ALIASES.get(_pair(word)) or ALIASES.get(leaf)
    if setting == "trainer.algorithm" and (text := ELSEWHERE.get(str(value).lower())):
        return text
    is_switch = leaf in ("enable", "enabled") and bool({*word.split(".")} & {*ANSWERS, *ALIASES})
    is_theirs = setting or leaf in ANSWERS or _pair(word) in ANSWERS
    if value is False and (is_switch or "for true" in COUNTED.get(leaf, "")):
        return "leave it out: it is off"
    return "leave it out: null sets nothing" if value is None and is_theirs else None


def counted(typed: str, values: Mapping[str, Any] = NONE) -> str:
    """Return how a setting of theirs is counted here, as the end of a sentence, or an empty text. `values`:
    the values of all settings that were given, by name.
    """
    word = _plain(typed)
    leaf, value = word.rpartition(".")[2], values.get(typed)
    note = COUNTED.get(_pair(word)) or COUNTED.get(leaf)
    if leaf in BY_SAMPLES and type(value) is int:
        samples = _given("rollout.samples_per_task", values) or RolloutSettings().samples_per_task
        note = f"{note}: {value} {BY_SAMPLES[leaf]} {samples} = {_by_samples(leaf, value, samples):g}"
    return f" ({note})" if note else ""


def _by_samples(leaf: str, value: int, samples: int) -> float:
    return value * samples if BY_SAMPLES[leaf] == "x" else value / samples


def _given(setting: str, values: Mapping[str, Any]) -> int | None:
    """Return the number above 0 that was given for a setting, by whatever name."""
    numbers = (number for key, number in values.items() if known_as(key, [setting]) == setting)
    return next((number for number in numbers if type(number) is int and number > 0), None)


def meant_each(unknown: Sequence[str], known: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return a sentence about an unknown setting among those of `values`; of several, a line for each."""
    meanings = {name: near_setting(name, known, values) for name in unknown}
    if len(unknown) > 1:
        return listed("settings", meanings)
    return f"unknown setting {unknown[0]}; {meanings[unknown[0]]}"


def listed(kind: str, meanings: Mapping[str, str]) -> str:
    """Return a line for each meaning of unknown words of a kind, and a last one for those that are like no
    other.
    """
    names = {text: [name for name in meanings if meanings[name] == text] for text in meanings.values()}
    nowhere = names.pop(ALL_SHOWN, [])
    lines = [f"{', '.join(same)}: {text}" for text, same in names.items()]
    if nowhere:
        lines.append(f"{ALL_SHOWN}, none is like {', '.join(nowhere)}")
    return "\n  ".join([f"{len(meanings)} unknown {kind}; change or remove each of them:", *lines])


def answer(typed: str, values: Mapping[str, Any] = NONE) -> str | None:
    """Return the advice for a setting, or a section, of others that is none here; else None. `values`: the
    values of all settings that were given, by name.
    """
    word = _plain(typed)
    if typed in values and (of_all := joint_answer(typed, values)):
        return of_all
    if typed in values and (of_value := by_value(typed, values[typed])):
        return of_value
    if typed in values and (of_default := _as_default(typed, values)):
        return of_default
    is_known = _pair(word) in ANSWERS or "overlong_buffer" in word
    section = next((part for part in word.split(".")[:-1] if part in _NOT_HERE), None)
    if section and not is_known:
        return ANSWERS[section]
    if "ref" in word.split(".")[:-1] and (of_reference := f"ref.{word.rpartition('.')[2]}") in ANSWERS:
        return ANSWERS[of_reference]
    if _pair(word) in ALIASES:  # closer than what holds for its whole section
        return None
    if word.rpartition(".")[2] == "beta" and values.get("trainer.algorithm") in ("dpo", "kto"):
        return "did you mean trainer.pair_beta?"
    if word == "dtype":
        return "did you mean trainer.compute_dtype, or engine.dtype of the embedded engine?"
    if word == "delta" and not isinstance(values.get(typed), bool):  # TRL's bound, no checkpoints.delta
        bound = values.get(typed)
        return f"set trainer.clip=dual and trainer.dual_clip{'' if bound is None else f'={bound}'}"
    parts = (_pair(word), *reversed(word.split(".")))
    instead = next((ANSWERS[part] for part in parts if part in ANSWERS), "")
    value, coefficient = values.get(typed), "trainer.kl_coefficient"
    longest = _given("rollout.max_tokens", values)
    if parts[0].endswith(("buffer.len", "buffer_len", "buffer_cfg.len")) and type(value) is int and longest:
        share = f"trainer.overlong=penalise trainer.overlong_buffer={value / longest:.3g}"
        return f"did you mean {share}? ({value} of {longest} tokens)"
    if instead.startswith("set") and coefficient in instead and value in (False, 0):
        return OFF
    if instead.startswith("set") and isinstance(value, int | float) and not isinstance(value, bool):
        return instead.replace(coefficient, f"{coefficient}={value:g}")
    return instead or None


def _as_default(typed: str, values: Mapping[str, Any]) -> str | None:
    """Return the answer to a truth of theirs which says what holds here anyway; else None."""
    word = _plain(typed)
    setting = ALIASES.get(_pair(word)) or ALIASES.get(word.rpartition(".")[2])
    if setting is None or not isinstance(values[typed], bool):
        return None
    default = f"{setting}={as_typed(default_of(setting))}"
    return (
        f"leave it out: {default} is the default"
        if translated(setting, typed, values)[0] == [default]
        else None
    )


def _pair(word: str) -> str:
    """Return the last two parts of a dotted name, which say more than the last one alone; else the name."""
    return ".".join(word.split(".")[-2:])


def _plain(typed: str) -> str:
    return typed.strip(" +~:").lstrip("-").replace("-", "_").lower()
