"""The benchmarks run and measure what they say; how fast anything is, a person reads."""

import json
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.engine import Sampling

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(BENCH / name), *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, check=False)


def test_overhead_of_the_collector_is_one_line_of_json() -> None:
    ended = run("overhead.py", "--samples", "80")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    rows = json.loads(line)["rows"]
    assert {row["parts"] for row in rows} == {False, True} and {row["n"] for row in rows} == {1, 8}
    for row in rows:
        assert [int(samples) for samples in row["memory_mb"]] == [8, 40, 80]
        assert row["samples_per_s"] > 0 and row["server_samples_per_s"] > 0


def test_collector_and_bare_client_generate_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    collector, overhead = import_module("collector"), import_module("overhead")
    with overhead.instant_server(n=4, tokens=5, core=[]) as port:
        url = f"http://127.0.0.1:{port}"
        for side in (collector.through_collector, collector.bare):
            tokens, seconds = side(url, collector.slots_of(samples=24, n=4), Sampling(n=4, max_tokens=5))
            assert tokens == 24 * 5 and seconds > 0
        sides = {
            "collector": partial(collector.through_collector, url),
            "bare": partial(collector.bare, url),
        }
        row = collector.compare(sides, samples=24, n=4, tokens=5, rounds=3)
    low, high = row["collector_of_bare"]["range"]
    assert 0 < low <= row["collector_of_bare"]["median"] <= high


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("name", ["collector.py", "reload.py"])
def test_benchmark_that_needs_vllm_says_so(name: str) -> None:
    ended = run(name)
    assert ended.returncode == 2 and "vLLM is not installed" in ended.stderr
