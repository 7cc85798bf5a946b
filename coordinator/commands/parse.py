"""The commands about a run: `run status`, `run report` and the others. Parse, then call; nothing else."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

LogPath = Annotated[
    Path,
    typer.Option(
        "--log-path", metavar="DIR", envvar="RUN_LOG_PATH", help="The run directory that all nodes share."
    ),
]


def _settings(incomplete: str) -> list[str]:
    """Return the settings that what was typed can become; for the completion."""
    from coordinator.config import known_keys

    begun = incomplete and "=" not in incomplete
    return [f"{key}=" for key in known_keys() if key.startswith(incomplete)] if begun else []


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Any setting by its dotted name.", autocompletion=_settings),
]


def option(*names: str, help: str, metavar: str = "TEXT") -> Any:
    """Return an option whose help shows no default."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=False)


def new_app(add_completion: bool = False) -> typer.Typer:
    """Return a command of its own; its help is plain text on any terminal."""
    return typer.Typer(add_completion=add_completion, rich_markup_mode=None, pretty_exceptions_enable=False)


status_app = new_app()
logs_app = new_app()
report_app = new_app()
doctor_app = new_app()
cleanup_app = new_app()
export_app = new_app()
launch_app = new_app()
plan_app = new_app()


@status_app.command()
def status(
    log_path: LogPath = Path("runs/default"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Live, until Ctrl+C.")] = False,
) -> int:
    """Show where each node is, what it waits for, its tasks done, and the rewards so far."""
    from coordinator.commands.status import show_status

    show_status(log_path.absolute(), as_json, watch)
    return 0


@logs_app.command()
def logs(
    rank: Annotated[str | None, typer.Argument(metavar="[RANK]", help="Only this rank.")] = None,
    log_path: LogPath = Path("runs/default"),
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, help="The last N lines of each file.")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then new lines, until Ctrl+C.")] = False,
) -> int:
    """Print the logs of the nodes, or of one node with its engine and trainer."""
    from coordinator.views.logs import show_logs

    show_logs(log_path.absolute(), None if rank is None else _rank(rank), lines, follow)
    return 0


@report_app.command()
def report(
    log_path: LogPath = Path("runs/default"),
    out: Annotated[
        Path | None,
        option("--out", "-o", metavar="FILE.html", help="Default: report.html in the run directory."),
    ] = None,
) -> int:
    """Write one page about the run: rewards, where the time goes, faults, samples to read."""
    from coordinator.views.report import write_report

    print(write_report(log_path.absolute(), out.absolute() if out else None))
    return 0


@plan_app.command()
def plan(
    log_path: LogPath = Path("runs/default"),
    devices: Annotated[
        int | None, option("--devices", metavar="N", help="For N devices; default: those of the run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> int:
    """Say whether two crews would be faster than one, and with which devices, by what a run has measured."""
    from coordinator.commands.plan import show_plan

    show_plan(log_path.absolute(), devices, as_json)
    return 0


@launch_app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def launch(
    context: typer.Context,
    hosts: Annotated[str, option("--hosts", metavar="A,B,C", help="The first one is the master.")],
    log_path: LogPath = Path("runs/default"),
    ssh: Annotated[
        str, typer.Option("--ssh", metavar="COMMAND", help='With its options, e.g. "ssh -p 2222 -i key".')
    ] = "ssh",
    program: Annotated[
        str | None, option("--run", metavar="PATH", help="Where `run` is on the hosts; default: as here.")
    ] = None,
) -> int:
    """Start a node on each host over ssh, show their output, stop all with Ctrl+C; takes the options of
    `run`."""
    from coordinator.commands.launch import launch as start

    return start(hosts, log_path.absolute(), context.args, ssh, program)


@cleanup_app.command()
def cleanup(
    iteration: Annotated[str, option("--iteration", metavar="N", help="The interrupted iteration.")],
    log_path: LogPath = Path("runs/default"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
    keep_partial: Annotated[
        bool, typer.Option("--keep-partial", help="Keep the finished groups, for training to use them.")
    ] = False,
) -> int:
    """Remove what an interrupted iteration left; never a published checkpoint."""
    from coordinator.commands.cleanup import cleanup as clean
    from coordinator.journal.plain import plain
    from coordinator.protocol.exits import Ended

    number = _iteration(iteration)
    try:
        clean(log_path.absolute(), number, dry_run, keep_partial)
    except Ended as end:
        print(f"run: {plain(end.text)}", file=sys.stderr)
        return end.code
    return 0


@export_app.command()
def export(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new directory for the model.")],
    iteration: Annotated[str | None, option("--iteration", metavar="N", help="Default: the newest.")] = None,
    log_path: LogPath = Path("runs/default"),
) -> int:
    """Copy a checkpoint's model, verified and with a model card, for the Hub or for a server."""
    from coordinator.commands.export import export as copy

    files = copy(log_path.absolute(), _iteration(iteration) if iteration else None, out.absolute())
    print(f"{out}: {', '.join(files)}")
    return 0


def _iteration(given: str) -> int:
    from coordinator.settings import SettingsError

    if not (given.isdecimal() and int(given)):
        raise SettingsError(f"--iteration {given}: give the number of an iteration, e.g. --iteration 5")
    return int(given)


def _rank(given: str) -> int:
    from coordinator.settings import SettingsError

    if not given.isdecimal():
        example = "e.g. run logs 1, and the run directory as --log-path"
        raise SettingsError(f"run logs {given}: give the number of a rank, {example}")
    return int(given)


@doctor_app.command()
def doctor(
    log_path: LogPath = Path("runs/default"),
    peers: Annotated[
        int,
        typer.Option("--peers", metavar="N", min=1, help="Nodes; type it on each, with its rank."),
    ] = 1,
    worker: Annotated[
        str | None, option("--worker", metavar="RANK", help="This is rank RANK; rank 0 reports.")
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0.0, help="How long to wait for the others.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> int:
    """Check whether this directory, this node and this network are fit for a run, and say what to do."""
    from coordinator.commands.doctor.run import doctor_rank, run_doctor

    return run_doctor(log_path.absolute(), peers, doctor_rank(worker, peers, os.environ), deadline, as_json)


COMMANDS = {
    "launch": launch_app,
    "status": status_app,
    "logs": logs_app,
    "report": report_app,
    "plan": plan_app,
    "doctor": doctor_app,
    "cleanup": cleanup_app,
    "export": export_app,
}
LOCAL = "local"
GROUPS = {
    "Start all nodes with one command": {
        LOCAL: "all nodes on this machine",
        "launch": "a node on each of several hosts, over ssh",
    },
    "Look at a run": {
        "status": "where each node is, and what it waits for; --watch: live",
        "logs": "what the nodes, their engines and trainers print",
        "report": "one page: rewards, where the time goes, faults, samples",
        "plan": "would two crews be faster, with which devices and weights?",
    },
    "Before and after": {
        "doctor": "is this directory, node and network fit for a run?",
        "cleanup": "remove what an interrupted iteration left",
        "export": "copy a checkpoint's model, for the Hub or for a server",
    },
}
"""What `run --help` says of the commands."""
