"""Read a file of settings: TOML, YAML or JSON."""

from pathlib import Path
from typing import Any, cast

from coordinator.settings.loading import flatten, known_keys
from coordinator.settings.tree import SettingsError


def read_file(path: Path) -> dict[str, Any]:
    """Read the settings of a .toml, .yaml or .json file as dotted keys."""
    try:
        tree = _parse_file(path.read_text(encoding="utf-8"), path.suffix)
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


def _parse_file(text: str, suffix: str) -> Any:
    """Parse the text of a settings file; ValueError if it cannot be parsed."""
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
