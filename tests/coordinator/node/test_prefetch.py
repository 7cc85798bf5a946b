"""The policy that samples next: fetched beside the run, verified on the way, dropped when nobody wants it."""

import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.published import Incomplete
from coordinator.keeping import policy_choice
from coordinator.machine import store as store_module
from coordinator.machine.filesystems import Mount
from coordinator.machine.store import Store
from coordinator.node import prefetch as module
from coordinator.node.iteration import Iteration
from coordinator.node.policies import Policies
from coordinator.node.prefetch import Prefetch
from coordinator.phases import rollout
from coordinator.settings.loading import build
from coordinator.settings.tree import Crew
from rollout.storage import delta, files, hashing
from rollout.storage.hashing import unheard
from tests.coordinator.examples import run_dir_at, write_checkpoint

SOON_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> RunDir:
    """A run with checkpoints 1 to 3, each with a delta to the one before."""
    run_dir = run_dir_at(tmp_path / "run")
    write_checkpoint(run_dir.base_model, content=b"weights 0")
    for number in (1, 2, 3):
        before = run_dir.checkpoint(number - 1) if number > 1 else None
        write_checkpoint(run_dir.checkpoint(number), number, b"weights %d" % number, before)
    return run_dir


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for copies; every path counts as shared."""
    monkeypatch.setattr(store_module, "find_mount", lambda _path: Mount("nfs4", "", "/"))
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


@pytest.fixture
def read(root: RunDir, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of checkpoints that are read piece by piece: `3/model.safetensors`."""
    found: list[str] = []
    real = hashing.pieces

    def pieces(path: Path, *more: Any) -> Any:
        checkpoint, name = path.relative_to(root.checkpoints).as_posix().split("/", 1)
        found.append(f"{int(checkpoint[-6:])}/{name}")
        return real(path, *more)

    monkeypatch.setattr(hashing, "pieces", pieces)
    return found


def policies_at(root: RunDir, crew: Crew = "rollout", below: Path | None = None, **given: Any) -> Policies:
    settings = build({name.replace("__", "."): value for name, value in given.items()})
    identity: Any = SimpleNamespace(
        run_dir=RunDir(root.root, crew),
        settings=settings.of_crew(crew),
        inputs=SimpleNamespace(model_files={}),
    )
    return Policies(identity, Store(str(below) if below else None))


def weights(name: str) -> list[str]:
    """The files of a checkpoint that an engine loads."""
    return [f"{name}/{file}" for file in ("config.json", "content.json", "model.safetensors", "probe.json")]


# ---- what is read of a checkpoint, and what is believed


def test_crew_that_generates_reads_the_model_once_and_nothing_else(
    root: RunDir, local: Path, read: list[str]
) -> None:
    policies = policies_at(root, below=local)
    policies.verify(1)
    assert sorted(read) == weights("1")
    policies.verify(1)
    copy = policies.hold(policies.policy_of(1), unheard)
    assert (
        sorted(read) == weights("1") and (copy.directory / "model.safetensors").read_bytes() == b"weights 1"
    )


def test_crew_that_generates_reads_in_place_what_is_on_this_machine(root: RunDir, read: list[str]) -> None:
    policies = policies_at(root)
    policies.verify(1)
    policies.verify(1)
    assert sorted(read) == weights("1") and policies.hold(
        policies.policy_of(1), unheard
    ) == policies.policy_of(1)
    policies_at(root, engine__url="http://127.0.0.1:8000").verify(2)
    assert sorted(read) == [*weights("1"), *weights("2")], "a server of the user loads it from there"


def test_other_crews_read_all_of_a_checkpoint_to_verify_it(
    root: RunDir, local: Path, read: list[str]
) -> None:
    policies_at(root, "train", local).verify(1)
    assert sorted(read) == [*weights("1"), "1/trainer_state/optimizer.safetensors"]


def test_what_somebody_has_verified_is_not_read_again(root: RunDir, read: list[str]) -> None:
    published.verify_and_record(root.checkpoint(1))
    read.clear()
    policies_at(root).verify(1)
    assert read == []


@pytest.mark.parametrize("is_shared", [True, False])
def test_damaged_model_is_named_and_not_believed(root: RunDir, request: Any, is_shared: bool) -> None:
    below = request.getfixturevalue("local") if is_shared else None
    policies = policies_at(root, below=below)
    (root.checkpoint(1) / "model.safetensors").write_bytes(b"WEIGHTS 1")
    with pytest.raises(Incomplete, match=r"iteration_000001/model\.safetensors"):
        policies.verify(1)
    with pytest.raises(Incomplete, match=r"iteration_000001/model\.safetensors"):
        policies.verify(1)


