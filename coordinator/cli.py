"""The command `run`, also installed as `flagpost`: parse, then call. Nothing else."""

import io
import json
import os
import socket
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from coordinator.commands.parse import COMMANDS, LogPath, new_app, option

SUMMARY = " ".join(
    ["run local --num-nodes N [options]: all nodes on this machine."]
    + [f"run {name} {text}." for name, (_, text) in COMMANDS.items()]
)


def node(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any setting by its dotted name.")
    ] = None,
    master: Annotated[bool, typer.Option("--master", help="This is rank 0.")] = False,
    worker: Annotated[
        str | None, option("--worker", metavar="RANK", help="This is rank RANK, from 1.")
    ] = None,
    log_path: LogPath = Path("runs/default"),
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings, .toml or .yaml.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and stop.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    debug_mode: Annotated[
        bool, typer.Option("--debug-mode", help="--engine-url http://127.0.0.1:8000.")
    ] = False,
    accept_code_change: Annotated[
        bool,
        typer.Option(
            "--accept-code-change",
            help="Go on with an open iteration although the code of its reward or environment has changed.",
        ),
    ] = False,
    allow_shared_dir: Annotated[
        bool,
        typer.Option(
            "--allow-shared-dir",
            help="Take a run directory that other users own or can write; give it on every node.",
        ),
    ] = False,
    local: Annotated[bool, typer.Option("--local", hidden=True)] = False,
    **typed: str | None,
) -> int:
    """Take part in a run: post-train a language model on machines that share only a directory.

    The same command again, on any node, after anything, resumes.
    """
    from coordinator.commands.options import given_options
    from coordinator.config import build, parse_override, read_file
    from coordinator.settings import SettingsError

    if version:
        from importlib.metadata import version as installed

        print(f"flagpost {installed('flagpost')}")
        return 0
    given: dict[str, Any] = read_file(config) if config else {}
    given |= {"engine.url": "http://127.0.0.1:8000"} if debug_mode else {}
    given |= given_options(typed)
    given |= dict(parse_override(text) for text in settings or [])
    root = log_path.absolute()
    if local:
        from coordinator.commands.local import run_local

        if master or worker is not None:
            raise SettingsError("run local starts all nodes of this machine; leave --master and --worker out")
        if dry_run:
            return _show(build(given))
        return run_local(root, given, accept_code_change, allow_shared_dir)
    if worker is not None and accept_code_change:  # Slurm gives all nodes the same command, without --worker
        raise SettingsError(f"--accept-code-change is for the master; leave it out beside --worker {worker}")
    return _run_node(root, given, master, worker, dry_run, accept_code_change, allow_shared_dir)


def _run_node(
    root: Path,
    given: dict[str, Any],
    master: bool,
    worker: str | None,
    dry_run: bool,
    accept_code_change: bool,
    allow_shared_dir: bool,
) -> int:
    from coordinator.config import build
    from coordinator.journal import logs
    from coordinator.machine import network
    from coordinator.main import run_node
    from coordinator.node.rank import nodes_from, resolve_rank

    if "cluster.num_nodes" not in given and worker is None and (nodes := nodes_from(os.environ)):
        given["cluster.num_nodes"] = nodes
    host = socket.gethostname()
    own_names = {host, host.partition(".")[0], "localhost", network.LOOPBACK}
    own_names |= {address.ip for address in network.local_addresses()}
    num_nodes = build(given).cluster.num_nodes if worker is None else 0
    rank = resolve_rank(master, worker, num_nodes, os.environ, own_names)
    if dry_run:
        return _show(build(given))
    return run_node(root, rank, given, logs.set_up(rank), accept_code_change, allow_shared_dir)


def _node_app() -> typer.Typer:
    """Make `run` without the name of a command; its options come from the settings."""
    from coordinator.commands.options import with_options

    app = new_app()
    app.command(epilog=SUMMARY)(with_options(node))
    return app


def _show(settings: Any) -> int:
    print(json.dumps(settings.model_dump(mode="json"), indent=2))
    return 0


def main() -> int:
    """Parse the arguments of `run` and call; return the exit code. Every bad input is one line."""
    os.umask(os.umask(0o077) | 0o007)
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 must not end what is shown
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    name = arguments[0] if arguments else ""
    if name in COMMANDS:
        app, arguments = COMMANDS[name][0], arguments[1:]
    else:
        app, arguments = _node_app(), ["--local", *arguments[1:]] if name == "local" else arguments
    from coordinator.journal.plain import plain
    from coordinator.settings import SettingsError
    from rollout.storage.files import SharedFsError

    try:
        return app(arguments, prog_name="run", standalone_mode=False) or 0
    except SettingsError as error:
        print(f"run: {plain(str(error))}", file=sys.stderr)
    except typer.TyperException as error:
        print(f"run: {plain(str(error))}; see run --help", file=sys.stderr)
    except SharedFsError as error:
        print(f"run: {plain(str(error))}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
