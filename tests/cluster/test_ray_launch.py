"""`run launch --ray`: raylets on loopback addresses, real nodes below them, and what is left of them."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import netns
from tests.bash import READY_TO_WAIT, WAIT
from tests.cluster import ray_cluster
from tests.cluster.cluster import FAST, REPOSITORY, Cluster, token_ids
from tests.cluster.launchers import RUN, Launcher, until
from tests.cluster.ray_cluster import RayCluster, raylet_of

pytestmark = [
    pytest.mark.skipif(ray_cluster.unavailable() is not None, reason=str(ray_cluster.unavailable())),
    pytest.mark.timeout(400),
]
ITERATIONS = 2
SETTINGS = (*FAST, "--iterations", str(ITERATIONS), "--rl-phase", "rollout", "cluster.node_timeout_s=5")
SLOW = "rollout.environment=tests.cluster.plugins:slow"
Launch = Callable[..., Launcher]


@pytest.fixture(scope="module")
def ray(cache: Path) -> Iterator[RayCluster]:
    """Two machines, the head among them."""
    nodes = {"XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    cluster = ray_cluster.started({**os.environ, **nodes, "SLOW_S": "0.5"}, 2)
    try:
        yield cluster
    finally:
        cluster.__exit__()


@pytest.fixture
def launch(ray: RayCluster, tmp_path: Path) -> Iterator[Launch]:
    """Starts launchers; whatever is left of them at the end fails the test."""
    started: list[Launcher] = []

    def start(*words: str, address: str = "", nodes: int = 2) -> Launcher:
        options = ("--ray", address or ray.address, "--num-nodes", str(nodes))
        how: dict[str, Any] = {"cwd": REPOSITORY, "env": ray.environment}
        started.append(Launcher(tmp_path, f"said-{len(started)}", *options, *words, **how))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.wait()
        launcher.check_nothing_is_left(30.0)


@pytest.fixture(scope="module")
def by_run_local(cache: Path, engine_url: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """The token ids of each iteration, as `run local` makes them."""
    place = tmp_path_factory.mktemp("local")
    cluster = Cluster(place / "run", cache, place)
    try:
        cluster.start(0, *SETTINGS, "--engine-url", engine_url, "--num-nodes", "2", role=("local",))
        assert cluster.wait() == [0], cluster.everything_said()
        return made(cluster.root)
    finally:
        cluster.close()


def made(root: Path) -> dict[int, Any]:
    """The token ids of each iteration of a run."""
    run = Cluster(root, root, root)
    return {iteration: token_ids(run.groups(iteration)) for iteration in range(1, ITERATIONS + 1)}


def node_of(launcher: Launcher, rank: int) -> psutil.Process | None:
    """The process of a rank, once it is a node."""
    for line in launcher.left():
        pid, *words = line.split()
        role = f"--worker {rank} " if rank else "--master "
        if words[1:2] and words[1].endswith("/run") and role in f"{line} ":
            return psutil.Process(int(pid))
    return None


def has_parts(launcher: Launcher) -> bool:
    """Whether groups of the first iteration are finished, and not all."""
    directory = launcher.run_dir.trajectories("train", 1)
    return any(directory.glob("*.safetensors")) and not launcher.run_dir.manifest("train", 1).exists()


def test_nodes_end_with_a_launcher_that_is_killed_and_a_rank_outlives_its_raylet(
    launch: Launch, ray: RayCluster, engine_url: str, by_run_local: dict[int, Any]
) -> None:
    """First the launcher is killed in mid-rollout; it starts again, and a machine dies in mid-rollout."""
    words = (*SETTINGS, "--engine-url", engine_url, SLOW)
    killed = launch(*words, "rollout.concurrency=1")
    killed.until(lambda: has_parts(killed))
    killed.process.kill()
    killed.process.wait()
    killed.check_nothing_is_left(30.0)

    ray.add()
    again = launch(*words)
    again.until(lambda: "epoch" in again.said and has_parts(again) and node_of(again, 1))
    ranks = [rank for rank in (0, 1) if (node := node_of(again, rank)) and raylet_of(node) in ray.raylets()]
    victim = node_of(again, ranks[0])
    assert victim is not None
    dying = raylet_of(victim)
    others = ray.raylets().keys() - {dying}
    os.kill(dying, signal.SIGKILL)
    again.until(lambda: "starting it again (1 of 10)" in again.said)
    assert again.wait() == 0, again.said
    assert ray.raylets().keys() == others
    again.check_nothing_is_left()
    assert [line["iteration"] for line in again.metrics()] == [1, 2] and "[rank 1" in again.said
    assert made(again.run_dir.root) == by_run_local, "no group is lost, and none is made anew in another way"


WAITS = f"#!/bin/bash\n{READY_TO_WAIT}echo \"$1 runs\"; trap 'echo got TERM; exit 130' TERM\n{WAIT}"
ENDS = '#!/bin/bash\necho "$* gpus:$CUDA_VISIBLE_DEVICES threads:$OMP_NUM_THREADS in $PWD"\n'
DIES = '#!/bin/bash\necho here >> "$0$1"; (($(wc -l < "$0$1") < 3)) && kill -9 $$; exit 0\n'


def stand_in(place: Path, text: str) -> str:
    """A program in place of `run` on the machines."""
    program = place / "program"
    program.write_text(text)
    program.chmod(0o755)
    return str(program)


def test_launcher_that_is_asked_to_end_ends_every_node(
    launch: Launch, ray: RayCluster, tmp_path: Path
) -> None:
    launcher = launch("--run", stand_in(tmp_path, WAITS))
    launcher.until(lambda: launcher.said.count(" runs") == 2)
    launcher.process.terminate()
    assert launcher.wait() == 130, launcher.said
    assert launcher.said.count("got TERM") == 2
    assert f"to resume: run launch --ray {ray.address} --num-nodes 2 --log-path" in launcher.said
    launcher.check_nothing_is_left()


def test_node_that_is_killed_comes_back_where_it_was(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("--run", stand_in(tmp_path, DIES), nodes=1)
    assert launcher.wait() == 0, launcher.said
    assert (tmp_path / "program--master").read_text() == "here\n" * 3
    assert "it ended with -9; starting it again (2 of 10)" in launcher.said


def test_machines_that_are_missing_are_named_and_nothing_is_written(launch: Launch) -> None:
    launcher = launch(nodes=9)
    assert launcher.wait() == 2, launcher.said
    assert "--num-nodes 9: the Ray cluster at" in launcher.said
    assert "127.0.0.2 (0 GPUs, 1 CPUs)" in launcher.said
    assert not launcher.run_dir.root.exists()
    assert not list(launcher.run_dir.root.parent.glob(".flagpost*"))


def test_launcher_of_another_place_reaches_the_cluster_as_a_client(
    launch: Launch, ray: RayCluster, tmp_path: Path
) -> None:
    for _ in range(3):  # on a busy machine Ray may take longer to start its server than it allows itself
        launcher = launch("--run", stand_in(tmp_path, ENDS), address=ray.client)
        code = launcher.wait()
        if "Starting Ray client server failed" not in launcher.said:
            break
    assert code == 0, launcher.said
    assert f"[rank 0, {os.uname().nodename}] --master --num-nodes 2" in launcher.said
    assert launcher.said.count(f"gpus: threads:1 in {REPOSITORY}") == 2


def test_job_that_is_submitted_launches_a_run(ray: RayCluster, tmp_path: Path) -> None:
    """As on docs/clusters.md: the entry point is the launcher, on the head."""
    program, root = stand_in(tmp_path, ENDS), str(tmp_path / "run")
    words = ["run", "launch", "--ray", "auto", "--num-nodes", "2", "--log-path", root, "--run", program]
    path = f"{ray_cluster.RAY.parent}:{os.environ['PATH']}"
    submit = [str(ray_cluster.RAY), "job", "submit", "--address", ray.dashboard, "--"]
    done = subprocess.run(
        [*submit, "env", f"PATH={path}", *words],
        env=ray.environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"--worker 1 --log-path {root}" in done.stdout


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to hide a directory from one raylet")
def test_machine_that_does_not_see_the_directory_is_named(
    launch: Launch, ray: RayCluster, tmp_path: Path
) -> None:
    """The newest raylet has an empty directory in that place; it alone has two CPUs."""
    hide = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "hidden")
    blind = ray.add(prefix=hide, cpus=2)
    launcher = launch("--cpus-per-node", "1,2", "--run", stand_in(tmp_path, ENDS))
    assert launcher.wait() == 2, launcher.said
    assert f"rank 1 ({os.uname().nodename}) does not see what rank 0" in launcher.said
    assert "mount the shared directory there, at the same path" in launcher.said
    blind.terminate()
    blind.wait(60)


@pytest.mark.skipif(netns.unavailable() is not None, reason=str(netns.unavailable()))
def test_with_ray_runs_a_command_on_the_head_of_all_machines(cache: Path, tmp_path: Path) -> None:
    """The other one starts first; it ends once the head is gone."""
    place = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    program, root = stand_in(tmp_path, ENDS), str(tmp_path / "run")
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "RAY_TMPDIR": str(place)}
    words = [str(RUN), "with-ray", "--num-nodes", "2", "--deadline", "90", "--"]
    words += [str(RUN), "launch", "--ray", "auto", "--num-nodes", "2", "--log-path", root, "--run", program]
    try:
        with netns.Hosts(2) as hosts:
            environment["MASTER_ADDR"] = hosts[0].address
            started: list[subprocess.Popen[str]] = []
            for host in reversed(hosts):
                started.append(
                    subprocess.Popen(
                        host.argv(words), env=environment, cwd=tmp_path, text=True, start_new_session=True,
                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip
            said = [process.communicate(timeout=150)[0] for process in reversed(started)]
            assert [process.returncode for process in started] == [0, 0], said
            assert "--master" in said[0] and "--worker 1" in said[0] and "--worker" not in said[1]
            until(
                lambda: not any(host.pids() for host in hosts), lambda: str([h.pids() for h in hosts]), 10.0
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.parametrize(
    ("variables", "words", "expected"),
    [
        ({}, ["--", "true"], "set MASTER_ADDR"),
        ({"MASTER_ADDR": "localhost"}, ["--", "absent-program"], "no program 'absent-program'"),
        (
            {"MASTER_ADDR": "192.0.2.77"},
            ["--deadline", "0", "--port", "1", "--", "true"],
            "no head at 192.0.2.77:1",
        ),
    ],
)
def test_with_ray_says_what_it_lacks(variables: dict[str, str], words: list[str], expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"} | variables
    done = subprocess.run(
        [str(RUN), "with-ray", *words], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (3 if "--deadline" in words else 2)
    assert expected in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
