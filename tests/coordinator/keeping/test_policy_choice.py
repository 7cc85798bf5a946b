import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.published import Incomplete
from coordinator.keeping import policy_choice
from coordinator.keeping.resume import next_iteration
from coordinator.machine.store import Store
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.node.policies import Policies
from coordinator.node.position import Position
from coordinator.protocol.fresh_listing import FreshListing
from coordinator.settings.loading import build
from rollout.storage import files
from tests.coordinator.examples import write_checkpoint


def node_at(run_dir: RunDir, level: int = 0, checkpoints: range = range(1, 5), kind: str = "both") -> Any:
    """A master whose run has finished these iterations."""
    settings = build({"cluster.max_async_level": level, "rl_phase": kind, "model": str(run_dir.base_model)})
    run_dir.base_model.mkdir(exist_ok=True)
    (run_dir.base_model / "model.safetensors").write_bytes(b"start")
    for number in checkpoints:
        write_checkpoint(run_dir.checkpoint(number), number, b"weights %d" % number)
        run_dir.trajectories("train", number).mkdir(exist_ok=True)
        run_dir.manifest("train", number).write_text("{}")
    lines = [{"iteration": number, "kind": kind} for number in checkpoints]
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    identity: Any = SimpleNamespace(
        run_dir=run_dir, settings=settings, inputs=SimpleNamespace(model_files={})
    )
    node: Any = SimpleNamespace(
        run_dir=run_dir, settings=settings, policies=Policies(identity, Store()), position=Position(),
        finished=FinishedIterations(run_dir),
    )  # fmt: skip
    node.check = lambda: None
    node.reading = lambda: Node.reading(node)
    return node


def sampler(node: Any, number: int, opened: dict[str, Any] | None = None) -> int:
    iteration = Iteration(number)
    return policy_choice.sampler_of(node, iteration, policy_choice.base_of(node, iteration), opened).iteration


def damage(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"WEIGHTS 0")


@pytest.mark.parametrize(("level", "found"), [(0, 4), (1, 3), (3, 1), (4, 0), (9, 0)])
def test_policy_of_so_many_iterations_before_samples(run_dir: RunDir, level: int, found: int) -> None:
    assert sampler(node_at(run_dir, level), 5) == found


def test_rollout_alone_takes_the_newest_policy(run_dir: RunDir) -> None:
    assert sampler(node_at(run_dir, level=2, kind="rollout"), 7) == 4


def test_begun_iteration_keeps_its_policy_while_that_is_there(run_dir: RunDir) -> None:
    node = node_at(run_dir, level=0)
    assert sampler(node, 5, {"policy_iteration": 2}) == 2
    files.remove_tree(run_dir.checkpoint(2))
    assert sampler(node, 5, {"policy_iteration": 2}) == 1


@pytest.mark.parametrize(
    ("level", "number", "found"), [(1, 12, None), (0, 10, 9), (3, 10, 7), (5, 10, 7), (9, 10, 0), (1, 11, 9)]
)
def test_crew_that_generates_waits_only_for_a_policy_that_will_come(
    run_dir: RunDir, level: int, number: int, found: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is gone while newer ones are there is not made again."""
    node = node_at(run_dir, level=level, checkpoints=range(7, 10))
    node.run_dir = RunDir(run_dir.root, "rollout")
    assert policy_choice.awaited_sampler(node, number) == found
    if found is not None:
        assert policy_choice.base_of(node, Iteration(number)).iteration == found
        assert ("is gone" in caplog.text) == (found != policy_choice.sampled_by(number, node.settings))


def test_nearest_policy_samples_where_the_right_one_is_gone(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention goes by the level that the run had before."""
    node = node_at(run_dir, level=3, checkpoints=range(7, 10))
    assert sampler(node, 10) == 7
    assert "checkpoint of iteration 6 is gone: iteration 10 is sampled by that of iteration 7" in caplog.text
    assert (
        policy_choice.nearest(5, [3, 7]) == 3
        and policy_choice.nearest(0, [3]) == 0
        and policy_choice.nearest(5, []) == 0
    )


def test_policy_that_was_just_published_is_served_where_a_client_believes_its_older_listing(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nearest one that an old listing shows may have been removed."""
    node = node_at(run_dir)
    node.watch = SimpleNamespace(listings=FreshListing(1))
    believed, listing, mark = (
        {run_dir.checkpoints: files.listing(run_dir.checkpoints)},
        files.listing,
        files.mark,
    )
    write_checkpoint(run_dir.checkpoint(5), 5, b"weights 5")
    monkeypatch.setattr(files, "listing", lambda path: believed[path] if path in believed else listing(path))
    monkeypatch.setattr(files, "mark", lambda path: (believed.pop(path.parent, None), mark(path)))
    assert policy_choice.served_next(node, Iteration(5)).iteration == 5


def test_damaged_policy_that_samples_is_set_aside_and_the_nearest_taken(run_dir: RunDir) -> None:
    node = node_at(run_dir, level=2)
    damage(run_dir.checkpoint(2))
    assert sampler(node, 5) == 1
    assert run_dir.checkpoint(2).with_name("iteration_000002.damaged").is_dir()


def test_iteration_whose_checkpoint_is_damaged_is_run_again(run_dir: RunDir) -> None:
    node = node_at(run_dir)
    assert policy_choice.next_to_run(node, 5) == 5
    damage(run_dir.checkpoint(4))
    with pytest.raises(Incomplete, match="iteration_000004"):
        policy_choice.base_of(node, Iteration(5))
    assert policy_choice.next_to_run(node, 5) == 4
    assert policy_choice.base_of(node, Iteration(4)).iteration == 3


def test_training_goes_on_without_an_iteration_that_cannot_be_trained_again(
    run_dir: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    node = node_at(run_dir)
    run_dir.manifest("train", 4).unlink()
    damage(run_dir.checkpoint(4))
    node.finished.look()
    assert policy_choice.base_of(node, Iteration(5)).iteration == 3
    assert "the checkpoint of iteration 4 is gone: going on from the one of iteration 3" in caplog.text
    assert policy_choice.next_to_run(node, 5) == 5


@pytest.mark.parametrize("lines", [0, 2, 3])
@pytest.mark.parametrize("kept", [range(1, 5), range(4, 5)])
def test_run_whose_metrics_are_lost_goes_on_from_its_newest_checkpoint(
    run_dir: RunDir, lines: int, kept: range
) -> None:
    node = node_at(run_dir)
    for number in set(range(1, 5)) - set(kept):
        files.rename(run_dir.checkpoint(number), run_dir.removed(number, 1))
    there = run_dir.metrics.read_text().splitlines(keepends=True)
    run_dir.metrics.write_text("".join(there[:lines]))
    number = next_iteration(node.finished, node.settings)
    assert number == lines + 1 and policy_choice.next_to_run(node, number) == 4
    assert policy_choice.base_of(node, Iteration(4)).iteration == (3 if len(kept) > 1 else 0)
