"""A policy is loaded only where it must be, and proved; a wrong engine is loaded once more, then refused."""

from pathlib import Path
from typing import Any, cast

import pytest

from coordinator.directory.published import Policy
from coordinator.machine.weights import Adapters, Loader, RunningServer
from rollout.engines.admin import EngineAdmin, WrongWeights
from rollout.engines.answers import EngineError
from rollout.engines.model_dir import ADAPTER_CONFIG, PROBE
from tests.coordinator.examples import write_json

LOGPROBS = [-1.0, -2.0]


class FakeAdmin:
    """A server in memory: which policy it holds, whether it sleeps, what it computes."""

    def __init__(self, policy: str = "") -> None:
        self.holds, self.sleeps, self.asked = policy, False, list[str]()
        self.answers = [list(LOGPROBS)]
        """Logprobs of the next probes; the last ones stay."""
        self.proves, self.unproved = True, list[str]()
        self.wrong = list[str]()
        """What the next proofs find."""

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

    def can_prove(self) -> bool:
        self.asked.append("can it prove")
        return self.proves

    def prove(self, path: Path | None = None, adapter: Path | None = None) -> list[str]:
        self.asked.append(" ".join(["prove", *(place.name for place in (path, adapter) if place)]))
        if path is not None and self.wrong:
            raise WrongWeights(self.wrong.pop())
        return self.unproved

    def prompt_logprobs(
        self, token_ids: list[int], replica: int = 0, model: str | None = None
    ) -> list[float]:
        self.asked.append(f"probe {replica}")
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


@pytest.fixture
def loader() -> Loader:
    return Loader(lambda *_args, **_more: None)


def running(
    admin: FakeAdmin, start: int = 1, replicas: int = 1, proves: bool | None = False
) -> RunningServer:
    return RunningServer(cast(EngineAdmin, admin), "http://127.0.0.1:8000", replicas, start, proves)


def policy(tmp_path: Path, iteration: int, adapter: bool = False) -> Policy:
    directory = tmp_path / f"iteration_{iteration}"
    write_json(directory / PROBE, {"token_ids": [1, 2, 3], "logprobs": LOGPROBS})
    if adapter:
        write_json(directory / ADAPTER_CONFIG, {})
    return Policy(iteration, directory, f"digest-{iteration}")


def load(loader: Loader, server: RunningServer, wanted: Policy) -> list[str]:
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


def test_bfloat16_may_differ_by_more_and_where_weights_are_proved_it_is_only_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def offered(difference: float, dtype: str, proves: bool, trainer: str = "float32") -> None:
        admin, loader = FakeAdmin(), Loader(lambda *_args, **_more: None)
        admin.answers = [[logprob - difference for logprob in LOGPROBS]]
        wanted = policy(tmp_path, 1)
        probe = {"token_ids": [1, 2, 3], "logprobs": LOGPROBS, "computed_in": trainer}
        write_json(wanted.directory / PROBE, probe)
        loader.load(running(admin, proves=proves)._replace(dtype=dtype), wanted)

    offered(0.2, "bfloat16", proves=False)
    with pytest.raises(EngineError, match=r"tolerance is 0\.3; .* computes in bfloat16 \(engine.args.dtype"):
        offered(0.5, "bfloat16", proves=False)
    with pytest.raises(EngineError, match=r"tolerance is 0\.1; "):
        offered(0.2, "float32", proves=True)
    with pytest.raises(EngineError, match="differ by nan"):
        offered(float("nan"), "bfloat16", proves=True)
    offered(0.8, "bfloat16", proves=False, trainer="nf4")
    with pytest.raises(EngineError, match=r"tolerance is 1\.5; .* the trainer in nf4 \(.*lora.base_dtype"):
        offered(3.0, "bfloat16", proves=False, trainer="nf4")
    caplog.clear()
    offered(0.5, "bfloat16", proves=True)
    assert "differ by 0.5 on average" in caplog.text and "proved by content, so it goes on" in caplog.text


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


def test_engine_compares_itself_to_what_it_was_started_with_and_then_to_all_that_it_loads(
    loader: Loader, tmp_path: Path
) -> None:
    one, two = policy(tmp_path, 1), policy(tmp_path, 2)
    server = running(FakeAdmin(one.digest), proves=True)
    assert load(loader, server, one) == ["prove", "probe 0"]
    assert load(loader, server, one) == []
    asked = load(loader, server, two)
    assert asked == ["reload iteration_2 like iteration_1", "prove iteration_2", "probe 0"]
    again = load(loader, server._replace(start=2), one)
    assert again == ["prove", "reload iteration_1 like iteration_2", "prove iteration_1", "probe 0"]


def test_sleeping_engine_is_compared_once_it_is_awake(loader: Loader, tmp_path: Path) -> None:
    admin, one = FakeAdmin(), policy(tmp_path, 1)
    admin.holds, admin.sleeps = one.digest, True
    assert load(loader, running(admin, proves=True), one) == ["wake", "prove iteration_1", "probe 0"]


def test_engine_with_other_weights_is_loaded_once_more_then_refused_with_the_tensors(
    loader: Loader, tmp_path: Path
) -> None:
    admin, one = FakeAdmin(), policy(tmp_path, 1)
    admin.wrong = ["norm is 1, should be 2"]
    assert [word.split()[0] for word in load(loader, running(admin, proves=True), one)] == [
        "prove", "reload", "prove", "reload", "prove", "probe",
    ]  # fmt: skip
    admin.wrong = ["norm is 1, should be 2"] * 2
    with pytest.raises(EngineError, match="norm is 1, should be 2"):
        loader.load(running(admin, start=2, proves=True), policy(tmp_path, 2), tolerance=0.01)
    assert loader.served == one


def test_adapter_is_compared_beside_its_model(loader: Loader, tmp_path: Path) -> None:
    loader.adapters = Adapters(Policy(0, tmp_path / "base", "base"), rank=4)
    asked = load(loader, running(FakeAdmin("base"), proves=True), policy(tmp_path, 1, adapter=True))
    assert asked == ["prove", "adapter iteration_1 like None", "prove base iteration_1", "probe 0"]


def test_users_server_is_asked_whether_it_can_prove_and_says_once_what_it_cannot(
    loader: Loader, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = policy(tmp_path, 1), policy(tmp_path, 2)
    admin = FakeAdmin()
    admin.proves = False
    for number in (one, two, one):
        load(loader, running(admin, start=0, proves=None), number)
    assert admin.asked.count("can it prove") == 1 and "prove" not in admin.asked
    assert caplog.text.count("cannot prove its weights by content (start vLLM with --worker-ext") == 1
    caplog.clear()
    able, other = FakeAdmin(), Loader(lambda *_args, **_more: None)
    able.unproved = ["layers.1"]
    for number in (one, two, one):
        load(other, running(able, start=0, proves=None), number)
    assert able.asked.count("can it prove") == 1 and able.asked.count("prove iteration_1") == 2
    assert caplog.text.count("changes tensors when it loads them: in layers.1 the logprobs") == 1


def test_reload_event_says_how_long_the_proof_took(tmp_path: Path) -> None:
    said = list[dict[str, Any]]()
    loader = Loader(lambda *_args, **facts: said.append(facts))
    load(loader, running(FakeAdmin(), proves=True), policy(tmp_path, 1))
    (event,) = said
    assert 0 <= event["proof_s"] <= event["seconds"] and event["probe_differs"] == 0
