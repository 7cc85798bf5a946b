"""`from coordinator import Run`: a run directory for programs and notebooks. Nothing is written."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.directory import published
from coordinator.directory.layout import Kind, RunDir, parse_iteration_name
from coordinator.directory.published import Incomplete
from coordinator.settings import SettingsError
from coordinator.views.status import StatusReader

if TYPE_CHECKING:
    from rollout.trajectory import Group


class Run:
    """A run, while it goes on or afterwards.

        from coordinator import Run

        run = Run("/shared/exp1")
        print(run.status()["state"])
        print([line["reward"] for line in run.metrics()])
        for group in run.trajectories(run.iterations()[-1]):
            print(group.prompt, [sample.reward for sample in group.samples])
        model = AutoModelForCausalLM.from_pretrained(run.checkpoint())

    Every call reads anew. Errors of the shared directory that do not pass are `OSError`s with the path; a
    question that has no answer (no run, no such iteration) is a `SettingsError`, one line that says what
    there is.
    """

    def __init__(self, log_path: str | Path) -> None:
        """`log_path`: as of `run --log-path`. SettingsError if no run is there."""
        self.run_dir = RunDir(Path(log_path).absolute())
        self._reader = StatusReader(self.run_dir.root)
        self._reader.open()

    def status(self) -> dict[str, Any]:
        """Who is where, what it waits for, tasks done: what `run status --json` prints.

        >>> run.status()["waiting_for"]
        [2]
        """
        return self._reader.read()

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl: one a finished iteration, in order, each once, and whole ones only.

        An iteration whose rollout and update ran apart has one of each `kind`.

            >>> run.metrics()[-1]["reward"]
            0.953125
        """
        return published.metrics_lines(self.run_dir)

    def iterations(self) -> list[int]:
        """The finished iterations, in order."""
        return sorted({line["iteration"] for line in self.metrics()})

    def trajectories(self, iteration: int, kind: Kind = "train") -> "Iterator[Group]":
        """The groups of an iteration that count, by slot; every file is verified against the manifest first.

        A group has `slot`, `task_id`, `prompt` and `samples`, each with `token_ids`, `logprobs`, `text` and
        `reward`; one that was given up has no samples and says why in `given_up`. `kind`: "train" or "eval".
        SettingsError if the iteration has none (yet), `published.Incomplete` if a file is gone or damaged.

            >>> max(sample.reward for group in run.trajectories(3) for sample in group.samples)
            1.0
        """
        from coordinator.directory.parts import read_groups  # it takes numpy

        manifest = published.read_manifest(self.run_dir, kind, iteration)
        if manifest is None:
            there = [number for number in self._collected(kind) if self._has_manifest(kind, number)]
            found = f"there are those of {_listed(there)}" if there else "there are none yet"
            raise SettingsError(
                f"{self.run_dir.root}: no {kind} trajectories of iteration {iteration}; {found}"
            )
        return iter(read_groups(self.run_dir.trajectories(kind, iteration), manifest))

    def checkpoint(self, iteration: int | None = None, *, verify: bool = True) -> Path:
        """The directory of a checkpoint, which `from_pretrained` and `vllm serve` load: the newest whole one,
        or that of `iteration`. `verify`: every file has the size and checksum that its result.json names.

        SettingsError if there is none, or the one that was asked for is damaged.

            >>> run.checkpoint(5)
            PosixPath('/shared/exp1/checkpoints/iteration_000005')
        """
        there = published.checkpoints(self.run_dir)
        wanted = list(reversed(there)) if iteration is None else [iteration]
        damage = ""
        for number in wanted:
            if number not in there:
                found = f"there are those of {_listed(there)}" if there else "there is none yet"
                raise SettingsError(f"{self.run_dir.root}: no checkpoint of iteration {number}; {found}")
            directory = self.run_dir.checkpoint(number)
            try:
                if verify:
                    published.verify_checkpoint(directory)
                return directory
            except Incomplete as error:
                damage = damage or f"; {str(error).splitlines()[0]}"
        asked = "" if iteration is None else f" of iteration {iteration}"
        raise SettingsError(f"{self.run_dir.root}: no whole checkpoint{asked}{damage}")

    def _collected(self, kind: Kind) -> list[int]:
        directory = self.run_dir.trajectories(kind, 0).parent
        found = (parse_iteration_name(name) for name in published.names(directory))
        return sorted(number for number in found if number is not None)

    def _has_manifest(self, kind: Kind, iteration: int) -> bool:
        path = self.run_dir.manifest(kind, iteration)
        return path.name in published.names(path.parent)


def _listed(numbers: list[int]) -> str:
    """`iterations 1 to 12`; `iterations 5, 10` where some are missing."""
    first, last = numbers[0], numbers[-1]
    if last > first and last - first == len(numbers) - 1:
        return f"iterations {first} to {last}"
    return f"iteration{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
