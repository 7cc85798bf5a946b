"""Commands for before and after a run: `run eval`, `run doctor`, `run cleanup`, `run fork`, `run rescore`,
`run verify`, `run export`."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coordinator.console.commands.arguments import (
    AsJson,
    Deadline,
    LogPath,
    Words,
    command_in,
    directory_of_user,
    option,
)

APPS: dict[str, typer.Typer] = {}


@command_in(APPS, "eval")
def evaluate(
    words: Words = None,
    checkpoint: Annotated[
        str | None,
        option(
            "--checkpoint",
            metavar="N|DIR",
            help="Checkpoint of iteration N (0: the base model), or a directory; default: the newest.",
        ),
    ] = None,
    log_path: Annotated[
        Path | None,
        option("--log-path", metavar="DIR", help="The run, whose settings are the defaults."),
    ] = None,
    eval_tasks: Annotated[
        str | None,
        option(
            "--eval-tasks", metavar="FILE", help="Evaluation tasks, as in `run`; default: those of the run."
        ),
    ] = None,
    reward: Annotated[
        list[str] | None, option("--reward", metavar="NAME[=WEIGHT]", help="Rewards, as in `run`.")
    ] = None,
    environment: Annotated[
        str | None, option("--environment", metavar="NAME", help="Environment, as in `run`.")
    ] = None,
    config: Annotated[
        Path | None,
        option("--config", metavar="FILE", help="Read settings from a .toml, .yaml or .json file."),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "-o",
            metavar="DIR",
            help="Keep the samples in this new directory.",
            parser=directory_of_user,
        ),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Score a checkpoint of a run, or any model, on this machine. The run itself is not changed."""
    from coordinator.console.commands.evaluate import evaluate as score
    from coordinator.console.commands.typos import settings_of
    from coordinator.settings.settings_file import read_file

    overrides: dict[str, Any] = read_file(config) if config else {}
    named = {"eval_tasks": eval_tasks, "rollout.reward": reward, "rollout.environment": environment}
    overrides |= {key: value for key, value in named.items() if value}
    if reward:  # then it is that of all sources
        overrides["rollout.rewards"] = {}
    overrides |= settings_of(words or [])
    root = log_path.absolute() if log_path else None
    return score(checkpoint, root, overrides, out.absolute() if out else None, as_json)


@command_in(APPS, "doctor")
def doctor(
    log_path: LogPath = Path("runs/default"),
    peers: Annotated[
        int,
        typer.Option(
            "--peers", metavar="N", min=1, help="Number of nodes; run the doctor on each, with its rank."
        ),
    ] = 1,
    worker: Annotated[
        str | None, option("--worker", metavar="RANK", help="Rank of this node; rank 0 prints the report.")
    ] = None,
    deadline: Deadline = 60.0,
    as_json: AsJson = False,
) -> int:
    """Check that the directory, this machine and the network are fit for a run, and say what to fix."""
    from coordinator.console.doctor.run import doctor_rank, run_doctor

    return run_doctor(log_path.absolute(), peers, doctor_rank(worker, peers, os.environ), deadline, as_json)


