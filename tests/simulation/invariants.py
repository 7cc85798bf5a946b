"""What must hold whatever happens, watched at every change on disk and looked over at the end.

- What is published (run.json, epoch records, iteration.json, parts, manifests, checkpoints, metrics) never
  changes, and is never set aside: nothing damages anything in a simulation.
- A flag of an epoch is raised by the process that the epoch's record lists, and by nobody else; a node goes
  on at flags of its own epoch alone; once all have entered an epoch, an older one passes no phase of all
  nodes but the one that it is in. A flag is removed once nobody waits for it, or its epoch has ended.
- A chunk is claimed by one process, in its epoch. No slot is in two chunks of a plan, and the groups of an
  epoch are made once: no two ranks have parts with the same slot.
- A manifest has as many groups as are needed, each in exactly one entry (all slots, where none is spare);
  groups that were durable when the nodes entered an epoch are in no share of its plan, and in the manifest,
  unless an earlier part has their slots or they are spare.
- Iteration i is sampled by the policy of iteration max(0, i - 1 - K), and trained from that of i - 1.
- With segments, an iteration goes on with all that the one before has left unfinished; each span of a sample
  is by the policy of its iteration; a group ends once, after as many iterations as its longest sample needs.
  No evaluation is cut.
- metrics.jsonl has every iteration once, in order; checkpoints follow from the trajectories as they do in a
  run that nobody disturbs.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.collector.unfinished_samples import BegunGroup
from coordinator.directory import published
from coordinator.directory.file_names import (
    DOCUMENT,
    ENTER,
    OK,
    Claim,
    Flag,
    PartName,
    Record,
    parse_claim_name,
    parse_iteration_name,
    parse_part_name,
    parse_protocol_name,
)
from coordinator.directory.layout import GUESTS, MASTER, REMOVED, Kind, RunDir
from coordinator.keeping import resume
from coordinator.node.flags import Flags
from coordinator.protocol.failed_starts import NOT_STARTED
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import EpochRecord
from coordinator.settings.tree import Crew
from rollout.part_file import decode_part
from rollout.quota import Quota
from rollout.trajectory import UNFINISHED, Group, Sample, Span
from tests.simulation.scheduler import Process
from tests.simulation.world import NodeProcess, World

PHASES_OF_ALL = {Phase(phase) for phase in (2, 3, 6, 7, 10, 12, 13)}
CHANGES = {"replace", "rename", "rmtree", "rmdir", "unlink"}
SET_ASIDE = (".damaged", ".foreign")
ONCE = {"run.json", "iteration.json", "manifest.json"}


class Invariants:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._disk = world.disk
        self._run_dir = world.run_dir
        self._published: dict[Path, str] = {}
        """sha256 of every output that must not change."""
        self._records: dict[tuple[Crew, int], EpochRecord] = {}
        """Also those that have been removed."""
        self._metrics = b""
        self._level = world.settings.get("cluster.max_async_level", 0)
        self._policies: dict[int, str] = {}
        """The digest that each iteration's training has made."""
        self._raised: dict[tuple[Crew, Flag], tuple[Process, int]] = {}
        """Who raised each flag, as which incarnation. Here a flag is the same with and without a document."""
        self._waited: dict[tuple[Crew, Flag], set[int]] = {}
        """The ranks that have gone on at each flag."""
        self._claimed: dict[tuple[Crew, Claim], NodeProcess] = {}
        """Who has claimed each chunk."""
        self._entered_s: dict[tuple[Crew, int], float] = {}
        """When the last member of an epoch raised `enter`."""
        self._late_phases: Counter[tuple[Crew, int]] = Counter()
        self._parts: dict[tuple[str, PartName], tuple[float, str, set[int]]] = {}
        """(directory, name) of each part: when it was published, its policy, its slots."""
        self._ended: set[tuple[int, int]] = set()
        """Where the groups were begun (iteration and slot) that have ended."""
        self._disk.after = self._after
        world.patches.append(self._watch_waits)

    def _watch_waits(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Flags, "wait_members", self._watched_wait(Flags.wait_members))
        patch.setattr(Flags, "wait_master", self._watched_wait(Flags.wait_master))

    # ---- changes on disk

    def _after(self, process: Process, operation: str, path: Path, target: Path | None) -> None:
        process = process.acts_for or process
        made = path if target is None else target
        if made.name.endswith(SET_ASIDE):
            self._violate(process, f"sets {path} aside, which nothing has damaged")
        if operation == "rename" and made.name.startswith(REMOVED):
            is_checkpoint = path.parent == self._run_dir.checkpoints
            (self._forget if is_checkpoint else self._forget_iteration)(process, path)
        if operation == "unlink" and isinstance(record := _entry(made), Record):
            self._forget_record(process, made, record)
        if operation == "unlink" and isinstance(flag := _entry(made), Flag):
            self._check_lowered(process, _crew(made), flag)
        if made.name == "iteration.unused":
            self._forget_opening(process, path)
        if operation in CHANGES:
            changed = tuple({f"{path}/", f"{made}/"})
            for output in self._published:
                if f"{output}/".startswith(changed) and not self._is_unchanged(output):
                    self._violate(process, f"{operation} {path} -> {target} changes the output {output}")
        if operation == "unlink" and (claim := parse_claim_name(path.name)):
            self._claimed.pop((_crew(path), claim), None)  # nobody reads it any more
        if operation in {"link", "open"} and (claim := parse_claim_name(made.name)):
            self._check_claim(process, _crew(made), claim)
        if operation in {"link", "replace"} and isinstance(record := _entry(made), Record):
            self._record(_crew(made), record.epoch)
        if operation == "link" and (made.name in ONCE or isinstance(_entry(made), Record)):
            self._publish(made)
            if made.name == "manifest.json":
                self._check_manifest(process, made)
        elif operation in {"open", "replace"} and isinstance(flag := _entry(made), Flag):
            self._check_flag(process, _crew(made), flag)
        elif operation == "replace" and (name := parse_part_name(made.name)):
            self._take_part(process, made, name)
        elif operation == "rename" and parse_iteration_name(made.name):
            for file in sorted(made.rglob("*")):
                if file.is_file():
                    self._publish(file)
            if made.parent == self._run_dir.checkpoints:
                self._check_checkpoint(process, made)
        elif operation == "appended":
            self._check_metrics(process)
        if operation in {"link", "replace"} and made.name == "iteration.json":
            self._check_is_open(process, made, parse_iteration_name(made.parent.name))

    def _publish(self, path: Path) -> None:
        self._published.setdefault(path, hashlib.sha256(path.read_bytes()).hexdigest())

    def _forget(self, process: Process, checkpoint: Path) -> None:
        """A checkpoint is removed because newer ones are kept."""
        kept = {path.parent for path in self._published if path.parent.parent == self._run_dir.checkpoints}
        newer = [path for path in kept if path.name > checkpoint.name]
        if len(newer) < max(self._world.settings["checkpoints.keep_last"], self._level + 1):
            self._violate(process, f"removes {checkpoint}, of which there are only {len(newer)} newer ones")
        if not any((path / published.VERIFIED).is_file() for path in newer):
            self._violate(process, f"removes {checkpoint}, and none of {newer} was read back")
        for path in [path for path in self._published if checkpoint in path.parents]:
            del self._published[path]

    def _forget_record(self, process: Process, path: Path, record: Record) -> None:
        """A record is removed because newer ones are there."""
        entries = map(_entry, path.parent.iterdir())
        newer = [entry for entry in entries if isinstance(entry, Record) and entry.epoch > record.epoch]
        if len(newer) < 3:
            self._violate(process, f"removes {path.name}, of which there are only {len(newer)} newer ones")
        self._published.pop(path, None)

    def _forget_iteration(self, process: Process, directory: Path) -> None:
        """Trajectories, or a batch, are removed because newer ones are kept, which are trained."""
        number, checkpoints = parse_iteration_name(directory.name), published.checkpoints(self._run_dir)
        finished = [line["iteration"] for line in published.metrics_lines(self._run_dir)]
        kept_from = max(finished, default=0) - self._world.settings["trajectories.keep_last"] + 1
        if number is None or number >= min(kept_from, 1 + min(checkpoints, default=0)):
            self._violate(process, f"removes {directory}; finished: {finished}, checkpoints: {checkpoints}")
        for path in [path for path in self._published if directory in path.parents]:
            del self._published[path]

    def _forget_opening(self, process: Process, opening: Path) -> None:
        """An iteration is opened anew because nothing was made with it."""
        finished = {Path(directory).name for directory, _name in self._parts}
        if opening.parent.name in finished:
            self._violate(process, f"opens {opening} anew, and parts were made with it")
        del self._published[opening]

    def _is_unchanged(self, path: Path) -> bool:
        return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == self._published[path]

    def _take_part(self, process: Process, path: Path, name: PartName) -> None:
        header, groups = decode_part(path.read_bytes())
        slots = {group.slot for group in groups}
        for (where, other), (_, _, theirs) in self._parts.items():
            is_same = where == str(path.parent) and other.epoch == name.epoch and other.rank != name.rank
            is_same = is_same and max(other.rank, name.rank) < GUESTS  # one that is silent may come back
            if is_same and slots & theirs and name.epoch >= max(epoch for _, epoch in self._entered_s):
                self._violate(process, f"makes {sorted(slots & theirs)} again, which {other.name} has")
        self._check_is_open(process, path, parse_iteration_name(path.parent.name))
        self._parts[str(path.parent), name] = (self._world.scheduler.now_s, header.policy, slots)
        self._publish(path)

    def _check_checkpoint(self, process: Process, path: Path) -> None:
        result, number = published.read_result(path), parse_iteration_name(path.name)
        assert number is not None
        self._policies[number] = result.policy
        if number > 1 and result.base_policy != self._policies[number - 1]:
            self._violate(process, f"{path} was trained from {result.base_policy}: {self._policies}")

    def _check_is_open(self, process: Process, path: Path, iteration: int | None) -> None:
        """Nothing names an iteration before the policy that samples it is published."""
        sampler = max(0, (iteration or 0) - 1 - self._level)
        if sampler and sampler not in self._policies:
            self._violate(process, f"makes {path}, and policy {sampler} is not published: {self._policies}")

    def _check_sampler(self, process: Process, path: Path, manifest: dict[str, Any]) -> None:
        number = max(0, manifest["iteration"] - 1 - self._level)
        said = manifest["origin"]["policy_iteration"]
        if said != number or (number and manifest["policy"] != self._policies[number]):
            self._violate(process, f"{path} is of policy {said}, {manifest['policy']}: {self._policies}")

    def _check_metrics(self, process: Process) -> None:
        now = self._run_dir.metrics.read_bytes()
        if not now.startswith(self._metrics):
            self._violate(process, "metrics.jsonl has changed")
        self._metrics = now
        lines = [line["iteration"] for line in published.metrics_lines(self._run_dir)]
        if lines != list(range(1, len(lines) + 1)):
            self._violate(process, f"metrics.jsonl has the iterations {lines}")
        if not set(lines) <= set(self._policies):
            self._violate(process, f"metrics.jsonl has {lines}; published policies: {self._policies}")

    # ---- flags

    def _check_flag(self, process: Process, crew: Crew, flag: Flag) -> None:
        if flag.kind == NOT_STARTED:
            return  # raised by who is in no epoch; no verdict heeds it
        record = self._record(crew, flag.epoch)
        member = record.members.get(flag.rank) if record else None
        incarnation = process.incarnation if isinstance(process, NodeProcess) else 0
        is_lobbys = record is not None and record.kind == "lobby" and flag.rank == MASTER
        listed = record.master_incarnation if record and is_lobbys else member.incarnation if member else 0
        raised = self._raised.setdefault((crew, _plain(flag)), (process, incarnation))
        if incarnation != listed or raised[0] is not process:
            self._violate(process, f"raises {flag.name}, which incarnation {listed} has to")
        if record is None:
            return
        if _plain(flag).kind == ENTER and not self._absent(crew, flag, record):
            self._entered_s.setdefault((crew, flag.epoch), self._world.scheduler.now_s)
        if flag.is_done and flag.rank == MASTER:
            self._check_row(process, crew, flag, record)

    def _check_lowered(self, process: Process, crew: Crew, flag: Flag) -> None:
        """A flag is removed."""
        record = self._record(crew, flag.epoch)
        if record is None or not flag.is_done or self._has_later(crew, flag.epoch):
            return
        waiting = set(record.members) - {MASTER} if flag.rank == MASTER else {MASTER}
        if left := waiting - self._waited.get((crew, _plain(flag)), set()):
            self._violate(process, f"removes {flag.name}, at which {sorted(left)} have not gone on")

    def _has_later(self, crew: Crew, epoch: int) -> bool:
        return max((number for of, number in self._entered_s if of == crew), default=0) > epoch

    def _absent(self, crew: Crew, flag: Flag, record: EpochRecord) -> list[int]:
        """The members of an epoch that have not raised this flag."""
        place = (crew, flag[:3], _plain(flag).kind)
        raised = {flag.rank for of, flag in self._raised if (of, flag[:3], flag.kind) == place}
        return sorted(record.members.keys() - raised)

    def _check_row(self, process: Process, crew: Crew, flag: Flag, record: EpochRecord) -> None:
        """The master says that a phase is over."""
        phase = Phase(flag.phase)
        epoch: tuple[Crew, int] = (crew, flag.epoch)
        if epoch not in self._entered_s:
            self._violate(process, f"passes {flag.name} before all have entered")
            return
        if phase in PHASES_OF_ALL:
            if absent := self._absent(crew, flag, record):
                self._violate(process, f"passes {flag.name} without {absent}")
            if self._has_later(crew, flag.epoch):
                self._late_phases[epoch] += 1
                if self._late_phases[epoch] > 1 and len(record.members) > 1:  # a node alone asks nobody
                    self._violate(
                        process, f"epoch {flag.epoch} passes another phase of all nodes: {flag.name}"
                    )
        if phase in {Phase.TRAIN_PLAN, Phase.EVAL_DECISION}:
            plan = json.loads((RunDir(self._run_dir.root, crew).entry(flag)).read_bytes())
            kind: Kind = "train" if phase is Phase.TRAIN_PLAN else "eval"
            durable = self._durable(kind, flag.iteration, self._entered_s[epoch])
            planned = _planned(plan)
            if again := durable & set(planned):
                self._violate(process, f"{flag.name} has slots {sorted(again)} generated again")
            if len(set(planned)) != len(planned):
                self._violate(process, f"{flag.name} gives slots to two: {planned}")

    def _check_claim(self, process: Process, crew: Crew, claim: Claim) -> None:
        """A chunk is claimed by one process, of the epoch that it says."""
        record = self._record(crew, claim.epoch)
        assert isinstance(process, NodeProcess)
        if process.rank >= GUESTS or claim.kind != "c":
            self._check_guest(process, crew, claim)
            return
        member = record.members.get(process.rank) if record else None
        if member is None or member.incarnation != process.incarnation:
            self._violate(process, f"claims {claim.name}, of an epoch in which it is not")
        self._check_is_open(process, self._run_dir.claims / claim.name, claim.iteration)
        if self._claimed.setdefault((crew, claim), process) is not process:
            self._violate(process, f"claims {claim.name}, which is another's")

    def _check_guest(self, process: NodeProcess, crew: Crew, claim: Claim) -> None:
        """A guest claims what is free, and says what it has made; the master alone gives back for others."""
        owner = self._claimed.get((crew, claim._replace(kind="c")))
        if claim.kind == "c" and self._claimed.setdefault((crew, claim), process) is not process:
            self._violate(process, f"claims {claim.name}, which is another's")
        if claim.kind == "m" and owner not in {process, None}:  # None: it is removed, in a newer epoch
            self._violate(process, f"says {claim.name}, and the chunk is not its own")
        is_masters = process.rank == MASTER and owner is not None and owner.rank >= GUESTS
        if claim.kind == "b" and owner not in {process, None} and not is_masters:
            self._violate(process, f"gives back {claim.name}, and the chunk is not its own")

    def _durable(self, kind: Kind, iteration: int, entered_s: float) -> set[int]:
        """The slots that were finished when the nodes entered an epoch."""
        directory = str(self._run_dir.trajectories(kind, iteration))
        return {
            slot
            for (where, _), (published_s, _policy, slots) in self._parts.items()
            if where == directory and published_s < entered_s
            for slot in slots
        }

    def _watched_wait(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def wait(flags: Flags, iteration: int, phase: int) -> Any:
            result = real(flags, iteration, phase)
            process = self._world.scheduler.process
            assert isinstance(process, NodeProcess) and process.node is not None
            record, crew = process.node.record, process.node.run_dir.crew
            awaited = [MASTER] if process.rank != MASTER else [rank for rank in record.members if rank]
            for rank in awaited:
                flag = Flag(record.epoch, iteration, int(phase), rank, OK if iteration else ENTER)
                self._waited.setdefault((crew, flag), set()).add(process.rank)
                by, incarnation = self._raised.get((crew, flag), (None, 0))
                if by is None or record.members[rank].incarnation != incarnation:
                    self._violate(process, f"goes on at {flag.name}, raised by {by and by.name}")
            return result

        return wait

    # ---- manifests

    def _check_manifest(self, process: Process, path: Path) -> None:
        manifest = json.loads(path.read_bytes())
        taken = {slot: entry for entry in manifest["parts"] for slot in entry["slots"]}
        count = sum(len(entry["slots"]) for entry in manifest["parts"])
        quota = _quota(path, manifest)
        groups = [
            group
            for entry in manifest["parts"]
            for group in decode_part((path.parent / entry["file"]).read_bytes())[1]
            if group.slot in entry["slots"]
        ]
        counted = sum(map(quota.counts, groups))
        if count != len(taken) or counted != quota.needed or not set(taken) <= set(range(quota.slots)):
            self._violate(process, f"{path} does not have the groups it needs once: {manifest['parts']}")
        for entry in manifest["parts"]:
            name, file = parse_part_name(entry["file"]), path.parent / entry["file"]
            assert name is not None
            if hashlib.sha256(file.read_bytes()).hexdigest() != entry["sha256"]:
                self._violate(process, f"{path} has another checksum for {file}")
            if not set(entry["slots"]) <= self._parts[str(path.parent), name][2]:
                self._violate(process, f"{path} takes slots from {file} that are not in it")
        self._check_sampler(process, path, manifest)
        if path.parent.parent.name == "train_trajectories":
            self._check_segments(process, manifest, groups)
        elif any(sample.spans or sample.finish_reason == UNFINISHED for g in groups for sample in g.samples):
            self._violate(process, f"{path}: an evaluation was cut")
        assert isinstance(process, NodeProcess) and process.node is not None
        entered_s = self._entered_s[process.node.run_dir.crew, process.node.record.epoch]
        for (where, name), (published_s, policy, slots) in self._parts.items():
            if where == str(path.parent) and published_s < entered_s and policy == manifest["policy"]:
                late = [slot for slot in slots if self._comes_later(taken.get(slot), name, quota)]
                if late:
                    self._violate(process, f"{path} loses the groups {late} of {name.name}")

    def _check_segments(self, process: Process, manifest: dict[str, Any], groups: list[Group]) -> None:
        number, run_dir = manifest["iteration"], self._run_dir
        opened = published.read_json(run_dir.iteration_json(number)) or {}
        before = published.read_manifest(run_dir, "train", number - 1) or {}
        begun = BegunGroup.all_of(opened)
        if [one.file_slot for one in begun] != before.get("unfinished", []):
            self._violate(process, f"iteration {number} goes on with {begun}, and not with all of {before}")
        left = {g.slot for g in groups if UNFINISHED in {sample.finish_reason for sample in g.samples}}
        if manifest["unfinished"] != sorted(left):
            self._violate(process, f"the manifest of {number} says {manifest['unfinished']}, not {left}")
        for group in groups:
            one = begun[group.slot] if group.slot < len(begun) else None
            first = (number, group.slot - len(begun)) if one is None else (one.iteration, one.slot)
            if first in self._ended:
                self._violate(process, f"the group begun in {first} is made again in iteration {number}")
            if group.slot not in left:
                self._ended.add(first)
            for sample in group.samples:
                self._check_spans(process, number, first[0], sample)

    def _check_spans(self, process: Process, number: int, begun_in: int, sample: Sample) -> None:
        segment: int = self._world.settings.get("rollout.segment_tokens", 0)
        ruled = [
            Span(2 + k * segment, 0, i, max(0, i - 1 - self._level))
            for k, i in enumerate(range(begun_in, number + 1))
            if segment and 2 + k * segment < len(sample.token_ids)
        ]
        if [replace(span, end=0) for span in sample.spans] != ruled:
            self._violate(process, f"a sample of iteration {number} has {sample.spans}, and not {ruled}")
        if sample.finish_reason == UNFINISHED and len(sample.token_ids) - 2 != len(ruled) * segment:
            self._violate(process, f"a sample has only {len(sample.token_ids) - 2} tokens after {ruled}")

    @staticmethod
    def _comes_later(entry: dict[str, Any] | None, name: PartName, quota: Quota) -> bool:
        """Whether a manifest takes a slot that part `name` holds from a later one, or not at all although it
        is no spare one.
        """
        if entry is None:
            return quota.slots == quota.needed
        return (parse_part_name(entry["file"]) or name) > name

    # ---- the end

    def look_over(self) -> str:
        """The policy that the run has come to: it follows from all that was generated and trained."""
        world, run_dir = self._world, self._run_dir
        for path in self._published:
            if not self._is_unchanged(path):
                world.scheduler.violate(f"{path} was published, and has changed or gone")
        last = world.settings["iterations"]
        lines = [line["iteration"] for line in published.metrics_lines(run_dir)]
        if lines != list(range(1, last + 1)):
            world.scheduler.violate(f"the run has ended with the iterations {lines}")
        for machine in range(world.nodes):
            newest = max((p for p in world.processes if p.machine == machine), key=lambda p: p.incarnation)
            if newest.code != 0 and not newest.killed:
                world.scheduler.violate(
                    f"{newest.name}, the newest of its rank, has ended with {newest.code}"
                )
        keep_last = world.settings.get("trajectories.keep_last") or last
        there = sorted(filter(None, map(parse_iteration_name, published.names(run_dir.batch(0).parent))))
        if there != list(range(last - keep_last + 1, last + 1)):
            world.scheduler.violate(f"the run has ended with the batches {there}")
        if self._disk.has_links:  # else no manifest was looked at when it was made
            self._check_all_have_ended(last)
        if published.checkpoints(run_dir)[-1:] != [last]:
            world.scheduler.violate(
                f"the run has ended with the checkpoints {published.checkpoints(run_dir)}"
            )
            return ""
        return published.policy_of(run_dir, last).digest

    def _check_all_have_ended(self, last: int) -> None:
        """Whether all groups have ended that had time for it."""
        settings = self._world.settings
        longest = settings.get("rollout.max_tokens", 1)
        segments = -(-longest // settings.get("rollout.segment_tokens", longest))
        slots = range(settings["rollout.tasks_per_iteration"])
        for number in range(1, last - segments + 2):
            opened = published.read_json(self._run_dir.iteration_json(number)) or {}
            new = {(number, slot) for slot in slots}
            if opened and not opened["replace_flat"] and not new <= self._ended:
                self._world.scheduler.violate(f"of iteration {number} {new - self._ended} have not ended")

    def _record(self, crew: Crew, epoch: int) -> EpochRecord | None:
        path = RunDir(self._run_dir.root, crew).entry(Record(epoch))
        if (crew, epoch) not in self._records and path.exists():
            self._records[crew, epoch] = EpochRecord.model_validate_json(path.read_bytes())
        return self._records.get((crew, epoch))

    def _violate(self, process: Process, text: str) -> None:
        self._world.scheduler.violate(f"{process.name} {text}")


def _planned(plan: dict[str, Any]) -> list[int]:
    """The slots of a plan, of nodes or of chunks."""
    if "chunks" in plan:
        return [*(slot for slots, _ in plan["chunks"] for slot in slots), *plan["spare"]]
    return [slot for share in plan["shares"].values() for slot in share]


def _crew(path: Path) -> Any:
    """The crew whose entry of protocol/ a path is."""
    return path.parent.parent.name


def _plain(flag: Flag) -> Flag:
    return flag._replace(kind=flag.kind.removesuffix(DOCUMENT))


def _entry(path: Path) -> Any:
    return parse_protocol_name(path.name) if path.parent.name in {"master", "workers"} else None


def _quota(manifest_path: Path, manifest: dict[str, Any]) -> Quota:
    """What an iteration needs; of an evaluation, which has no iteration.json, every slot."""
    opened = manifest_path.with_name("iteration.json")
    if not opened.exists():
        return Quota(manifest["slots"], manifest["slots"])
    return resume.quota(json.loads(opened.read_bytes()))