def test_checkpoint_that_was_made_again_otherwise_is_read_again(
    root: RunDir, local: Path, read: list[str]
) -> None:
    policies = policies_at(root, below=local)
    policies.verify(3)
    files.remove_tree(root.checkpoint(3))
    write_checkpoint(root.checkpoint(3), 3, b"WEIGHTS 3")
    read.clear()
    policies.verify(3)
    assert "3/model.safetensors" in read


# ---- deltas


def test_policy_is_made_of_the_copy_of_the_one_before_and_the_delta(
    root: RunDir, local: Path, read: list[str]
) -> None:
    policies = policies_at(root, below=local)
    policies.hold(policies.policy_of(1), unheard)
    read.clear()
    copy = policies.hold(policies.policy_of(2), unheard).directory
    assert (copy / "model.safetensors").read_bytes() == b"weights 2" and not list(copy.glob(".*"))
    assert "2/.model.safetensors.delta" in read and "2/model.safetensors" not in read


def test_delta_of_a_copy_that_an_earlier_process_has_left_is_used(
    root: RunDir, local: Path, read: list[str]
) -> None:
    earlier = policies_at(root, below=local)
    earlier.hold(earlier.policy_of(1), unheard)
    policies = policies_at(root, below=local)
    read.clear()
    policies.hold(policies.policy_of(2), unheard)
    assert "2/model.safetensors" not in read


@pytest.mark.parametrize(
    "what", ["no copy", "damaged copy", "other base", "no checkpoint before", "no result before"]
)
def test_whole_policy_is_read_where_the_one_before_is_of_no_use(
    root: RunDir, local: Path, read: list[str], what: str, caplog: pytest.LogCaptureFixture
) -> None:
    policies = policies_at(root, below=local)
    if what != "no copy":
        held = policies.hold(policies.policy_of(1), unheard).directory / "model.safetensors"
        if what == "damaged copy":
            held.write_bytes(b"WEIGHTS 1")
        elif what == "other base":
            files.remove_tree(root.checkpoint(1))
            write_checkpoint(root.checkpoint(1), 1, b"others..1")
            policies.hold(policies.policy_of(1), unheard)
        elif what == "no checkpoint before":
            files.remove_tree(root.checkpoint(1))
        else:
            (root.checkpoint(1) / "result.json").unlink()
    read.clear()
    copy = policies.hold(policies.policy_of(2), unheard).directory
    assert (copy / "model.safetensors").read_bytes() == b"weights 2" and "2/model.safetensors" in read
    assert ("is of no use" in caplog.text) == (what == "damaged copy")


def test_damaged_delta_is_found_when_a_checkpoint_is_verified(root: RunDir) -> None:
    (root.checkpoint(2) / delta.delta_name("model.safetensors")).write_bytes(b"?")
    with pytest.raises(Incomplete, match=r"iteration_000002/\.model\.safetensors\.delta"):
        published.verify_checkpoint(root.checkpoint(2))


# ---- beside the run


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + SOON_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def is_there(root: RunDir, local: Path, number: int) -> bool:
    result = published.read_result(root.checkpoint(number))
    model = {name: facts for name, facts in result.files.items() if published.is_part_of_model(name)}
    return Store(str(local)).find(model) is not None


@pytest.fixture
def beside(root: RunDir, local: Path) -> Any:
    """A node's policies, and what fetches them ahead."""
    found = SimpleNamespace(policies=policies_at(root, below=local))
    found.prefetch = Prefetch(root, found.policies)
    yield found
    found.prefetch.close()


def test_policy_is_fetched_as_soon_as_it_is_published(
    root: RunDir, local: Path, beside: Any, read: list[str]
) -> None:
    away = root.checkpoint(3).rename(root.root / "not yet")
    beside.prefetch.begin(3, 0.01)
    time.sleep(0.1)
    assert read == []
    away.rename(root.checkpoint(3))
    wait_until(lambda: is_there(root, local, 3))
    beside.prefetch.begin(3, 0.01)  # an epoch later
    beside.policies.verify(3)
    beside.policies.hold(beside.policies.policy_of(3), unheard)
    assert sorted(read) == weights("3")


