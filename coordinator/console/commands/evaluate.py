"""`run eval`: score a checkpoint of a run, or any model, on this machine, without training.

One node does an evaluation alone (--rollout-split eval-only) in a directory of its own. Its model is the
checkpoint. Of the run it only reads.
"""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.local import as_overrides, follow
from coordinator.console.views.run import Run
from coordinator.console.views.scores import INTERVAL, Score
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import SCORES
from coordinator.journal.control_characters import plain
from coordinator.machine.children import Children
from coordinator.machine.run_command import run_command
from coordinator.node.messages import STARTED_BY
from coordinator.protocol.exits import Exit
from coordinator.settings import loading
from coordinator.settings.tree import TINY, RunSettings, SettingsError
from coordinator.start.start import absolute, last_start
from rollout.engines.model_dir import is_adapter
from rollout.settings import EvalSetSettings

KEPT = (
    "data_path",
    "cluster.local_dir",
    *(
        f"rollout.{name}"
        for name in ("stop", "tool_parser", "chat_template", "reasoning_end", "thinking_tokens", "history",
                     "concurrency", "group_timeout_s", "on_reward_error", "reward_timeout_s",
                     "reward_processes", "ratio_field", "seed", "stall_timeout_s")
    ),
    *(
        f"engine.{name}"
        for name in ("kind", "dtype", "max_batch", "tensor_parallel_size", "start_timeout_s",
                     "request_timeout_s", "health_timeout_s", "max_restarts", "args")
    ),
)  # fmt: skip
"""The settings of a run that its evaluation goes by too. Not engine.url: that server has the run's policy."""
LONGEST = ("rollout.max_tokens", "eval.max_tokens")
"""The longest completions, of those sets that say nothing of it."""
OWN = "eval"
"""What the tasks of --eval-tasks are called in the table."""


