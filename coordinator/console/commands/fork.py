"""`run fork`: a new run that goes on from an iteration of another one, which it leaves as it is.

What the new run needs of the finished iterations is linked, or copied to another filesystem: nobody changes a
published file. The new directory gets its name when it is whole.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import MASTER, RunDir
from coordinator.directory.published import Incomplete
from coordinator.keeping.trainer_states import saved_in_background
from coordinator.machine.run_command import node_command
from coordinator.protocol.placement_records import run_dirs
from coordinator.protocol.records import EpochRecord, claim_stopped
from coordinator.protocol.snapshot import whole_board
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.directory_access import share_with_group
from coordinator.start.run_json import find_run, new_run_id
from coordinator.start.start import last_start
from rollout.storage import files, once

NO_LINKS = {*once.NO_LINKS, errno.EACCES}
"""What os.link reports where a file can only be copied."""


@dataclass
class Forked:
    """What a fork has taken of its parent."""

    files: int = 0
    bytes: int = 0
    copied_bytes: int = 0
    """Bytes of files that could not be linked."""


def fork(
    root: Path,
    iteration: int,
    target: Path,
    fill: Callable[[RunDir], None] = lambda _child: None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Forked:
    """Make a run at `target` whose next iteration is `iteration`, with all before it as in the run at `root`.

    It begins with the settings of the parent's last start, and `overrides` over them. Nothing of the parent
    changes, which may be running. `fill` adds to the new run before it gets its name. Raises SettingsError if
    that cannot be; then there is nothing at `target`.
    """
    run_dir = RunDir(root)
    run = find_run(root)
    if target.exists() and (not target.is_dir() or any(target.iterdir()) or target.samefile(Path.cwd())):
        raise SettingsError(f"--to {target}: is there already; give a new directory")
    if root.resolve() in target.resolve().parents:
        raise SettingsError(f"--to {target}: is in the run at {root}; give a directory beside it")
    refuse_unfinished(run_dir, iteration)
    share_with_group(root)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            complete = RunDir(Path(temporary) / target.name)
            forked = _link_all(run_dir, complete, iteration)
            if iteration > 1:
                published.weigh_checkpoint(complete.checkpoint(iteration - 1))
            _begin(run_dir, complete, run, iteration, overrides)
            fill(complete)
            os.replace(complete.root, target)
    except Incomplete as error:
        raise SettingsError(f"--iteration {iteration}: {error}; nothing was made") from None
    except OSError as error:
        raise SettingsError(f"--to {target}: {error}; nothing was made") from None
    return forked


def summary(forked: Forked, iteration: int, target: Path) -> str:
    """Return the message about a fork: how large it is, and how to go on."""
    copied = f", {forked.copied_bytes / 1e6:,.0f} MB of them copied" if forked.copied_bytes else " in links"
    size = f"{forked.files} files, {forked.bytes / 1e6:,.0f} MB{copied}"
    command = node_command(target, MASTER)
    return (
        f"{target} goes on at iteration {iteration}: {size}\nstart it with the settings to change: {command}"
    )


def refuse_unfinished(run_dir: RunDir, iteration: int, done: str = "forked") -> None:
    """Raise SettingsError unless what is before `iteration` is finished, and has left its policy."""
    finished = {line["iteration"] for line in published.metrics_lines(run_dir)}
    checkpoints = published.checkpoints(run_dir)
    can = sorted({1, *(number + 1 for number in checkpoints if number in finished)})
    if iteration not in can:
        has = "is not finished" if iteration - 1 not in finished else "has no checkpoint any more"
        raise SettingsError(
            f"--iteration {iteration}: iteration {iteration - 1} of {run_dir.root} {has}; "
            f"the run can be {done} at {', '.join(map(str, can))}"
        )


def _link_all(parent: RunDir, child: RunDir, iteration: int) -> Forked:
    """Link what the iterations from `iteration` on need, and what there is to read of those before it."""
    newest = iteration - 1
    forked = Forked()
    child.root.mkdir()
    for source in _taken(parent, newest):
        link_tree(source, child.root / source.relative_to(parent.root), forked)
    lines = [line for line in published.metrics_lines(parent) if line["iteration"] <= newest]
    child.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return forked


def _taken(parent: RunDir, newest: int) -> Iterator[Path]:
    """Yield the directories of what was finished up to iteration `newest`."""
    yield from filter(Path.is_dir, (parent.base_model, parent.images))
    samples = (parent.trajectories("train", 0), parent.trajectories("eval", 0))
    for directory in (*samples, parent.batch(0), parent.checkpoint(0)):
        yield from (path for number, path in by_iteration(directory.parent) if number <= newest)
    states = saved_in_background(parent)
    yield from (directory for directory, state in states.items() if state.iteration <= newest)


def by_iteration(directory: Path) -> Iterator[tuple[int, Path]]:
    """Yield the folders of iterations in a directory."""
    for name in published.names(directory):
        if (number := parse_iteration_name(name)) is not None:
            yield number, directory / name


def link_tree(source: Path, target: Path, forked: Forked) -> None:
    """Link the files of a directory into another one, in the same folders, and count them in `forked`."""
    for directory, _, names in os.walk(source):
        inside = target / Path(directory).relative_to(source)
        inside.mkdir(parents=True, exist_ok=True)
        for name in names:
            if not files.is_temporary(name):
                _link(Path(directory) / name, inside / name, forked)


def _link(source: Path, target: Path, forked: Forked) -> None:
    """Link a file, or copy it with its times; one that is being removed is left out."""
    try:
        size = source.stat().st_size
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            shutil.copy2(source, target)
            forked.copied_bytes += size
    except FileNotFoundError:
        return
    forked.files += 1
    forked.bytes += size


def _begin(
    parent: RunDir, child: RunDir, run: dict[str, Any], iteration: int, overrides: Mapping[str, Any]
) -> None:
    """Give the new run its identity, and the settings with which it goes on."""
    for directory in child.fixed_directories:
        files.make_directory(directory)
    parents = {"forked_from": run["forked_from"]} if "forked_from" in run else {}
    origin = {"run_id": run["run_id"], "directory": str(parent.root), "iteration": iteration, **parents}
    run_id = new_run_id()
    epoch = 1 + max(whole_board(crew, published.names).newest_epoch() for crew in run_dirs(parent.root))
    text = f"run fork has made this run of {parent.root}, at iteration {iteration}; nobody has started it"
    claim_stopped(child, run_id, _with(last_start(parent.root), overrides), epoch, text)
    document = {**run, "run_id": run_id, "forked_from": origin}
    files.publish(child.run_json, json.dumps(document, indent=1).encode())


def _with(record: EpochRecord | None, overrides: Mapping[str, Any]) -> EpochRecord | None:
    """Return the record of a start that was given these settings too."""
    if record is None or not overrides:
        return record
    settings = loading.overlay(RunSettings.published(record.settings), overrides).model_dump(mode="json")
    typed = record.given
    replaced = tuple(f"{name}." for name in overrides)  # of a table that is given whole
    typed_before = (
        {key: value for key, value in typed.settings.items() if not key.startswith(replaced)} if typed else {}
    )
    update = {"settings": {**typed_before, **overrides}}
    typed = typed and typed.model_copy(update=update)
    return record.model_copy(update={"settings": settings, "given": typed})
