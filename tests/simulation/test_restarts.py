"""A master is killed in the middle of an iteration and started again with other settings; a worker holds."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.directory.file_names import Beat, parse_protocol_name
from coordinator.directory.layout import Kind, RunDir
from coordinator.protocol.exits import Exit
from rollout.part_file import decode_part
from rollout.trajectory import Group
from tests.simulation.faults import Fault, Injector
from tests.simulation.invariants import Invariants
from tests.simulation.scheduler import Process
from tests.simulation.world import NodeProcess, World
from trainer.batch.batch import Batch

OTHER_REWARD = "tests.simulation.engines:other_reward"
IN_PLAN, IN_ROLLOUT, IN_EVALUATION = 1, 2, 6
CALLS = 20
"""On the shared directory, which the master makes in the phase before it dies."""


class Restart(World):
    """A world in which the next process of the master is given other settings, and these alone, once one was
    killed.
    """

    changed: dict[str, Any]

    def kill(self, process: Any) -> None:
        super().kill(process)
        self.settings |= self.changed

    def given(self, process: NodeProcess) -> Mapping[str, Any]:
        is_again = any(other.killed and other.rank == 0 for other in self.processes)
        return self.changed if process.rank == 0 and is_again else super().given(process)


def run(root: Path, changed: dict[str, Any], phase: int = IN_ROLLOUT, **settings: Any) -> Restart:
    """Two nodes, two iterations; the master dies in `phase` of the first, when some groups are finished."""
    world = killed_in(root, changed, phase, CALLS, **settings)
    kind: Kind = "train" if phase == IN_ROLLOUT else "eval"
    epochs = {entry["epoch"] for entry in manifest(world.run_dir, kind, 1)["parts"]}
    story = "\n".join(world.said)
    assert len(epochs) > 1, f"nothing was finished when the master died, or everything was\n{story}"
    return world


def killed_in(root: Path, changed: dict[str, Any], phase: int, calls: int, **settings: Any) -> Restart:
    """The same; the master dies at this call of the phase, whatever is finished."""
    first = {"rollout.tasks_per_iteration": 24, "eval.max_tasks": 48, "eval.interval": 1, "iterations": 2}
    first |= {name.replace("__", "."): value for name, value in settings.items()}
    world = Restart(root, 2, seed=3, settings=first)
    world.changed = changed
    invariants = Invariants(world)
    world.run(Injector(world, [Fault("kill", 0, 1, phase, calls, 3.0)]).are_over)
    if not world.scheduler.violation:
        invariants.look_over()
    story = "\n".join(world.said)
    assert not world.scheduler.violation, f"{story}\n{world.scheduler.violation}"
    return world


def manifest(run_dir: RunDir, kind: Kind, iteration: int) -> dict[str, Any]:
    return json.loads(run_dir.manifest(kind, iteration).read_bytes())


def groups(run_dir: RunDir, kind: Kind, iteration: int) -> list[Group]:
    """The groups that a manifest names."""
    directory = run_dir.trajectories(kind, iteration)
    return [
        group
        for entry in manifest(run_dir, kind, iteration)["parts"]
        for group in decode_part((directory / entry["file"]).read_bytes())[1]
        if group.slot in entry["slots"]
    ]


def seen(run_dir: RunDir, iteration: int, kind: Kind = "train") -> dict[str, set[Any]]:
    """How the samples of an iteration were made, as the samples themselves show it."""
    found: dict[str, set[Any]] = defaultdict(set)
    for group in groups(run_dir, kind, iteration):
        found["samples_per_task"].add(len(group.samples))
        for sample in group.samples:
            for name in ("max_tokens", "temperature", "top_p"):
                found[name].add(json.loads(sample.text)["sampling"][name])
            found["tens"].add(math.floor((sample.reward or 0.0) / 10))
    return found


def said(world: Restart, text: str) -> int:
    return sum(text in line for line in world.said)


OF_THE_MACHINE = "trainer.processes_per_node is 0, at the last start it was 1"
"""Each process is on a machine of its own, and this was given for the first one's."""


def changes(world: Restart) -> list[str]:
    """What masters have said of settings that are not as they were."""
    return [line.partition("info: ")[2] for line in world.said if "at the last start it was" in line]


SAMPLING = {"max_tokens": (8, 16), "temperature": (1.0, 0.5), "top_p": (1.0, 0.9), "samples_per_task": (2, 4)}


def test_open_iteration_keeps_its_sampling_and_the_next_has_the_new(tmp_path: Path) -> None:
    world = run(tmp_path, {f"rollout.{name}": now for name, (_, now) in SAMPLING.items()})
    origins = [manifest(world.run_dir, "train", iteration)["origin"]["sampling"] for iteration in (1, 2)]
    (line,) = (text for text in world.said if "iteration 1 is finished as it was begun: " in text)
    for name, (before, now) in SAMPLING.items():
        assert [seen(world.run_dir, iteration)[name] for iteration in (1, 2)] == [{before}, {now}]
        key = "n" if name == "samples_per_task" else name
        assert [sampling[key] for sampling in origins] == [before, now]
        assert f"rollout.{name}={before:g} (now {now:g})" in line
    batches = [Batch.decode((world.run_dir.batch(n) / "batch.safetensors").read_bytes()) for n in (1, 2)]
    assert [set(batch.temperatures.tolist()) for batch in batches] == [{1.0}, {0.5}]


