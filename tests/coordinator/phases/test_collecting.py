"""What a node orders of its collector, and what it leaves in flight from one epoch to the next."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.collector.host import InFlight
from coordinator.node.iteration import Iteration
from coordinator.node.position import Position
from coordinator.phases.collecting import _engine, collect_share, drop_outdated, key_of
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build, parse_override
from rollout.engines.answers import EngineFacts
from rollout.environments.environment import single_turn
from rollout.origin import Code, Sampling


@pytest.fixture
def node() -> Any:
    collector = SimpleNamespace(in_flight=None)

    def drop() -> None:
        collector.in_flight = None

    collector.drop = drop
    return SimpleNamespace(settings=build({"model": "any"}), collector=collector)


@pytest.fixture
def iteration() -> Iteration:
    return Iteration(1, documents={Phase.ITERATION_START: {"policy": "p", "opened": {}, "code": {}}})


def test_what_is_in_flight_is_given_up_when_the_iteration_is_another(node: Any, iteration: Iteration) -> None:
    for key, kept in ((key_of(node, iteration, "train"), True), ("another", False)):
        node.collector.in_flight = InFlight(key, 1, [0])
        drop_outdated(node, iteration)
        assert (node.collector.in_flight is not None) is kept


@pytest.mark.parametrize(
    ("phase", "kept"), [(Phase.TRAINING, False), (Phase.CHECKPOINT, True), (Phase.ENGINE_RESTARTED, True)]
)
def test_what_is_in_flight_of_the_next_iteration_outlives_no_training(
    node: Any, iteration: Iteration, phase: Phase, kept: bool
) -> None:
    node.collector.in_flight = InFlight("of the next", 2, [0])
    iteration.resume_at = phase
    drop_outdated(node, iteration)
    assert (node.collector.in_flight is not None) is kept


@pytest.mark.parametrize(("environment", "total"), [("single_turn", 32), ("calculator", 0)])
def test_samples_are_counted_where_each_completion_is_one(
    node: Any, iteration: Iteration, environment: str, total: int
) -> None:
    node.position, node.rank = Position(), 0
    share: Any = SimpleNamespace(
        functions=SimpleNamespace(environment=Code(environment, "")),
        origin=SimpleNamespace(sampling=Sampling(n=8, max_tokens=24)),
        sets=(),
        in_flight=lambda _rank: [],
        is_empty=lambda _rank: True,
    )
    assert collect_share(node, iteration, share) == {"short": 0}
    node.position.reach(0, 4)
    assert node.position.describe()["samples_total"] == total


def test_other_settings_make_other_groups(node: Any, iteration: Iteration) -> None:
    keys = {key_of(node, iteration, "train"), key_of(node, iteration, "eval")}
    node.settings = build({"model": "any", "rollout.temperature": 0.5})
    keys.add(key_of(node, iteration, "train"))
    iteration.documents[Phase.ITERATION_START]["policy"] = "q"
    keys.add(key_of(node, iteration, "train"))
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("setting", "kind", "uncorrected"),
    [
        ("trainer.algorithm=grpo", "train", ""),
        ("trainer.algorithm=rft", "train", "trainer.engine_correction=off"),
        ("trainer.algorithm=rft", "eval", ""),
        ("trainer.sources.code.algorithm=rft", "train", "trainer.sources.code.engine_correction=off"),
    ],
)
def test_engine_may_force_a_form_where_the_loss_corrects_for_it(
    node: Any, setting: str, kind: str, uncorrected: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"image_token_id": 7, "vision_config": {}}')
    node.policies = SimpleNamespace(policy_of=lambda _iteration: SimpleNamespace(directory=tmp_path))
    node.settings = build({"model": "any", **dict([parse_override(setting)])})
    node.engine = SimpleNamespace(
        url="http://127.0.0.1:1", model=None, facts=EngineFacts(9), restart_patience_s=lambda _: 1.0
    )
    share: Any = SimpleNamespace(kind=kind, functions=SimpleNamespace(environment=single_turn))
    assert _engine(node, share).facts == EngineFacts(9, why_no_form=uncorrected, placeholder=7)
