"""Read a file of settings: TOML, YAML or JSON."""

import os
import re
import time
from pathlib import Path
from typing import Any, cast

from coordinator.settings.loading import flatten, known_keys
from coordinator.settings.tree import SettingsError

TOML_OR_YAML = "pipe"
"""What a pipe has in place of a suffix."""
WRITER_S = 10.0
"""How long a pipe may have no writer: a shell starts both sides at once."""


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings of a .toml, .yaml or .json file, or of a pipe, as dotted keys."""
    try:
        content = _read_pipe(path) if path.is_fifo() else path.read_bytes()
        is_stream = path.is_fifo() or str(path).startswith("/dev/")
        tree = _parse_file(content.decode(), path.suffix or (TOML_OR_YAML if is_stream else ""))
    except OSError as error:
        raise SettingsError(f"--config {path}: {error.strerror}; give a .toml or .yaml file") from error
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
    return {
        key: value
        for key, value in settings
        if value is not None or not any(name.startswith(f"{key}.") for name in known)
    }


def _read_pipe(path: Path) -> bytes:
    """Read a pipe to its end, as of `--config <(COMMAND)`. ValueError if nobody writes to it."""
    pipe, deadline_s = os.open(path, os.O_RDONLY | os.O_NONBLOCK), time.monotonic() + WRITER_S
    with open(pipe, "rb", buffering=0) as opened:
        while (content := opened.read(1)) == b"":  # None: there is a writer, which has written nothing yet
            if time.monotonic() > deadline_s:
                raise ValueError("is a pipe, and nobody writes to it; write the settings to a file")
            time.sleep(0.05)
        os.set_blocking(pipe, True)
        return (content or b"") + opened.readall()


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

        return tomllib.loads(text)
    if suffix not in {".yaml", ".yml", ".json"}:
        raise ValueError("give a .toml or .yaml file")
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
