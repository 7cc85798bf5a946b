"""What an interrupted iteration left, by the names of its files."""

from pathlib import Path

import pytest

from coordinator.console.commands.leftovers import Leftover, LeftoverKind, look, plan
from coordinator.directory.file_names import Beat, Flag, Record
from coordinator.directory.layout import RunDir
from tests.coordinator.console.commands.interrupted_run import N, interrupted_run


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return interrupted_run(tmp_path / "run")


def test_plan_names_all_that_the_iteration_left_what_was_made_last_first(run_dir: RunDir) -> None:
    planned = plan({run_dir: 4}, N, look([run_dir], N))
    assert [(str(left.path.relative_to(run_dir.root)), left.kind) for left in planned.leftovers] == [
        ("protocol/main/workers/e0002.i000000.p00.r0001.enter", LeftoverKind.ENDED),
        ("protocol/main/master/e0003.i000002.p04.r0000.ok", LeftoverKind.FLAG),
        ("protocol/main/master/e0002.i000001.p04.r0000.ok", LeftoverKind.ENDED),
        (f"images/.{'ab' * 32}.0011aabb.tmp", LeftoverKind.TEMPORARY),
        ("checkpoints/.LATEST.0011aabb.tmp", LeftoverKind.TEMPORARY),
        ("checkpoints/.iteration_000002.e0002.damaged", LeftoverKind.STAGING),
        ("checkpoints/.iteration_000002.e0003", LeftoverKind.STAGING),
        ("trainer_states/iteration_000002.e0003", LeftoverKind.STATE),
        ("batches/iteration_000002/batch.json", LeftoverKind.BATCH),
        ("batches/iteration_000002/batch.safetensors", LeftoverKind.BATCH),
        ("eval_trajectories/iteration_000002/manifest.json", LeftoverKind.MANIFEST),
        ("train_trajectories/iteration_000002/manifest.json", LeftoverKind.MANIFEST),
        ("train_trajectories/iteration_000002/groups.jsonl", LeftoverKind.GROUPS),
        ("train_trajectories/iteration_000002/r0000.e0002.part0001.safetensors", LeftoverKind.PART),
        ("train_trajectories/iteration_000002/r0001.e0002.part0001.safetensors", LeftoverKind.PART),
        ("train_trajectories/iteration_000002/iteration.json", LeftoverKind.OPENING),
    ]
    assert not planned.unknown


def test_what_a_rollout_crew_has_measured_goes_with_its_iteration(run_dir: RunDir) -> None:
    run_dir.rollout_times(N).write_text("{}")
    planned = plan({run_dir: 4}, N, look([run_dir], N))
    assert Leftover(run_dir.rollout_times(N), LeftoverKind.TIMES) in planned.leftovers and not planned.unknown


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (Record(3).name, None),
        (Flag(3, 9, 0, 0, "failed").name, LeftoverKind.ENDED),
        (Flag(3, N, 10, 0, "trainer_failed").name, LeftoverKind.FLAG),
        (Flag(4, N, 0, 0, "ok").name, None),
        (Beat(3, 1, 1, 5).name, None),
        (Beat(3, 1, 1, 4).name, LeftoverKind.BEAT),
        (Beat(0, 1, 1, 0).name, LeftoverKind.BEAT),
        (f".{Beat(3, 1, 1, 6).name}.00ff00ff.tmp", LeftoverKind.TEMPORARY),
        (f".{Beat(0, 1, 2, 0).name}.00ff00ff.tmp", None),  # of a process that starts just now
        (f".{Flag(3, 1, 0, 0, 'ok').name}.00ff00ff.tmp", LeftoverKind.TEMPORARY),
        (f".{Flag(4, 1, 0, 0, 'ok').name}.00ff00ff.tmp", None),
        (f".{Record(3).name}.00ff00ff.tmp", LeftoverKind.TEMPORARY),
        (f".{Record(4).name}.00ff00ff.tmp", None),
        (".nfs0000", None),
    ],
)
def test_in_protocol_only_what_has_ended_goes(tmp_path: Path, name: str, what: LeftoverKind | None) -> None:
    run_dir = RunDir(tmp_path)
    listed = look([run_dir], N) | {run_dir.workers: [Beat(3, 1, 1, 5).name, name]}
    assert plan({run_dir: 4}, N, listed).leftovers == ([(run_dir.workers / name, what)] if what else [])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("iteration_000002", None),
        ("iteration_000002.damaged", None),
        ("LATEST", None),
        (".iteration_000002.e0010", LeftoverKind.STAGING),
        (".iteration_000002.e0010.foreign", LeftoverKind.STAGING),
        (".removed_iteration_000002.e0010", LeftoverKind.STAGING),
        (".removed_iteration_000001.e0010", None),
        (".iteration_000020.e0010", None),
        (".iteration_000001.e0002", None),
    ],
)
def test_in_checkpoints_only_what_was_never_published_of_this_iteration_goes(
    tmp_path: Path, name: str, what: LeftoverKind | None
) -> None:
    run_dir = RunDir(tmp_path)
    listed = look([run_dir], N) | {run_dir.checkpoints: [name]}
    planned = plan({run_dir: 4}, N, listed)
    assert planned.leftovers == ([(run_dir.checkpoints / name, what)] if what else [])
    assert not planned.unknown
