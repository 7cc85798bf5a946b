"""`run rescore`: a new run that trains on the samples of another one with other rewards, and makes none anew.

It is a fork whose first iterations have the samples of the parent, scored by another reward. The new run
trains on them from the policy at which it begins; in the iterations behind them it generates.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.console.commands.fork import by_iteration, fork, refuse_unfinished, summary
from coordinator.console.views.rewards_before_after import BeforeAfter, table
from coordinator.directory import manifests, published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.journal.progress_reminder import progress_reminders
from coordinator.keeping import resume
from coordinator.settings import loading
from coordinator.settings.number_ranges import iterations_text, listed
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.eval_tasks import RunTasks
from coordinator.start.inputs import load_inputs
from coordinator.start.refusals_of_tasks import refuse_unscored
from coordinator.start.run_json import NOT_STARTED, find_run, fixed_of, refuse_changes
from coordinator.start.start import last_start
from coordinator.start.user_functions import load_functions
from rollout.environments.environment import OUTSIDE
from rollout.part_file import DamagedPart, PartHeader, decode_part, encode_part
from rollout.rewards.resolve import resolve_reward, weights_by_title
from rollout.rewards.reward import RewardError, score
from rollout.storage import files
from rollout.stuck_user_code import interrupting
from rollout.tasks.task_set import Task
from rollout.trajectory import Group

CONCURRENCY = 256
"""How many samples are scored at once, in whole groups, where rollout.concurrency does not say."""
PULSE_S = 0.1
"""How often the event loop says that no reward blocks it."""


def rescore(root: Path, first: int, last: int | None, reward: str, target: Path | None) -> None:
    """Score the samples of iterations `first` to `last` (None: the newest that has any) of the run at `root`
    by `reward`, print what that changes, and make a run at `target` that trains on them (None: make nothing).

    Nothing of the parent changes. Raises SettingsError if that cannot be; then there is nothing at `target`.
    """
    scorer = Rescorer(root, first, last, reward)
    try:
        if target is None:
            scorer.score_all()
            print("\n".join(table(scorer.iterations)))
            return
        forked = fork(root, first, target, scorer.write, replaced_by(reward))
    except RewardError as error:
        raise SettingsError(f"{error} (rollout.on_reward_error=run); nothing was made") from None
    except Incomplete as error:
        raise SettingsError(f"{error}; nothing was made") from None
    print("\n".join(table(scorer.iterations)))
    those = iterations_text(scorer.numbers)
    print(f"{those} have the samples of {root}: trained on with these rewards, and not generated again")
    print(summary(forked, first, target))


def replaced_by(reward: str) -> dict[str, Any]:
    """Return the settings of a run in which every source has this reward."""
    return {"rollout.reward": reward, "rollout.rewards": {}}


class Rescorer:
    """Scores samples of a run by another reward."""

    def __init__(self, root: Path, first: int, last: int | None, reward: str) -> None:
        """Read all that `rescore` needs. Raises SettingsError."""
        run, record = find_run(root), last_start(root)
        if record is None:
            raise SettingsError(NOT_STARTED.format(root))
        settings = RunSettings.published(record.settings)
        self._run_dir = RunDir(root)
        self._first = first
        self.numbers = self._with_samples(first, last)
        """The iterations whose samples are scored."""
        refuse_unfinished(self._run_dir, first, "rescored")
        _refuse(settings, self.numbers)
        self._code = load_functions(reward, "single_turn").reward
        # To score takes neither an engine nor tasks to evaluate on.
        replaced = {**replaced_by(reward), "cluster.place": (), "rollout_split": None, "eval.interval": 0}
        inputs = load_inputs(loading.overlay(settings, {**replaced, "rl_phase": "update"}), {})
        refuse_changes(run, fixed_of(settings, inputs))
        refuse_unscored(loading.overlay(settings, {**replaced, "rl_phase": "both"}), RunTasks(inputs.tasks))
        self._tasks: Sequence[Task] = inputs.tasks.tasks
        self._settings = settings.rollout
        self._reward = resolve_reward(reward)
        self._failure = ""
        """Why a sample, the last one of these, has got no reward."""
        self.iterations: list[BeforeAfter] = []
        """What was scored so far."""

    def _with_samples(self, first: int, last: int | None) -> list[int]:
        with_samples = [
            number
            for number, _ in by_iteration(self._run_dir.trajectories("train", 0).parent)
            if published.read_manifest(self._run_dir, "train", number) is not None
        ]
        last = max([first, *with_samples]) if last is None else last
        if last < first:
            raise SettingsError(f"--last {last}: is before --iteration {first}; give it or a later one")
        numbers = [*range(first, last + 1)]
        if lacking := sorted({*numbers} - {*with_samples}):
            raise SettingsError(
                f"--iteration {first}: {self._run_dir.root} has no samples of {iterations_text(lacking)}; "
                f"there are those of iterations {listed(sorted(with_samples))}"
            )
        return numbers

    def score_all(self) -> None:
        """Score all samples, and write nothing."""
        for number in self.numbers:
            for _ in self._scored_parts(number):
                continue

    def write(self, child: RunDir) -> None:
        """Score all samples, and write them as those of another run."""
        for number in self.numbers:
            directory = child.trajectories("train", number)
            files.make_directory(directory)
            header: PartHeader | None = None
            for name, header, groups in self._scored_parts(number):
                files.publish(directory / name, encode_part(groups, header))
            if header is not None:
                self._write_documents(child, number, header)
        run = published.read_json(child.run_json) or {}
        run["forked_from"]["rescored"] = self.numbers
        files.publish(child.run_json, json.dumps(run, indent=1).encode())

    def _write_documents(self, child: RunDir, number: int, header: PartHeader) -> None:
        """Write what says of an iteration that its samples are there."""
        before = published.read_manifest(self._run_dir, "train", number) or {}
        sampler = before["origin"]["policy_iteration"]
        mark = {"directory": str(self._run_dir.root), "policy_iteration": sampler}
        opened = self._opened(number) | {"reward": asdict(self._code), "policy_iteration": number - 1}
        opened |= {"eval_slots": 0, "rescored": mark}  # to evaluate is to generate
        files.publish(child.iteration_json(number), json.dumps(opened, indent=1).encode())
        directory, quota = child.trajectories("train", number), resume.quota(opened)
        document, groups = manifests.manifest(directory, number, quota, header.origin, short=None)
        document |= {name: before[name] for name in ("costs", "paces") if name in before}
        document |= {"generated": 0, "rescored": mark}
        manifests.publish_manifest(child.manifest("train", number), document, groups)

    def _opened(self, number: int) -> dict[str, Any]:
        return published.read_json(self._run_dir.iteration_json(number)) or {}

    def _scored_parts(self, number: int) -> Iterator[tuple[str, PartHeader, list[Group]]]:
        """Yield name, header and groups of each part of an iteration, with their new rewards."""
        manifest = published.read_manifest(self._run_dir, "train", number) or {}
        order: list[int] = self._opened(number)["tasks"]
        self.iterations.append(BeforeAfter(number))

        def doing() -> tuple[int, str]:
            scored = self.iterations[-1].samples
            return number, f"run: iteration {number}: {scored} of {manifest['samples']} samples are scored"

        with progress_reminders(doing, say=print):
            for entry in manifest["parts"]:
                header, groups = self._read(number, entry["file"], entry["sha256"])
                groups = [group for group in groups if group.slot in entry["slots"]]
                titles = weights_by_title(header.reward.name) or {}
                tasks = [self._tasks[order[group.slot]] for group in groups]
                end = header.sampling.reasoning_end
                asyncio.run(self._score(groups, tasks, titles, end))
                # Of the parent's policies the new run has no later one, so they are as old as this one.
                policy = min(header.policy_iteration, self._first - 1)
                yield entry["file"], replace(header, reward=self._code, policy_iteration=policy), groups
        scored = self.iterations[-1]
        if scored.samples and scored.failed == scored.samples:
            raise SettingsError(
                f"no sample of iteration {number} has got a reward: {self._failure}; nothing was made"
            )

    def _read(self, number: int, name: str, sha256: str) -> tuple[PartHeader, list[Group]]:
        path = self._run_dir.trajectories("train", number) / name
        try:
            data = files.read(path)
            if hashlib.sha256(data).hexdigest() != sha256:
                raise Incomplete(f"{path} differs from the manifest's checksum")
            return decode_part(data)
        except (FileNotFoundError, DamagedPart) as error:
            raise Incomplete(f"{path}: {error}") from None

    async def _score(
        self, groups: Sequence[Group], tasks: Sequence[Task], before: Collection[str], end: str | None
    ) -> None:
        """Give the samples of the groups their new rewards. `before`: what the old rewards are called, of
        which no metric stays; `end`: what ends the reasoning in a sample.
        """
        most = max([1, *(len(group.samples) for group in groups)])
        places = asyncio.Semaphore(max(1, (self._settings.concurrency or CONCURRENCY) // most))
        scoring = partial(self._score_group, places=places, before=before, end=end)
        with interrupting(self._settings.group_timeout_s, "rollout.group_timeout_s") as say_free:
            pulse = asyncio.create_task(_pulse(say_free))
            try:
                await asyncio.gather(*map(scoring, groups, tasks))
            finally:
                pulse.cancel()
                await self._reward.close()

    async def _score_group(
        self,
        group: Group,
        task: Task,
        *,
        places: asyncio.Semaphore,
        before: Collection[str],
        end: str | None,
    ) -> None:
        if not group.samples:
            return
        rewards = [float(sample.reward or 0.0) for sample in group.samples]
        for sample in group.samples:
            sample.reward = None
            for name in [name for name in sample.metrics if name.partition(".")[0] in before]:
                del sample.metrics[name]
        async with places:
            failures = await self._failures(group, task, end)
        if failures:
            self._failure = failures[-1]
        self.iterations[-1].add(group, rewards, [sample.reward for sample in group.samples])
        group.failed = [*group.failed, *failures]
        group.samples = [sample for sample in group.samples if sample.reward is not None]
        group.given_up = None if group.samples else f"no sample is left: {group.failed[0]}"

    async def _failures(self, group: Group, task: Task, end: str | None) -> list[str]:
        """Score the samples of a group. Returns why some have got no reward."""
        limit_s = self._settings.group_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                errors = await score(self._reward, task, group.samples, self._settings, end)
        except TimeoutError:
            hint = "an async reward that computes should be a plain function"
            return [f"took longer than rollout.group_timeout_s={limit_s:g}; {hint}"]
        except SystemExit as error:  # of the user's code, which must not end this command mute
            return [f"SystemExit: {error}"]
        if errors and self._settings.on_reward_error == "run":
            raise errors[0]
        return [str(error) for error in errors]


async def _pulse(say_free: Callable[[], None]) -> None:
    """Say that the event loop is free, for ever: a reward that keeps this from being said is ended."""
    while True:
        say_free()
        await asyncio.sleep(PULSE_S)


def _refuse(settings: RunSettings, numbers: Sequence[int]) -> None:
    """Raise SettingsError where other rewards would change nothing, or too much."""
    environment = settings.rollout.environment
    each_source = settings.trainer.of_all_sources
    if all(each.clip == "likelihood" and each.advantage in ("one", "zero") for each in each_source):
        raise SettingsError(
            f"trainer.algorithm={settings.trainer.algorithm}: its samples teach by themselves, so another "
            "reward changes nothing"
        )
    if environment.partition(":")[0] in OUTSIDE:
        raise SettingsError(
            f"--environment {environment}: it gives the rewards itself, also in the iterations that the new "
            "run generates; repair it there, and use run fork"
        )
    if settings.rollout.segment_tokens is not None:
        raise SettingsError(
            f"rollout.segment_tokens={settings.rollout.segment_tokens}: samples of one iteration are scored "
            "in another one, and cannot be scored anew; use run fork"
        )
    limit = settings.trainer.max_off_policy_steps
    if limit is not None and len(numbers) - 1 > limit:
        raise SettingsError(
            f"--last {numbers[-1]}: trainer.max_off_policy_steps={limit} leaves out samples of policies that "
            f"are {len(numbers) - 1} trainings old; rescore up to --last {numbers[0] + limit}"
        )
    if len(numbers) > 1 and not all(each.corrects_for_age for each in each_source):
        raise SettingsError(
            f"--last {numbers[-1]}: the samples behind iteration {numbers[0]} are of policies that the new "
            "run does not have, for which trainer.engine_correction=off does not correct; rescore iteration "
            f"{numbers[0]} alone: --last {numbers[0]}"
        )
