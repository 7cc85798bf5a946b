"""Made-up runs as the nodes leave them: events on their own clocks, metrics, manifests, samples to read."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from coordinator.directory.file_names import Beat, PartName
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.machine.network import pid_space
from coordinator.protocol.phase import Phase
from coordinator.protocol.records import EpochRecord, Member, claim
from coordinator.protocol.split_slots import share_sizes
from coordinator.settings.loading import build
from rollout.part_file import PartHeader, encode_part
from rollout.trajectory import Group, Sample, line_for_people
from tests.coordinator.examples import POLICY, origin, run_dir_at, write_json

State = Literal["finished", "running", "died"]
MASTERS_PHASES = {Phase(phase) for phase in (0, 1, 4, 5, 8, 9, 11)}
NO_PROCESS = 2**22 + 1
"""No process has this id."""
EVAL_INTERVAL = 10
CONCLUSION_S = 0.2
"""The master puts together what the nodes sampled."""
VERSIONS = {
    "python": "3.11.2",
    "flagpost": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.19.1",
    "vllm": "0.32.1",
}


@dataclass
class MadeUpNode:
    """A node with a clock that began at some other time, and what it has said."""

    rank: int
    zero_s: float
    speed: float
    incarnation: int = 1
    epoch: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"node-{self.rank:02d}"

    def say(self, at_s: float, what: str, **more: Any) -> None:
        """An event at `at_s` of the run, which this node's clock shows otherwise."""
        t = round(self.zero_s + at_s, 4)
        self.lines.append({"t": t, "n": self.incarnation, "e": self.epoch, "what": what, **more})

    def start(self, at_s: float) -> None:
        at = "2026-11-21T20:00:00+00:00"
        self.say(at_s, "process", rank=self.rank, host=self.host, pid=1, versions=VERSIONS, at=at)


