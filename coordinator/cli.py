"""The command `run`, also installed as `flagpost`.

`main` puts right what a shell has left odd (streams, signals, variables), finds the command, parses, calls,
and says each mistake in one line. `run` itself, `run local` and `run guest` are parsed here; the other
commands in console/commands, whose files are imported when they are typed.
"""

import errno
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from coordinator.console.commands.arguments import (
    RESET,
    AcceptCodeChange,
    AllowSharedDir,
    Config,
    DebugMode,
    DryRun,
    LogPath,
    LogPathOrNone,
    Reset,
    SettingsOnly,
    Words,
    new_app,
    option,
)
from coordinator.console.commands.names import GUEST, LOCAL, as_help
from coordinator.console.commands.parse import COMMANDS

if TYPE_CHECKING:
    from coordinator.start.request import StartRequest

PROGRAM = "run"
OfCrew = Annotated[str | None, typer.Option("--crew", hidden=True)]
PlacedAs = Annotated[str | None, typer.Option("--placed-as", hidden=True)]


def node(
    words: Words = None,
    master: Annotated[bool, typer.Option("--master", help="Start the master, rank 0.")] = False,
    worker: Annotated[
        str | None, option("--worker", metavar="RANK", help="Start the worker of this rank, from 1.")
    ] = None,
    log_path: LogPath = Path("runs/default"),
    config: Config = None,
    reset_settings: Reset = None,
    dry_run: DryRun = False,
    settings_only: SettingsOnly = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug_mode: DebugMode = False,
    accept_code_change: AcceptCodeChange = False,
    allow_shared_dir: AllowSharedDir = False,
    crew: OfCrew = None,
    placed_as: PlacedAs = None,
    **typed: Any,
) -> int:
    """Start a node of a run: post-train a language model on machines that share only a directory.

    Example: run --model Qwen/Qwen3-0.6B --tasks tasks.jsonl --reward numeric

    To resume, type the same command again, on any node, whatever happened. Settings that you leave out stay
    as they were at the last start.
    """
    from coordinator.journal.streams import hold_up_nobody
    from coordinator.settings.tree import SettingsError

    if version:
        from importlib.metadata import version as installed

        print(f"flagpost {installed('flagpost')}")
        return 0
    if worker is not None and worker.startswith("--"):
        raise SettingsError(f"--worker {worker}: give the rank of this machine, e.g. --worker 1 {worker}")
    for_the_master = {"--accept-code-change": accept_code_change, RESET: reset_settings}
    for name in [name for name, is_given in for_the_master.items() if is_given and worker is not None]:
        # Slurm gives all nodes the same command, without --worker
        raise SettingsError(f"{name} is for the master; leave it out beside --worker {worker}")
    start = {"allow_shared_dir": allow_shared_dir, "accept_code_change": accept_code_change}
    request = _request(log_path, words, config, debug_mode, typed, reset=reset_settings or (), **start)
    request = _with_rank(request, master, worker)
    if dry_run or settings_only:
        from coordinator.start.dry_run import show

        return show(request, looks=not settings_only)
    hold_up_nobody()
    from rollout.processes.imports import importing

    with importing():
        from coordinator.console.commands.crews_here import run_machine
        from coordinator.console.views.terminal import live_view
        from coordinator.journal import logs
        from coordinator.main import run_node
        from coordinator.start.log_path import ready_machine

    request = replace(request, root=ready_machine(request.root))

    def as_node(request: "StartRequest") -> int:
        return run_node(request, logs.set_up(request.rank, request.crew), live_view)

    if crew is not None:  # by run_machine
        return as_node(replace(request, crew=cast(Any, crew), placed_as=placed_as))
    return run_machine(request, as_node)