def evaluate(
    checkpoint: str | None, root: Path | None, given: Mapping[str, Any], out: Path | None, as_json: bool
) -> int:
    """Evaluate, and print a table (or JSON); return the exit code. SettingsError: nothing was written.

    `checkpoint`: the number of an iteration of the run at `root` (0: what it started from; None: its newest
    one), or a directory. `out`: a new directory that keeps the samples; None: they are not kept.
    """
    settings = _settings(root, given)
    model = _model(checkpoint, root, settings)
    sets = _sets(settings)
    if out is not None and (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise SettingsError(f"-o {out}: is there already; give a new directory")
    kept = dict(loading.flatten(settings.model_dump(mode="json")))
    asked = {
        **{key: kept[key] for key in KEPT},
        **{key: given[key] for key in given if key.startswith("engine.")},
        # The default of a model without a run is fitted to its context.
        **{key: kept[key] for key in LONGEST if root is not None or key in given},
        "model": str(model),
        "rl_phase": "rollout",
        "rollout_split": "eval-only",
        "iterations": 1,
        "eval.sets": sets,
    }
    with _directory(out) as directory:
        if is_adapter(model):
            asked["model"] = str(_merged(model, directory / "model"))
        # Tasks to train on are asked for, and never used here: those of the run may be large.
        tasks = directory / "no_training.jsonl"
        tasks.write_text('{"prompt": "none"}\n')
        log_path = directory / "run"
        code = _run(log_path, {**asked, "tasks": str(tasks)})
        if code != Exit.DONE:
            if code == Exit.USAGE and out is not None:
                shutil.rmtree(out)
            return code
        line = Run(log_path).metrics()[-1]
    scores: dict[str, Any] = {name: _with_interval(of) for name, of in line[SCORES].items()}
    where = str(log_path) if out is not None else None
    if as_json:
        print(json.dumps({"checkpoint": str(model), "sets": scores, "log_path": where}))
    else:
        print("\n".join([f"checkpoint {model}", "", *_table(scores)]))
        if where:
            print(f"\nsamples    run report --log-path {where}")
    return code


def _settings(root: Path | None, given: Mapping[str, Any]) -> RunSettings:
    """Return the settings of the run's last start, with `given` over them; without a run the defaults."""
    given = absolute(given)
    if root is None:
        return loading.build({"model": "any", "tasks": "none", **given})  # the defaults, but no tasks
    last = last_start(root)
    if last is None:
        raise SettingsError(f"--log-path {root}: no run has been started here; give the directory of a run")
    return loading.overlay(RunSettings.published(last.settings), given)


def _model(checkpoint: str | None, root: Path | None, settings: RunSettings) -> Path:
    """Return the directory of the model, or of an adapter; SettingsError if there is none."""
    if checkpoint is not None and not checkpoint.isdecimal():
        found = Path(checkpoint).absolute()
        if not found.is_dir():
            what = "no such directory; give the directory of a model, or the number of an iteration"
            raise SettingsError(f"--checkpoint {checkpoint}: {what}")
    elif root is None:
        raise SettingsError(
            f"--checkpoint {checkpoint or '(the newest)'} is of a run; add --log-path DIR, or give the "
            "directory of a model"
        )
    elif checkpoint is not None and int(checkpoint) == 0:
        found = RunDir(root).base_model if settings.model == TINY else Path(settings.model)
        if not found.is_dir():
            raise SettingsError(
                f"--checkpoint 0: {found}, which the run started from, is not on this machine (yet); "
                "give one as --checkpoint DIR"
            )
    else:
        found = Run(root).checkpoint(None if checkpoint is None else int(checkpoint))
    return found


def _merged(adapter: Path, made: Path) -> Path:
    """Make a model of an adapter and its base, for any engine; SettingsError if that cannot be."""
    argv = [sys.executable, "-P", "-m", "trainer.checkpoint.merge", str(adapter), str(made)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.splitlines() or ["it ended without a word"])[-1]
        raise SettingsError(f"{adapter} is an adapter, and could not be added to its base model: {reason}")
    return made


def _sets(settings: RunSettings) -> dict[str, Any]:
    """Return all sets of the settings as named ones, with what they inherit; SettingsError for none."""
    sets = settings.eval_sets
    if settings.evaluation_tasks is not None:
        name = OWN if OWN not in sets else "eval_tasks"
        own = EvalSetSettings(tasks=settings.evaluation_tasks, columns=settings.eval_columns)
        with_own = settings.eval.model_copy(update={"sets": {name: own}})
        sets = {**settings.model_copy(update={"eval": with_own}).eval_sets, **sets}
    if not sets:
        raise SettingsError(
            "there are no tasks to evaluate on; give --eval-tasks FILE, or eval.sets.NAME.tasks=FILE"
        )
    longest = {name: one.max_tokens for name, one in settings.eval.sets.items()}
    return {
        name: {**one.model_dump(mode="json"), "max_tokens": longest.get(name)} for name, one in sets.items()
    }


@contextlib.contextmanager
def _directory(out: Path | None) -> Generator[Path]:
    """Make the directory of the evaluation: `out`, or one that is removed at the end."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="flagpost-eval-") as made:
        yield Path(made)


def _run(log_path: Path, asked: Mapping[str, Any]) -> int:
    """Run the one node of the evaluation; its lines go to stderr."""
    interrupts = Interrupts()
    argv = [*run_command("--master", "--log-path", str(log_path)), *as_overrides(asked)]
    with Children() as children:
        said = {STARTED_BY: shlex.join(["run", *sys.argv[1:]])}
        node = children.start("node-0", argv, env=said, echo=lambda line: print(plain(line), file=sys.stderr))
        (code,) = follow([node], interrupts)
        children.close()
    return code if code >= 0 else Exit.LOST


def _with_interval(of: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of a set with `interval`: the score on all such tasks is in it with 95 %."""
    if of.get("error") is None:
        return dict(of)
    half = INTERVAL * of["error"]
    return {**of, "interval": [of["reward"] - half, of["reward"] + half]}


def _table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table, a set in each, and one for each source of a set."""
    rows = [("set", "tasks", "samples", "score", "length", "truncated")]
    for name, of in scores.items():
        score = str(Score(name, of["reward"], of.get("error"))) if "reward" in of else "none"
        length = f"{of['length']:.1f}" if "length" in of else ""
        cut = f"{100 * of['truncated']:.1f} %" if "truncated" in of else ""
        rows.append((name, str(of["tasks"]), str(of["samples"]), score, length, cut))
        for source, reward in of.get("reward_by_source", {}).items():
            rows.append((f"  {source}", "", "", f"{reward:.3f}", "", ""))
        for k, rate in of["pass_at"].items():
            if k != "1":
                rows.append((f"  pass@{k}", "", "", f"{rate:.3f}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            f"{cell:<{width}}" if column in (0, 3) else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
