"""How an engine leaves its GPU to the trainer."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.published import Policy
from coordinator.machine.engine import EngineHost, last_words
from coordinator.machine.weights import Adapters
from rollout.engines.kinds.kind import ServerCommand
from rollout.settings import EngineSettings


@pytest.mark.parametrize(
    ("sleep", "adapters", "level"), [(None, False, 2), (None, True, 1), (1, False, 1), (2, True, 2)]
)
def test_engine_drops_weights_that_training_replaces_and_keeps_a_model_under_adapters(
    sleep: Any, adapters: bool, level: int
) -> None:
    children: Any = None
    host: Any = EngineHost(children, children, 0, lambda *_args, **_more: None)
    host._child = SimpleNamespace(poll=lambda: None)
    host._server = ServerCommand([], on_gpu=True)
    levels: list[int] = []
    host._admin = SimpleNamespace(sleep=levels.append)
    host._loader.adapters = Adapters(Policy(0, Path("base"), "base"), rank=4) if adapters else None
    host.sleep(EngineSettings(sleep=sleep))
    assert levels == [level]


def test_error_of_a_server_that_died_is_the_one_that_it_began_with() -> None:
    said = [
        "(EngineCore pid=7) ValueError: Available memory (1.18 GiB) is less than requested (2.0 GiB).",
        *(f"line {number}" for number in range(30)),
        "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    words = last_words(lambda lines: "\n".join(said[-lines:]))
    assert words.startswith(": ValueError: Available memory (1.18 GiB) is less than requested (2.0 GiB).;")
    assert words.splitlines()[-1] == said[-1] and words.count("\n") == 20
    assert last_words(lambda _lines: "killed").splitlines() == ["; its last words:", "killed"]