class MadeUpRun:
    """The life of a run: phase after phase; every node's next phase begins when it sees the master's flag."""

    def __init__(self, root: Path, nodes: int, iterations: int, tasks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.tasks, self.iterations = tasks, iterations
        self.shares = share_sizes(tasks, dict.fromkeys(range(nodes), 1.0))
        self.run_dir = run_dir_at(root)
        self.now_s = 0.0
        self.epoch = 0
        self.metrics: list[dict[str, Any]] = []
        speeds = [2.0 if rank == 0 else self.random.uniform(0.9, 1.1) for rank in range(nodes)]
        self.nodes = [
            MadeUpNode(rank, self.random.uniform(1e3, 1e6), speed) for rank, speed in enumerate(speeds)
        ]
        for node in self.nodes:
            node.start(0.0)
        self.enter(1.0)

    def enter(self, after_s: float) -> None:
        """All nodes enter a new epoch."""
        self.epoch += 1
        self.now_s += after_s
        for node in self.nodes:
            node.epoch = self.epoch
            members = [node.rank for node in self.nodes]
            node.say(self.now_s, "epoch", members=members, weight=1.0, gpus=["NVIDIA H100 80GB HBM3"] * 8)

    def work_s(self, phase: Phase, iteration: int, node: MadeUpNode) -> float:
        """Seconds of own work in a row, the longer the more tasks a node has for its speed."""
        if node.rank and phase in MASTERS_PHASES:
            return 0.0
        rollout_s = 0.4 * self.shares[node.rank] / node.speed
        usual = {
            Phase.TRAIN_ROLLOUT: rollout_s * (2.5 if iteration % 37 == 5 and node.rank == 1 else 1.0),
            Phase.EVAL_ROLLOUT: rollout_s / 4 if (iteration - 1) % EVAL_INTERVAL == 0 else 0.0,
            Phase.ENGINE_STOPPED: 0.3,
            Phase.TRAIN_DATA: 0.4,
            Phase.TRAINING: 6.0,
            Phase.CHECKPOINT: 1.1,
            Phase.ENGINE_RESTARTED: 1.5,
        }
        return usual.get(phase, 0.01) * self.random.uniform(0.95, 1.05)

    def phase(self, phase: Phase, iteration: int, starting: bool = False) -> dict[int, tuple[float, float]]:
        """All nodes do a phase; {rank: (seconds of work, of waiting)}."""
        work = {node.rank: self.work_s(phase, iteration, node) for node in self.nodes}
        place: dict[str, Any] = {"it": iteration, "row": phase.label}
        for node in self.nodes:
            node.say(self.now_s, "begin", **place)
            if starting:
                work[node.rank] += 20.0
                node.say(self.now_s + 20.0, "engine_ready", seconds=20.0)
        then_s = CONCLUSION_S if phase == Phase.TRAIN_ROLLOUT else 0.0
        over_s = self.now_s + max(work.values()) + 0.01 + then_s
        work[0] += then_s
        times: dict[int, tuple[float, float]] = {}
        for node in self.nodes:
            seen_s = over_s + (self.random.uniform(0.001, 0.02) if node.rank else 0.0)
            concluding = {} if node.rank else {"then_s": then_s}
            node.say(seen_s, "end", **place, work_s=round(work[node.rank], 4), **concluding)
            times[node.rank] = (work[node.rank], seen_s - self.now_s - work[node.rank])
        self.now_s = over_s + 0.02
        return times

    def iterate(self, iteration: int, lost: int | None = None) -> None:
        """One iteration; `lost`: this rank dies in its training and comes back."""
        spent: dict[Phase, dict[int, tuple[float, float]]] = {}
        for phase in Phase:
            if phase == Phase.TRAINING and lost is not None:
                self.lose(lost, iteration)
                self.enter(8.0)
                spent[Phase.ITERATION_START] = self.phase(Phase.ITERATION_START, iteration)
            spent[phase] = self.phase(
                phase, iteration, starting=iteration == 1 and phase == Phase.TRAIN_ROLLOUT
            )
        self.metrics.append(self.line(iteration, spent))

    def lose(self, rank: int, iteration: int) -> None:
        """A rank dies in the training; the master says so 30 s later; it is back after a minute."""
        for node in self.nodes:
            node.say(self.now_s, "begin", it=iteration, row=Phase.TRAINING.label)
        self.now_s += 33.0
        text = f"rank {rank} (node-{rank:02d}) is silent for 30.0 s; it was last seen in training"
        self.nodes[0].say(self.now_s, "lost", rank=rank, text=text)
        self.now_s += 25.0
        self.nodes[rank].incarnation += 1
        self.nodes[rank].start(self.now_s)

    def line(
        self, iteration: int, spent: Mapping[Phase, Mapping[int, tuple[float, float]]]
    ) -> dict[str, Any]:
        """The metrics of a run that learns."""
        progress = 1 - math.exp(-3 * iteration / self.iterations)
        reward = min(1.0, max(0.0, 0.08 + 0.8 * progress + self.random.gauss(0, 0.03)))
        seconds = {phase.label: round(sum(times[0]), 4) for phase, times in spent.items()}
        waits = {
            str(node.rank): round(sum(t[node.rank][1] for t in spent.values()), 3) for node in self.nodes
        }
        total = sum(seconds.values())
        evaluated = (iteration - 1) % EVAL_INTERVAL == 0
        return {
            "iteration": iteration,
            "kind": "both",
            "reward": reward,
            "eval_reward": min(1.0, 0.1 + 0.82 * progress) if evaluated else None,
            "eval_pass_at": None,
            "samples": self.tasks * 4,
            "length": 180 + 300 * progress + self.random.gauss(0, 8),
            "tokens_per_s": 9000 + self.random.gauss(0, 300),
            "train_tokens_per_s": 15000 + self.random.gauss(0, 300),
            "loss": 0.02 * (1 - progress) + self.random.gauss(0, 0.004),
            "grad_norm": 0.6 + self.random.gauss(0, 0.05),
            "lr": 1e-6,
            "kl_engine": 0.0008 + abs(self.random.gauss(0, 0.0002)),
            "kl_reference": None,
            "entropy": 1.2 - 0.9 * progress + self.random.gauss(0, 0.02),
            "clip_fraction": 0.01 + abs(self.random.gauss(0, 0.002)),
            "truncated": max(0.0, 0.2 * (1 - progress) + self.random.gauss(0, 0.01)),
            "seconds": round(total, 3),
            "phase_seconds": seconds,
            "wait_seconds": waits,
            "busy_fraction": round(1 - sum(waits.values()) / max(total * len(self.nodes), 1e-9), 3),
        }

    def manifest(self, iteration: int, with_parts: bool) -> None:
        """The iteration's manifest, and its parts, if they are to be read."""
        directory = self.run_dir.trajectories("train", iteration)
        directory.mkdir(parents=True)
        entries, rewards, first, lines = [], {}, 0, ""
        for rank, size in self.shares.items():
            groups = [self.group(slot, iteration) for slot in range(first, first + size)]
            first += size
            name = PartName(self.epoch, rank, 1).name
            entries.append(
                {"file": name, "rank": rank, "epoch": self.epoch, "slots": [g.slot for g in groups]}
            )
            rewards |= {str(g.slot): sum(s.reward or 0 for s in g.samples) / len(g.samples) for g in groups}
            if with_parts:
                header = PartHeader("train", iteration, rank, 1, 1, **vars(origin(POLICY)))
                (directory / name).write_bytes(encode_part(groups, header))
                lines += "".join(line_for_people(g, rank=rank, model_version=POLICY) for g in groups)
        document = {"iteration": iteration, "policy": POLICY, "parts": entries, "given_up": []}
        write_json(self.run_dir.manifest("train", iteration), document | {"rewards": rewards})
        self.run_dir.groups("train", iteration).write_text(lines)

    def group(self, slot: int, iteration: int) -> Group:
        """A sum, and four answers."""
        a, b = 13 + slot, 29 + 3 * slot
        samples: list[Sample] = []
        for index in range(4):
            right = self.random.random() < 0.2 + 0.6 * iteration / self.iterations
            answer = a + b if right else a + b + self.random.randint(1, 9)
            text = f"Adding {a} and {b}: the tens first, then the ones. The answer is {answer}."
            text += "</script><script>alert(1)</script>" if slot % 3 == index else ""
            ids = np.arange(24, dtype=np.int32)
            mask = (ids > 7).astype(np.uint8)
            cut = "stop" if right else "length"
            samples.append(Sample(ids, mask, np.zeros(24, np.float32), cut, text, float(right)))
        return Group(slot, f"sum-{slot}", f"What is {a} + {b}? Explain, then give the number.\n", samples)


def make_run(
    root: Path,
    iterations: int = 20,
    nodes: int = 3,
    state: State = "finished",
    tasks: int | None = None,
    lost: int | None = None,
    with_events: bool = True,
    seed: int = 0,
) -> RunDir:
    """A run of `iterations` at `root`; in iteration `lost` its last rank dies and comes back.

    running, died: one more iteration had begun, and was in its rollout.
    """
    run = MadeUpRun(root, nodes, max(iterations, 1), tasks or 16 * nodes, seed)
    for iteration in range(1, iterations + 1):
        run.iterate(iteration, lost=nodes - 1 if iteration == lost else None)
        run.manifest(iteration, with_parts=iteration in {1, iterations})
    if state != "finished":
        run.phase(Phase.ITERATION_START, iterations + 1)
        run.phase(Phase.TRAIN_PLAN, iterations + 1)
        for node in run.nodes:
            node.say(run.now_s, "begin", it=iterations + 1, row=Phase.TRAIN_ROLLOUT.label)
        for node in run.nodes:
            node.say(run.now_s + 3.0 + node.rank, "warning", text=f"a request took {7 + node.rank}.2 s")
    if state == "died":
        run.nodes[0].say(
            run.now_s + 20.0, "error", text="the shared directory is full: No space left on device"
        )
        run.nodes[0].say(run.now_s + 20.1, "exit", code=1, text="failed")
    _write(run, iterations, state, with_events)
    return run.run_dir


def _write(run: MadeUpRun, iterations: int, state: State, with_events: bool) -> None:
    run_dir, count = run.run_dir, len(run.nodes)
    fixed = {"model": {"name": "Qwen/Qwen3-4B"}, "tasks": {"name": "sums.jsonl"}}
    write_json(run_dir.run_json, {"run_id": "c0ffee12", "format": FORMAT, "fixed": fixed})
    settings = build(
        {
            "model": "Qwen/Qwen3-4B",
            "tasks": "sums.jsonl",
            "cluster.num_nodes": count,
            "iterations": iterations + (state != "finished"),
        }
    )
    members = {
        node.rank: Member(
            incarnation=node.incarnation,
            host=node.host,
            address=f"10.0.0.{node.rank + 1}",
            processes=8,
            weight=1.0,
        )
        for node in run.nodes
    }
    record = EpochRecord(
        epoch=run.epoch,
        kind="finished" if state == "finished" else "full",
        token="t",
        run_id="c0ffee12",
        master_incarnation=1,
        master_host="node-00",
        settings=settings.model_dump(mode="json"),
        members=members,
    )  # fmt: skip
    claim(run_dir, record)
    for node in run.nodes:
        content = {
            "host": node.host,
            "pid": NO_PROCESS,
            "pid_space": pid_space() if state == "died" else "elsewhere",
            "address": f"10.0.0.{node.rank + 1}",
            "processes": 8,
            "state": "running",
            "iteration": iterations + (state != "finished"),
            "phase": Phase.TRAIN_ROLLOUT.label,
            "done": 3,
            "total": 16,
            "waiting_for": [],
            "row_s": 12.0 + node.rank,
        }
        write_json(run_dir.entry(Beat(run.epoch, node.rank, node.incarnation, 5)), content)
        if with_events:
            lines = "".join(json.dumps(line) + "\n" for line in node.lines)
            run_dir.events(node.rank).write_text("\n" + lines)
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in run.metrics))
