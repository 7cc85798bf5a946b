"""`run profile` while real nodes train: whom it asks, what it leaves, what it says when nothing trains."""

import gzip
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.cluster import small_run
from tests.cluster.cluster import REPOSITORY, Cluster

SLOW = ("rollout.environment=tests.cluster.plugins:slow",)


def profile(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "coordinator.cli",
        "profile",
        "--log-path",
        str(cluster.root),
        *arguments,
    ]
    return subprocess.run(
        command, cwd=REPOSITORY, env=os.environ, capture_output=True, text=True, timeout=120
    )


def test_nodes_are_profiled_and_the_weights_are_those_of_a_run_that_is_not(
    cluster: Cluster, engine_urls: list[str], undisturbed: list[dict[str, object]]
) -> None:
    for rank in (0, 1):
        cluster.start(rank, *small_run.arguments(rank, engine_urls, *SLOW), variables={"SLOW_S": "3"})
    begun = cluster.run_dir.trajectories("train", 1)
    cluster.until(begun.is_dir, "the first iteration")
    with ThreadPoolExecutor() as pool:
        done, of_the_master = pool.map(lambda options: profile(cluster, *options), [("--rank", "1"), ()])
    assert (done.returncode, of_the_master.returncode) == (0, 0), done.stderr + of_the_master.stderr
    assert cluster.wait() == [0, 0], cluster.everything_said()
    assert small_run.results(cluster) == undisturbed

    (trace,) = cluster.run_dir.logs(1).glob("profile.*.json.gz")
    named, _, table = done.stdout.partition("\n\n")
    assert named == str(trace) and trace.name.startswith("profile.i00000")
    assert trace.with_suffix("").with_suffix(".txt").read_text() == table
    rows = [line.split() for line in table.splitlines()[1:]]
    assert len(rows) == 10 and any(name.startswith("aten::") for *_, name in rows)
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {name for *_, name in rows} <= {event.get("name") for event in events}
    (of_rank_0,) = cluster.run_dir.logs(0).glob("profile.*.json.gz")
    assert of_the_master.stdout.startswith(f"{of_rank_0}\n")
    assert not [*cluster.run_dir.master.glob("profile.*")]

    late = profile(cluster)
    assert (late.returncode, late.stdout) == (2, "")
    assert "nothing trains: the run is finished" in late.stderr
