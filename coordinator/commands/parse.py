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
eval_app = new_app()
cleanup_app = new_app()
export_app = new_app()
launch_app = new_app()
plan_app = new_app()
profile_app = new_app()
serve_app = new_app()
with_ray_app = new_app()


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
    rank: Annotated[
        str | None, typer.Argument(metavar="[RANK]", help="Only this rank; with --server: the job's name.")
    ] = None,
    log_path: LogPath = Path("runs/default"),
    server: Annotated[str | None, option("--server", metavar="URL", help="Of a job of this server.")] = None,
    token_file: Annotated[
        Path | None, option("--token-file", metavar="FILE", help="Of that server; default: $FLAGPOST_TOKEN.")
    ] = None,
    of_rank: Annotated[
        str | None, option("--rank", metavar="RANK", help="Of the job: only this rank.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, help="The last N lines of each file.")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Then new lines, until Ctrl+C.")] = False,
) -> int:
    """Print the logs of the nodes, or of one node with its engine and trainer."""
    if server is not None:
        from coordinator.client import main

        words = ["--token-file", str(token_file)] if token_file else []
        words += ["--rank", of_rank] if of_rank else []
        words += ["--follow"] if follow else []
        return main(
            ["logs", "--server", server, "--lines", str(lines), *words, *([rank] if rank else [])], "run"
        )
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


@profile_app.command()
def profile(
    log_path: LogPath = Path("runs/default"),
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", min=0, help="Of this node; default: the first that trains."),
    ] = None,
) -> int:
    """Profile the next optimizer step of a run that trains: a trace, and the ten costliest operators."""
    from coordinator.commands.profile import profile_next_step

    return profile_next_step(log_path.absolute(), rank)


@launch_app.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def launch(
    context: typer.Context,
    hosts: Annotated[
        str | None, option("--hosts", metavar="A,B,C", help="Over ssh; the first one is the master.")
    ] = None,
    ray: Annotated[
        str | None,
        option("--ray", metavar="ADDRESS", help="A Ray cluster: auto, HOST:PORT, ray://HOST:PORT or local."),
    ] = None,
    num_nodes: Annotated[str | None, option("--num-nodes", metavar="N", help="Beside --ray.")] = None,
    gpus: Annotated[
        str | None,
        option("--gpus-per-node", metavar="N", help="Beside --ray: 8 or 8,8,4; default: all of a machine."),
    ] = None,
    cpus: Annotated[
        str | None,
        option("--cpus-per-node", metavar="N", help="Beside --ray: in the same way."),
    ] = None,
    log_path: LogPath = Path("runs/default"),
    ssh: Annotated[
        str | None, option("--ssh", metavar="COMMAND", help='Default: ssh. E.g. "ssh -p 2222 -i key".')
    ] = None,
    program: Annotated[
        str | None, option("--run", metavar="PATH", help="Where `run` is on the hosts; default: as here.")
    ] = None,
) -> int:
    """Start a node on each host over ssh, or on machines of a Ray cluster; show their output, stop all with
    Ctrl+C; takes the options of `run`."""
    from coordinator.settings import SettingsError

    if (hosts is None) == (ray is None):
        raise SettingsError("run launch: give --hosts A,B,C or --ray ADDRESS, one of the two")
    of_the_other = {"--ssh": ssh} if hosts is None else {
        "--num-nodes": num_nodes, "--gpus-per-node": gpus, "--cpus-per-node": cpus
    }  # fmt: skip
    for name in [name for name, value in of_the_other.items() if value is not None]:
        raise SettingsError(
            f"run launch: leave {name} out; it does not go with {'--hosts' if hosts else '--ray'}"
        )
    if hosts is not None:
        from coordinator.commands.launch_ssh import SSH, launch_ssh

        return launch_ssh(hosts, log_path.absolute(), context.args, ssh or SSH, program)
    from coordinator.commands.launch_ray import launch_ray

    nodes = num_nodes or ""
    if not (nodes.isdecimal() and int(nodes)):
        raise SettingsError(
            f"run launch --ray: --num-nodes {nodes or 'is missing'}; give a number, e.g. --num-nodes 3"
        )
    return launch_ray(ray or "", int(nodes), log_path.absolute(), context.args, gpus, cpus, program)


@with_ray_app.command(context_settings={"allow_interspersed_args": False})
def with_ray(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="Runs on the head alone.")],
    num_nodes: Annotated[
        int | None,
        typer.Option(
            "--num-nodes", metavar="N", min=1, help="The head waits for N; default: as Slurm says, or 1."
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", metavar="P", min=1, max=65535, help="Of the head.")] = 6379,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", min=0.0, help="How long to wait for the others.")
    ] = 600.0,
) -> int:
    """Start Ray on every machine that is given this command, run COMMAND on the one that MASTER_ADDR names,
    then end that Ray."""
    from coordinator.commands.with_ray import with_ray as start
    from coordinator.node.rank import nodes_from

    return start(command, num_nodes or nodes_from(os.environ) or 1, port, deadline)


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


