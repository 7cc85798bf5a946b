"""Commands that look at runs: `run status`, `logs`, `report`, `samples`, `diff`, `plan`, `profile`."""

from pathlib import Path
from typing import Annotated

import typer

from coordinator.console.commands.arguments import AsJson, LogPath, command_in, option

APPS: dict[str, typer.Typer] = {}


@command_in(APPS, "status")
def status(
    log_path: LogPath = Path("runs/default"),
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl+C.")] = False,
) -> int:
    """Show where each node is, what it waits for, its tasks done, and the rewards so far."""
    from coordinator.console.commands.status import show_status

    show_status(log_path.absolute(), as_json, watch)
    return 0


@command_in(APPS, "logs")
def logs(
    rank: Annotated[
        str | None,
        typer.Argument(metavar="RANK", help="Show only this rank; with --server, the name of the job."),
    ] = None,
    log_path: LogPath = Path("runs/default"),
    server: Annotated[
        str | None, option("--server", metavar="URL", help="Show the log of a job on this server.")
    ] = None,
    token_file: Annotated[
        Path | None,
        option(
            "--token-file", metavar="FILE", help="File with the server's token; default: $FLAGPOST_TOKEN."
        ),
    ] = None,
    of_rank: Annotated[
        str | None, option("--rank", metavar="RANK", help="With --server: show only this rank.")
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=1, help="Show the last N lines of each file.")
    ] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow new lines, until Ctrl+C.")] = False,
) -> int:
    """Print the logs of the nodes, or of one node with its engine and trainer."""
    if server is not None:
        from coordinator.console.server.client import main

        words = ["--token-file", str(token_file)] if token_file else []
        words += ["--rank", of_rank] if of_rank else []
        words += ["--follow"] if follow else []
        return main(
            ["logs", "--server", server, "--lines", str(lines), *words, *([rank] if rank else [])], "run"
        )
    from coordinator.console.views.logs import show_logs

    show_logs(log_path.absolute(), None if rank is None else _rank(rank), lines, follow)
    return 0


@command_in(APPS, "report")
def report(
    log_path: LogPath = Path("runs/default"),
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            metavar="FILE.html",
            help="Where to write the page; default: report.html in the run directory.",
        ),
    ] = None,
) -> int:
    """Write one HTML page about the run: rewards, where the time goes, faults, samples to read."""
    from coordinator.console.report import write_report

    print(write_report(log_path.absolute(), out.absolute() if out else None))
    return 0


@command_in(APPS, "samples")
def samples(
    log_path: LogPath = Path("runs/default"),
    iteration: Annotated[
        int | None, option("--iteration", metavar="I", help="Choose the iteration; default: the newest.")
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", metavar="N", min=1, help="Print N samples.")] = 3,
    best: Annotated[bool, typer.Option("--best", help="Take those with the highest rewards.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Take those with the lowest rewards.")] = False,
    flat: Annotated[
        bool, typer.Option("--flat", help="Take tasks whose samples all have the same reward.")
    ] = False,
    of_eval: Annotated[bool, typer.Option("--eval", help="Take samples of the evaluation.")] = False,
) -> int:
    """Print samples as the model saw them, special tokens included, with their rewards and answers."""
    from coordinator.console.views.samples import Order, show_samples
    from coordinator.settings.tree import SettingsError

    orders: list[tuple[bool, Order]] = [(best, "best"), (worst, "worst"), (flat, "flat")]
    chosen: list[Order] = [name for is_chosen, name in orders if is_chosen]
    if len(chosen) > 1:
        raise SettingsError(f"run samples --{chosen[0]} --{chosen[1]}: give one of them")
    order = chosen[0] if chosen else "spread"
    show_samples(log_path.absolute(), iteration, count, order, "eval" if of_eval else "train")
    return 0


@command_in(APPS, "diff")
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run directory.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="The run directory to compare it with.")],
    out: Annotated[
        Path | None,
        option("--out", "-o", metavar="FILE.html", help="Also write a page with the curves of both."),
    ] = None,
) -> int:
    """Say where two runs diverge: iteration, phase, task, sample and token.

    The exit code is 0 if they are equal, else 1."""
    from coordinator.console.views.difference import describe_difference

    roots = first.absolute(), second.absolute()
    lines, is_equal = describe_difference(*roots)
    print("\n".join(lines))
    if out is not None:
        from coordinator.console.report import write_comparison

        print(f"page: {write_comparison(*roots, lines, out.absolute())}")
    return int(not is_equal)


@command_in(APPS, "plan")
def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="With --model: settings of the run."),
    ] = None,
    log_path: LogPath = Path("runs/default"),
    devices: Annotated[
        int | None,
        option("--devices", metavar="N", help="Plan for N devices (GPUs); default: those of the run."),
    ] = None,
    as_json: AsJson = False,
    model: Annotated[
        str | None,
        option(
            "--model", metavar="MODEL", help="Estimate memory and time for this model, before there is a run."
        ),
    ] = None,
    gpus: Annotated[
        int, typer.Option("--gpus", metavar="N", min=1, help="With --model: number of GPUs.")
    ] = 1,
    gpu: Annotated[str, option("--gpu", metavar="NAME", help="With --model: kind of GPU.")] = "H100",
) -> int:
    """Estimate from the timings of a run whether it would be faster to generate and train at the same time
    on separate devices; or, with --model, whether a run would fit."""
    if model is not None:
        from coordinator.console.commands.typos import settings_of
        from coordinator.console.plan.before import show_needs

        show_needs(model, gpus, gpu, settings_of(words or []))
        return 0
    from coordinator.console.plan import show_plan

    if words:
        from coordinator.settings.tree import SettingsError

        raise SettingsError(f"run plan {words[0]}: settings go with --model, e.g. --model DIR --gpus 8")
    show_plan(log_path.absolute(), devices, as_json)
    return 0


@command_in(APPS, "profile")
def profile(
    log_path: LogPath = Path("runs/default"),
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="R", min=0, help="Profile this node; default: the first that trains."),
    ] = None,
) -> int:
    """Profile the next optimizer step of a run: the ten most expensive operators, and a trace."""
    from coordinator.console.commands.profile import profile_next_step

    return profile_next_step(log_path.absolute(), rank)


def _rank(text: str) -> int:
    from coordinator.settings.tree import SettingsError

    if not text.isdecimal():
        example = "e.g. run logs 1, and the run directory as --log-path"
        raise SettingsError(f"run logs {text}: give the number of a rank, {example}")
    return int(text)
