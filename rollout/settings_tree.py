"""The parts of every settings tree: the frozen class, marks on settings, tables with names of the user's."""

import copy
from collections.abc import Mapping
from enum import Enum
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator
from pydantic_core import PydanticCustomError


class Settings(BaseModel):
    """One part of the settings tree, frozen; an unknown name is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _refuse_truths(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        checked = validate(value)
        refuse_truth(value, checked)
        return checked


def refuse_truth(typed: Any, checked: Any) -> None:
    """Raise an error of pydantic for true or false in `typed` where the setting holds a number."""
    if isinstance(typed, bool) and type(checked) in (int, float):
        number = "whole number" if isinstance(checked, int) else "number"
        raise PydanticCustomError("number", f"give a {number}, not true or false")  # pyright: ignore
    if isinstance(typed, bool | list | tuple) and isinstance(checked, tuple):
        typed = (typed,) if isinstance(typed, bool) else typed  # pyright: ignore
        for pair in zip(typed, checked, strict=False):  # pyright: ignore[reportUnknownVariableType]
            refuse_truth(*pair)
    elif isinstance(typed, dict) and isinstance(checked, dict):
        for name, value in typed.items():  # pyright: ignore[reportUnknownVariableType]
            refuse_truth(value, checked.get(name))  # pyright: ignore


class Mark(Enum):
    """What holds for a setting, said where the setting is, in its annotation; see `marked`."""

    SHAPES_BATCH = "the training batch depends on it"
    PER_MACHINE = "a worker's own value holds for its machine, and contradicts nothing"
    PER_GUEST = "a guest may have its own value, too: it changes no sample"


def marked(settings: type[Settings], *marks: Mark) -> list[str]:
    """Return the settings of a tree that have one of these marks, as a person types them."""
    names: list[str] = []
    for name, field in settings.model_fields.items():
        below = field.annotation
        if isinstance(below, type) and issubclass(below, Settings):
            names += [f"{name}.{inner}" for inner in marked(below, *marks)]
        names += [name] if {*marks} & {each for each in field.metadata if isinstance(each, Mark)} else []
    return names


def nested(name: str, table: Any) -> Any:
    """Return the setting `name`, which holds tables by names of the user's, as a tree: `fast.env.NAME`, as it
    is typed, stands for a value in a table of a table.
    """
    if not isinstance(table, Mapping):
        return table
    items = cast("Mapping[str, Any]", table)
    tree: dict[str, Any] = {}
    for key, value in items.items():
        *parents, leaf = key.split(".")
        place: Any = tree
        for parent in parents:
            place = cast("dict[str, Any]", place).setdefault(parent, {})
            if not isinstance(place, dict):
                raise ValueError(f"{name}.{key}: {parent} is not a table; leave one of them out")
        place[leaf] = copy.deepcopy(value)
    return tree
