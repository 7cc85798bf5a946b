"""The submission of a client: a name, options of `run`, files. Checked before anything is written."""

import base64
import binascii
import difflib
import hashlib
import importlib.util
import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from coordinator.machine.run_command import settings_of
from coordinator.settings.loading import OPTIONS, option_name
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import is_path
from rollout.rewards.parts import rewards_of_sources
from rollout.rewards.resolve import RewardSettingError, refuse_unknown, with_setting
from rollout.settings import PROGRAMS, SELF
from rollout.storage.files import exists, is_directory
from rollout.storage.hashing import facts_of
from rollout.tasks.task_set import is_file

JOB_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.ASCII)
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}", re.ASCII)
DATA = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".toml", ".yaml", ".yml")
CODE = ".py"
"""Endings of the files that a client may upload, CODE only where the server takes code."""
MOST_OPTIONS, MOST_FILES, LONGEST = 256, 32, 4096
"""How many options and files a submission may have, and how many characters a text."""
VALUED = {option_name(key) for key in OPTIONS} | {"--config"}
FLAGS = {"--debug-mode"}
_OF_MACHINE = re.compile("ImportError|ModuleNotFoundError|install|sandbox|no such file|--model ")
"""In what `run` says of something that this machine lacks, and another one may have."""
SERVERS = {
    *("--master", "--worker", "--crew", "--log-path", "--dry-run", "--version", "--help", "--reset-settings"),
    *("--allow-shared-dir", "--accept-code-change", "--install-completion", "--show-completion", "--"),
}
"""What the server decides, and what starts no run."""


@dataclass(frozen=True)
class Submission:
    """A job that is asked for. Two of the same digest are the same job."""

    name: str
    options: tuple[str, ...]
    """Each with its value in one word; a file that was uploaded is named as it is in `files`."""
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """A digest of the options and the files."""
        facts = {name: facts_of(data) for name, data in sorted(self.files.items())}
        return hashlib.sha256(json.dumps([self.options, facts]).encode()).hexdigest()[:16]


def parse(body: bytes) -> Submission:
    """Read a submission from the JSON of a request; SettingsError says in one line what is wrong with it."""
    document = parse_object(body, {"name", "options", "files"})
    name, options, uploads = (document.get(key) for key in ("name", "options", "files"))
    if not isinstance(name, str) or not JOB_NAME.fullmatch(name):
        raise SettingsError(
            f"name {_shown(name)}: give 1 to 63 lower-case letters, digits, - and _, e.g. sums-3"
        )
    if not isinstance(options, list) or len(cast("list[Any]", options)) > MOST_OPTIONS:
        raise SettingsError(f"options: give a list of at most {MOST_OPTIONS} words, as behind `run`")
    for word in cast("list[Any]", options):
        if not isinstance(word, str) or not 0 < len(word) <= LONGEST or not word.isprintable():
            raise SettingsError(
                f"options: {_shown(word)} is not a word of 1 to {LONGEST} printable characters"
            )
    if not isinstance(uploads, dict | None) or len(cast("dict[str, Any]", uploads or {})) > MOST_FILES:
        raise SettingsError(f"files: give at most {MOST_FILES} by their paths")
    files, names = _files(cast("dict[str, Any]", uploads or {}))
    return Submission(name, tuple(_normal(cast("list[str]", options), names)), files)


