"""What makes the groups of a share, and what it asks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.collection import makers
from coordinator.settings.loading import build
from rollout.engines.client import EngineFacts
from rollout.environments.environment import single_turn


@pytest.mark.parametrize(
    ("algorithm", "kind", "may_force"),
    [("grpo", "train", True), ("rft", "train", False), ("rft", "eval", True)],
)
def test_engine_may_force_a_form_where_the_loss_corrects_for_it(
    algorithm: str, kind: str, may_force: bool
) -> None:
    settings = build({"model": "any", "trainer.algorithm": algorithm})
    engine = SimpleNamespace(
        url="http://127.0.0.1:1", model=None, facts=EngineFacts(9), restart_patience_s=lambda _: 1.0
    )
    share: Any = SimpleNamespace(kind=kind, functions=SimpleNamespace(environment=single_turn))
    client = makers.client_of(cast(Any, SimpleNamespace(settings=settings, engine=engine)), share)
    assert client.facts == EngineFacts(9, may_force=may_force)