@eval_app.command("eval")
def evaluate(
    words: Words = None,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            metavar="N|DIR",
            help="Of iteration N (0: the start), or of DIR; default: the newest.",
        ),
    ] = None,
    log_path: Annotated[
        Path | None,
        option("--log-path", metavar="DIR", help="The run; its settings hold where nothing else is given."),
    ] = None,
    eval_tasks: Annotated[
        str | None, option("--eval-tasks", metavar="FILE", help="As in `run`; default: those of the run.")
    ] = None,
    reward: Annotated[
        list[str] | None, option("--reward", metavar="NAME[=WEIGHT]", help="As in `run`.")
    ] = None,
    environment: Annotated[str | None, option("--environment", metavar="NAME", help="As in `run`.")] = None,
    config: Annotated[
        Path | None, option("--config", metavar="FILE", help="Settings, .toml or .yaml.")
    ] = None,
    out: Annotated[
        Path | None, option("--out", "-o", metavar="DIR", help="A new directory that keeps the samples.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> int:
    """Score a checkpoint of a run, or any model, on this machine; the run is only read."""
    from coordinator.commands.evaluate import evaluate as score
    from coordinator.config import parse_override, read_file

    given: dict[str, Any] = read_file(config) if config else {}
    named = {"eval_tasks": eval_tasks, "rollout.reward": reward, "rollout.environment": environment}
    given |= {key: value for key, value in named.items() if value}
    given |= dict(parse_override(word) for word in words or [])
    root = log_path.absolute() if log_path else None
    return score(checkpoint, root, given, out.absolute() if out else None, as_json)


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


@serve_app.command()
def serve(
    root: Annotated[Path, option("--root", metavar="DIR", help="Each job is a directory in it.")],
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Where to listen; others than this machine: 0.0.0.0."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0: a free one.")
    ] = 8765,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file", metavar="FILE", help="Default: $FLAGPOST_TOKEN, else DIR/.token, which is made."
        ),
    ] = None,
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="local|ssh|slurm|ray", help="What starts the nodes of a job.")
    ] = "local",
    hosts: Annotated[str, option("--hosts", metavar="A,B,C", help="With ssh: a node on each.")] = "",
    sbatch: Annotated[
        Path | None,
        option("--sbatch", metavar="FILE", help="With slurm: the job script; default: node.sbatch."),
    ] = None,
    ray: Annotated[str, typer.Option("--ray", metavar="ADDRESS", help="With ray: the cluster.")] = "auto",
    at_once: Annotated[
        int, typer.Option("--at-once", metavar="N", min=1, help="Jobs that run at the same time.")
    ] = 1,
    max_upload: Annotated[
        int, typer.Option("--max-upload", metavar="MIB", min=1, help="The largest submission.")
    ] = 64,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let clients bring rewards and environments: they run here.")
    ] = False,
) -> int:
    """Take jobs over HTTP, start them, and show them on a page; Ctrl+C ends the server, but no job."""
    from coordinator.commands.serve import serve as start
    from coordinator.server.launchers import SBATCH, Launcher

    chosen = Launcher(launcher, hosts, sbatch.absolute() if sbatch else SBATCH, ray)
    return start(root.absolute(), chosen, host, port, token_file, allow_code, at_once, max_upload)


def _of_client(name: str) -> typer.Typer:
    """Return a command of the client, which parses its words itself: it is also a file of its own."""
    app, everything = new_app(), {"ignore_unknown_options": True, "allow_extra_args": True}
    settings: dict[str, Any] = {**everything, "allow_interspersed_args": False, "help_option_names": []}

    @app.command(context_settings=settings)
    def command(context: typer.Context) -> int:  # pyright: ignore[reportUnusedFunction]
        from coordinator.client import main

        return main([name, *context.args], "run")

    return app


COMMANDS = {
    "launch": launch_app,
    "with-ray": with_ray_app,
    "status": status_app,
    "logs": logs_app,
    "report": report_app,
    "plan": plan_app,
    "profile": profile_app,
    "eval": eval_app,
    "doctor": doctor_app,
    "cleanup": cleanup_app,
    "export": export_app,
    "serve": serve_app,
    **{name: _of_client(name) for name in ("submit", "jobs", "overwatch", "stop", "resume", "fetch")},
}
LOCAL = "local"
GROUPS = {
    "Start all nodes with one command": {
        LOCAL: "all nodes on this machine",
        "launch": "a node on each of several hosts, over ssh, or of a Ray cluster",
        "with-ray": "a Ray cluster for one command, with MASTER_ADDR",
    },
    "Look at a run": {
        "status": "where each node is, and what it waits for; --watch: live",
        "logs": "what the nodes, their engines and trainers print",
        "report": "one page: rewards, where the time goes, faults, samples",
        "plan": "would two crews be faster, with which devices and weights?",
        "profile": "where the time of one training step goes, by torch's profiler",
    },
    "Before and after": {
        "doctor": "is this directory, node and network fit for a run?",
        "cleanup": "remove what an interrupted iteration left",
        "eval": "score a checkpoint, or any model, on sets of tasks",
        "export": "copy a checkpoint's model, for the Hub or for a server",
    },
    "From another machine, over HTTP": {
        "serve": "take jobs, start them, show them on a page",
        "submit": "submit a job; with the options of `run`",
        "jobs": "list the jobs",
        "overwatch": "show the jobs, or one, live",
        "stop": "stop a job",
        "resume": "go on with a job that has ended",
        "fetch": "fetch a checkpoint's model, or the report",
    },
}
"""What `run --help` says of the commands."""
