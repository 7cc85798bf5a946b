"""One server of each kind for all tests, and the weights that it starts with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engines import KINDS, Engine, Reference, serving
from tests.models import make_model

FIRST = "first"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0, hidden=128)


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same architecture with other weights."""
    return make_model(tmp_path_factory.mktemp("other"), seed=1, hidden=128)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


@pytest.fixture(scope="session")
def other_reference(other_model_dir: Path) -> Reference:
    return Reference(other_model_dir)


@pytest.fixture(scope="session", params=KINDS)
def shared_engine(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with serving(request.param, model_dir, tmp_path_factory.mktemp("engine") / "log") as engine:
        engine.admin.name_policy(FIRST)
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, model_dir: Path) -> Engine:
    """The shared server with the weights of `model_dir`, whatever the test before has left in it."""
    if shared_engine.admin.policy() != FIRST:
        shared_engine.admin.reload(model_dir, FIRST)
    return shared_engine