def parse_object(body: bytes, known: set[str]) -> dict[str, Any]:
    """Read a JSON object that has no other keys than `known`, and none twice; SettingsError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            raise SettingsError("the body has a key twice; give each once")
        return values

    try:
        document = json.loads(body.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"the body is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(document, dict):
        raise SettingsError("the body is not a JSON object")
    values = cast("dict[str, Any]", document)
    if strange := sorted(values.keys() - known):
        raise SettingsError(
            f"{_shown(strange[0])} is not known; give {', '.join(sorted(known)) or 'nothing'}"
        )
    return values


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _files(uploads: Mapping[str, Any]) -> tuple[dict[str, bytes], dict[str, str]]:
    """Return the files by name, and their names by the path that the client knows them by."""
    files: dict[str, bytes] = {}
    names: dict[str, str] = {}
    for path, encoded in uploads.items():
        name = re.split(r"[/\\]", path)[-1]
        if len(path) > LONGEST or not FILE_NAME.fullmatch(name):
            raise SettingsError(f"file {_shown(path)}: rename it to letters, digits, -, _ and .")
        if not name.endswith((*DATA, CODE)):
            raise SettingsError(f"file {name}: a job takes {', '.join(DATA)} and {CODE}")
        if name in files:
            raise SettingsError(
                f"file {name} is there twice; a job has its files in one directory: rename one"
            )
        try:
            files[name] = base64.b64decode(encoded, validate=True)
        except (binascii.Error, TypeError, ValueError):
            raise SettingsError(f"file {name}: its content is not base64") from None
        names[path] = name
    return files, names


def _normal(words: Sequence[str], names: Mapping[str, str]) -> Iterator[str]:
    """Yield each option with its value in one word, and with the names of uploaded files for their paths."""
    following = iter(words)
    for word in following:
        name, sign, value = word.partition("=")
        if name in SERVERS:
            raise SettingsError(f"leave {name} out: the server decides it")
        if word.startswith("-") and not word.startswith("--"):
            raise SettingsError(f"No such option: {word}")
        if name in VALUED and not sign:
            value = next(following, None)
            if value is None:
                raise SettingsError(f"Option '{name}' requires an argument.")
        elif not sign:
            yield word
            continue
        elif name.startswith("--") and name not in VALUED:
            _refuse_unknown(name)
        yield f"{name}={_renamed(value, names)}"


def _refuse_unknown(name: str) -> None:
    near = difflib.get_close_matches(name, VALUED | FLAGS, n=1)
    raise SettingsError(f"No such option: {name}{f'; did you mean {near[0]}?' if near else ''}")


def _renamed(value: str, names: Mapping[str, str]) -> str:
    """Return a value with the name of the uploaded file that it is; `dir/mine.py:score` is `mine:score`."""
    module, sign, function = value.rpartition(":")
    if sign and module.endswith(CODE) and module in names:
        return f"{names[module].removesuffix(CODE)}:{function}"
    return names.get(value, value)


def check(submission: Submission, decided: Sequence[str], allow_code: bool, is_here: bool) -> None:
    """Raise SettingsError, in the words of `run`, if it would refuse the options; and for code, unless that
    is allowed, before any is loaded. `decided`: options that the server adds. `is_here`: the job runs on this
    machine, so that all it names can be looked at; another machine may have other libraries.
    """
    for name in submission.files:
        if name.endswith(CODE):
            if not allow_code:
                raise SettingsError(
                    f"file {name} is code, and this server takes none (run serve --allow-code)"
                )
            _refuse_taken(name)
    for option in submission.options:
        name, _, value = option.partition("=")
        if name.startswith("--") and name not in VALUED | FLAGS:
            _refuse_unknown(name)
        if name == "--config" and value not in submission.files:
            raise SettingsError(
                f"--config {value}: the server has no such file of this job; add --upload {value}"
            )
    with tempfile.TemporaryDirectory(prefix="flagpost-check-") as directory:
        for name, data in submission.files.items():
            Path(directory, name).write_bytes(data)
        log_path = str(Path(directory, "run"))
        words = ["local", *submission.options, *decided, "--log-path", log_path]
        text = settings_of(words, Path(directory))
        settings = RunSettings.published(json.loads(text))
        _refuse_absent(settings, Path(directory))
        _refuse_absent_model(settings, Path(directory))
        if not allow_code:
            _refuse_code(settings)
        if not is_here:
            _refuse_unknown_reward(settings)
        try:
            settings_of(words, Path(directory), "--dry-run")
        except SettingsError as error:
            text = str(error).replace(f"{directory}/", "")
            if is_here or _is_wrong_anywhere(text, submission.files, settings):
                raise SettingsError(text) from None


def _refuse_taken(name: str) -> None:
    """Raise SettingsError for a module that would hide another one, or be hidden by it."""
    module = name.removesuffix(CODE)
    if not module.isidentifier() or importlib.util.find_spec(module) is not None:
        raise SettingsError(f"file {name}: the server has a module of this name, or it is none; rename it")


def _refuse_absent(settings: RunSettings, directory: Path) -> None:
    """Raise SettingsError for a task file that is neither uploaded nor at the server."""
    below = Path(settings.data_path) if settings.data_path else directory
    sets = [(f"eval.sets.{name}.tasks", eval_set.tasks) for name, eval_set in settings.eval_sets.items()]
    for option, source in (("--tasks", settings.tasks), ("--eval-tasks", settings.eval_tasks), *sets):
        if source and is_file(source) and not any(exists(at / source) for at in (directory, below)):
            raise SettingsError(
                f"{option} {source}: the server has no such file; to send yours: --upload {source}"
            )


def _refuse_absent_model(settings: RunSettings, directory: Path) -> None:
    """Raise SettingsError for a model that is a path, and no directory at the server."""
    below = Path(settings.data_path) if settings.data_path else directory
    if is_path(settings.model) and not any(is_directory(at / settings.model) for at in (directory, below)):
        raise SettingsError(
            f"--model {settings.model}: the server has no such directory, and no model is sent to it; give "
            "one that it has, or the name of a model on Hugging Face"
        )


def _refuse_unknown_reward(settings: RunSettings) -> None:
    try:
        refuse_unknown(settings.rollout.scoring)
    except RewardSettingError as error:
        raise SettingsError(with_setting("--reward ", settings.rollout.scoring, str(error))) from None


def _is_wrong_anywhere(text: str, files: Iterable[str], settings: RunSettings) -> bool:
    """Return whether what `run` refuses here is in a file or a function that it has found, so that other
    machines would refuse it too, whatever is installed there.
    """
    sets = settings.eval_sets.values()
    sources = [settings.tasks, settings.eval_tasks, *(each.tasks for each in sets)]
    functions = [settings.rollout.reward, *settings.rollout.rewards.values(), settings.rollout.environment]
    functions += [str(name) for each in sets for name in (each.reward, each.environment)]
    named = [*files, *(source for source in sources if source and is_file(source))]
    named += [name for name in functions if ":" in name and not name.startswith(PROGRAMS)]
    return any(name in text for name in named) and not _OF_MACHINE.search(text)


def _refuse_code(settings: RunSettings) -> None:
    """Raise SettingsError for a setting by which a client could have its own code run."""
    named = [
        (f"eval.sets.{name}.{field}", str(getattr(eval_set, field)))
        for name, eval_set in settings.eval_sets.items()
        for field in ("reward", "environment")
    ]
    sources = [("--tasks", settings.tasks), ("--eval-tasks", settings.eval_tasks or "")]
    sources += [(f"eval.sets.{name}.tasks", eval_set.tasks) for name, eval_set in settings.eval_sets.items()]
    named = [(option, text) for option, name in named for text in rewards_of_sources(name).all()]
    for option, name in (
        ("--reward", settings.rollout.reward),
        *((f"rollout.rewards.{name}", text) for name, text in settings.rollout.rewards.items()),
        ("--environment", settings.rollout.environment),
        *named,
        *((option, source) for option, source in sources if source.startswith(PROGRAMS)),
    ):
        if ":" in name:
            raise SettingsError(
                f"{option} {name} runs code or asks another server, and this server lets no client do so "
                "(run serve --allow-code)"
            )
    accounts = sorted({*settings.metrics.sinks} - {"tensorboard"})
    for name, is_set, effect in (
        ("engine.args", settings.engine.args, "can name programs"),
        ("cluster.groups", settings.cluster.groups, "can name programs"),
        ("cluster.local_dir", settings.cluster.local_dir, "names a directory that is emptied"),
        ("engine.url", settings.engine.url, "asks another server"),
        ("rollout.teachers", settings.rollout.teachers, "asks other servers"),
        ("rollout.teacher", not (settings.rollout.teacher or SELF).startswith(SELF), "asks another server"),
        (f"metrics.sinks={','.join(accounts)}", accounts, "uses the account of the server's user"),
    ):
        if is_set:
            raise SettingsError(
                f"{name} {effect}, and this server lets no client do so (run serve --allow-code)"
            )
