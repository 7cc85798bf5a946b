"""A made-up run in which one crew generates and another trains, each on clocks of its own."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.console.views.crew_status import crew_dirs
from coordinator.directory.file_names import Beat
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.protocol.phase import Phase, phases_of
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement
from coordinator.protocol.records import claim
from coordinator.settings.loading import build
from tests.coordinator.example_run import MadeUpNode
from tests.coordinator.examples import record, run_dir_at, write_json

SHORT_S = 0.05
"""A phase in which nothing happens."""


@dataclass
class MadeUpCrew:
    """The nodes of a crew, and the moment at which they have come."""

    run_dir: RunDir
    nodes: list[MadeUpNode]
    now_s: float = 0.0
    begun_s: dict[int, float] = field(default_factory=dict[int, float])
    published_s: dict[int, float] = field(default_factory=dict[int, float])
    """By iteration, when its groups were complete, or its checkpoint published."""

    def iterate(self, iteration: int, after_s: float, seconds: float) -> None:
        """An iteration that begins at `after_s` at the earliest; its long phase lasts `seconds`."""
        self.now_s = max(self.now_s, after_s)
        self.begun_s[iteration] = self.now_s
        kind = "rollout" if self.run_dir.crew == "rollout" else "update"
        long = {"rollout": Phase.TRAIN_ROLLOUT, "update": Phase.TRAINING}[kind]
        for phase in sorted(phases_of(kind)):
            work_s = seconds if phase is long else SHORT_S
            for node in self.nodes:
                node.say(self.now_s, "begin", it=iteration, row=phase.label)
                late_s = 0.003 * node.rank
                node.say(self.now_s + work_s + late_s, "end", it=iteration, row=phase.label, work_s=work_s)
            self.now_s += work_s
            if phase in {Phase.EVAL_ROLLOUT, Phase.CHECKPOINT}:
                self.published_s[iteration] = self.now_s
            self.now_s += 0.004


def make_crews(
    root: Path, rollout_s: float, train_s: float, level: int = 1, iterations: int = 8
) -> tuple[MadeUpCrew, MadeUpCrew]:
    """A finished run of two nodes that generate and one that trains, by the rule of max_async_level."""
    run_dir = run_dir_at(root)
    fixed = {"model": {"name": "Qwen/Qwen3-4B"}, "tasks": {"name": "sums.jsonl"}}
    write_json(run_dir.run_json, {"run_id": "c0ffee12", "format": FORMAT, "fixed": fixed})
    publish_placement(root, Placement(3, ("rollout=0-1", "train=2")))
    for machine in range(3):
        publish_devices(root, machine, f"node-{machine:02d}", 1)
    zeros = {"rollout": (5000.0, 90.0), "train": (77_777.0,)}
    crews: list[MadeUpCrew] = []
    for run_dir in crew_dirs(root):
        nodes = [MadeUpNode(rank, zero, 1.0) for rank, zero in enumerate(zeros[run_dir.crew])]
        crews.append(MadeUpCrew(run_dir, nodes))
        for node in nodes:
            host = f"node-{run_dir.machine(node.rank):02d}"
            node.say(0.0, "process", rank=node.rank, host=host, at="2026-11-21T20:00:00+00:00", versions={})
            node.epoch = 1
            node.say(0.0, "epoch", members=[node.rank for node in nodes], weight=1.0, gpus=["H100"])
    rollout, train = crews
    for number in range(1, iterations + 1):
        rollout.iterate(number, train.published_s.get(number - 1 - level, 0.0), rollout_s)
        train.iterate(number, rollout.published_s[number], train_s)
    for crew in crews:
        _write(crew, level, iterations)
    _write_metrics(root, train, level)
    return rollout, train


def _write(crew: MadeUpCrew, level: int, iterations: int) -> None:
    run_dir, count = crew.run_dir, len(crew.nodes)
    for directory in run_dir.protocol:
        directory.mkdir(parents=True)
    settings = build(
        {"cluster.num_nodes": count, "iterations": iterations, "cluster.max_async_level": level}
    ).of_crew(run_dir.crew)
    claim(run_dir, record(1, "finished", dict.fromkeys(range(count), 1), settings=settings))
    for node in crew.nodes:
        content = {"host": f"node-{run_dir.machine(node.rank):02d}", "pid": 1, "pid_space": "elsewhere"}
        write_json(
            run_dir.entry(Beat(1, node.rank, 1, 5)), {**content, "state": "ended", "iteration": iterations}
        )
        run_dir.events(node.rank).write_text("".join(json.dumps(line) + "\n" for line in node.lines))


def _write_metrics(root: Path, train: MadeUpCrew, level: int) -> None:
    lines: list[dict[str, Any]] = []
    for number, begun_s in train.begun_s.items():
        policy = max(0, number - 1 - level)
        seconds = train.published_s[number] - begun_s
        lines.append(
            {
                "iteration": number, "kind": "both", "policy_iteration": policy, "reward": 0.1 * policy,
                "eval_reward": 0.05 * policy, "loss": 0.01, "seconds": seconds, "tokens_per_s": 9000.0,
                "phase_seconds": {"training": seconds}, "wait_seconds": {"0": 0.0}, "busy_fraction": 1.0,
            }
        )  # fmt: skip
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
