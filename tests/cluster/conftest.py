"""A cluster for each test, and one engine that the protocol's tests share."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from coordinator.network import LOOPBACK, free_port
from rollout.engine import EngineAdmin
from rollout.weights import file_checksums, policy_digest
from tests.cluster.cluster import REPOSITORY, Cluster


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nodes' cache, one for all workers of the test session."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    return shared / "cache"


@pytest.fixture
def cluster(tmp_path: Path, cache: Path) -> Iterator[Cluster]:
    """Nodes of a fresh run directory; whatever is left of them at the end fails the test."""
    nodes = Cluster(tmp_path / "run", cache, tmp_path)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def random_model(cache: Path) -> Path:
    """builtin:tiny with random weights."""
    cache.mkdir(exist_ok=True)
    made = cache / "random"
    with FileLock(cache / "random.lock"):
        if not made.is_dir():
            command = [
                sys.executable,
                "-m",
                "trainer.tiny",
                "--seed",
                "0",
                "--steps",
                "0",
                "--out",
                str(made),
            ]
            subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
    return made


@pytest.fixture(scope="session")
def engine_url(random_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An engine that "the user" runs: nodes that only roll out need not start one each."""
    port = free_port(LOOPBACK)
    command = [
        sys.executable,
        "-m",
        "rollout.torch_server",
        "--model",
        str(random_model),
        "--port",
        str(port),
    ]
    command += ["--weight-version", policy_digest(file_checksums(random_model))]
    log = tmp_path_factory.mktemp("engine") / "log"
    with open(log, "wb") as file:
        engine = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, start_new_session=True)
    try:
        url = f"http://{LOOPBACK}:{port}"
        EngineAdmin(url).wait_healthy(120.0, lambda: engine.poll() is None)
        yield url
    finally:
        engine.kill()
        engine.wait()
