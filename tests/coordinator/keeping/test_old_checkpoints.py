"""Which checkpoints stay."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory import published
from coordinator.directory.background import Background
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.published import Incomplete
from coordinator.keeping import old_checkpoints, policy_choice
from coordinator.keeping.old_checkpoints import checkpoints_to_keep, old_copies, read_back, retire_checkpoints
from coordinator.machine.store import Store
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.node.policies import Policies
from coordinator.node.position import Position
from coordinator.phases import metrics, rollout
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.keeping import CheckpointSettings
from rollout.storage import files, hashing
from tests.coordinator.examples import write_checkpoint

SAMPLED = [
    {"iteration": n, "kind": "both", "reward": reward}
    for n, reward in enumerate([0.1, 0.5, 0.9, 0.2, 0.3, 0.3], 1)
]


def kept_after(run_dir: RunDir, lines: list[dict[str, Any]], **settings: Any) -> set[int]:
    """Which of the checkpoints 1 to 6 stay after these lines of metrics.jsonl."""
    run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    score = FinishedIterations(run_dir, keeps_scores=True).look().score
    return checkpoints_to_keep([1, 2, 3, 4, 5, 6], score, CheckpointSettings(**settings))


@pytest.mark.parametrize(
    ("settings", "stay"),
    [
        ({"keep_last": 2}, {5, 6}),
        ({"keep_last": 9}, {1, 2, 3, 4, 5, 6}),
        ({"keep_last": 2, "keep_every": 2}, {2, 4, 5, 6}),
        # Iteration 3 sampled from what iteration 2 had trained; nothing has sampled from 6 yet.
        ({"keep_last": 2, "keep_best": 1}, {2, 5, 6}),
        ({"keep_last": 2, "keep_best": 3, "keep_every": 3}, {1, 2, 3, 5, 6}),
    ],
)
def test_newest_stay_and_every_nth_and_the_best(
    run_dir: RunDir, settings: dict[str, int], stay: set[int]
) -> None:
    assert kept_after(run_dir, SAMPLED, **settings) == stay


def test_best_is_the_best_evaluated_where_there_are_evaluations(run_dir: RunDir) -> None:
    evaluated = {"iteration": 5, "kind": "both", "reward": 0.1, "eval_reward": 0.7}
    lines = [*SAMPLED[:4], evaluated, SAMPLED[5]]
    assert kept_after(run_dir, lines, keep_last=2, keep_best=1) == {4, 5, 6}


def test_of_equally_good_ones_the_newer_stays(run_dir: RunDir) -> None:
    lines = [{"iteration": n, "kind": "both", "reward": 0.5} for n in (2, 3, 4)]
    assert kept_after(run_dir, lines, keep_last=3, keep_best=1) == {3, 4, 5, 6}


# ---- on disk


def node_at(run_dir: RunDir) -> Any:
    """A master, as far as retention knows one."""
    identity: Any = SimpleNamespace(run_dir=run_dir, inputs=SimpleNamespace(model_files={}))
    settings = SimpleNamespace(checkpoints=CheckpointSettings(keep_last=2), cluster=ClusterSettings())
    record = SimpleNamespace(epoch=2)
    policies, position = Policies(identity, Store()), Position()
    node: Any = SimpleNamespace(
        run_dir=run_dir, settings=settings, record=record, policies=policies, position=position,
        finished=FinishedIterations(run_dir),
    )  # fmt: skip
    node.check = lambda: None
    node.reading = lambda: Node.reading(node)
    return node


def publish(run_dir: RunDir, *iterations: int) -> None:
    for number in iterations:
        write_checkpoint(run_dir.checkpoint(number), number, b"weights %d" % number)


def damage(directory: Path) -> None:
    """Other content of the same size."""
    (directory / "model.safetensors").write_bytes(b"WEIGHTS 0")


def removed(node: Any) -> list[int]:
    before = set(published.checkpoints(node.run_dir))
    retire_checkpoints(node, Iteration(9))
    return sorted(before - set(published.checkpoints(node.run_dir)))


def test_no_checkpoint_goes_before_a_newer_one_is_verified(run_dir: RunDir) -> None:
    node = node_at(run_dir)
    publish(run_dir, 1, 2, 3, 4)
    assert removed(node) == []
    read_back(run_dir.checkpoint(2))
    assert removed(node) == [1], "3 and 4 are still to be verified: 2 is what there is to fall back to"
    read_back(run_dir.checkpoint(4))
    assert removed(node) == [2]


def test_damage_after_the_publication_costs_no_predecessor_and_is_found(run_dir: RunDir) -> None:
    node = node_at(run_dir)
    publish(run_dir, 1, 2)
    node.policies.know_usable(2)
    damage(run_dir.checkpoint(2))
    node.policies.verify(2)  # it was weighed, and is being read back
    read_back(run_dir.checkpoint(2))
    with pytest.raises(Incomplete, match=r"model\.safetensors is missing or differs"):
        node.policies.verify(2)
    assert removed(node) == [2] and (run_dir.checkpoints / "iteration_000002.damaged").is_dir()
    assert published.verify_checkpoint(run_dir.checkpoint(1)).iteration == 1


def test_next_start_reads_only_what_nobody_has_verified(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(run_dir, 1)
    read_back(run_dir.checkpoint(1))
    monkeypatch.setattr(published, "verify_checkpoint", lambda *_: pytest.fail("it is read again"))
    node_at(run_dir).policies.verify(1)
    monkeypatch.undo()
    damage(run_dir.checkpoint(1))
    with pytest.raises(Incomplete):
        node_at(run_dir).policies.verify(1)


def test_master_verifies_where_the_background_does_not_keep_up(run_dir: RunDir) -> None:
    node = node_at(run_dir)
    publish(run_dir, *range(1, old_checkpoints.UNVERIFIED + 3))
    assert removed(node) == []
    publish(run_dir, 8)
    assert removed(node) == [*range(1, old_checkpoints.UNVERIFIED + 2)], "8 was verified at once"
    assert node.position.describe()["done"] >= 0


@pytest.mark.parametrize("kind", ["both", "update"])
def test_damage_in_the_last_iteration_is_found_before_it_is_over(run_dir: RunDir, kind: str) -> None:
    node = node_at(run_dir)
    node.settings.kind, node.settings.iterations = kind, 2
    publish(run_dir, 1, 2)
    node.policies.know_usable(2)
    damage(run_dir.checkpoint(2))
    with pytest.raises(Incomplete, match=r"model\.safetensors is missing or differs"):
        metrics.end_iteration(node, Iteration(2), {})
    assert published.checkpoints(run_dir) == [1]
    assert published.metrics_lines(run_dir) == [], "so it is trained again"


@pytest.mark.parametrize("number", [1, 2])
def test_signal_ends_a_node_in_the_middle_of_a_checkpoint(run_dir: RunDir, number: int) -> None:
    """That it reads at the start of an iteration, or at the end of the run."""
    node = node_at(run_dir)
    node.settings.kind, node.settings.iterations = "both", number
    publish(run_dir, 1)

    def interrupted() -> None:
        raise NodeEnded(Exit.INTERRUPTED, "SIGINT", "stopped")

    node.check = interrupted
    with pytest.raises(NodeEnded, match="SIGINT"):
        if number == 1:
            old_checkpoints.verify_last(node, Iteration(1))
        else:
            policy_choice.base_of(node, Iteration(2))
    assert published.names(run_dir.checkpoint(1)) and not node.policies.is_verified(1)


def test_only_the_last_iteration_waits_for_its_checkpoint_to_be_read(run_dir: RunDir) -> None:
    node = node_at(run_dir)
    node.settings.kind = "both"
    publish(run_dir, 1)
    for node.settings.iterations in (None, 2, 1):
        assert not node.policies.is_verified(1)
        old_checkpoints.verify_last(node, Iteration(1))
    assert node.policies.is_verified(1)


def test_reading_back_what_is_set_aside_meanwhile_says_nothing(run_dir: RunDir) -> None:
    read_back(run_dir.checkpoint(5))
    assert published.names(run_dir.checkpoints) == []


def test_checkpoint_that_was_trained_again_while_the_first_was_read_is_not_called_damaged(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(run_dir.checkpoint(1), 1, b"first")
    read = hashing.file_facts

    def slow(path: Path, *more: Any) -> Any:
        monkeypatch.setattr(hashing, "file_facts", read)
        published.set_aside(run_dir.checkpoint(1), "damaged")
        write_checkpoint(run_dir.checkpoint(1), 1, b"again")
        return read(path, *more)

    monkeypatch.setattr(hashing, "file_facts", slow)
    read_back(run_dir.checkpoint(1))
    assert published.damage(run_dir.checkpoint(1)) is None
    node_at(run_dir).policies.verify(1)


def test_newest_copy_of_each_kind_that_was_set_aside_stays(run_dir: RunDir) -> None:
    names = [
        *("iteration_000009.damaged", "iteration_000010.damaged", "iteration_1000000.damaged"),
        *(".iteration_000002.e0009.damaged", ".iteration_000002.e0010.damaged"),
        *(".iteration_000003.e0001.foreign", "LATEST", "iteration_000001"),
    ]
    gone = ["iteration_000009.damaged", "iteration_000010.damaged", ".iteration_000002.e0009.damaged"]
    assert old_copies(names) == gone
    for name in gone:
        (run_dir.checkpoints / name).mkdir()
    (run_dir.checkpoints / "iteration_1000000.damaged").mkdir()
    left = retire_checkpoints(node_at(run_dir), Iteration(9))
    assert [path.name for path in left] == gone[:2]


def test_second_damaged_copy_of_one_iteration_takes_the_place_of_the_first(run_dir: RunDir) -> None:
    for content in (b"first", b"second"):
        write_checkpoint(run_dir.checkpoint(1), 1, content)
        published.set_aside(run_dir.checkpoint(1), "damaged")
    (copy,) = run_dir.checkpoints.iterdir()
    assert (copy / "model.safetensors").read_bytes() == b"second"


@pytest.mark.parametrize(
    ("members", "ranks"), [([0, 1, 3], [3, 1, 3]), ([0, 3], [3, 3, 3]), ([0], [0, 0, 0])]
)
def test_workers_take_turns_to_read_back_what_nobody_has_verified(
    run_dir: RunDir, members: list[int], ranks: list[int]
) -> None:
    node = node_at(run_dir)
    node.record.members = dict.fromkeys(members)
    publish(run_dir, 1)
    policy = published.policy_of(run_dir, 1)
    assert [rollout._verifier(node, Iteration(number), policy) for number in (1, 2, 3)] == ranks
    node.rank, node.verifier = ranks[1], Background("verifier")
    two = Iteration(2, documents={Phase.ITERATION_START: {"verifier": ranks[1], "base_iteration": 1}})
    rollout.begin_to_verify(node, two)
    assert node.verifier.is_idle(60.0)
    assert rollout._verifier(node, Iteration(2), policy) is None
    assert rollout._verifier(node, Iteration(2), published.Policy(0, run_dir.base_model, "d")) is None


def test_checkpoint_that_was_moved_to_an_archive_stays_there(run_dir: RunDir, tmp_path: Path) -> None:
    node = node_at(run_dir)
    publish(run_dir, 1, 2, 3)
    archive = tmp_path / "archive"
    run_dir.checkpoint(1).rename(archive)
    run_dir.checkpoint(1).symlink_to(archive)
    read_back(run_dir.checkpoint(3))
    there = sorted(path.name for path in archive.iterdir())
    for path in retire_checkpoints(node, Iteration(9)):
        files.remove_tree(path)
    assert published.checkpoints(run_dir) == [2, 3]
    assert there and sorted(path.name for path in archive.iterdir()) == there
    assert not [path for path in run_dir.checkpoints.iterdir() if path.is_symlink()]
