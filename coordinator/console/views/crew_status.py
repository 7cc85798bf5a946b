"""The state of one crew at one moment, from what its nodes have shown in protocol/."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.directory import published
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import GUESTS, MASTER, RunDir
from coordinator.protocol.failed_starts import NOT_STARTED, read_failed_start
from coordinator.protocol.on_node_failure import failure_policy
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import run_dirs
from coordinator.protocol.records import EpochRecord
from coordinator.protocol.snapshot import Board
from coordinator.protocol.verdict import has_left
from coordinator.protocol.watch import ENDED
from coordinator.settings.tree import RunSettings
from rollout.storage.retry import WAITING

ESTIMATED = {Phase.TRAIN_ROLLOUT.label, Phase.EVAL_ROLLOUT.label, Phase.TRAINING.label}
"""Phases whose nodes say when they will be ready."""
ENDINGS = ("failed", "gave_up", "stopped", "left")
"""Calls of a node that ends, or whose run does."""
GOING = {"running", "holding"}
"""States of a crew that works, or waits for nodes."""

Said = Mapping[int, dict[str, Any]]
"""By rank, the content of the newest heartbeat."""


def crew_dirs(root: Path) -> list[RunDir]:
    """Return the run directory as each crew sees it, first the one that generates; one crew: a single one."""
    return sorted(run_dirs(root), key=lambda run_dir: run_dir.crew)


def _rank_of(flag: Flag) -> int:
    return flag.rank


@dataclass(frozen=True)
class CrewSnapshot:
    """A crew as it was seen at one moment."""

    run_dir: RunDir
    board: Board
    record: EpochRecord | None
    settings: RunSettings
    contents: Said
    dead: set[int]
    """Ranks that are known to have ended, or are silent for too long."""
    silent_s: Mapping[int, float]
    """By rank."""

    @property
    def master(self) -> Mapping[str, Any]:
        """What the newest heartbeat of the master says; nothing if there is none."""
        return self.contents.get(MASTER, {})

    @property
    def has_ended(self) -> bool:
        """Whether somebody has said that the crew ends, or that it is finished."""
        record = self.record
        if record is None:
            return False
        calls = {flag.kind for flag in self.board.calls if flag.epoch == record.epoch}
        return record.kind == "finished" or bool(calls & {"failed", "gave_up", "stopped"})

    @property
    def ending(self) -> str:
        """Why the crew has stopped and how it goes on, as its master said it, or else another node; nothing
        if none did.
        """
        if self.record is None or self.state != "stopped":
            return ""
        calls = [flag for kind in ENDINGS for flag in self.board.called(self.record.epoch, kind)]
        read = (published.read_json(self.run_dir.entry(flag)) for flag in sorted(calls, key=_rank_of))
        return next((str(document["text"]) for document in read if document and "text" in document), "")

    @property
    def state(self) -> str:
        """running, holding (for nodes), finished or stopped."""
        record = self.record
        if record is None:  # its master has just started, or ended before it was in an epoch
            return "holding" if self.contents.keys() - self.dead else "stopped"
        if self.has_ended:
            return "finished" if record.kind == "finished" else "stopped"
        if MASTER in self.dead:  # its workers wait for it, unless they end with it or have ended too
            members = record.members.keys() or self.contents.keys()  # a lobby has no members yet
            holding = (self.contents.keys() & members) - self.dead
            return "holding" if holding and not self._ends_with_master() else "stopped"
        is_lost = any(flag.rank == MASTER for flag in self.board.called(record.epoch, "lost"))
        return "holding" if record.kind == "lobby" or is_lost else "running"

    def _ends_with_master(self) -> bool:
        return not failure_policy(self.settings.cluster.on_node_failure).holds

    def describe(self, finished: int, is_awaited: bool) -> dict[str, Any]:
        """Return the state of the crew as `run status --json` has it in `crews`.

        `finished`: the last iteration that has a line of metrics. `is_awaited`: the other crew goes on, and
        holds for this one if nobody of it is there.
        """
        ranks = range(len(self.run_dir.machines) or self.settings.cluster.num_nodes)
        nodes = [self._node(rank) for rank in ranks]
        self._add_complaints(nodes)
        guests = [self._node(rank) for rank in sorted(self.board.beats) if rank >= GUESTS]
        nodes += [guest for guest in guests if guest["state"] == "alive"]
        master, state = self.master, self.state
        phase = master.get("phase", "") or master.get("state", "")
        awaited = [MASTER] if MASTER in self.dead else master.get("waiting_for", [])
        since_s = master.get("waiting_s", 0.0)
        if MASTER in self.dead:
            since_s = self.silent_s.get(MASTER, 0.0)
        waits_for = master.get("waits_for", "") if state == "running" else ""
        if waits_for:
            since_s = since_s or master.get("row_s", 0.0)
        if state == "stopped" and is_awaited and not self.has_ended:
            state, awaited = "holding", [rank for rank in ranks if nodes[rank]["state"] != "alive"]
        in_phase = [node for node in nodes if node["state"] == "alive" and node["phase"] == phase]
        left_s = [node["left_s"] for node in in_phase if node["left_s"] is not None]
        return {
            "crew": self.run_dir.crew,
            "state": state,
            "epoch": self.record.epoch if self.record else 0,
            "iteration": master.get("iteration") or self._last_iteration(finished),
            "iterations": self.settings.iterations,
            "phase": phase,
            "master": nodes[MASTER]["name"],
            "waiting_for": list(map(self.run_dir.machine, awaited)) if state in GOING else [],
            "waits_for": waits_for,
            "work": self._work(nodes),
            "work_s": self._work_s(nodes),
            "ending": self.ending if state == "stopped" else "",
            "waiting_s": float(since_s) if state in GOING else 0.0,
            "left_s": max(left_s, default=None) if phase in ESTIMATED else None,
            "num_nodes": len(ranks),
            "nodes": nodes,
        }

    def _work(self, nodes: Sequence[Mapping[str, Any]]) -> str:
        """Return the nodes' work that is not what their phase is for: `starting the engine`."""
        works = {content.get("work", "") for content in self._of_alive(nodes)} - {""}
        # Nodes may have looked at one disk at two moments: one of them says it.
        full = sorted(work for work in works if work.startswith(WAITING))[-1:]
        return ", ".join(full or sorted(works))

    def _work_s(self, nodes: Sequence[Mapping[str, Any]]) -> float:
        """Return for how long nodes have waited for space on a full disk; 0 if none does."""
        return float(max((content.get("work_s", 0.0) for content in self._of_alive(nodes)), default=0.0))

    def _of_alive(self, nodes: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        alive = (rank for rank, node in enumerate(nodes) if node["state"] == "alive")
        return [self.contents.get(rank, {}) for rank in alive]

    def _add_complaints(self, nodes: list[dict[str, Any]]) -> None:
        """Add to the nodes that do not take part why they do not come, as far as they have said it."""
        calls = self.board.called(self.record.epoch, NOT_STARTED) if self.record else []
        for rank, node in enumerate(nodes):
            flags = [flag for flag in calls if flag.rank == rank and node["state"] != "alive"]
            complaint = read_failed_start(self.run_dir, flags[0]) if flags else None
            host, node["error"] = complaint or (node["host"], "")
            node["host"] = node["host"] or host

    def _last_iteration(self, finished: int) -> int:
        """Return the newest iteration that has a flag or a line: for a master that has been in none yet."""
        return max((*(flag.iteration for flag in self.board.flags), finished))

    def _node(self, rank: int) -> dict[str, Any]:
        """Describe a node by its last heartbeat and by what the master last observed."""
        content, cluster = self.contents.get(rank, {}), self.settings.cluster
        member = self.record.members.get(rank) if self.record else None
        beat, silent_s = self.board.beats.get(rank), self.silent_s.get(rank, 0.0)
        state = "alive"
        if beat is None:
            state = "never_seen"
        elif content.get("state") == ENDED or has_left(self.board, self.record, rank):
            state = "left"
        elif silent_s >= cluster.node_timeout_s or rank in self.dead:
            state = "silent"
        return {
            "crew": self.run_dir.crew,
            "rank": self.run_dir.machine(rank),
            "name": self.run_dir.name(rank),
            "host": content.get("host", member.host if member else ""),
            "address": member.address if member else content.get("address", ""),
            "state": state,
            "iteration": content.get("iteration", 0),
            "phase": content.get("phase", "") or content.get("state", ""),
            "row_s": content.get("row_s", 0.0),
            "waiting_s": content.get("waiting_s", 0.0),
            "weight": member.weight if member else self._weight(self.run_dir.machine(rank)),
            "tasks_assigned": content.get("total", 0),
            "tasks_done": content.get("done", 0),
            "samples_assigned": content.get("samples_total", 0),
            "samples_done": content.get("samples", 0),
            "tokens_per_s": content.get("tokens_per_s"),
            "left_s": content.get("left_s"),
            "gpu_count": content.get("gpu_count", 0),
            "gpus": content.get("gpus", []),
            "silent_s": silent_s,
        }

    def _weight(self, machine: int) -> float:
        """Return the weight of a machine that has no part in an epoch yet; a guest has none."""
        cluster = self.settings.cluster
        if machine >= GUESTS:
            return 0.0
        return cluster.weight(machine) if machine < cluster.num_nodes else 1.0
