"""`run eval`: score a checkpoint of a run, or any model, on this machine, without training.

One node does an evaluation alone (--rollout-split eval-only) in a directory of its own. Its model is the
checkpoint. Of the run it only reads.
"""

import contextlib
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from coordinator.console.commands.export import merge_adapter
from coordinator.console.commands.interrupts import Interrupts
from coordinator.console.commands.local import as_overrides, follow
from coordinator.console.views.run import Run
from coordinator.console.views.scores import INTERVAL, Score
from coordinator.console.views.status_text import table
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import SCORES
from coordinator.journal.control_characters import plain
from coordinator.machine.children import Children
from coordinator.machine.run_command import STARTED_BY, run_command
from coordinator.protocol.exits import Exit
from coordinator.settings import loading
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.announcement import PLACES, title_text
from coordinator.start.refusals_of_models import refuse_run
from coordinator.start.run_json import NOT_STARTED, find_run
from coordinator.start.start import absolute, last_start
from rollout.engines.model_dir import is_adapter
from rollout.eval_settings import EvalSetSettings
from rollout.settings import TINY

KEPT = (
    "data_path",
    "cluster.local_dir",
    *(
        f"rollout.{name}"
        for name in ("stop", "tool_parser", "chat_template", "system_prompt", "max_prompt_tokens",
                     "reasoning_end", "thinking_tokens", "history", "concurrency", "group_timeout_s",
                     "on_reward_error", "reward_timeout_s", "reward_processes", "ratio_field", "seed",
                     "stall_timeout_s")
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
    checkpoint: str | None, root: Path | None, overrides: Mapping[str, Any], out: Path | None, as_json: bool
) -> int:
    """Evaluate, and print a table (or JSON); return the exit code. SettingsError: nothing was written.

    `checkpoint`: the number of an iteration of the run at `root` (0: what it started from; None: its newest
    one), or a directory. `out`: a new directory that keeps the samples; None: they are not kept.
    """
    settings = _settings(root, overrides)
    model = _model(checkpoint, root, settings)
    sets = _sets(settings)
    if out is not None and (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise SettingsError(f"-o {out}: is there already; give a new directory")
    values = dict(loading.flatten(settings.model_dump(mode="json")))
    settled = {
        **{key: values[key] for key in KEPT},
        **{key: overrides[key] for key in overrides if key.startswith("engine.")},
        # The default of a model without a run is fitted to its context.
        **{key: values[key] for key in LONGEST if root is not None or key in overrides},
        "model": str(model),
        "rl_phase": "rollout",
        "rollout_split": "eval-only",
        "iterations": 1,
        "eval.sets": sets,
    }
    with _directory(out) as directory:
        if is_adapter(model):
            settled["model"] = str(merge_adapter(model, directory / "model"))
        # Tasks to train on are asked for, and never used here: those of the run may be large.
        tasks = directory / "no_training.jsonl"
        tasks.write_text('{"messages": "none"}\n')
        code = _run(directory, {**settled, "tasks": str(tasks)}, is_kept=out is not None)
        if code != Exit.DONE:
            if code == Exit.USAGE and out is not None:
                shutil.rmtree(out)
            return code
        line = Run(directory).metrics()[-1]
    scores: dict[str, Any] = {name: _with_interval(entry) for name, entry in line[SCORES].items()}
    if as_json:
        print(json.dumps({"checkpoint": str(model), "sets": scores, "log_path": out and str(out)}))
    else:
        print("\n".join([f"checkpoint {model}", "", *_table(scores)]))
        print(f"\nsamples    {_where_samples(out)}")
    return exit_code(scores)


def _where_samples(out: Path | None) -> str:
    """Return the command that shows the samples; without `out` they are gone, so that which keeps them."""
    if out is None:
        return f"{shlex.join(['run', *sys.argv[1:]])} -o DIR keeps them, for run samples --log-path DIR"
    return f"run samples --log-path {shlex.quote(str(out))}"


def exit_code(scores: Mapping[str, Mapping[str, Any]]) -> Exit:
    """Return the exit code of an evaluation that has come to its end, and say which sets have no score."""
    without = [name for name, entry in scores.items() if "reward" not in entry]
    if without:
        text = f"run: no score of {', '.join(without)}: all samples were lost, for the reasons above"
        print(text, file=sys.stderr)
    return Exit.FAILED if without else Exit.DONE


def _settings(root: Path | None, overrides: Mapping[str, Any]) -> RunSettings:
    """Return the settings of the run's last start, with `overrides` over them; without a run the defaults."""
    overrides = absolute(overrides)
    if root is None:
        return loading.build({"model": "any", "tasks": "none", **overrides})  # the defaults, but no tasks
    last = last_start(root)
    if last is None:
        find_run(root)
        raise SettingsError(NOT_STARTED.format(root))
    return loading.overlay(RunSettings.published(last.settings), overrides)


def _model(checkpoint: str | None, root: Path | None, settings: RunSettings) -> Path:
    """Return the directory of the model, or of an adapter; SettingsError if there is none."""
    if checkpoint is not None and not checkpoint.isdecimal():
        directory = Path(checkpoint).absolute()
        if not directory.is_dir():
            problem = "no such directory; give the directory of a model, or the number of an iteration"
            raise SettingsError(f"--checkpoint {checkpoint}: {problem}")
        refuse_run("--checkpoint", directory, takes_adapters=True)
    elif root is None:
        raise SettingsError(
            f"--checkpoint {checkpoint or '(the newest)'} is of a run; add --log-path DIR, or give the "
            "directory of a model"
        )
    elif checkpoint is not None and int(checkpoint) == 0:
        directory = RunDir(root).base_model if settings.model == TINY else Path(settings.model)
        if not directory.is_dir():
            raise SettingsError(
                f"--checkpoint 0: {directory}, which the run started from, is not on this machine (yet); "
                "give one as --checkpoint DIR"
            )
    else:
        directory = Run(root).checkpoint(None if checkpoint is None else int(checkpoint))
    return directory


def _sets(settings: RunSettings) -> dict[str, Any]:
    """Return all sets of the settings as named ones, with what they inherit; SettingsError for none."""
    sets = settings.eval_sets
    if settings.evaluation_tasks is not None:
        name = OWN if OWN not in sets else "eval_tasks"
        unnamed = EvalSetSettings(tasks=settings.evaluation_tasks, columns=settings.eval_columns)
        with_own = settings.eval.model_copy(update={"sets": {name: unnamed}})
        sets = {**settings.model_copy(update={"eval": with_own}).eval_sets, **sets}
    if not sets:
        raise SettingsError(
            "there are no tasks to evaluate on; give --eval-tasks FILE, or eval.sets.NAME.tasks=FILE"
        )
    longest = {name: eval_set.max_tokens for name, eval_set in settings.eval.sets.items()}
    return {
        name: {**eval_set.model_dump(mode="json"), "max_tokens": longest.get(name)}
        for name, eval_set in sets.items()
    }


@contextlib.contextmanager
def _directory(out: Path | None) -> Generator[Path]:
    """Make the directory of the evaluation: `out`, or one that is removed at the end."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="flagpost-eval-") as temporary:
        yield Path(temporary)


def _run(log_path: Path, overrides: Mapping[str, Any], is_kept: bool) -> int:
    """Run the one node of the evaluation; its lines go to stderr. `is_kept`: the directory stays."""
    interrupts = Interrupts()
    argv = [*run_command("--master", "--log-path", str(log_path)), *as_overrides(overrides)]
    places = [title_text(title, "") for title in PLACES]

    def echo(line: str) -> None:
        if is_kept or not any(f"] {beginning}" in line for beginning in places):
            print(as_typed(plain(line)), file=sys.stderr)

    with Children() as children:
        environment = {STARTED_BY: shlex.join(["run", *sys.argv[1:]])}
        node = children.start("node-0", argv, env=environment, echo=echo)
        (code,) = follow([node], interrupts)
        children.close()
    return code if code >= 0 else Exit.LOST


def as_typed(line: str) -> str:
    """Return a line of the node with what was typed in place of the set that stands for --eval-tasks."""
    prefix = f"eval.sets.{OWN}."
    return line.replace(f"{prefix}tasks=", "--eval-tasks ").replace(f"{prefix}columns.", "eval.columns.")


def _with_interval(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of a set with `interval`: the score on all such tasks is in it with 95 %."""
    if scores.get("error") is None:
        return dict(scores)
    half = INTERVAL * scores["error"]
    return {**scores, "interval": [scores["reward"] - half, scores["reward"] + half]}


def _table(scores: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the lines of the table, a set in each, and one for each source of a set."""
    rows = [("set", "tasks", "samples", "score", "length", "truncated")]
    for name, entry in scores.items():
        score = str(Score(name, entry["reward"], entry.get("error"))) if "reward" in entry else "none"
        length = f"{entry['length']:.1f}" if "length" in entry else ""
        cut = f"{100 * entry['truncated']:.1f} %" if "truncated" in entry else ""
        rows.append((name, str(entry["tasks"]), str(entry["samples"]), score, length, cut))
        for source, reward in entry.get("reward_by_source", {}).items():
            rows.append((f"  {source}", "", "", f"{reward:.3f}", "", ""))
        for k, rate in entry["pass_at"].items():
            if k != "1":
                rows.append((f"  pass@{k}", "", "", f"{rate:.3f}", "", ""))
    return table(zip(*rows, strict=True), {"tasks", "samples", "length", "truncated"})