def test_worker_that_held_scores_the_open_iteration_as_before_and_the_next_by_the_new_reward(
    tmp_path: Path,
) -> None:
    world = run(tmp_path, {"rollout.reward": OTHER_REWARD})
    assert [seen(world.run_dir, iteration)["tens"] for iteration in (1, 2)] == [{0}, {1}]
    names = [manifest(world.run_dir, "train", n)["origin"]["reward"]["name"] for n in (1, 2)]
    assert names == ["tests.simulation.engines:reward", OTHER_REWARD]
    ranks = {entry["rank"] for entry in manifest(world.run_dir, "train", 2)["parts"]}
    assert ranks == {0, 1}, "the worker that held has scored too"
    assert said(world, "--reward=tests.simulation.engines:reward (now tests.simulation.engines:other_reward)")


def test_open_evaluation_keeps_its_sampling_and_its_tasks(tmp_path: Path) -> None:
    changed = {"eval.samples_per_task": 3, "eval.temperature": 0.5, "eval.max_tasks": 4}
    world = run(tmp_path, {**changed, "rollout.reward": OTHER_REWARD}, phase=IN_EVALUATION)
    first, second = (seen(world.run_dir, n, "eval") for n in (1, 2))
    assert (first["samples_per_task"], first["temperature"], first["tens"]) == ({1}, {0.0}, {0})
    assert (second["samples_per_task"], second["temperature"], second["tens"]) == ({3}, {0.5}, {1})
    assert [manifest(world.run_dir, "eval", n)["slots"] for n in (1, 2)] == [48, 4]


def test_open_iteration_keeps_its_slots(tmp_path: Path) -> None:
    changed = {"rollout.tasks_per_iteration": 5, "rollout.over_sample": 2.0, "rollout.dynamic_sampling": True}
    world = run(tmp_path, changed)
    assert [manifest(world.run_dir, "train", n)["slots"] for n in (1, 2)] == [24, 5]
    assert said(world, "rollout.tasks_per_iteration=24 (now 5), rollout.dynamic_sampling=false (now true)")


def test_iteration_of_which_nothing_is_finished_is_opened_anew(tmp_path: Path) -> None:
    changed = {"rollout.max_tokens": 16, "rollout.tasks_per_iteration": 5, "eval.temperature": 0.5}
    world = killed_in(tmp_path, changed, IN_PLAN, 1)
    assert [seen(world.run_dir, n)["max_tokens"] for n in (1, 2)] == [{16}, {16}]
    assert [manifest(world.run_dir, "train", n)["slots"] for n in (1, 2)] == [5, 5]
    assert seen(world.run_dir, 1, "eval")["temperature"] == {0.5}
    assert said(world, "no group of iteration 1 is finished: it is opened anew with the new settings")


def test_nothing_is_said_when_nothing_has_changed(tmp_path: Path) -> None:
    world = run(tmp_path, {})
    assert not said(world, "as it was begun") and not said(world, "opened anew")
    assert changes(world) == [OF_THE_MACHINE]


def test_what_is_changed_is_said_and_nothing_else(tmp_path: Path) -> None:
    world = run(tmp_path, {"rollout.max_tokens": 16, "trainer.learning_rate": 1e-5})
    assert changes(world) == [
        "rollout.max_tokens is 16, at the last start it was 8",
        "trainer.learning_rate is 1e-05, at the last start it was 0.0003",
        OF_THE_MACHINE,
    ]


def test_rank_that_fails_again_and_again_is_let_in_ever_more_rarely(tmp_path: Path) -> None:
    world = World(tmp_path, 2, 0, {"iterations": 20, "cluster.on_node_failure": "shrink"})

    def fail(process: Process) -> None:
        if isinstance(process, NodeProcess) and process.rank == 1 and process.place >= (1, 2):
            world.kill(process)

    world.disk.on_call = fail
    world.run(lambda: True)
    assert world.scheduler.violation is None
    epochs = max(int(path.name[1:5]) for path in world.run_dir.master.glob("*.epoch.json"))
    failures = sum(process.killed for process in world.processes)
    assert 3 <= failures <= 8 and epochs <= 2 * failures + 4, (failures, epochs)
    assert any("before it finished an iteration" in line for line in world.said)


def test_master_whose_mount_shows_none_of_its_heartbeats_ends_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path, 2, 0, {})
    world.allowed = {Exit.FAILED}
    real = world.disk.listdir

    def without_beats(path: Any) -> list[str]:
        return [name for name in real(path) if not isinstance(parse_protocol_name(name), Beat)]

    def over() -> bool:
        if any(process.rank == 0 and process.code is not None for process in world.processes):
            world.scheduler.end()
        return False

    world.patches.append(lambda patch: patch.setattr(world.disk, "listdir", without_beats))
    world.run(over)
    assert world.scheduler.violation is None
    (text,) = [line for line in world.said if "has shown none of them" in line]
    assert f"run doctor --log-path {world.run_dir.root}" in text
