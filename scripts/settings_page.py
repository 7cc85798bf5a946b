"""Write docs/settings.md from the settings models: `python scripts/settings_page.py`.

One table per section: name, type, default, meaning (the docstring under the field), and the option that is
a short name of the setting.
"""

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from coordinator.console.commands.options import docstrings
from coordinator.settings.loading import OPTIONS, TINY_DEFAULTS, option_name
from coordinator.settings.tree import RunSettings
from coordinator.start.inputs import NODE_LOCAL

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
COMMAND = "python scripts/settings_page.py"
NODE_LOCAL_NAMES = ", ".join(f"`{name}`" for name in sorted(NODE_LOCAL))
HEAD = f"""\
# Settings

<!-- Written by `{COMMAND}` from the settings models; a test compares. Edit the models. -->

    run --model /shared/models/Qwen3-0.6B --tasks tasks.jsonl trainer.learning_rate=2e-6 eval.interval=5

This page lists every setting of a run by its dotted name. Type settings as `name=value` after the options,
or put them into a file for `--config settings.toml` (`.yaml` and `.json` work too):

```toml
model = "/shared/models/Qwen3-0.6B"
tasks = "tasks.jsonl"

[trainer]
learning_rate = 2e-6

[trainer.lora]
rank = 16
```

`name=value` wins over an option, an option over the file, and the file over the default. A value is parsed
as JSON if possible (`null`, `true`, `0.5`, `["stop here"]`), and is a string otherwise; you can type a list
of numbers as `2,1,1`. `run --dry-run` refuses what a start refuses, warns of what only this machine lacks,
and prints all settings. Defaults in brackets apply to `builtin:tiny`, the demo's model.

Give settings to the master only; workers read them from the run directory. These belong to one machine, and
may differ on a worker: {NODE_LOCAL_NAMES}. The model, the task file, `rollout.seed` and
`trainer.lora` are fixed for a run. You can change [everything
else](recovery.md#changing-settings-between-two-starts) at the next start.
"""
KINDS = {
    str: "text",
    bool: "`true` or `false`",
    int: "integer",
    float: "number",
    Any: "anything",
}
ANY_NAME = "NAME"
ALIKE = re.compile(r"The \w+'s `[\w.]+`\.")
"""The docstring of a setting of a table that is `null` for what holds elsewhere, and no different."""
SIGNS: dict[type, tuple[str, str]] = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def page() -> str:
    """Return the whole text of docs/settings.md."""
    sections = [section(name, model) for name, model in models()]
    return "\n".join([HEAD, *sections])


def models(model: type[BaseModel] = RunSettings, prefix: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield (dotted name, model) of each section, the run's own first."""
    yield prefix, model
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if is_section(inner):
            yield from models(inner, f"{prefix}.{name}" if prefix else name)
        elif get_origin(inner) is dict and is_section(get_args(inner)[1]):
            yield from models(get_args(inner)[1], f"{prefix}.{name}.{ANY_NAME}")


def is_section(annotation: Any) -> bool:
    """Return whether a field is itself a section."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def section(prefix: str, model: type[BaseModel]) -> str:
    """Return a heading, the model's docstring, and the table."""
    meanings = docstrings(model)
    rows = ["| setting | type | default | meaning | option |", "|---|---|---|---|---|"]
    alike: list[str] = []
    for name, field in model.model_fields.items():
        if is_section(field.annotation):
            continue
        if ALIKE.fullmatch(meanings.get(name, "")) and field.default is None:
            alike.append(name)
            continue
        key = f"{prefix}.{name}" if prefix else name
        option = f"`{option_name(key)}`" if key in OPTIONS else ""
        meaning = meanings.get(name, "").replace("|", "\\|")
        kind = type_words(field.annotation, field.metadata)
        rows.append(f"| `{key}` | {kind} | {default(key, field.default)} | {meaning} | {option} |")
    about = " ".join(inspect.cleandoc(model.__doc__ or "").split())
    if alike:
        rows += ["", f"Also, as the setting of that name: {', '.join(f'`{name}`' for name in alike)}."]
    return "\n".join([f"## {prefix or 'The run'}", "", about, "", *rows, ""])


def undescribed() -> list[str]:
    """Return the settings without a docstring."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, model in models()
        for name, field in model.model_fields.items()
        if not is_section(field.annotation) and name not in docstrings(model)
    ]


def type_words(annotation: Any, metadata: Any = ()) -> str:
    """Write a type for a person: `number > 0`, `wait`, `shrink` or `abort`, list of integers."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_words(arguments[0], arguments[1].metadata)
    if origin is Literal:
        return "one of " + ", ".join(f"`{value}`" for value in arguments)
    if origin in {types.UnionType, Union}:
        return " or ".join(
            "`null`" if kind is type(None) else type_words(kind, metadata) for kind in arguments
        )
    if origin is tuple:
        many = "list" if arguments[-1] is Ellipsis else str(len(arguments))
        return f"{many} of: {type_words(arguments[0])}"
    if is_section(annotation):
        return "table"
    if origin is dict:
        return f"by name: {type_words(arguments[1])}"
    signs = [(*SIGNS[type(bound)], bound) for bound in metadata if type(bound) in SIGNS]
    bounds = [f" {sign} {number(getattr(bound, name))}" for sign, name, bound in signs]
    return KINDS[annotation] + " and".join(bounds)


def number(value: float) -> str:
    """Write a number as a person types it: 1e-6, 0.28, 4096."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    mantissa, exponent, digits = text.partition("e")
    return f"{mantissa}e{int(digits)}" if exponent else text


def typed(value: Any) -> str:
    """Write a value as a person types it behind `=`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, tuple):
        return ",".join(map(typed, value)) if value else "[]"
    return str(value).replace("\n", "\\n") if value != {} else "{}"


def default(key: str, value: Any) -> str:
    """Write the default, and in brackets the default of the built-in model if it is different."""
    tiny = f" (`{typed(TINY_DEFAULTS[key])}`)" if key in TINY_DEFAULTS else ""
    return "" if value is PydanticUndefined else f"`{typed(value)}`{tiny}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"{PAGE}: {len(list(models()))} sections")
    if missing := undescribed():
        sys.exit(f"without a docstring: {', '.join(missing)}")
