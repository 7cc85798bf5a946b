"""A cluster for each test, and one engine that the protocol's tests share."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from coordinator.machine.network import LOOPBACK
from rollout.engines.admin import EngineAdmin
from rollout.engines.model_dir import policy_digest
from rollout.storage.hashing import checksums
from tests.cluster import small_run
from tests.cluster.cluster import REPOSITORY, Cluster
from tests.imports import forked
from tests.ports import unused_port

collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]  # `make test-vllm` runs it


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nodes' cache, one for all workers of the test session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "cache"


@pytest.fixture
def separate() -> bool:
    """Whether a node starts engine and trainer itself, as it does without `run local`; see SEPARATE."""
    return False


SEPARATE = pytest.mark.parametrize("separate", [True], ids=["separate"])
"""For tests about such processes, and for nodes in namespaces."""


@pytest.fixture
def cluster(tmp_path: Path, cache: Path, separate: bool) -> Iterator[Cluster]:
    """Nodes of a fresh run directory; whatever is left of them at the end fails the test."""
    nodes = Cluster(tmp_path / "run", cache, tmp_path, separate)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def random_model(cache: Path) -> Path:
    """builtin:tiny with random weights."""
    cache.mkdir(exist_ok=True)
    made = cache / "random"
    with FileLock(cache / "random.lock"):
        if not made.is_dir():
            program = [sys.executable, "-P", "-m", "trainer.model.tiny"]
            command = forked([*program, "--seed", "0", "--steps", "0", "--out", str(made)])
            subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    return made


@contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """An engine with `model`; its URL."""
    url = f"http://{LOOPBACK}:{unused_port()}"
    engine = _serve(model, url, log)
    try:
        EngineAdmin(url).wait_healthy(120.0, lambda: engine.poll() is None)
        yield url
    finally:
        engine.kill()
        engine.wait()


def _serve(model: Path, url: str, log: Path) -> "subprocess.Popen[bytes]":
    program = [sys.executable, "-P", "-m", "rollout.engines.embedded.server", "--model", str(model)]
    command = [
        *program,
        "--port",
        url.rpartition(":")[2],
        "--weight-version",
        policy_digest(checksums(model)),
    ]
    with open(log, "wb") as file:
        return subprocess.Popen(
            forked(command), cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True
        )


@pytest.fixture(scope="session")
def engine_url(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that "the user" runs: nodes that only roll out need not start one each."""
    with serving(random_model, tmp_path_factory.mktemp("engine") / "log") as url:
        yield url


@pytest.fixture(scope="session")
def engine_urls(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The same for two nodes that train: each loads new weights, so they cannot share one."""
    logs = tmp_path_factory.mktemp("engines")
    with serving(random_model, logs / "0") as first, serving(random_model, logs / "1") as second:
        yield [first, second]


@pytest.fixture(scope="session")
def undisturbed(
    cache: Path, engine_urls: list[str], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The results of a small run that nothing happens to; made once for all workers of the test session."""
    kept = cache / "undisturbed.json"
    with FileLock(cache / "undisturbed.lock"):
        if not kept.exists():
            logs = tmp_path_factory.mktemp("undisturbed")
            cluster = Cluster(logs / "run", cache, logs)
            try:
                for rank in (0, 1):
                    cluster.start(rank, *small_run.arguments(rank, engine_urls))
                assert cluster.wait() == [0, 0], cluster.everything_said()
            finally:
                cluster.close()
            kept.write_text(json.dumps(small_run.results(cluster)))
        return json.loads(kept.read_text())


@pytest.fixture
def beside(cluster: Cluster, cache: Path, tmp_path: Path) -> Callable[[str], Cluster]:
    """Return another run, of that name."""

    def made(name: str) -> Cluster:
        logs = tmp_path / f"logs of {name}"
        logs.mkdir()
        return Cluster(tmp_path / name, cache, logs)

    return made
