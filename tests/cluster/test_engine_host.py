"""The host of a real embedded engine: what a row that ends, or a server that dies, leaves; its policy."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import safetensors.numpy

from coordinator.directory.layout import RunDir
from coordinator.directory.published import Policy
from coordinator.machine.children import Children
from coordinator.machine.engine import Adapters, EngineHost
from coordinator.protocol.exits import EpochChanged
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import EngineError, EngineFacts
from rollout.engines.model_dir import PROBE, WeightsError, policy_digest
from rollout.settings import EngineSettings
from rollout.storage.hashing import checksums
from tests.adapters import make_adapter
from tests.cluster.conftest import SEPARATE
from tests.imports import shared_imports

SETTINGS = EngineSettings(kind="torch", start_timeout_s=120.0)
TOKENS = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def events() -> list[str]:
    """What the node has written about its engines. A log file appears some time after the first words."""
    return []


@pytest.fixture
def host(
    tmp_path: Path, separate: bool, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[EngineHost]:
    if not separate:
        for name, value in shared_imports().items():
            monkeypatch.setenv(name, value)
    run_dir = RunDir(tmp_path)
    run_dir.logs(0).mkdir(parents=True)
    with Children() as children:
        yield EngineHost(children, run_dir, 0, lambda what, **_more: events.append(what))


@pytest.fixture
def policy(random_model: Path) -> Policy:
    return Policy(0, random_model, policy_digest(checksums(random_model)))


def changed(policy: Policy, directory: Path) -> Policy:
    """A checkpoint of iteration 1: the weights of `policy`, some of them changed."""
    shutil.copytree(policy.directory, directory)
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * np.float32(1.5)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    return Policy(1, directory, policy_digest(checksums(directory)))


def write_probe(directory: Path, logprobs: list[float]) -> None:
    (directory / PROBE).write_text(json.dumps({"token_ids": TOKENS, "logprobs": logprobs}))


def fine() -> None:
    return None


def test_engine_that_starts_when_the_epoch_changes_is_waited_for_in_the_next(
    host: EngineHost, policy: Policy, events: list[str]
) -> None:
    def change() -> None:
        raise EpochChanged

    with pytest.raises(EpochChanged):
        host.ensure(policy, SETTINGS, change)
    host.ensure(policy, SETTINGS, fine)
    assert events.count("engine_start") == 1
    host.sleep(SETTINGS)


def test_node_knows_how_many_samples_its_engine_generates_at_once_and_that_seeds_decide(
    host: EngineHost, policy: Policy, tmp_path: Path
) -> None:
    assert host.facts == EngineFacts()
    host.ensure(policy, SETTINGS.model_copy(update={"max_batch": 48}), fine)
    assert host.facts == EngineFacts(48, is_seeded=True)


def test_engine_that_died_between_two_rollouts_is_started_again(
    host: EngineHost, policy: Policy, events: list[str]
) -> None:
    host.ensure(policy, SETTINGS, fine)
    child = host._child
    assert child is not None
    child.kill()
    host.sleep(SETTINGS)
    host.ensure(policy, SETTINGS, fine)
    assert events.count("engine_start") == 2


def test_engine_that_started_with_another_policy_than_is_asked_for_now_loads_it(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    def change() -> None:
        raise EpochChanged

    newer = changed(policy, tmp_path / "newer")
    with pytest.raises(EpochChanged):
        host.ensure(policy, SETTINGS, change)
    host.ensure(newer, SETTINGS, fine)
    assert EngineAdmin(host.url).policy() == newer.digest
    loaded = EngineAdmin(host.url).prompt_logprobs(TOKENS)
    host.ensure(policy, SETTINGS, fine)
    assert EngineAdmin(host.url).prompt_logprobs(TOKENS) != loaded
    assert events.count("engine_start") == 1


def test_engine_without_a_gpu_stays_awake_unless_it_is_to_be_started_anew(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    host.ensure(policy, SETTINGS, fine)
    host.sleep(SETTINGS)
    assert not EngineAdmin(host.url).is_sleeping()
    host.sleep(SETTINGS.model_copy(update={"sleep": "restart"}))
    assert not EngineAdmin(host.url).healthy()
    newer = changed(policy, tmp_path / "newer")
    host.ensure(newer, SETTINGS, fine)
    assert EngineAdmin(host.url).policy() == newer.digest
    assert events.count("engine_start") == 2


def test_engine_that_computes_what_the_trainer_does_is_taken(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    newer = changed(policy, tmp_path / "newer")
    host.ensure(newer, SETTINGS, fine)
    computed = EngineAdmin(host.url).prompt_logprobs(TOKENS)
    write_probe(newer.directory, [logprob + 0.05 for logprob in computed])
    host.ensure(newer, SETTINGS, fine)
    host.sleep(SETTINGS.model_copy(update={"sleep": "restart"}))
    host.ensure(newer, SETTINGS, fine)
    assert events.count("engine_start") == 2


def test_engine_that_computes_something_else_is_loaded_again_then_started_again_then_an_error(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    newer = changed(policy, tmp_path / "newer")
    host.ensure(policy, SETTINGS, fine)
    computed = EngineAdmin(host.url).prompt_logprobs(TOKENS)
    write_probe(newer.directory, computed)
    with pytest.raises(
        EngineError, match=r"differ by [\d.]+ on average, .*probe_tolerance is 0\.1"
    ) as raised:
        host.ensure(newer, SETTINGS, fine)
    assert str(newer.directory) in str(raised.value)
    assert f"the trainer's {computed[0]:.3f}" in str(raised.value)
    assert [name for name in ("loading it once more", "starting it once more") if name in caplog.text]
    assert caplog.text.count("loading it once more") == 2 and caplog.text.count("starting it once more") == 1
    assert events.count("engine_start") == 2


def test_engine_that_refuses_an_argument_is_not_started_again(
    host: EngineHost, policy: Policy, events: list[str]
) -> None:
    with pytest.raises(EngineError, match="argument --dtype: invalid choice"):
        host.ensure(policy, SETTINGS.model_copy(update={"dtype": "int4"}), fine)
    assert events.count("engine_start") == 1


def test_the_users_server_that_computes_something_else_is_left_running(
    host: EngineHost, policy: Policy, engine_url: str, tmp_path: Path, events: list[str]
) -> None:
    users = SETTINGS.model_copy(update={"url": engine_url})
    newer = changed(policy, tmp_path / "newer")
    write_probe(newer.directory, EngineAdmin(engine_url).prompt_logprobs(TOKENS))
    with pytest.raises(EngineError, match="differ by"):
        host.ensure(newer, users, fine)
    host.sleep(users.model_copy(update={"sleep": "restart"}))
    assert EngineAdmin(engine_url).healthy() and events.count("engine_start") == 0
    host.ensure(policy, users, fine)


def test_engine_that_failed_to_load_a_policy_is_started_anew(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    host.ensure(policy, SETTINGS, fine)
    broken = changed(policy, tmp_path / "broken")
    (broken.directory / "config.json").write_text("{}")
    with pytest.raises(EngineError, match="exited before it answered"):
        host.ensure(broken, SETTINGS, fine)
    host.ensure(policy, SETTINGS, fine)
    assert EngineAdmin(host.url).policy() == policy.digest
    assert events.count("engine_start") == 3


def test_engine_that_somebody_else_has_administered_is_found_out_and_one_that_starts_again_passes(
    host: EngineHost, policy: Policy, tmp_path: Path
) -> None:
    host.check_serves()
    host.ensure(policy, SETTINGS, fine)
    host.check_serves()
    child = host._child
    assert child is not None
    kill_and_wait(host, policy.digest, meanwhile=host.check_serves)
    EngineAdmin(host.url).reload(changed(policy, tmp_path / "newer").directory, "another's")
    with pytest.raises(EngineError, match=f"serves another's now, not {policy.digest}"):
        host.check_serves()


@SEPARATE
def test_no_other_user_can_enter_where_an_engine_listens(host: EngineHost, policy: Policy) -> None:
    host.ensure(policy, SETTINGS, fine)
    child = host._child
    assert child is not None
    socket = Path(host.url.removeprefix("unix:"))
    assert socket.is_socket() and socket.parent.stat().st_mode & 0o777 == 0o700
    assert not [found for found in psutil.Process(child.pid).net_connections() if found.status == "LISTEN"]


def test_engine_of_a_run_that_trains_adapters_keeps_its_model_and_comes_back_with_the_adapter(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    adapters = Adapters(policy, rank=4)

    def adapter(number: int) -> Policy:
        directory = make_adapter(tmp_path / f"adapter{number}", policy.directory, seed=number)
        return Policy(number, directory, policy_digest(checksums(directory)))

    def computed() -> list[float]:
        return EngineAdmin(host.url).prompt_logprobs(TOKENS, model=host.model)

    first, second = adapter(1), adapter(2)
    host.ensure(first, SETTINGS, fine, adapters)
    assert host.model == f"policy-{first.digest}" and EngineAdmin(host.url).policy() == first.digest
    of_first = computed()
    host.ensure(policy, SETTINGS, fine, adapters)
    assert host.model is None
    of_model = computed()
    host.ensure(second, SETTINGS, fine, adapters)
    of_second = computed()
    assert of_model != of_first != of_second != of_model
    damaged = Policy(3, tmp_path / "damaged", "damaged")
    shutil.copytree(second.directory, damaged.directory)
    safetensors.numpy.save_file({"a": np.zeros(1)}, damaged.directory / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=f"in {second.directory} it has"):
        host.ensure(damaged, SETTINGS, fine, adapters)
    assert computed() == of_second
    assert events.count("engine_start") == 1

    write_probe(second.directory, of_second)
    kill_and_wait(host, second.digest)
    assert computed() == of_second and events.count("engine_start") == 2
    # A checkpoint of an iteration that had nothing to learn from is the whole model.
    same = Policy(3, Path(shutil.copytree(policy.directory, tmp_path / "same")), policy.digest)
    host.ensure(same, SETTINGS, fine, adapters)
    assert host.model is None and computed() == of_model
    host.ensure(second, SETTINGS, fine, adapters)
    assert computed() == of_second and events.count("engine_start") == 2


def test_the_users_server_of_another_model_gets_the_model_before_the_adapter(
    host: EngineHost, policy: Policy, engine_url: str, tmp_path: Path
) -> None:
    users = SETTINGS.model_copy(update={"url": engine_url})
    directory = make_adapter(tmp_path / "adapter", policy.directory, seed=1)
    adapter = Policy(1, directory, policy_digest(checksums(directory)))
    host.ensure(adapter, users, fine, Adapters(policy, rank=4))
    wanted = EngineAdmin(engine_url).prompt_logprobs(TOKENS, model=host.model)
    EngineAdmin(engine_url).reload(changed(policy, tmp_path / "newer").directory, "of another run")
    host.ensure(adapter, users, fine, Adapters(policy, rank=4))
    assert EngineAdmin(engine_url).prompt_logprobs(TOKENS, model=host.model) == wanted
    host.ensure(policy, users, fine, Adapters(policy, rank=4))


def kill_and_wait(host: EngineHost, digest: str, meanwhile: Callable[[], None] = fine) -> None:
    """Kill the engine while it is minded, and call `meanwhile` until another one has the policy."""
    child, url, over = host._child, host.url, threading.Event()
    assert child is not None
    minding = threading.Thread(target=host.mind, args=(SETTINGS, fine, over), daemon=True)
    minding.start()
    child.kill_now()
    admin = EngineAdmin(url)
    for _ in range(6000):
        time.sleep(0.02)
        meanwhile()
        if not minding.is_alive() or (
            host._child is not child and admin.healthy() and admin.policy() == digest
        ):
            break
    assert minding.is_alive(), "it has failed"
    over.set()
    minding.join(60.0)
    assert not minding.is_alive()


def test_engine_that_dies_while_it_generates_comes_back_with_the_same_policy(
    host: EngineHost, policy: Policy, tmp_path: Path, events: list[str]
) -> None:
    newer = changed(policy, tmp_path / "newer")
    host.ensure(newer, SETTINGS, fine)
    url = host.url
    kill_and_wait(host, newer.digest)
    assert (host.url, EngineAdmin(url).policy()) == (url, newer.digest)
    assert events.count("engine_start") == 2
