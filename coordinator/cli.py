"""The command `run`: parse, then call. Nothing else."""

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

node_app = new_app()


@node_app.command(epilog=SUMMARY)
def node(
    settings: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Any setting by its dotted name.")
    ] = None,
    master: Annotated[bool, typer.Option("--master", help="This is rank 0.")] = False,
    worker: Annotated[
        str | None, option("--worker", metavar="RANK", help="This is rank RANK, from 1.")
    ] = None,
    num_nodes: Annotated[str | None, option("--num-nodes", metavar="N", help="Default 1.")] = None,
    rank_weights: Annotated[
        str | None,
        option("--rank-weights", metavar="2,1,1", help="One positive number per node; default equal."),
    ] = None,
    expect_gpus: Annotated[
        str | None,
        option(
            "--expect-gpus", metavar="N", help="End unless there are N GPUs in all, or 8,4,4 on each node."
        ),
    ] = None,
    log_path: LogPath = Path("runs/default"),
    data_path: Annotated[
        str | None, option("--data-path", metavar="DIR", help="Shared data: task files, model cache.")
    ] = None,
    model: Annotated[
        str | None, option("--model", metavar="PATH_OR_ID", help="Default builtin:tiny.")
    ] = None,
    tasks: Annotated[
        str | None, option("--tasks", metavar="FILE", help="JSON lines; default builtin:arithmetic.")
    ] = None,
    eval_tasks: Annotated[str | None, option("--eval-tasks", metavar="FILE", help="JSON lines.")] = None,
    reward: Annotated[
        str | None,
        option("--reward", metavar="NAME", help="exact, numeric, math ..., or module:function."),
    ] = None,
    environment: Annotated[
        str | None,
        option("--environment", metavar="NAME", help="single_turn ..., or module:function."),
    ] = None,
    rl_phase: Annotated[
        str | None, option("--rl-phase", metavar="PHASE", help="both, rollout or update.")
    ] = None,
    rollout_split: Annotated[
        str | None, option("--rollout-split", metavar="SPLIT", help="train-only or eval-only.")
    ] = None,
    eval_interval: Annotated[
        str | None, option("--eval-interval", metavar="N", help="Evaluate every N iterations.")
    ] = None,
    iterations: Annotated[
        str | None, option("--iterations", metavar="N", help="Stop after iteration N; default: go on.")
    ] = None,
    engine: Annotated[str | None, option("--engine", metavar="KIND", help="auto, vllm or torch.")] = None,
    engine_url: Annotated[
        str | None, option("--engine-url", metavar="URL", help="Use a server that you run.")
    ] = None,
    debug_mode: Annotated[
        bool, typer.Option("--debug-mode", help="--engine-url http://127.0.0.1:8000.")
    ] = False,
    on_node_failure: Annotated[
        str | None, option("--on-node-failure", metavar="POLICY", help="wait, shrink or abort.")
    ] = None,
    node_timeout: Annotated[
        str | None, option("--node-timeout", metavar="SECONDS", help="A node silent for longer is lost.")
    ] = None,
    rejoin_timeout: Annotated[
        str | None, option("--rejoin-timeout", metavar="SECONDS", help="How long nodes wait for each other.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Settings, .toml or .yaml.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the settings and stop.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
    local: Annotated[bool, typer.Option("--local", hidden=True)] = False,
) -> int:
    """Take part in a run: post-train a language model on machines that share nothing but a directory.

    The same command again, on any node, after anything, resumes.
    """
    from coordinator.config import OPTIONS, build, parse_override, read_file
    from coordinator.settings import SettingsError

    if version:
        from importlib.metadata import version as installed

        print(f"flagpost {installed('flagpost')}")
        return 0
    typed = {
        "--num-nodes": num_nodes, "--rank-weights": rank_weights, "--expect-gpus": expect_gpus,
        "--data-path": data_path, "--model": model, "--tasks": tasks, "--eval-tasks": eval_tasks,
        "--reward": reward, "--environment": environment,
        "--rl-phase": rl_phase, "--rollout-split": rollout_split, "--eval-interval": eval_interval,
        "--iterations": iterations, "--engine": engine, "--on-node-failure": on_node_failure,
        "--engine-url": engine_url or ("http://127.0.0.1:8000" if debug_mode else None),
        "--node-timeout": node_timeout, "--rejoin-timeout": rejoin_timeout,
    }  # fmt: skip
    given: dict[str, Any] = read_file(config) if config else {}
    given |= {key: typed[option] for key, option in OPTIONS.items() if typed[option] is not None}
    given |= dict(parse_override(text) for text in settings or [])
    root = log_path.absolute()
    if local:
        from coordinator.commands.local import run_local

        if master or worker is not None:
            raise SettingsError("run local starts all nodes of this machine; leave --master and --worker out")
        if dry_run:
            return _show(build(given))
        return run_local(root, given)
    return _run_node(root, given, master, worker, dry_run)


def _run_node(root: Path, given: dict[str, Any], master: bool, worker: str | None, dry_run: bool) -> int:
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
    return run_node(root, rank, given, logs.set_up(rank))


def _show(settings: Any) -> int:
    print(json.dumps(settings.model_dump(mode="json"), indent=2))
    return 0


def main() -> int:
    """Entry point of `run`: the exit code. Every bad input is one line."""
    os.umask(0o007)
    for stream in (sys.stdout, sys.stderr):  # a terminal that is not UTF-8 must not end what is shown
        cast(io.TextIOWrapper, stream).reconfigure(errors="backslashreplace")
    arguments = sys.argv[1:]
    app = COMMANDS[arguments[0]][0] if arguments and arguments[0] in COMMANDS else node_app
    if app is not node_app:
        arguments = arguments[1:]
    elif arguments[:1] == ["local"]:
        arguments = ["--local", *arguments[1:]]
    from coordinator.settings import SettingsError
    from rollout.storage.files import SharedFsError

    try:
        return app(arguments, prog_name="run", standalone_mode=False) or 0
    except SettingsError as error:
        print(f"run: {error}", file=sys.stderr)
    except typer.TyperException as error:
        print(f"run: {error}; see run --help", file=sys.stderr)
    except SharedFsError as error:
        print(f"run: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return 2


if __name__ == "__main__":
    sys.exit(main())
