"""Commands that start all nodes of a run on several machines: `run launch`, `run with-ray`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from coordinator.console.commands.arguments import Deadline, LogPath, command_in, option

APPS: dict[str, typer.Typer] = {}


@command_in(APPS, "launch", ignore_unknown_options=True, allow_extra_args=True)
def launch(
    context: typer.Context,
    hosts: Annotated[
        str | None,
        option("--hosts", metavar="A,B,C", help="Hosts to reach over ssh; the first becomes the master."),
    ] = None,
    ray: Annotated[
        str | None,
        option(
            "--ray", metavar="ADDRESS", help="Use a Ray cluster: auto, HOST:PORT, ray://HOST:PORT or local."
        ),
    ] = None,
    num_nodes: Annotated[
        str | None, option("--num-nodes", metavar="N", help="With --ray: number of nodes.")
    ] = None,
    gpus: Annotated[
        str | None,
        option(
            "--gpus-per-node",
            metavar="N",
            help="With --ray: GPUs of each node, 8 or 8,8,4; default: a whole machine.",
        ),
    ] = None,
    cpus: Annotated[
        str | None,
        option("--cpus-per-node", metavar="N", help="With --ray: CPUs of each node, in the same way."),
    ] = None,
    log_path: LogPath = Path("runs/default"),
    ssh: Annotated[
        str | None,
        option(
            "--ssh", metavar="COMMAND", help='The ssh command; default: ssh. Example: "ssh -p 2222 -i key".'
        ),
    ] = None,
    program: Annotated[
        str | None,
        option("--run", metavar="PATH", help="Path of `run` on the hosts; default: the same as here."),
    ] = None,
) -> int:
    """Start a node on each host, over ssh or on a Ray cluster, and show their output; Ctrl+C stops all nodes.

    Takes all options of `run` too."""
    from coordinator.settings.tree import SettingsError

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
        from coordinator.console.commands.launch_ssh import SSH, launch_ssh

        return launch_ssh(hosts, log_path.absolute(), context.args, ssh or SSH, program)
    from coordinator.console.commands.launch_ray import launch_ray

    nodes = num_nodes or ""
    if not (nodes.isdecimal() and int(nodes)):
        raise SettingsError(
            f"run launch --ray: --num-nodes {nodes or 'is missing'}; give a number, e.g. --num-nodes 3"
        )
    return launch_ray(ray or "", int(nodes), log_path.absolute(), context.args, gpus, cpus, program)


@command_in(APPS, "with-ray", allow_interspersed_args=False)
def with_ray(
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="The command, which runs only on the head.")
    ],
    num_nodes: Annotated[
        int | None,
        typer.Option(
            "--num-nodes", metavar="N", min=1, help="Number of machines; default: that of Slurm, or 1."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", metavar="P", min=1, max=65535, help="Port of the head.")
    ] = 6379,
    deadline: Deadline = 600.0,
) -> int:
    """Start Ray on every machine that is given this command, run COMMAND on the one that MASTER_ADDR names,
    then end that Ray."""
    from coordinator.console.commands.with_ray import with_ray as start
    from coordinator.start.rank import nodes_from

    return start(command, num_nodes or nodes_from(os.environ) or 1, port, deadline)
