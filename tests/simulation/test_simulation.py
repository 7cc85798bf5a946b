"""Random sequences of faults against the real protocol code of three nodes.

`FLAGPOST_EXAMPLES=5000 pytest -n 0 tests/simulation -k faults` looks for longer, at other examples each time.
A failure prints its faults and seed (for KNOWN below), and the story of the run.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.collector import unfinished_samples
from coordinator.directory import manifests, parts
from coordinator.directory.file_names import Flag
from coordinator.directory.layout import RunDir
from coordinator.keeping import old_checkpoints, policy_choice
from coordinator.node.flags import Flags, Payload
from coordinator.protocol.phase import Phase
from rollout.storage import files
from rollout.trajectory import Group
from tests.simulation.disk import Disk
from tests.simulation.faults import ACTIONS, Fault, Injector, faults
from tests.simulation.invariants import Invariants
from tests.simulation.world import World

NODES = 3
EXAMPLES = os.environ.get("FLAGPOST_EXAMPLES")
LINES = 200
"""Lines of the story that a failure shows."""
SEGMENTS: dict[str, Any] = {"rollout__segment_tokens": 2, "rollout__max_tokens": 6}
"""A sample takes up to three iterations."""
LINE = 1000
"""Bytes of a line of metrics.jsonl here, at least."""


def run(
    nodes: int,
    seed: int,
    happens: Sequence[Fault],
    patch: Callable[..., None] | None = None,
    has_links: bool = True,
    trainers: int = 0,
    guests: int = 0,
    **options: Any,
) -> str:
    """A run to its end; the policy that it came to. AssertionError if anything was not as it must be."""
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="flagpost-", dir=memory if memory.is_dir() else None))
    try:
        settings = {key.replace("__", "."): value for key, value in options.items()}
        world = World(root, nodes, seed, settings, trainers)
        world.disk.has_links, world.guests = has_links, guests
        invariants = Invariants(world)
        world.patches += [patch] if patch else []
        world.run(Injector(world, happens).are_over)
        policy = "" if world.scheduler.violation else invariants.look_over()
        if world.scheduler.violation:
            story = "\n".join(world.said[:LINES])
            raise AssertionError(f"seed {seed}, {happens}\n{story}\n{world.scheduler.violation}")
        return policy
    finally:
        shutil.rmtree(root)


@cache
def undisturbed(iterations: int = 2, level: int = 0, in_segments: bool = False) -> str:
    """The policy that a run of one node comes to if nothing happens."""
    more = SEGMENTS if in_segments else {}
    return run(1, 0, (), iterations=iterations, cluster__max_async_level=level, **more)


@pytest.mark.parametrize("nodes", [2, 3])
def test_the_policy_is_that_of_a_single_node(nodes: int) -> None:
    assert run(nodes, 7, ()) == undisturbed()


@pytest.mark.parametrize(("seed", "calls"), [(0, 1), (33, 3)])
def test_two_processes_of_a_master_may_make_the_built_in_model(seed: int, calls: int) -> None:
    """Each finds none, and the second one cannot put its own there: it takes that of the first."""
    assert run(NODES, seed, [Fault("replace", 0, 0, 0, calls, 0.0)]) == undisturbed()


def test_the_same_seed_and_faults_make_the_same_run() -> None:
    def story() -> list[str]:
        root = Path(tempfile.mkdtemp())
        try:
            world = World(root, NODES, 5, {})
            world.run(Injector(world, [Fault("kill", 0, 1, 2, 9, 3.0)]).are_over)
            return [line.replace(str(root), "") for line in world.said]
        finally:
            shutil.rmtree(root)

    assert story() == story()


searching = settings(
    max_examples=int(EXAMPLES or 5),
    derandomize=EXAMPLES is None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
sequences = st.lists(faults(NODES, ACTIONS), min_size=1, max_size=5)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(seed=st.integers(0, 1000), happens=sequences, has_links=st.booleans())
def test_nodes_that_hold_come_through_all_faults(seed: int, happens: list[Fault], has_links: bool) -> None:
    assert run(NODES, seed, happens, has_links=has_links) == undisturbed()


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(seed=st.integers(0, 1000), happens=sequences)
def test_nodes_that_go_on_without_the_lost_come_through_all_faults(seed: int, happens: list[Fault]) -> None:
    assert run(NODES, seed, happens, cluster__on_node_failure="shrink") == undisturbed()


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(seed=st.integers(0, 1000), happens=sequences, level=st.sampled_from([1, 3]))
def test_samples_of_older_policies_come_through_all_faults(
    seed: int, happens: list[Fault], level: int
) -> None:
    policy = run(NODES, seed, happens, iterations=4, cluster__max_async_level=level)
    assert policy == undisturbed(4, level) != undisturbed(4)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(seed=st.integers(0, 1000), happens=sequences, level=st.sampled_from([0, 1]))
def test_samples_in_segments_come_through_all_faults(seed: int, happens: list[Fault], level: int) -> None:
    policy = run(NODES, seed, happens, iterations=4, cluster__max_async_level=level, **SEGMENTS)
    assert policy == undisturbed(4, level, in_segments=True) != undisturbed(4, level)


@pytest.mark.timeout(900)  # a failure is made smaller, for up to five minutes
@searching
@given(seed=st.integers(0, 1000), happens=sequences)
def test_groups_that_are_replaced_come_through_all_faults(seed: int, happens: list[Fault]) -> None:
    spare = {"rollout__dynamic_sampling": True, "rollout__over_sample": 1.5, "rollout__dynamic_limit": 6.0}
    assert run(NODES, seed, happens, **spare), "what it comes to depends on which groups are the first"


@pytest.mark.parametrize("phase", range(7))
def test_old_iterations_are_removed_whenever_a_node_is_killed(phase: int) -> None:
    """The master and the worker, each in both of two phases, in iterations whose predecessors are removed."""
    places = [(0, 3, phase), (1, 3, phase + 7), (1, 4, phase), (0, 4, phase + 7)]
    happens = [Fault("kill", *place, calls=sum(place) % 5, seconds=3.0) for place in places]
    assert run(2, phase, happens, iterations=5, trajectories__keep_last=1) == undisturbed(5)


@pytest.mark.parametrize("keep_last", [None, 2])
def test_no_iteration_lists_or_reads_what_grows_with_their_number(keep_last: int | None) -> None:
    read_bytes, listed, disks = list[int](), Counter[str](), set[Disk]()

    def watch(patch: pytest.MonkeyPatch) -> None:
        for name in ("read", "read_from"):
            patch.setattr(files, name, partial(watched_read, getattr(files, name)))
        for name in ("listdir", "scandir"):
            patch.setattr(Disk, name, partialmethod(watched_listing, getattr(Disk, name)))

    def watched_read(real: Callable[..., bytes], path: Path, *more: Any, **options: Any) -> bytes:
        data = real(path, *more, **options)
        if path.name == "metrics.jsonl" and not any(disk.is_observing for disk in disks):
            read_bytes.append(len(data))
        return data

    def watched_listing(disk: Disk, real: Callable[..., Any], path: Path) -> Any:
        disks.add(disk)
        listed[Path(path).name] += not disk.is_observing
        return real(disk, path)

    assert run(
        1, 0, (), watch, iterations=12, rollout__task_sampling="curriculum", trajectories__keep_last=keep_last
    )
    assert max(read_bytes) < 4 * LINE and sum(read_bytes) > 12 * LINE
    assert listed["workers"] > 12 * 5
    assert listed["train_trajectories"] <= 6, "when the run starts, and nothing is there yet"
    assert listed["eval_trajectories"] <= 1
    assert listed["batches"] == (12 if keep_last else 0)


KNOWN: dict[str, tuple[int, list[Fault]]] = {
    "an old master wakes in the metrics row": (122, [Fault("replace", 0, 1, 13, 10, 142.65)]),
    "three masters start at once": (
        52,
        [
            Fault("twin", 0, 0, 2, 12, 38.14),
            Fault("twin", 1, 0, 3, 1, 45.12),
            Fault("twin", 0, 0, 9, 6, 35.63),
        ],
    ),
    "a master stopped while it starts wakes when a newer one runs": (
        1254,
        [
            Fault("twin", 0, 2, 0, 37, 118.0),
            Fault("replace", 1, 1, 4, 9, 74.88),
            Fault("replace", 0, 0, 0, 10, 42.62),
        ],
    ),
    "a rank started twice while the master is away": (
        2176,
        [Fault("twin", 2, 1, 5, 4, 79.55), Fault("leave", 0, 0, 9, 7, 110.46)],
    ),
    "an old master wakes while it verifies a checkpoint": (2141, [Fault("replace", 0, 2, 11, 7, 26.22)]),
    "an old master names the checkpoint that the new one looks at": (626, [Fault("twin", 0, 2, 11, 2, 0.0)]),
    "an old worker wakes after the newer one has left": (
        5024,
        [
            Fault("replace", 1, 0, 4, 7, 147.55),
            Fault("leave", 1, 2, 8, 9, 1.94),
            Fault("freeze", 0, 1, 2, 16, 3.54),
            Fault("freeze", 0, 0, 2, 1, 35.4),
        ],
    ),
    "an old master wakes between two looks for the manifest": (0, [Fault("replace", 0, 1, 4, 3, 20.0)]),
    "an engine is being started again when the epoch changes": (
        0,
        [Fault("kill", 0, 0, 1, 1, 21.0), Fault("kill", 1, 1, 4, 0, 0.0), Fault("engine", 0, 0, 0, 0, 0.0)],
    ),
}
"""What the search has found: seed and faults."""


@pytest.mark.parametrize("name", KNOWN)
def test_what_was_found_once_does_no_harm(name: str) -> None:
    seed, happens = KNOWN[name]
    assert run(NODES, seed, happens) == undisturbed()


# ---- the search finds what it is there for


def everything_is_unfinished(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts, "finished_groups", lambda *_: {})


def groups_count_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(manifests, "first_finished", lambda found: ((part, part.groups) for part in found))


def nobody_waits_for_enter(patch: pytest.MonkeyPatch) -> None:
    real = Flags.wait_members

    def wait(flags: Flags, iteration: int, phase: int) -> dict[int, Flag]:
        return real(flags, iteration, phase) if iteration else {}

    patch.setattr(Flags, "wait_members", wait)


def staging_has_no_epoch(patch: pytest.MonkeyPatch) -> None:
    real = RunDir.staging
    patch.setattr(RunDir, "staging", lambda run_dir, iteration, _epoch: real(run_dir, iteration, 1))


def the_newest_policy_samples(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(policy_choice, "sampler_of", lambda _node, _iteration, base, _opened: base)


def a_checkpoint_too_many_goes(patch: pytest.MonkeyPatch) -> None:
    real = old_checkpoints.checkpoints_to_keep

    def kept(there: Sequence[int], score: Any, settings: Any, at_least: int) -> set[int]:
        return real(there, score, settings, at_least - 1)

    patch.setattr(old_checkpoints, "checkpoints_to_keep", kept)


def what_was_begun_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unfinished_samples, "left_by", lambda *_: ([], [], []))


def samples_begin_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(unfinished_samples, "read", lambda *_: {})


def what_is_unfinished_is_trained(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Group, "is_unfinished", property(lambda _: False))


def flags_go_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    real = Flags.raise_done

    def raise_done(flags: Flags, iteration: int, phase: Phase, payload: Payload) -> None:
        real(flags, iteration, phase, payload)
        flags._lower(lambda own: own.is_done and own[1:3] < (iteration, phase))

    patch.setattr(Flags, "raise_done", raise_done)


def flags_go_before_they_are_counted(patch: pytest.MonkeyPatch) -> None:
    real = Flags.raise_done

    def raise_done(flags: Flags, iteration: int, phase: Phase, payload: Payload) -> None:
        real(flags, iteration, phase, payload)
        if phase is Phase.TRAINING:
            flags._lower(lambda own: own.is_done and own[1:3] == (iteration, phase))

    patch.setattr(Flags, "raise_done", raise_done)


def a_document_is_left_out(patch: pytest.MonkeyPatch) -> None:
    real = Flags.raise_done

    def raise_done(flags: Flags, iteration: int, phase: Phase, payload: Payload) -> None:
        real(flags, iteration, phase, {} if phase is Phase.TRAIN_CONFIG else payload)

    patch.setattr(Flags, "raise_done", raise_done)


BROKEN: dict[Callable[[pytest.MonkeyPatch], None], list[Fault]] = {
    everything_is_unfinished: [Fault("kill", 1, 1, 3, 5, 3.0)],
    groups_count_twice: [Fault("replace", 0, 1, 2, 15, 4.0)],
    nobody_waits_for_enter: [Fault("twin", 1, 1, 10, 6, 1.0)],
    staging_has_no_epoch: [Fault("trainer", 0, 1, 10, 10, 1.0)],
}
SEEDS = 24
"""With which the faults hit the moment at which it matters at least once; the first of these ends the
search."""


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        for seed in range(SEEDS):
            run(NODES, seed, BROKEN[broken], broken)


@pytest.mark.parametrize(
    "broken", [flags_go_before_they_are_read, flags_go_before_they_are_counted, a_document_is_left_out]
)
def test_a_broken_rule_of_flags_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        run(NODES, 0, (), broken)


@pytest.mark.parametrize("broken", [the_newest_policy_samples, a_checkpoint_too_many_goes])
def test_a_broken_rule_of_asynchrony_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        run(1, 0, (), broken, iterations=6, cluster__max_async_level=3)


@pytest.mark.parametrize(
    "broken", [what_was_begun_is_forgotten, samples_begin_again, what_is_unfinished_is_trained]
)
def test_a_broken_rule_of_segments_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: "):
        run(1, 0, (), broken, iterations=4, **SEGMENTS)
