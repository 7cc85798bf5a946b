"""Answer a word that `run` does not know with the one that was meant."""

import difflib
import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from coordinator.console.commands.names import GROUPS, LOCAL
from coordinator.settings import suggestions
from coordinator.settings.loading import (
    OPTIONS,
    REPEATED,
    as_list,
    items,
    known_keys,
    option_name,
    parse_override,
    parse_value,
)
from coordinator.settings.tree import SettingsError
from coordinator.settings.wrong_values import advice_on
from trainer.algorithms import PRESETS

MEANT = {"train": LOCAL, "start": LOCAL, "log": "logs", "ps": "status", "clean": "cleanup", "help": "--help",
         "version": "--version", "worker": "--worker RANK", "master": "--master",
         "metrics": "report", "merge": "export --merge", "convert": "export"}  # fmt: skip
"""Commands by other names."""


_PLACES = ("--to", "-o", "--root", "--log-path")
ALSO_CALLED = {
    **dict.fromkeys(("--dir", "--directory", "--path", "--folder", "--output-dir", "--output"), _PLACES),
    **dict.fromkeys(("--from", "--run", "--run-dir", "--log-dir", "--logdir"), ("--log-path", "--root")),
    "--log-path": ("--root",),
    "--nodes": ("--num-nodes", "--peers"),
    "--num-nodes": ("--peers",),
    "--rank": ("--worker",),
    "-h": ("--help",),
    **dict.fromkeys(("-v", "-V"), ("--version",)),
}
"""What others, or other commands, call an option; the first that the command has is meant."""
_WITH_COMMAS = ("--hosts", "--rank-weights", "--expect-gpus", "--gpus-per-node", "--cpus-per-node")
_OF_RANKS = ("--master", "--worker", "--rank")
_SETTINGS, _TASKS = "--config {}", "--tasks {}"
_OPTION_OF = {
    ".toml": _SETTINGS, ".yaml": _SETTINGS, ".yml": _SETTINGS,
    ".jsonl": _TASKS, ".json": _TASKS, ".csv": _TASKS, ".parquet": _TASKS, ".arrow": _TASKS,
    ".py": "--reward {}:FUNCTION",
}  # fmt: skip
"""How a file is given, by its suffix."""
_EXTRA = re.compile(r"Got unexpected extra argument\S* \((\S+)\)")


