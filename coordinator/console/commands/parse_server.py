"""Commands of the server and of its clients: `run serve`, `run submit`, `run jobs` and the others."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.console.commands.arguments import command_in, directory_of_user, option

APPS: dict[str, typer.Typer] = {}


@command_in(APPS, "serve")
def serve(
    root: Annotated[
        Path,
        option(
            "--root",
            metavar="DIR",
            help="Directory of the jobs; each job gets a directory in it.",
            parser=directory_of_user,
        ),
    ],
    host: Annotated[
        str,
        typer.Option(
            "--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines in."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option("--port", metavar="PORT", min=0, max=65535, help="Port to listen on; 0: any free one."),
    ] = 8765,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file",
            metavar="FILE",
            help="File with the token; default: $FLAGPOST_TOKEN, else DIR/.token, which is created.",
        ),
    ] = None,
    launcher: Annotated[
        str, typer.Option("--launcher", metavar="local|ssh|slurm|ray", help="What starts the nodes of a job.")
    ] = "local",
    hosts: Annotated[str, option("--hosts", metavar="A,B,C", help="With ssh: hosts of the nodes.")] = "",
    sbatch: Annotated[
        Path | None,
        option("--sbatch", metavar="FILE", help="With slurm: the job script; default: node.sbatch."),
    ] = None,
    ray: Annotated[
        str, typer.Option("--ray", metavar="ADDRESS", help="With ray: address of the cluster.")
    ] = "auto",
    at_once: Annotated[
        int, typer.Option("--at-once", metavar="N", min=1, help="How many jobs may run at the same time.")
    ] = 1,
    max_upload: Annotated[
        int, typer.Option("--max-upload", metavar="MIB", min=1, help="Size limit of a submission.")
    ] = 64,
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let clients send rewards and environments, which run here.")
    ] = False,
) -> int:
    """Accept jobs over HTTP, start them, and show them on a web page. Ctrl+C ends the server, but no job."""
    from coordinator.console.commands.serve import serve as start
    from coordinator.console.server.launchers import SBATCH, Launcher

    chosen = Launcher(launcher, hosts, sbatch.absolute() if sbatch else SBATCH, ray)
    return start(root.absolute(), chosen, host, port, token_file, allow_code, at_once, max_upload)


def _add_of_client(name: str) -> None:
    """Add a command of the client, which parses its words itself: it is also a file of its own."""

    @command_in(
        APPS,
        name,
        ignore_unknown_options=True,
        allow_extra_args=True,
        allow_interspersed_args=False,
        help_option_names=[],
    )
    def command(context: typer.Context) -> int:  # pyright: ignore[reportUnusedFunction]
        from coordinator.console.server.client import main

        return main([name, *context.args], "run")


for _name in ("submit", "jobs", "overwatch", "stop", "resume", "fetch"):
    _add_of_client(_name)
