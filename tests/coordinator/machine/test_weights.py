"""A policy is loaded only where it must be, and proved; a wrong engine is loaded once more, then refused."""

from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.directory.published import Policy
from coordinator.machine.weights import Adapters, Loader, Running
from rollout.engines.admin import PROBE, EngineAdmin
from rollout.engines.client import EngineError
from rollout.engines.model_dir import ADAPTER_CONFIG
from tests.coordinator.made_up import write_json

LOGPROBS = [-1.0, -2.0]


class FakeAdmin:
    """A server in memory: which policy it holds, whether it sleeps, what it computes."""

    def __init__(self, policy: str = "") -> None:
        self.holds, self.sleeps, self.asked = policy, False, list[str]()
        self.answers = [list(LOGPROBS)]
        """Of the next probes; the last one stays."""

    def policy(self) -> str:
        return self.holds

    def is_sleeping(self) -> bool:
        return self.sleeps

    def wake(self) -> None:
        self.sleeps = False
        self.asked.append("wake")

    def reload(self, path: Path, digest: str, like: Path | None = None) -> None:
        self.holds = digest
        self.asked.append(f"reload {path.name} like {like and like.name}")

    def load_adapter(self, path: Path, digest: str, like: Path | None = None) -> None:
        self.holds = digest
        self.asked.append(f"adapter {path.name} like {like and like.name}")

    def prompt_logprobs(
        self, token_ids: list[int], replica: int = 0, model: str | None = None
    ) -> list[float]:
        self.asked.append(f"probe {replica}")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def loader() -> Loader:
    return Loader(lambda *_args, **_more: None)


def running(admin: FakeAdmin, start: int = 1, replicas: int = 1) -> Running:
    return Running(cast(EngineAdmin, admin), "http://127.0.0.1:8000", replicas, start)


def policy(tmp_path: Path, iteration: int, adapter: bool = False) -> Policy:
    directory = tmp_path / f"iteration_{iteration}"
    write_json(directory / PROBE, {"token_ids": [1, 2, 3], "logprobs": LOGPROBS})
    if adapter:
        write_json(directory / ADAPTER_CONFIG, {})
    return Policy(iteration, directory, f"digest-{iteration}")


def load(loader: Loader, server: Running, wanted: Policy) -> list[str]:
    """Load `wanted`; what the server was asked for that."""
    admin = cast(Any, server.admin)
    before = len(admin.asked)
    loader.load(server, wanted, tolerance=0.01)
    assert loader.served == wanted
    return admin.asked[before:]


def test_policy_that_was_proved_in_this_start_is_not_asked_again(loader: Loader, tmp_path: Path) -> None:
    admin, one = FakeAdmin(), policy(tmp_path, 1)
    assert load(loader, running(admin), one) == ["reload iteration_1 like None", "probe 0"]
    assert load(loader, running(admin), one) == []
    assert load(loader, running(admin, start=2), one) == ["probe 0"], "the server was started anew"
    assert load(loader, running(admin, start=0), one) == ["probe 0"], "nobody knows who else uses it"


def test_next_policy_must_have_the_tensors_of_the_one_before(loader: Loader, tmp_path: Path) -> None:
    server = running(FakeAdmin(), replicas=2)
    load(loader, server, policy(tmp_path, 1))
    asked = load(loader, server, policy(tmp_path, 2))
    assert asked == ["reload iteration_2 like iteration_1", "probe 0", "probe 1"]


def test_sleeping_engine_is_woken_and_proved(loader: Loader, tmp_path: Path) -> None:
    admin = FakeAdmin()
    load(loader, running(admin), policy(tmp_path, 1))
    admin.sleeps = True
    assert load(loader, running(admin), policy(tmp_path, 1)) == ["wake", "probe 0"]


def test_engine_that_computes_something_else_is_loaded_once_more_then_refused(
    loader: Loader, tmp_path: Path
) -> None:
    admin, one = FakeAdmin(), policy(tmp_path, 1)
    admin.answers = [[-5.0, -5.0], LOGPROBS]
    assert [word.split()[0] for word in load(loader, running(admin), one)] == [
        "reload", "probe", "reload", "probe",
    ]  # fmt: skip
    admin.answers = [[float("nan"), -2.0]]
    with pytest.raises(EngineError, match=r"does not compute what the trainer does .* the first are nan, -2"):
        loader.load(running(admin, start=2), one, tolerance=0.01)
    assert loader.served == one


def test_adapter_is_loaded_over_the_base_that_the_run_trains(loader: Loader, tmp_path: Path) -> None:
    base = Policy(0, tmp_path / "base", "base")
    loader.adapters = Adapters(base, rank=4)
    admin, one, two = FakeAdmin("another model"), policy(tmp_path, 1, adapter=True), policy(tmp_path, 2, True)
    assert load(loader, running(admin, start=0), one)[:2] == [
        "reload base like None", "adapter iteration_1 like None",
    ]  # fmt: skip
    assert load(loader, running(admin, start=0), two)[0] == "adapter iteration_2 like iteration_1"
    assert loader.name_of(base) is None and loader.name_of(one) != loader.name_of(two)
    assert loader.model_of(two) == base, "a server starts with the whole model"