def local(
    words: Words = None,
    master: Annotated[bool, typer.Option("--master", hidden=True)] = False,
    worker: Annotated[str | None, typer.Option("--worker", hidden=True)] = None,
    log_path: LogPath = Path("runs/default"),
    config: Config = None,
    reset_settings: Reset = None,
    dry_run: DryRun = False,
    settings_only: SettingsOnly = False,
    debug_mode: DebugMode = False,
    accept_code_change: AcceptCodeChange = False,
    allow_shared_dir: AllowSharedDir = False,
    **typed: Any,
) -> int:
    """Start all nodes of a run on this machine, in one terminal; Ctrl+C stops them.

    To resume, type the same command again. Settings that you leave out stay as they were at the last start.
    """
    from coordinator.journal.streams import hold_up_nobody
    from coordinator.settings.tree import SettingsError

    if master or worker is not None:
        raise SettingsError("run local starts all nodes of this machine; leave --master and --worker out")
    start = {"allow_shared_dir": allow_shared_dir, "accept_code_change": accept_code_change}
    request = _request(log_path, words, config, debug_mode, typed, reset=reset_settings or (), **start)
    if dry_run or settings_only:
        from coordinator.start.dry_run import show

        return show(request, looks=not settings_only)
    hold_up_nobody()
    from coordinator.machine.children import Children
    from coordinator.machine.oddities import need_temporary
    from rollout.processes.imports import importing

    need_temporary(request.root)
    with Children() as children:
        children.share_imports()
        with importing():  # for half a second: what is shared is imported beside it
            from coordinator.console.commands.local import run_local
            from coordinator.start.log_path import ready_machine

        return run_local(children, replace(request, root=ready_machine(request.root)))


def guest(
    words: Words = None,
    log_path: LogPathOrNone = None,
    name: Annotated[
        str,
        option(
            "--name",
            metavar="NAME",
            help="Name of this guest; default: the host's. A newer guest of that name replaces it.",
        ),
    ] = "",
    server: Annotated[
        str | None,
        option("--server", metavar="URL", help="Let the machine of this server help the job that you name."),
    ] = None,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file", metavar="FILE", help="File with the server's token; default: $FLAGPOST_TOKEN."
        ),
    ] = None,
    allow_shared_dir: AllowSharedDir = False,
) -> int:
    """Let this machine help a run to generate, for as long as you like.

    Ctrl+C ends it. At SIGTERM it finishes what it can within 20 s, and leaves.
    """
    if server is not None:
        from coordinator.console.server.client import main as ask_server

        of_server = ["--token-file", str(token_file)] if token_file else []
        return ask_server(["guest", "--server", server, *of_server, *(words or [])], "run")
    from coordinator.console.commands.typos import settings_of
    from coordinator.journal.streams import hold_up_nobody

    overrides = settings_of(words or [])
    hold_up_nobody()
    from rollout.processes.imports import importing

    with importing():
        from coordinator.journal import logs
        from coordinator.main import run_guest
        from coordinator.start.log_path import ready_machine
        from coordinator.start.request import StartRequest
        from coordinator.start.run_json import run_to_help

    root = ready_machine(run_to_help(log_path))
    request = StartRequest(root, overrides=overrides, allow_shared_dir=allow_shared_dir, guest=name)
    return run_guest(request, logs.set_up(None))


def _request(
    log_path: Path,
    words: Sequence[str] | None,
    config: Path | None,
    debug_mode: bool,
    typed: dict[str, Any],
    **start: Any,
) -> "StartRequest":
    """Return the StartRequest of rank 0: settings of a file, of options, of KEY=VALUE; the last counts.
    `start`: other fields of StartRequest.
    """
    from coordinator.console.commands.options import given_options
    from coordinator.console.commands.typos import say_what_is_given_twice, settings_of
    from coordinator.settings.settings_file import read_file
    from coordinator.start.request import StartRequest

    overrides: dict[str, Any] = read_file(config) if config else {}
    overrides |= {"engine.url": "http://127.0.0.1:8000"} if debug_mode else {}
    overrides |= given_options(typed) | settings_of(words or [])
    say_what_is_given_twice(words or [], sys.argv[1:])
    return StartRequest(log_path.absolute(), overrides=overrides, **start)