def test_what_is_not_wanted_any_more_is_given_up(
    root: RunDir, local: Path, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, go_on = threading.Event(), threading.Event()
    real = hashing.pieces

    def pieces(path: Path, *more: Any) -> Any:
        if path.parent == root.checkpoint(1):
            copying.set()
            assert go_on.wait(SOON_S)
        return real(path, *more)

    monkeypatch.setattr(hashing, "pieces", pieces)
    beside.prefetch.begin(1, 0.01)
    assert copying.wait(SOON_S)
    began_s = time.monotonic()
    beside.prefetch.begin(2, 0.01)
    wait_until(lambda: is_there(root, local, 2))
    assert time.monotonic() - began_s < SOON_S and not is_there(root, local, 1)
    go_on.set()
    wait_until(lambda: len(list(next(local.iterdir()).iterdir())) == 1)
    assert is_there(root, local, 2) and not is_there(root, local, 1)


def test_node_that_ends_does_not_wait_for_a_directory_that_hangs(
    root: RunDir, beside: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(published, "checkpoints", lambda _run_dir: hangs.wait(SOON_S) and [])
    beside.prefetch.begin(3, 0.01)
    beside.prefetch.close()
    assert not beside.prefetch._background.is_idle()
    hangs.set()


@pytest.mark.parametrize("damage", ["model", "full disk", "gone"])
def test_policy_that_cannot_be_fetched_is_named_and_left_to_the_row(
    root: RunDir, beside: Any, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    if damage == "model":
        (root.checkpoint(3) / "model.safetensors").write_bytes(b"WEIGHTS 3")
    elif damage == "gone":
        (root.checkpoint(3) / "result.json").unlink()
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    beside.prefetch.begin(3, 0.01)
    wait_until(lambda: "the policy of iteration 3 was not fetched ahead: " in caplog.text)
    text = {"model": "was read as 9 bytes", "full disk": "cannot be copied", "gone": "has no result.json"}
    assert text[damage] in caplog.text
    if damage == "model":
        with pytest.raises(Incomplete, match="was read as 9 bytes"):
            beside.policies.verify(3)


def test_damaged_policy_of_the_crew_that_generates_is_set_aside_by_the_row(root: RunDir, local: Path) -> None:
    policies = policies_at(root, below=local, cluster__max_async_level=1)
    (root.checkpoint(3) / "model.safetensors").write_bytes(b"WEIGHTS 3")
    node: Any = SimpleNamespace(
        run_dir=RunDir(root.root, "rollout"), settings=policies._identity.settings, policies=policies,
        reading=lambda: unheard,
    )  # fmt: skip
    with pytest.raises(Incomplete):
        policy_choice.base_of(node, Iteration(5))
    assert "iteration_000003.damaged" in published.names(root.checkpoints)


# ---- which one


@pytest.mark.parametrize(
    ("crew", "number", "given", "begun"),
    [
        ("rollout", 5, {"cluster.max_async_level": 1}, 4),
        ("rollout", 5, {"cluster.max_async_level": 3}, 2),
        ("rollout", 5, {"cluster.max_async_level": 0}, 5),
        ("rollout", 2, {"cluster.max_async_level": 2}, None),
        ("rollout", 5, {"cluster.max_async_level": 1, "iterations": 5}, None),
        ("rollout", 5, {"cluster.max_async_level": 1, "engine.url": "http://127.0.0.1:1"}, None),
        ("train", 5, {"cluster.max_async_level": 1}, None),
        ("main", 5, {"cluster.max_async_level": 2}, 3),
        ("main", 5, {"cluster.max_async_level": 0}, None),
        ("main", 5, {"cluster.max_async_level": 1, "rl_phase": "rollout"}, None),
    ],
)
def test_next_iterations_policy_is_fetched_where_it_is_or_will_be_published_meanwhile(
    crew: Crew, number: int, given: dict[str, Any], begun: int | None
) -> None:
    asked: list[int] = []
    node: Any = SimpleNamespace(
        run_dir=RunDir(Path("run"), crew), settings=build(given).of_crew(crew),
        prefetch=SimpleNamespace(begin=lambda wanted, _pause_s: asked.append(wanted)),
    )  # fmt: skip
    rollout.begin_to_fetch(node, Iteration(number))
    assert asked == ([] if begun is None else [begun])


def test_nobody_of_the_crew_that_generates_reads_a_checkpoint_back(root: RunDir) -> None:
    policies = policies_at(root)
    node: Any = SimpleNamespace(
        run_dir=RunDir(root.root, "rollout"), policies=policies, record=SimpleNamespace(members={0: 0, 1: 0})
    )
    assert rollout._verifier(node, Iteration(2), policies.policy_of(1)) is None
