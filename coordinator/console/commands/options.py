"""Make the options of `run` from the settings: type and docstring of a field give metavar and help."""

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from coordinator.settings.loading import OPTIONS, REPEATED, TINY_DEFAULTS, option_name, show
from coordinator.settings.tree import RunSettings, SettingsError
from rollout.settings import TINY


def with_options(function: Callable[..., int]) -> Callable[..., int]:
    """Return `function` with a parameter for each option in place of its `**typed`.

    A value is passed on as it was typed; the settings refuse a wrong one.
    """

    @wraps(function)
    def command(**arguments: Any) -> int:
        return function(**arguments)

    signature = inspect.signature(function)
    *parameters, _typed = signature.parameters.values()
    options = [
        inspect.Parameter(
            _parameter(key), inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_annotation(key)
        )
        for key in OPTIONS
    ]
    command.__signature__ = signature.replace(parameters=[*parameters, *options])  # pyright: ignore
    return command


def given_options(typed: dict[str, Any]) -> dict[str, Any]:
    """Return the settings whose options were typed, by dotted name; SettingsError for an empty one."""
    values = {key: typed[_parameter(key)] for key in OPTIONS if typed[_parameter(key)] is not None}
    for key, value in values.items():
        if value in ("", [""]):
            raise SettingsError(f"{option_name(key)} is empty (a variable that is not set?); give a value")
        for word in [value] if isinstance(value, str) else value:
            if word.startswith("--"):
                raise SettingsError(f"{option_name(key)}: {word} follows; give a value between them")
    return values


def parameter_names() -> set[str]:
    """Return the names of the parameters that are settings."""
    return {_parameter(key) for key in OPTIONS}


def _parameter(key: str) -> str:
    """Name the parameter of an option: `num_nodes`."""
    return option_name(key).removeprefix("--").replace("-", "_")


def _annotation(key: str) -> Any:
    """Make the option of a setting, as typer reads it from a parameter."""
    model, name = find_model(key)
    field = model.model_fields[name]
    metavar = OPTIONS[key].partition(" ")[2] or _metavar(name, field.annotation)
    default = "" if field.default in (None, ()) else f"  [default: {show(field.default)}]"
    default += f"  [with {TINY}: {show(TINY_DEFAULTS[key])}]" if key in TINY_DEFAULTS else ""
    text = docstrings(model)[name] + default
    choices = metavar.split("|") if "|" in metavar else []
    option = typer.Option(
        option_name(key),
        metavar=metavar,
        help=text,
        show_default=False,
        autocompletion=(lambda: choices) if choices else None,
    )
    is_tuple = get_origin(field.annotation) is tuple and get_args(field.annotation)[0] is str
    several = is_tuple or key in REPEATED
    return Annotated[list[str] | None, option] if several else Annotated[str | None, option]


def find_model(key: str) -> tuple[type[BaseModel], str]:
    """Find the model that holds a setting, and the name of its field."""
    model: Any = RunSettings
    *sections, name = key.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    return model, name


def _metavar(name: str, annotation: Any) -> str:
    """Name a value in the help: `N`, `SECONDS`, `N,N,...`, `wait|shrink|abort`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in {types.UnionType, Union}:
        return _metavar(name, next(kind for kind in arguments if kind is not type(None)))
    if origin is Annotated:
        return _metavar(name, arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin is tuple:
        return "N,N,..."
    if name.endswith("_s"):
        return "SECONDS"
    return "TEXT" if annotation is str else "N"


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field of a model, in one line; a field without a text is left out.

    pydantic can collect these texts too, but then every process that imports the settings pays for it.
    """
    texts: dict[str, str] = {}
    for part in model.__mro__[: model.__mro__.index(BaseModel)]:
        (tree,) = [node for node in _classes(part.__module__) if node.name == part.__name__]
        texts |= _field_texts(tree)
    return texts


def _field_texts(tree: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())
            case _:
                pass


@cache
def _classes(module: str) -> list[ast.ClassDef]:
    """Parse the classes of a module."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return [node for node in body if isinstance(node, ast.ClassDef)]
