"""The host of a real embedded engine: what a row that ends, or a server that dies, leaves of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.children import Children
from coordinator.engine_host import EngineHost
from coordinator.outcome import EpochChanged
from coordinator.outputs import Policy
from coordinator.run_dir import RunDir
from rollout.settings import EngineSettings
from rollout.weights import file_checksums, policy_digest

SETTINGS = EngineSettings(start_timeout_s=120.0)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EngineHost]:
    run_dir = RunDir(tmp_path)
    run_dir.logs(0).mkdir(parents=True)
    with Children() as children:
        yield EngineHost(children, run_dir, 0)


@pytest.fixture
def policy(random_model: Path) -> Policy:
    return Policy(0, random_model, policy_digest(file_checksums(random_model)))


def engines_started(tmp_path: Path) -> int:
    return len(list(RunDir(tmp_path).logs(0).glob("engine.*.log")))


def fine() -> None:
    return None


def test_engine_that_starts_when_the_epoch_changes_is_waited_for_in_the_next(
    host: EngineHost, policy: Policy, tmp_path: Path
) -> None:
    def change() -> None:
        raise EpochChanged

    with pytest.raises(EpochChanged):
        host.ensure(policy, SETTINGS, change)
    host.ensure(policy, SETTINGS, fine)
    assert engines_started(tmp_path) == 1
    host.sleep()


def test_engine_that_died_between_two_rollouts_is_started_again(
    host: EngineHost, policy: Policy, tmp_path: Path
) -> None:
    host.ensure(policy, SETTINGS, fine)
    child = host._child
    assert child is not None
    child.kill()
    host.sleep()
    host.ensure(policy, SETTINGS, fine)
    assert engines_started(tmp_path) == 2