def _with_rank(request: "StartRequest", master: bool, worker: str | None) -> "StartRequest":
    """Return the request with the rank of this machine, and the number of nodes that a scheduler says."""
    from coordinator.machine.network import own_names
    from coordinator.settings.loading import build
    from coordinator.start.rank import nodes_from, resolve_rank
    from coordinator.start.start import resume_given

    if "cluster.num_nodes" not in request.overrides and worker is None and (nodes := nodes_from(os.environ)):
        request = replace(request, overrides={**request.overrides, "cluster.num_nodes": nodes})
    num_nodes = build(resume_given(request)).cluster.num_nodes if worker is None else 0
    return replace(request, rank=resolve_rank(master, worker, num_nodes, os.environ, own_names()))


def _app(name: str) -> typer.Typer:
    """Make a command; options of those that start nodes come from the settings, which takes a moment."""
    if name in COMMANDS:
        return COMMANDS[name]
    if name == GUEST:
        app = new_app()
        app.command(GUEST)(guest)
        return app
    from coordinator.console.commands.help_and_completion import StartCommand
    from coordinator.console.commands.options import with_options

    app = new_app(add_completion=name == PROGRAM)
    app.command(cls=StartCommand)(with_options(local if name == LOCAL else node))
    return app


def main() -> int:
    """Parse the arguments of `run` and call; return the exit code. Every bad input is one line."""
    from coordinator.journal.streams import repair_streams
    from coordinator.machine.signals import need_signals

    repair_streams()
    need_signals()
    from rollout.environment_variables import need_no_proxy, need_quiet_python, need_utf8_folder

    need_no_proxy(os.environ)
    need_utf8_folder(os.environ)
    if need_quiet_python(os.environ):
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    os.umask((os.umask(0o077) | 0o007) & 0o077)  # the owner may, all others may not
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 must not end what is shown
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    program = "flagpost" if Path(sys.argv[0]).name == "flagpost" else PROGRAM
    if f"_{program.upper()}_COMPLETE" in os.environ:
        from coordinator.console.commands.help_and_completion import complete

        return complete(program, {name: _app(name) for name in (PROGRAM, LOCAL, GUEST, *COMMANDS)})
    arguments = as_help(sys.argv[1:])
    names = [name for name in arguments[:1] if name in (LOCAL, GUEST, *COMMANDS)]
    from coordinator.console.commands.typos import with_all_resets
    from coordinator.settings.tree import SettingsError
    from rollout.processes.imports import importing

    command = " ".join([PROGRAM, *names])
    installs = {"--install-completion", "--show-completion"} & set(arguments)
    shown = program if installs else command
    try:
        with importing():
            app = _app(names[0] if names else PROGRAM)
            typed = with_all_resets(arguments[len(names) :], RESET)
        return app(typed, prog_name=shown, standalone_mode=False) or 0
    except KeyboardInterrupt:
        return 130
    except (SettingsError, typer.TyperException, RuntimeError, OSError) as error:
        text, code = _failure(error, command, arguments)
        print(f"run: {text}", file=sys.stderr)
        return code


def _failure(error: Exception, command: str, arguments: list[str]) -> tuple[str, int]:
    """Return the text of an error of what was typed or of this machine, and the exit code; raise others."""
    from coordinator.journal.control_characters import plain
    from coordinator.machine.oddities import explained
    from coordinator.settings.tree import SettingsError
    from rollout.storage.files import SharedFsError

    if isinstance(error, SettingsError | SharedFsError):
        return plain(str(error)), 2 if isinstance(error, SettingsError) else 1
    if isinstance(error, typer.TyperException):
        from coordinator.console.commands.typos import of_option

        text = plain(of_option(error, arguments)).rstrip(".")
        ends = "\n  see" if "\n" in text else " See" if text.endswith("?") else "; see"
        return f"{text}{ends} {command} --help", 2
    if (reason := explained(error)) is not error:
        return str(reason), 1
    if isinstance(error, FileNotFoundError) and str(error.filename).startswith("/proc/"):
        return f"{error.filename} is not there: mount /proc (mount -t proc proc /proc)", 1
    if isinstance(error, FileNotFoundError) and error.filename is None:
        return "the current directory was removed: go to another one (cd), and type it again", 2
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left of it would fail once more at the end
        return f"the output cannot be written: {error.strerror}", 1
    raise error


if __name__ == "__main__":
    sys.exit(main())
