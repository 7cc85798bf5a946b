"""Options that several commands have, and how a command is made."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., int])


def directory_of_user(typed: str | Path) -> Path:
    """Return the path of a directory that may be made, as it was meant: no shell expands the `~` of
    `--log-path=~/exp1`. What stands before a `..` may not be there, as in runs/../exp1.
    """
    if not str(typed):
        raise typer.BadParameter("the name of a directory is empty (a variable that is not set?): give one")
    path = Path(os.path.expanduser(typed))
    return path.resolve() if ".." in path.parts else path


def _log_path() -> Any:
    return typer.Option(
        "--log-path",
        metavar="DIR",
        envvar="RUN_LOG_PATH",
        help="The run directory that all nodes share.",
        parser=directory_of_user,
    )


LogPath = Annotated[Path, _log_path()]
LogPathOrNone = Annotated[Path | None, _log_path()]
"""That of a command which must be told."""


def _settings(incomplete: str) -> list[str]:
    """Return the settings that what was typed can become; for the completion."""
    from coordinator.settings.loading import known_keys

    begun = incomplete and "=" not in incomplete
    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)] if begun else []


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any setting by its dotted name.", autocompletion=_settings),
]
AllowSharedDir = Annotated[
    bool,
    typer.Option(
        "--allow-shared-dir",
        help="Accept a run directory that other users own or can write to; give this on every node.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", min=0.0, help="How long to wait for the others.")
]


def option(*names: str, help: str, metavar: str = "TEXT", **more: Any) -> Any:
    """Return an option whose help shows no default."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False, **more)


RESET = "--reset-settings"
Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Read settings from a .toml, .yaml or .json file."),
]
Reset = Annotated[
    list[str] | None,
    option(
        RESET,
        metavar="[KEY]",
        help="Reset a setting or section to its default; without KEY, all of them.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print all settings, check tasks, rewards and model, and stop.")
]
SettingsOnly = Annotated[bool, typer.Option("--settings-only", hidden=True)]
"""Print the settings, and look at nothing that they name: it is elsewhere, or nobody trusts it yet."""
DebugMode = Annotated[
    bool, typer.Option("--debug-mode", help="Use your own vLLM server on port 8000, as with --engine-url.")
]
AcceptCodeChange = Annotated[
    bool,
    typer.Option(
        "--accept-code-change",
        help="Finish an iteration although the code of its reward or environment has changed.",
    ),
]


def new_app(add_completion: bool = False) -> typer.Typer:
    """Return a command of its own; its help is plain text on any terminal."""
    return typer.Typer(add_completion=add_completion, rich_markup_mode=None, pretty_exceptions_enable=False)


def command_in(apps: dict[str, typer.Typer], name: str, **settings: Any) -> Callable[[Function], Function]:
    """Return a decorator that makes a function the command `name` of `apps`. `settings`: of its parser."""
    app = apps[name] = new_app()
    return app.command(name, context_settings=settings)