def settings_of(words: Sequence[str], arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the settings that were typed as KEY=VALUE; SettingsError for another word. `arguments`: all that
    was typed; None: as this process was called.
    """
    for word in words:
        _refuse_word(word, sys.argv[1:] if arguments is None else arguments)
    return dict(parse_override(word) for word in words)


def say_what_is_given_twice(words: Sequence[str], arguments: Sequence[str]) -> None:
    """Print a line for each setting that has two values among the options in `arguments`, and in `words`."""
    options = {option_name(key): key for key in OPTIONS if key not in (*REPEATED, "cluster.place")}
    typed = [word.partition("=") for word in arguments]
    pairs = [
        (options[name], value if sign else after)
        for (name, sign, value), after in zip(typed, [*arguments[1:], ""], strict=True)
        if name in options
    ]
    values: dict[str, str] = {}
    for key, value in [*pairs, *(word.partition("=")[::2] for word in words)]:
        if values.get(key, value) != value:
            print(f"run: {option_name(key)} is given twice, as {values[key]} and as {value}: {value} counts",
                  file=sys.stderr)  # fmt: skip
        values[key] = value


def part_of_value(word: str, arguments: Sequence[str]) -> str:
    """Return how to type the value that `word` seems a part of, as it stands behind a whole one; else ""."""
    before = list(itertools.takewhile(lambda other: other != word, arguments))
    values = [word]
    while before and not before[-1].startswith("-") and "=" not in before[-1]:
        values.insert(0, before.pop())
    key, sign, value = before[-1].partition("=") if before else ("", "", "")
    values = [value, *values] if sign else values
    if len(values) > 1 and key == "--reward":
        return f"give each for itself: {' '.join(f'--reward {name}' for name in values)}"
    if len(values) > 1 and key in _WITH_COMMAS:
        return f"write commas without spaces: {key} {','.join(items(','.join(values)))}"
    if sign and isinstance(parse_value(value), str):
        from_word = arguments[len(before) :]
        pieces = itertools.takewhile(lambda other: "=" not in other and not other.startswith("-"), from_word)
        joined = " ".join([value, *pieces])
        quoted = shlex.quote(f"{key}={as_list(joined) if joined.startswith('[') else joined}")
        return f"the shell divides a value at spaces; quote it: {quoted}"
    return ""


def _without_spaces(word: str, arguments: Sequence[str]) -> str:
    """Return KEY=VALUE for a word that stands apart from its `=`; else an empty text."""
    if "=" in word or word not in arguments:
        return ""
    place = arguments.index(word)
    before, after = arguments[max(place - 2, 0) : place], arguments[place + 1 : place + 3]
    if after and after[0].startswith("="):
        value = after[0] if after[0] != "=" else "".join(after)
        return shlex.quote(f"{word}{value}")
    if before and before[-1] == "=" and len(before) > 1 and "=" not in before[0]:
        return shlex.quote(f"{before[0]}={word}")
    return (
        shlex.quote(f"{before[-1]}{word}")
        if before and before[-1].strip("=") and before[-1].endswith("=")
        else ""
    )


def _refuse_word(word: str, arguments: Sequence[str]) -> None:
    """Raise SettingsError for a word that is not KEY=VALUE, saying what was meant."""
    if typed := _without_spaces(word, arguments):
        raise SettingsError(f"there is no space around the =; type {typed}")
    if "=" in word:
        return
    commands, known = [name for group in GROUPS.values() for name in group], known_keys()
    known_as = suggestions.known_as(word, known)
    near = [] if known_as else difflib.get_close_matches(word, [*commands, *MEANT], n=1)
    if word in commands:
        advice = f"a command comes first: run {word} ..."
    elif option := _OPTION_OF.get(Path(word).suffix if Path(word).is_file() else ""):
        advice = f"a file is given as {option.format(word)}"
    elif Path(word, "run.json").is_file():
        advice = f"a run directory is given as --log-path {word}"
    elif part := part_of_value(word, arguments):
        advice = part
    elif word.isdecimal() and (arguments[0] == "local" or "--master" in arguments):
        advice = f"a number of nodes is given as --num-nodes {word}"
    elif word.lower() in PRESETS:
        advice = f"an algorithm is given as trainer.algorithm={word.lower()}"
    elif near:
        advice = f"did you mean run {MEANT.get(near[0], near[0])}?"
    elif setting := known_as or suggestions.spelled_like(word, known):
        advice = f"did you mean {_typed(setting)}?{suggestions.counted(word)}"
    else:
        advice = "e.g. trainer.learning_rate=1e-6"
    raise SettingsError(f"'{word}' is neither a command, nor an option, nor KEY=VALUE; {advice}")


def of_option(error: typer.TyperException, arguments: Sequence[str] = ()) -> str:
    """Return the text of an error of the command line, and the option or setting that was meant.

    Of another trainer's command line, the `arguments`, all unknown options are answered, not the first alone.
    """
    text, typed = str(error) or error.format_message(), getattr(error, "option_name", None)
    param: Any = getattr(error, "param", None)
    if text.startswith("Missing parameter"):
        help_text = f"{param.help[:1].lower()}{param.help[1:]}".rstrip(".")
        name = f"{param.opts[-1]} {param.metavar}" if param.opts[-1].startswith("-") else param.metavar
        return f"{name} is missing: {help_text}"
    cause: Any = error.__cause__
    if hasattr(cause, "errors"):  # pydantic's, which does not name the option
        names = (name for name in param.opts for word in arguments if word.startswith(name))
        typed = next(names, param.opts[0])
        details = cause.errors()[0]
        return f"{typed}={details['input']}: {advice_on(details)}"
    if extra := _EXTRA.fullmatch(text):
        takes_run = any("--log-path" in param.opts for param in _params(error))
        advice = f"a run directory is given as --log-path {extra[1]}" if takes_run else "leave it out"
        advice = part_of_value(extra[1], arguments) or advice
        if extra[1].isdecimal():
            takes_number = any("--iteration" in param.opts for param in _params(error))
            advice = f"did you mean --iteration {extra[1]}?" if takes_number else "leave it out"
        if "=" in extra[1]:
            advice = "this command takes no settings; give them where the run is started"
        return f"{text}; {advice}"
    if typed == "--worker" and "requires an argument" in text:
        return "--worker: give the rank of this machine, e.g. --worker 1"
    if typed is None or not text.startswith("No such option"):
        return text
    params = _params(error)
    options = {"--help", *(name for param in params for name in (*param.opts, *param.secondary_opts))}
    words = [typed, *(word.partition("=")[0] for word in arguments if word.startswith("--"))]
    values = _values(arguments)
    meanings = {word: _meant(word, sorted(options), params, values) for word in words if word not in options}
    if len(meanings) > 1:
        return suggestions.listed(
            "options", {word: text or suggestions.ALL_SHOWN for word, text in meanings.items()}
        )
    return f"{text}; {meanings[typed]}" if meanings.get(typed) else text


def _values(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the values that were typed as `--NAME VALUE`, `--NAME A B`, `--NAME=VALUE` or KEY=VALUE, by what
    is before; True for an option without one.
    """
    values: dict[str, Any] = {}
    for place, word in enumerate(arguments):
        name, sign, value = word.partition("=")
        if sign:
            values[name] = parse_value(value)
        elif word.startswith("--"):
            after = itertools.takewhile(_is_value, arguments[place + 1 :])
            typed = [parse_value(value) for value in after]
            values[name] = typed if len(typed) > 1 else typed[0] if typed else True
    return values


def _is_value(word: str) -> bool:
    return "=" not in word and not word.startswith("--")


def _meant(typed: str, options: Sequence[str], params: Sequence[Any], values: Mapping[str, Any]) -> str:
    """Return the option or setting meant by one that no command has, or an empty text. `values`: what was
    typed for each.
    """
    if also := next((name for name in ALSO_CALLED.get(typed, ()) if name in options), None):
        return f"did you mean {also}?"
    if typed in _OF_RANKS:
        return "this command takes no rank; leave it out"
    if instead := suggestions.answer(typed, values):
        return instead
    known = known_keys()
    near = difflib.get_close_matches(typed, options, n=1, cutoff=0.7)
    setting = suggestions.known_as(typed, known) or ("" if near else suggestions.spelled_like(typed, known))
    guess = _typed(setting) if setting else "".join(near)
    if setting and guess not in options:  # perhaps an option of `run` that this command lacks
        takes_settings = any(param.name == "words" for param in params)
        near = near if guess == typed or not takes_settings else []
        guess = "".join(near) or (f"{setting}=VALUE" if takes_settings else "")
    settings, note = suggestions.translated(setting, typed, values) if setting else ([], "")
    if settings and guess in options:
        guess = f"{guess} {settings[0].partition('=')[2]}"
    elif settings and guess:
        guess = " ".join(settings)
    return f"did you mean {guess}?{note}" if guess else ""


def _params(error: typer.TyperException) -> list[Any]:
    """Return the parameters of the error's command."""
    command: Any = getattr(getattr(error, "ctx", None), "command", None)
    return list(command.params) if command else []


def _typed(key: str) -> str:
    """Return how a setting is typed: `--num-nodes`, `trainer.learning_rate=VALUE`."""
    return option_name(key) if key in OPTIONS else f"{key}=VALUE"


def with_all_resets(arguments: Sequence[str], option: str) -> list[str]:
    """Return the arguments with `all` as the value of each `option` that has none of its own."""
    following = itertools.chain(arguments[1:], ["-"])
    return [
        f"{word}=all" if word == option and (after.startswith("-") or "=" in after) else word
        for word, after in zip(arguments, following, strict=False)
    ]
