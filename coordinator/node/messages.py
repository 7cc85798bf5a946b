"""Messages of a node to a person: who is waited for, what was lost, and the command that repairs it."""

import contextlib
import os
import shlex
import signal

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import GUESTS, MASTER
from coordinator.machine.run_command import STARTED_BY, node_command
from coordinator.node.flags import read_call
from coordinator.node.identity import Identity
from coordinator.node.position import Position
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.phase import Phase
from coordinator.protocol.verdict import LOSSES, Event, Verdict
from coordinator.protocol.watch import Watch
from rollout.collect import AllGivenUp
from rollout.rewards.reward import RewardError
from rollout.storage.retry import WAITING, DirectoryCall, hangs

QUIET_S = 5.0
"""A shorter silence is not said: heartbeats are seconds apart."""


class Messages:
    """Sentences about this node and about the others, from what it sees of them."""

    def __init__(self, identity: Identity, position: Position, watch: Watch) -> None:
        self._identity = identity
        self._position = position
        self._watch = watch

    @property
    def _path(self) -> str:
        return shlex.quote(str(self._identity.root))

    def repair(self, rank: int | None = None) -> str:
        """Return the sentence that says how to go on; for `rank` alone, where the others hold for it."""
        me = self._identity
        if me.is_guest:
            return f"To bring it back, on that machine: {self.node_command(me.rank)}"
        holds = failure_policy(me.settings.cluster.on_node_failure).holds
        if rank is not None and me.run_dir.machine(rank) != MASTER and holds:
            return f"To bring it back, on that machine: {self.node_command(rank)}"
        return f"To resume: {self.resume_command()}"

    def resume_command(self, options: str = "") -> str:
        """Return the command that starts the run again; the settings are kept."""
        if all_nodes := os.environ.get(STARTED_BY):
            return f"{all_nodes}{options}"
        elsewhere = f", and run --worker RANK --log-path {self._path} on each other machine"
        is_alone = self._identity.of_run.cluster.num_nodes == 1
        return f"{self.master_command()}{options}{'' if is_alone else elsewhere}"

    def master_command(self) -> str:
        """Return the command that starts the master."""
        return node_command(self._identity.root, MASTER)

    def finished(self, done: int) -> str:
        """Return the message of a run that has `done` its iterations, and how it can go on; an evaluation
        cannot.
        """
        if self._identity.settings.kind == "eval":
            return "the evaluation is finished"
        more = self.resume_command(f" --iterations {2 * done}")
        iterations = f"{done} iteration{'s' * (done != 1)}"
        return f"the run is finished after {iterations}; to continue it, for example: {more}"

    def unevaluated(self) -> str:
        """Return how to score the last checkpoint, which no iteration evaluates; nothing in a run without
        evaluations.
        """
        settings = self._identity.of_run
        has_tasks = settings.evaluation_tasks is not None or settings.eval_sets
        command = f"run eval --log-path {self._path}"
        text = f"the last checkpoint was written after the last evaluation; to score it too: {command}"
        return text if has_tasks and settings.eval.interval else ""

    def node_command(self, rank: int) -> str:
        """Return the command that starts a node."""
        if rank >= GUESTS:
            return f"run guest --log-path {self._path}"
        return node_command(self._identity.root, self._identity.run_dir.machine(rank))

    def doctor_command(self) -> str:
        """Return the command that tries the shared directory."""
        return f"run doctor --log-path {self._path}"

    def failure(self, error: BaseException) -> str:
        """Return one line: rank, host, phase, iteration, and the error."""
        me = self._identity
        is_repeated = isinstance(error, AllGivenUp | RewardError)
        mend = (
            ". Mend the environment, the reward or the tasks first, or it fails again" if is_repeated else ""
        )
        return f"{me.name} ({me.host}) failed{self._position.where()}: {error}{mend}"

    def interrupted(self, name: str) -> str:
        """Return the message about a signal of this name."""
        me = self._identity
        return (
            f"{me.name} ({me.host}) was interrupted by {name}{self._position.where()}. {self.repair(me.rank)}"
        )

    def hangs(self, number: int, call: DirectoryCall) -> str:
        """Return the message about a call that keeps this node from ending at a signal."""
        me, name = self._identity, signal.Signals(number).name
        return (
            f"{me.name} ({me.host}) was interrupted by {name}{self._position.where()}, but the shared "
            f"directory does not answer: {call.verb} {call.path}. Its own engine and trainer are killed; the "
            "process itself goes as soon as the mount answers"
        )

    def unseen(self, master_host: str, limit_s: float) -> str:
        """Return the message of a worker whose heartbeats do not get to the master."""
        return (
            f"the master ({master_host}) has seen no heartbeat of {self._identity.name} "
            f"({self._identity.host}) for {limit_s:.0f} s, while its own arrive here. Try the directory on "
            f"both machines: {self.doctor_command()}"
        )

    def missing(self) -> str:
        """Return the ranks that are waited for, as `of_rank`; in place of a master that waits for others
        itself, those.
        """
        if self._position.waiting_for == [MASTER] and (awaited := self._masters_missing()):
            return awaited
        return "; ".join(self.of_rank(rank) for rank in self._position.waiting_for)

    def _masters_missing(self) -> str:
        """Return for whom the master waits, unless this node is among them: `rank 2 (silent for 28 s)`."""
        heartbeat = self._watch.heartbeat(MASTER)
        ranks: list[int] = heartbeat.get("waiting_for", [])
        if self._identity.rank in ranks:
            return ""
        silences = {rank: heartbeat.get("silent_s", {}).get(str(rank), 0.0) for rank in ranks}
        return "; ".join(
            f"{self._identity.run_dir.name(rank)}" + (f" (silent for {s:.0f} s)" if s >= QUIET_S else "")
            for rank, s in silences.items()
        )

    def elsewhere(self) -> str:
        """Return, in brackets, what this node waits for without a flag of its own: for whom its master waits,
        and who waits for space on a full disk.
        """
        me, watch, texts = self._identity, self._watch, list[str]()
        if me.is_guest or watch.fence.tripped or hangs(QUIET_S):
            return ""
        with contextlib.suppress(OSError):
            if self._position.waiting_for == [MASTER] and (awaited := self._masters_missing()):
                texts.append(f"{me.run_dir.name(MASTER)} waits for {awaited}")
            if self._position.phase is Phase.TRAINING and watch.current is not None:
                for rank in (set(watch.current.members) if me.is_master else {MASTER}) - {me.rank}:
                    work = watch.heartbeat(rank).get("work", "")
                    texts += [f"{me.run_dir.name(rank)}: {work}"] if work.startswith(WAITING) else []
        return f" ({'; '.join(texts)})" if texts else ""

    def of_rank(self, rank: int) -> str:
        """Return `rank 2 (node-c; last seen in train_rollout, iteration 7, 37/128)`."""
        heartbeat, name = self._watch.heartbeat(rank), self._identity.run_dir.name(rank)
        if not heartbeat:
            members = self._watch.current.members if self._watch.current else {}
            return f"{name} ({members[rank].host if rank in members else 'never seen'})"
        progress = f", {heartbeat['done']}/{heartbeat['total']}" if heartbeat["total"] else ""
        phase = heartbeat["phase"] or heartbeat["state"]
        silent_s = self._watch.silence.silent_s.get(rank, 0.0)
        limit_s = self._identity.settings.cluster.node_timeout_s
        silent = f", silent for {silent_s:.0f} s" if silent_s >= limit_s else ""
        last_sign = f"last seen in {phase}, iteration {heartbeat['iteration']}{progress}{silent}"
        return f"{name} ({heartbeat['host']}; {last_sign})"

    def master_is_lost(self) -> str:
        """Return the message of a worker while it holds for its master."""
        board, current = self._watch.board, self._watch.current
        calls = board.called(current.epoch, "left") if current else []
        texts = (self.called(flag) for flag in calls if flag.rank == MASTER)
        why = "".join(f": {text.partition('. To ')[0]}" for text in texts)
        again = f"to bring it back, on that machine: {self.node_command(MASTER)}"
        return f"holding: {self.of_rank(MASTER)} is lost{why}; {again}"

    def of_verdict(self, verdict: Verdict) -> str:
        """Return the message about a verdict, for the person at this node."""
        if verdict.event is Event.SUPERSEDED:
            return self.superseded()
        text = self.called(verdict.flag)
        if verdict.event not in LOSSES:
            return text
        rank = verdict.rank or 0
        why = f"no heartbeat for {self._watch.silence.silent_s.get(rank, 0.0):.0f} s"
        if verdict.event is Event.LEFT:
            why = text.partition(". To ")[0]
        if verdict.event is Event.STALLED:
            still_s = self._watch.judge.standstill.still_s.get(rank, 0.0)
            why = f"it beats, but has made no progress for {still_s:.0f} s"
        return f"{self.of_rank(rank)} is lost: {why}. {self.repair(rank)}"

    def superseded(self) -> str:
        """Return who has taken over from this process."""
        me, watch = self._identity, self._watch
        newest = watch.newest_record()
        member = newest.members.get(me.rank) if newest else None
        highest = watch.board.highest_incarnation(me.rank)
        by = "a newer process"
        if highest > watch.incarnation:
            by = f"incarnation {highest} on {watch.heartbeat(me.rank).get('host', 'another host')}"
        elif me.is_master and newest:
            by = f"incarnation {newest.master_incarnation} on {newest.master_host}"
        elif member:
            by = f"incarnation {member.incarnation} on {member.host}"
        return f"{me.name} was taken over by {by}; this process ends"

    def called(self, flag: Flag | None) -> str:
        """Return the text of a node's call; an empty one without a call."""
        return read_call(self._identity.run_dir, flag) if flag else ""
