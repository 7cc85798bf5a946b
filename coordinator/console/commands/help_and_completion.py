"""Help before all commands: the page of `run --help`, and the completion of what is typed."""

from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from coordinator.console.commands.names import GROUPS
from coordinator.console.commands.options import docstrings, find_model, parameter_names
from coordinator.console.commands.typos import settings_of
from coordinator.settings.loading import option_name
from coordinator.settings.near_names import known_as
from coordinator.settings.setting_names import as_typed, fields
from coordinator.settings.tree import RunSettings, SettingsError

SETTINGS = "Settings; give any other as KEY=VALUE, and see all with --dry-run"


class StartCommand(TyperCommand):
    """A command that starts nodes. Its help names the other commands first, then its options in two parts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; SettingsError for a second rank or file of settings. Of other options the last counts, as a
        script that adds to a command relies on. `WORD --help` prints settings.
        """
        if len(args) == 2 and args[1] == "--help" and not args[0].startswith("-") and "=" not in args[0]:
            raise typer.Exit(show_settings(args[0]))
        names = [word.partition("=")[0] for word in args]
        for name in ("--worker", "--config"):
            if names.count(name) > 1:
                raise SettingsError(f"{name} is there {names.count(name)} times; give it once")
        return super().parse_args(ctx, args)

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        """Write the usage; of `run` itself, also the one with a command."""
        super().format_usage(ctx, formatter)
        if ctx.parent is None and " " not in ctx.info_name:
            formatter.write_usage(ctx.info_name, "COMMAND [OPTIONS]", prefix="   or: ")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups, if this is `run` itself, then the options."""
        if " " not in ctx.info_name:
            width = max(len(name) for commands in GROUPS.values() for name in commands)
            for title, commands in GROUPS.items():
                with formatter.section(title):
                    lines = [(f"{ctx.info_name} {name:{width}}", text) for name, text in commands.items()]
                    formatter.write_dl(lines)
        settings = parameter_names()
        parts: dict[str, list[tuple[str, str]]] = {"Options": [], SETTINGS: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and param.param_type_name == "option":
                parts[SETTINGS if param.name in settings else "Options"].append(record)
        for title, records in parts.items():
            with formatter.section(title):
                formatter.write_dl(records)


def show_settings(word: str) -> int:
    """Print the setting of this name, or all that a section has; SettingsError if there is none."""
    known = dict(fields(RunSettings))
    name = word if any(f"{key}.".startswith(f"{word}.") for key in known) else known_as(word, list(known))
    if name is None:
        settings_of([word], [word])  # which says what was meant
    for key in known:
        if f"{key}.".startswith(f"{name}."):
            model, field = find_model(key)
            print(f"{option_name(key)}={as_typed(known[key].default)}\n    {docstrings(model)[field]}")
    return 0


class _CompletionRoot(TyperGroup):
    """`run` with its commands, as the completion sees it: a word may also be a setting."""

    words: Any
    """The parameter of `run` that takes KEY=VALUE."""

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the commands, options and settings that `incomplete` can become."""
        return [*super().shell_complete(ctx, incomplete), *self.words.shell_complete(ctx, incomplete)]


def complete(program: str, apps: Mapping[str, typer.Typer]) -> int:
    """Answer the shell, which asks in environment variables what `program` could go on with.

    `apps`: the command without a name, then the others by name.
    """
    first, *names = apps
    words, *options = get_command(apps[first]).params
    commands = {name: get_command(apps[name]) for name in names}
    everything = _CompletionRoot(name=program, commands=commands, params=options, invoke_without_command=True)
    everything.words = words
    return everything(prog_name=program) or 0
