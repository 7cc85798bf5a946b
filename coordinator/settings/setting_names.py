"""The settings by their dotted names: which there are, which values each takes, how a value is typed."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic.fields import FieldInfo

from coordinator.settings.tree import RunSettings
from rollout.settings_tree import refuse_truth
from trainer.algorithms import PRESETS


def known_keys() -> list[str]:
    """Return the dotted names of all settings."""
    return [name for name, _field in fields(RunSettings)]


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted name of each setting of a tree, and its field."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def checked(field: FieldInfo, value: Any) -> Any:
    """Return a value as the settings hold it; ValidationError or PydanticCustomError if it is wrong."""
    kind: Any = Annotated[field.annotation, field]  # pyright: ignore
    adapter: TypeAdapter[Any] = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))
    valid = adapter.validate_python(value)
    refuse_truth(value, valid)
    return adapter.dump_python(valid, mode="json")


def takes(name: str, value: Any) -> bool:
    """Return whether a setting, taken alone, may have this value."""
    if name == "trainer.algorithm":
        return isinstance(value, str) and value in PRESETS
    field = dict(fields(RunSettings)).get(name)
    if field is None:
        return name.startswith(("engine.args.", "rollout.chat_template."))
    try:
        checked(field, value)
    except ValueError:  # which both of pydantic's errors are
        return False
    return True


def choices_of(name: str) -> list[str]:
    """Return the words that a setting may have as its value; none for one that takes others, too."""
    if name == "trainer.algorithm":
        return list(PRESETS)
    field = dict(fields(RunSettings)).get(name)
    words = get_args(field.annotation) if field and get_origin(field.annotation) is Literal else ()
    return list(words)


def default_of(name: str) -> Any:
    """Return a setting's default; None for a setting that a preset may change, and for an unknown one."""
    field = dict(fields(RunSettings)).get(name)
    of_presets = {key for preset in PRESETS.values() for key in preset()}
    return None if field is None or name.removeprefix("trainer.") in of_presets else field.default


def show(value: Any) -> str:
    """Write a value as a person types it: `2,1,1`, `0.5`, `true`; None is `not set`."""
    if isinstance(value, list | tuple):
        return ",".join(show(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return str(value).lower()
    return "not set" if value is None else str(value)


def as_typed(value: Any) -> str:
    """Write a value that a person has typed, which may be `null`."""
    return "null" if value is None else show(value)
