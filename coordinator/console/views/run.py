"""`from coordinator import Run`: read a run directory from programs and notebooks, or start a run there.

Reading writes nothing.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.console.views.status import StatusReader
from coordinator.directory import published
from coordinator.directory.file_names import parse_iteration_name
from coordinator.directory.layout import Kind, RunDir
from coordinator.directory.published import Incomplete
from coordinator.machine.run_command import run_command, settings_of
from coordinator.protocol.exits import OUTCOMES
from coordinator.settings.number_ranges import iterations_text
from coordinator.settings.tree import SettingsError

if TYPE_CHECKING:
    from rollout.trajectory import Group


LOOK_S = 0.2


class Run:
    """A run, while it works or afterwards.

        from coordinator import Run

        run = Run("/shared/exp1")
        print(run.status()["state"])
        print([line["reward"] for line in run.metrics()])
        for group in run.trajectories(run.iterations()[-1]):
            print(group.prompt, [sample.reward for sample in group.samples])
        model = AutoModelForCausalLM.from_pretrained(run.checkpoint())

    Every call reads the directory again. A lasting error of the shared directory is an `OSError` with the
    path. A question without an answer (no run, no such iteration) is a `SettingsError`: one line that says
    what there is.
    """

    def __init__(self, log_path: str | Path) -> None:
        """`log_path`: as for `run --log-path`. SettingsError if no run is there."""
        self.run_dir = RunDir(Path(log_path).absolute())
        self._reader = StatusReader(self.run_dir.root)
        self._reader.open()

    @staticmethod
    def start(log_path: str | Path, settings: Mapping[str, Any] | None = None) -> "StartedRun":
        """Start the nodes of a run as processes of this machine, as `run local` does; return it once its
        directory is there. A run that is there already is resumed.

        `settings`: by name, as `run` takes them. The run goes on when this program ends. SettingsError says
        what `run local` refuses, in its words.

            >>> run = Run.start("runs/sums", {"iterations": 3, "rollout.max_tokens": 8})
            >>> run.wait(), run.metrics()[-1]["reward"]
            ('finished', 0.953125)
        """
        return StartedRun(log_path, settings or {})

    def status(self) -> dict[str, Any]:
        """Return the document of `run status --json`: where each node is, what it waits for, its tasks done.

        `crews` has the same of each crew, where one generates and another trains.

        >>> run.status()["waiting_for"]
        [2]
        """
        return self._reader.read()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl, one per finished iteration, in order.

        An iteration whose rollout and update ran separately has a line for each `kind`. The mean of each
        metric of rewards and environments is in `sample_metrics` by its name, of an evaluation in
        `eval_sample_metrics`; None if there are none.

            >>> run.metrics()[-1]["reward"]
            0.953125
            >>> run.metrics()[-1]["sample_metrics"]
            {'tries': 1.75}
        """
        return published.metrics_lines(self.run_dir)

    def iterations(self) -> list[int]:
        """Return the finished iterations, in order."""
        return sorted({line["iteration"] for line in self.metrics()})

    def trajectories(self, iteration: int, kind: Kind = "train") -> "Iterator[Group]":
        """Return an iterator over the groups of an iteration's manifest, by slot. All files are read now, and
        each is verified against the manifest.

        A group has `slot`, `task_id`, `prompt` and `samples` (see rollout.trajectory.Sample), each with
        `token_ids`, `loss_mask`, `logprobs`, `text`, `reward`, `metrics` and `turns`, the conversation after
        the prompt (empty if that is `text`). A group that was given up has no samples and says why in
        `given_up`. `kind`: "train" or "eval". SettingsError if the iteration has no groups (yet),
        `published.Incomplete` if a file is missing or damaged.

            >>> max(sample.reward for group in run.trajectories(3) for sample in group.samples)
            1.0
            >>> [(turn.role, turn.text) for turn in next(run.trajectories(3)).samples[0].turns]
            [('assistant', '<<27+58>>'), ('environment', '=85\\n'), ('assistant', '58')]
        """
        from coordinator.directory.manifests import read_groups  # it takes numpy

        manifest = published.read_manifest(self.run_dir, kind, iteration)
        if manifest is None:
            collected = self.collected(kind)
            choices = (
                f"there are trajectories of {iterations_text(collected)}"
                if collected
                else "there are none yet"
            )
            raise SettingsError(
                f"{self.run_dir.root}: no {kind} trajectories of iteration {iteration}; {choices}"
            )
        return iter(read_groups(self.run_dir.trajectories(kind, iteration), manifest))

    def checkpoint(self, iteration: int | None = None, *, verify: bool = True) -> Path:
        """Return the directory of the newest undamaged checkpoint, or of the checkpoint of `iteration`.

        `from_pretrained` and `vllm serve` load it. `verify`: compare the size and checksum of every file with
        its result.json. SettingsError if there is none, or if the checkpoint of `iteration` is damaged.

            >>> run.checkpoint(5)
            PosixPath('/shared/exp1/checkpoints/iteration_000005')
        """
        checkpoints = published.checkpoints(self.run_dir)
        candidates = list(reversed(checkpoints)) if iteration is None else [iteration]
        damage = ""
        for number in candidates:
            if number not in checkpoints:
                choices = (
                    f"there are checkpoints of {iterations_text(checkpoints)}"
                    if checkpoints
                    else "there is none yet"
                )
                raise SettingsError(f"{self.run_dir.root}: no checkpoint of iteration {number}; {choices}")
            directory = self.run_dir.checkpoint(number)
            try:
                if verify:
                    published.verify_checkpoint(directory)
                return directory
            except Incomplete as error:
                damage = damage or f"; {str(error).splitlines()[0]}"
        scope = "" if iteration is None else f" of iteration {iteration}"
        raise SettingsError(f"{self.run_dir.root}: no whole checkpoint{scope}{damage}")

    def collected(self, kind: Kind = "train") -> list[int]:
        """Return the iterations that `trajectories` can read, in order."""
        directory = self.run_dir.trajectories(kind, 0).parent
        numbers = [number for name in published.names(directory) if (number := parse_iteration_name(name))]
        manifests = {number: self.run_dir.manifest(kind, number) for number in sorted(numbers)}
        return [number for number, path in manifests.items() if path.name in published.names(path.parent)]


class StartedRun(Run):
    """A run whose nodes this program has started; see Run.start."""

    def __init__(self, log_path: str | Path, settings: Mapping[str, Any]) -> None:
        root = Path(log_path).absolute()
        words = ["local", f"--log-path={root}"]
        words += [f"{name}={json.dumps(value)}" for name, value in settings.items()]
        settings_of(words)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._output.close)
        # Ctrl+C in this program's terminal is not the run's.
        self._process = subprocess.Popen(
            run_command(*words),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while True:
            has_ended = self._process.poll() is not None
            try:
                super().__init__(root)
                return
            except SettingsError:
                if has_ended:
                    lines = self.output().strip().splitlines()
                    raise SettingsError(lines[-1] if lines else f"{root}: no run was made") from None
            time.sleep(LOOK_S)

    def output(self) -> str:
        """Return the output of `run local` so far; `run logs` has the lines of each node."""
        descriptor = self._output.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def wait(self, timeout_s: float | None = None) -> str:
        """Return how the run has ended: finished, failed, lost or stopped. Raises TimeoutError."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.run_dir.root} goes on after {timeout_s:g} s") from None
        return OUTCOMES.get(code, "failed")

    def stop(self, now: bool = False) -> None:
        """Stop the run in order, as one Ctrl+C; `now`: end each node at once."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM if now else signal.SIGINT)
