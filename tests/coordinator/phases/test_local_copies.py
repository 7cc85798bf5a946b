"""What of a run's policies a node copies to its machine, for whom, and what it tells the others."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.directory.published import Policy
from coordinator.machine import store
from coordinator.machine.filesystems import Mount
from coordinator.machine.store import Store
from coordinator.node.iteration import Iteration
from coordinator.node.policies import Policies
from coordinator.phases import training
from coordinator.phases.load_policy import serve
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from rollout.storage.hashing import checksums, unheard
from tests.coordinator.examples import record, run_dir_at, write_checkpoint
from trainer.documents import Resume, TrainRequest


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run with a checkpoint, whose model is beside it."""
    found = run_dir_at(tmp_path / "run")
    write_checkpoint(found.checkpoint(1))
    write_checkpoint(found.base_model, content=b"start")
    return found


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for copies; every path counts as shared."""
    monkeypatch.setattr(store, "find_mount", lambda _path: Mount("nfs4", "", "/"))
    (tmp_path / "local").mkdir()
    return tmp_path / "local"


def node_at(run_dir: RunDir, local: Path, *given: str, holds: bool = False) -> Any:
    """A node with an engine that notes what it is to serve, and trainers that note what they are asked."""
    settings = build(dict(text.split("=") for text in given))
    identity: Any = SimpleNamespace(
        run_dir=run_dir, settings=settings, inputs=SimpleNamespace(model_files={})
    )
    node = SimpleNamespace(run_dir=run_dir, settings=settings, rank=0, served=[], asked=[])
    node.record = record(settings=settings)
    node.policies = Policies(identity, Store(str(local)))
    node.reading, node.check = lambda: unheard, lambda: None
    node.phase_endings = SimpleNamespace(check_training=None)
    node.watch = SimpleNamespace(board=SimpleNamespace(profiles=()))
    node.position = SimpleNamespace(reach=None, wait_for_space=None)
    node.engine = SimpleNamespace(
        ensure=lambda policy, _settings, _check, adapters: node.served.append((policy, adapters))
    )
    node.trainer = SimpleNamespace(
        holds=lambda _job, iteration: holds and iteration == 1,
        ensure=lambda *_arguments: None,
        train=lambda request, *_arguments: node.asked.append(request),
        leave_epoch=lambda: None,
    )
    return node


def ask_to_train(node: Any, resume: Resume | None = None) -> TrainRequest:
    config = {
        "job": "j", "processes": {"0": 1}, "batch_sha256": "0" * 64, "max_tokens": 8, "staging": "s",
        "layout": "hybrid", "state": None, "rank_weights": [1.0], "resume": (resume or Resume()).model_dump(),
    }  # fmt: skip
    iteration = Iteration(2)
    iteration.documents |= {Phase.ITERATION_START: {"base_iteration": 1}, Phase.TRAIN_CONFIG: config}
    training.train(node, iteration)
    [request] = node.asked
    return request


def is_copy(path: Path | str, local: Path) -> bool:
    return local in Path(path).parents


def test_engine_of_the_node_loads_a_copy_of_the_model_alone(run_dir: RunDir, local: Path) -> None:
    node = node_at(run_dir, local)
    policy = node.policies.policy_of(1)
    serve(node, policy)
    [(served, adapters)] = node.served
    assert is_copy(served.directory, local) and adapters is None
    assert (served.iteration, served.digest) == (1, policy.digest)
    model = {"config.json", "model.safetensors", "content.json", "probe.json"}
    assert set(checksums(served.directory)) == model and not (served.directory / "trainer_state").exists()


def test_server_of_the_user_loads_from_the_shared_directory(run_dir: RunDir, local: Path) -> None:
    node = node_at(run_dir, local, "engine.url=http://127.0.0.1:8000", "trainer.lora.rank=4")
    serve(node, node.policies.policy_of(1))
    [(served, adapters)] = node.served
    assert served.directory == run_dir.checkpoint(1) and adapters.base.directory == run_dir.base_model
    assert list(local.iterdir()) == []


def test_engine_of_the_node_adds_adapters_to_a_copy_of_their_model(run_dir: RunDir, local: Path) -> None:
    node = node_at(run_dir, local, "trainer.lora.rank=4")
    serve(node, node.policies.policy_of(1))
    [(served, adapters)] = node.served
    assert is_copy(served.directory, local) and is_copy(adapters.base.directory, local)
    assert adapters.base.directory != served.directory


def test_trainers_that_hold_the_weights_need_no_copy(run_dir: RunDir, local: Path) -> None:
    request = ask_to_train(node_at(run_dir, local, holds=True))
    assert (request.base_dir, request.model_dir) == (f"{run_dir.checkpoint(1)}", f"{run_dir.base_model}")
    assert list(local.iterdir()) == []


def test_every_node_trains_in_the_layout_that_the_master_has_chosen(run_dir: RunDir, local: Path) -> None:
    node = node_at(run_dir, local, holds=True)
    assert node.settings.trainer.layout == "auto" and ask_to_train(node).settings.layout == "hybrid"
    node.policies.policy_of(0).directory.joinpath("model.safetensors").unlink()
    alone, unknown = list[Any](
        SimpleNamespace(processes=2, gpu_bytes=size, host_bytes=1e15) for size in (8e10, None)
    )
    for members in ([alone], [alone, unknown]):
        assert training._layout(node, members) == "auto", "and no file of the model is read"


def test_nodes_of_one_machine_share_its_memory(
    run_dir: RunDir, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, given = node_at(run_dir, local), list[Any]()
    monkeypatch.setattr(training, "_shapes", lambda _model_dir: {})
    monkeypatch.setattr(training, "is_whole_on_each_node", lambda *arguments: given.append(arguments[2:]))
    members: Any = [
        SimpleNamespace(processes=2, gpu_bytes=8e10, host_bytes=6e11, host=host) for host in ("a", "a", "b")
    ]
    assert training._layout(node, members) == "auto"
    assert given == [([2, 2, 2], [8e10] * 3, [3e11, 3e11, 6e11])]


def test_trainers_that_begin_load_a_copy_and_find_the_state_where_it_is(run_dir: RunDir, local: Path) -> None:
    request = ask_to_train(node_at(run_dir, local))
    assert is_copy(request.base_dir, local) and request.model_dir == f"{run_dir.base_model}"
    assert request.resume.state_dir == f"{run_dir.checkpoint(1) / 'trainer_state'}"


@pytest.mark.parametrize("given", ["trainer.kl=k3", "trainer.lora.rank=4", "from the start"])
def test_model_of_the_start_is_copied_where_trainers_need_it_and_named_where_all_find_it(
    run_dir: RunDir, local: Path, given: str
) -> None:
    again = Resume(from_start=True) if given == "from the start" else None
    node = node_at(run_dir, local, *([] if again else [given]))
    request = ask_to_train(node, again)
    assert is_copy(request.model_dir, local) and request.model_name == f"{run_dir.base_model}"
    assert again is None or request.resume.state_dir is None


def test_trainers_are_asked_for_a_delta_if_the_run_wants_one(run_dir: RunDir, local: Path) -> None:
    assert ask_to_train(node_at(run_dir, local, "checkpoints.delta=true")).delta
    assert not ask_to_train(node_at(run_dir, local)).delta


def test_policy_itself_stays_in_the_shared_directory(run_dir: RunDir, local: Path) -> None:
    policies = node_at(run_dir, local).policies
    before = policies.policy_of(1)
    assert is_copy(policies.hold(before, unheard).directory, local)
    assert policies.policy_of(1) == before == Policy(1, run_dir.checkpoint(1), before.digest)
