"""scripts/node.sbatch on a real Slurm of three nodes, with stand-ins for `run`, and with the real one."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.console.server import jobs
from coordinator.console.server.launchers import Launcher
from coordinator.console.server.submission import Submission
from coordinator.console.views import run
from coordinator.directory.layout import RunDir
from tests.cluster.cluster import FAST
from tests.scripts import slurm
from tests.scripts.slurm import Slurm

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "scripts" / "node.sbatch"
pytestmark = pytest.mark.skipif(slurm.unavailable() is not None, reason=str(slurm.unavailable()))

SETTINGS = (
    *FAST,
    "rollout.environment=tests.cluster.plugins:slow",
    "rl_phase=rollout",
    "rollout.concurrency=4",
    "rollout.tasks_per_iteration=12",
    "eval.interval=100",
    "cluster.node_timeout_s=5",
)
START_S = 200.0
"""How long two nodes and their engines may take to start; on two idle cores it is a tenth of it."""
END_S = 25.0
"""Slurm kills what is left 30 s after it asked for the end."""
STUB = """\
#!/usr/bin/env bash
# Says how it was started; $start counts the starts of the job, $seen those of this node since then.
start=${{SLURM_RESTART_COUNT:-0}} rank=$SLURM_NODEID
seen=$(grep -cs "^$start $rank/" {said})
echo "$start $rank/$SLURM_NNODES $*" >> {said}
{body}
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three idle nodes."""
    with Slurm(tmp_path_factory.mktemp("slurm"), nodes=3) as started:
        yield started


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where other tests of the session have left the built-in model, perhaps."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"


class Stub:
    """A stand-in for `run`, found where node.sbatch looks first: in the checkout it is submitted from."""

    def __init__(self, directory: Path, body: str) -> None:
        self.directory = directory
        self._said = directory / "said"
        program = directory / ".venv" / "bin" / "run"
        program.parent.mkdir(parents=True)
        program.write_text(STUB.format(said=self._said, body=body))
        program.chmod(0o755)

    def starts(self) -> list[str]:
        """`START RANK/NODES WORDS` of every start."""
        return sorted(self._said.read_text().splitlines()) if self._said.exists() else []


def test_every_node_runs_once_with_rank_and_count_from_slurm_and_the_words_as_typed(
    cluster: Slurm, tmp_path: Path
) -> None:
    stub = Stub(tmp_path, "exit 0")
    job = cluster.sbatch(SCRIPT, "--log-path", "/shared/two words", "--tasks=*", cwd=tmp_path)
    assert cluster.until(job, "COMPLETED")["ExitCode"] == "0:0"
    assert stub.starts() == [f"0 {rank}/3 --log-path /shared/two words --tasks=*" for rank in range(3)]


@pytest.mark.parametrize("code", [1, 2, 4, 130])
def test_a_run_that_ended_by_itself_is_not_started_again(cluster: Slurm, tmp_path: Path, code: int) -> None:
    """The other nodes end as they please, later."""
    stub = Stub(tmp_path, f"((rank != 1)) || exit {code}; sleep 0.5; echo done-$rank; exit 0")
    job = cluster.sbatch(SCRIPT, cwd=tmp_path)
    assert cluster.until(job, "FAILED")["ExitCode"] == f"{code}:0"
    assert stub.starts() == ["0 0/3 ", "0 1/3 ", "0 2/3 "]
    said = (tmp_path / f"slurm-{job}.out").read_text()
    assert "done-0" in said and "done-2" in said


def test_a_killed_run_comes_back_and_a_lost_node_or_the_time_limit_queues_the_job_again(
    cluster: Slurm, tmp_path: Path
) -> None:
    """First the time limit is near, then a node is lost for good, then one `run` is killed twice."""
    stub = Stub(
        tmp_path,
        """case $start in
            0) sleep 60 & trap 'kill $!; exit 130' TERM; wait ;;
            1) exit 3 ;;
            *) ((rank != 2 || seen > 1)) || kill -9 $$ ;;
        esac""",
    )
    job = cluster.sbatch(SCRIPT, cwd=tmp_path)
    cluster.poll(lambda: len(stub.starts()) == 3, "the first start")
    cluster.scancel("--batch", "--signal=USR1", job)  # what --signal makes Slurm send
    for restarts in (1, 2):
        cluster.until(job, "PENDING", restarts)
        cluster.hurry(job)
    assert cluster.until(job, "COMPLETED", restarts=2)["ExitCode"] == "0:0"
    nodes = ["0/3 ", "1/3 ", "2/3 "]
    assert stub.starts() == [
        *(f"0 {node}" for node in nodes), *(f"1 {node}" for node in nodes),
        *(f"2 {node}" for node in [*nodes, "2/3 ", "2/3 "]),
    ]  # fmt: skip


def test_job_of_a_server_runs_on_slurm_and_is_cancelled_there(
    cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    launcher, made = Launcher("slurm"), list[tuple[jobs.Job, Stub]]()
    for name, body in (
        ("short", "echo it-runs"),
        ("long", "trap 'exit 130' TERM; while sleep 0.1; do :; done; exit 130"),
    ):
        job = jobs.submit(tmp_path, Submission(name, ("--iterations=3",), {}))
        made.append((job, Stub(job.directory, body)))
        job.begin(launcher)
        cluster.poll(lambda stub=made[-1][1]: len(stub.starts()) == 3, "the nodes")
        if name == "short":
            cluster.poll(lambda job=job: job.start().exit_code() is not None, "the end", 60)
    (short, stub), (long, _) = made
    assert (short.start().exit_code(), short.state(None, 0)) == (0, "finished")
    assert stub.starts()[0] == f"0 0/3 --log-path {short.log_path} --iterations=3"
    assert short.output().read_text().count("it-runs") == 3
    long.stop(launcher, now=False)
    cluster.poll(lambda: long.start().exit_code() is not None, "the end", 60)
    assert long.state(None, 0) == "stopped"


class Run:
    """A run directory that jobs work on."""

    def __init__(self, root: Path, cache: Path) -> None:
        self.directory = RunDir(root)
        self._cache = cache

    def submit(self, cluster: Slurm, iterations: int) -> str:
        """A job that goes on to this iteration; its number."""
        root = self.directory.root
        return cluster.sbatch(
            SCRIPT,
            *("--log-path", str(root), "--iterations", str(iterations), *SETTINGS),
            cwd=REPOSITORY,
            options=["--nodes", "2", "--output", f"{root}.%j.out"],
            PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            XDG_CACHE_HOME=str(self._cache),
            OMP_NUM_THREADS="1",
            PYTHONPATH=str(REPOSITORY),
            SLOW_S="0.6",
        )

    def iterations(self) -> list[int]:
        """Those with a metrics line."""
        path = self.directory.metrics
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["iteration"] for line in lines]

    def has_parts(self) -> bool:
        """Whether groups of the first iteration are finished."""
        return any(self.directory.trajectories("train", 1).glob("*.safetensors"))

    def states(self) -> tuple[str, set[str]]:
        """Of the run, and of its two nodes."""
        status = run.Run(self.directory.root).status()
        assert [node["rank"] for node in status["nodes"]] == [0, 1]
        return status["state"], {node["state"] for node in status["nodes"]}


@pytest.mark.timeout(2 * START_S + 100)
def test_a_requeued_run_resumes_and_scancel_leaves_no_process(
    cluster: Slurm, tmp_path: Path, cache: Path
) -> None:
    """Queued again in its first rollout, cancelled in its third, ended by another job."""
    run = Run(tmp_path / "run", cache)
    job = run.submit(cluster, iterations=100)
    cluster.poll(run.has_parts, "a finished group", START_S)
    assert run.states() == ("running", {"alive"})
    cluster.scontrol("requeue", job)
    cluster.until(job, "PENDING", restarts=1)
    assert run.states() == ("stopped", {"left"})  # asked to end, not killed

    cluster.hurry(job)
    cluster.poll(lambda: len(run.iterations()) == 2, "two iterations", START_S)
    manifest = json.loads(run.directory.manifest("train", 1).read_text())
    assert len({part["epoch"] for part in manifest["parts"]}) == 2  # what was finished before, and the rest
    assert manifest["groups"] == 12

    assert sum("embedded.server" in line for line in cluster.processes(job)) == 2
    cluster.scancel(job)
    cluster.poll(lambda: not cluster.processes(job), "the end of every process", END_S)
    assert cluster.until(job, "CANCELLED", restarts=1)
    assert run.states() == ("stopped", {"left"})

    done = run.iterations()
    last = run.submit(cluster, iterations=done[-1])
    assert cluster.until(last, "COMPLETED")["ExitCode"] == "0:0"
    assert run.states()[0] == "finished"
    assert run.iterations() == done == list(range(1, len(done) + 1))
