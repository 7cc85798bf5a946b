"""Read a file of settings: TOML, YAML or JSON."""

import os
import re
import time
from pathlib import Path
from typing import Any, cast

from coordinator.settings.loading import check_each, flatten, known_keys
from coordinator.settings.tree import SettingsError

_PART_BYTES = 65536
_KINDS = "a .toml, .yaml or .json file"
TOML_OR_YAML = "pipe"
"""What a pipe has in place of a suffix."""
SILENT_S = 30.0
"""How long nothing may be written to a pipe, whose writer may be a program that takes a moment."""


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings of a .toml, .yaml or .json file, or of a pipe, as dotted keys."""
    try:
        content = _read_pipe(path) if path.is_fifo() else path.read_bytes()
        is_stream = path.is_fifo() or str(path).startswith("/dev/")
        tree = _parse_file(content.decode(), path.suffix or (TOML_OR_YAML if is_stream else ""))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}; give {_KINDS}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(
            f"--config {path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        ) from error
    except ValueError as error:
        raise SettingsError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise SettingsError(f"--config {path}: expected settings by name, found {type(tree).__name__}")
    known, settings = known_keys(), flatten(cast(dict[str, Any], tree))
    # A section whose lines are all comments is nothing in YAML.
    overrides = {
        key: value
        for key, value in settings
        if value is not None or not any(name.startswith(f"{key}.") for name in known)
    }
    try:
        check_each(overrides)
    except SettingsError as error:
        raise SettingsError(f"--config {path}: {error}") from None
    return overrides


def _read_pipe(path: Path) -> bytes:
    """Read a pipe to its end, as of `--config <(COMMAND)`. ValueError if nothing is written to it."""
    content, deadline_s = bytearray(), time.monotonic() + SILENT_S
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        while (part := pipe.read(_PART_BYTES)) != b"" or not content:
            if part:
                content += part
                deadline_s = time.monotonic() + SILENT_S
                continue
            if part == b"" and str(path).startswith("/dev/"):  # a shell has started its writer
                raise ValueError("is a pipe that ended without a line; mend the command that writes it")
            if time.monotonic() > deadline_s:
                raise ValueError(
                    f"is a pipe to which nothing was written for {SILENT_S:g} s; write the settings to a file"
                )
            time.sleep(0.05)
    return bytes(content)


def _parse_file(text: str, suffix: str) -> Any:
    """Parse the text of a settings file; ValueError if it cannot be parsed."""
    if suffix == TOML_OR_YAML:
        try:
            return _parse_file(text, ".toml")
        except ValueError as error:
            if re.search(r"^\s*(\[|[\w.-]+\s*=)", text, re.MULTILINE):
                raise
            if isinstance(tree := _parse_file(text, ".yaml"), dict):
                return cast(Any, tree)
            raise ValueError(f"is neither TOML ({error}) nor YAML") from None
    if suffix == ".toml":
        import tomllib

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            if str(error).startswith("Invalid value"):
                raise ValueError(f"{error}; put texts in quotes") from error
            raise
    if suffix not in {".yaml", ".yml", ".json"}:
        typed = "; or type settings as NAME=VALUE: docs/settings.md lists them" if suffix == ".py" else ""
        raise ValueError(f"give {_KINDS}{typed}")
    import yaml

    try:
        _refuse_twice(cast(Any, yaml).compose(text, yaml.SafeLoader))
        tree = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{line}{error.problem}; mend it, e.g. how far the line is indented") from error
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    return {} if tree is None else tree


def _refuse_twice(node: Any, above: tuple[Any, ...] = ()) -> None:
    """Raise ValueError for a name that a table of a YAML document has twice: the first would be lost. So does
    a table within itself; `above` are those around it.
    """
    names = set[str]()
    for key, value in getattr(node, "value", ()) if getattr(node, "id", "") == "mapping" else ():
        if isinstance(key.value, str) and key.value in names:
            raise ValueError(f"line {key.start_mark.line + 1}: {key.value} is there twice; put them together")
        names.add(str(key.value))
        if value in (node, *above):
            raise ValueError(f"line {key.start_mark.line + 1}: {key.value} has itself in it; write it out")
        _refuse_twice(value, (node, *above))