@command_in(APPS, "cleanup")
def cleanup(
    iteration: Annotated[
        str | None, option("--iteration", metavar="N", help="The interrupted one: the last that was begun.")
    ] = None,
    log_path: LogPath = Path("runs/default"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed.")] = False,
    keep_partial: Annotated[
        bool, typer.Option("--keep-partial", help="Keep the finished groups, so that training can use them.")
    ] = False,
) -> int:
    """Remove the files of an interrupted iteration; never a published checkpoint."""
    from coordinator.console.commands.cleanup import cleanup as clean
    from coordinator.console.commands.cleanup import refuse_unnamed
    from coordinator.journal.control_characters import plain
    from coordinator.protocol.exits import NodeEnded

    if iteration is None:
        refuse_unnamed(log_path.absolute())
    number = _iteration(iteration or "")
    try:
        clean(log_path.absolute(), number, dry_run, keep_partial)
    except NodeEnded as end:
        print(f"run: {plain(end.text)}", file=sys.stderr)
        return end.code
    return 0


@command_in(APPS, "fork")
def fork(
    iteration: Annotated[
        str, option("--iteration", metavar="N", help="The first iteration that the new run makes itself.")
    ],
    to: Annotated[
        Path,
        option(
            "--to",
            metavar="DIR",
            help="Directory of the new run, preferably on the same filesystem.",
            parser=directory_of_user,
        ),
    ],
    log_path: LogPath = Path("runs/default"),
) -> int:
    """Make a new run that continues from an iteration of this one, with other settings if you like."""
    from coordinator.console.commands.fork import fork as make
    from coordinator.console.commands.fork import summary

    number = _iteration(iteration)
    forked = make(log_path.absolute(), number, to.absolute())
    print(summary(forked, number, to))
    return 0


@command_in(APPS, "rescore")
def rescore(
    iteration: Annotated[str, option("--iteration", metavar="N", help="The first iteration to score again.")],
    reward: Annotated[
        list[str], option("--reward", metavar="NAME[=WEIGHT]", help="The new reward, as in `run`.")
    ],
    last: Annotated[
        str | None,
        option("--last", metavar="N", help="The last iteration to score again; default: the newest."),
    ] = None,
    to: Annotated[
        Path | None,
        option("--to", metavar="DIR", help="Directory of the new run.", parser=directory_of_user),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would change, and make no run.")
    ] = False,
    log_path: LogPath = Path("runs/default"),
) -> int:
    """Make a new run that trains on the samples of this one with another reward."""
    from coordinator.console.commands.rescore import rescore as make
    from coordinator.settings.tree import SettingsError
    from rollout.settings import JOIN

    if dry_run and to is not None:
        raise SettingsError(f"--to {to} beside --dry-run: a dry run makes nothing; leave one of them out")
    if not dry_run and to is None:
        raise SettingsError("give --to DIR for the new run, or --dry-run to see what would change")
    first, end = _iteration(iteration), _iteration(last, "--last") if last else None
    make(log_path.absolute(), first, end, JOIN.join(reward), to.absolute() if to else None)
    return 0


@command_in(APPS, "verify")
def verify(
    iteration: Annotated[
        str | None,
        option(
            "--iteration",
            metavar="N",
            help="Check only this iteration; default: check all, repeat the newest.",
        ),
    ] = None,
    files_only: Annotated[
        bool, typer.Option("--files-only", help="Only compare checksums; repeat no iteration.")
    ] = False,
    log_path: LogPath = Path("runs/default"),
) -> int:
    """Check all checksums from the base model to the newest weights, then repeat an iteration on this machine
    and compare the bits. The run itself is not changed."""
    from coordinator.console.commands.verify import verify as check

    return check(log_path.absolute(), _iteration(iteration) if iteration else None, files_only)


@command_in(APPS, "export")
def export(
    out: Annotated[
        Path,
        option("--out", "-o", metavar="DIR", help="New directory for the model.", parser=directory_of_user),
    ],
    iteration: Annotated[
        str | None,
        option("--iteration", metavar="N", help="Iteration of the checkpoint; default: the newest."),
    ] = None,
    merge: Annotated[bool, option("--merge", help="Merge the LoRA adapter into its base model.")] = False,
    dtype: Annotated[
        str | None, option("--dtype", metavar="DTYPE", help="Type of the weights; default: as saved.")
    ] = None,
    log_path: LogPath = Path("runs/default"),
) -> int:
    """Copy a checkpoint's model, verified and with a model card, for the Hub or for a server."""
    from coordinator.console.commands.export import export as copy

    number = _iteration(iteration) if iteration else None
    files = copy(log_path.absolute(), number, out.absolute(), merge, dtype)
    print(f"{out}: {', '.join(files)}")
    return 0


def _iteration(text: str, option: str = "--iteration") -> int:
    from coordinator.settings.tree import SettingsError

    if not (text.isdecimal() and int(text)):
        raise SettingsError(f"{option} {text}: give the number of an iteration, e.g. {option} 5")
    return int(text)
