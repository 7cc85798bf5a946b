"""`from coordinator import Run`: what a program reads of a run."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coordinator import Run
from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.directory.manifests import manifest, publish_manifest
from coordinator.directory.parts import PartWriter
from coordinator.directory.published import Incomplete
from coordinator.protocol.records import claim
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from rollout.quota import Quota
from rollout.trajectory import Turn
from tests.coordinator.examples import ORIGIN, group, record, run_dir_at, tree, write_checkpoint, write_json
from tests.paths import REPOSITORY


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = run_dir_at(tmp_path / "run")
    write_json(made.run_json, {"run_id": "abc", "format": FORMAT, "fixed": {}})
    return made


def collect(run_dir: RunDir, iteration: int, slots: int = 3) -> None:
    """Trajectories of an iteration, in a part a group, and one that came too late to count."""
    writer = PartWriter(run_dir, "train", iteration, 1, 2, ORIGIN)
    run_dir.trajectories("train", iteration).mkdir()
    for slot in reversed(range(slots)):
        writer.add(group(slot))
        writer.flush()
    directory = run_dir.trajectories("train", iteration)
    document, _ = manifest(directory, iteration, Quota(slots, slots), ORIGIN)
    write_json(run_dir.manifest("train", iteration), document)
    writer.add(group(0, rewards=(9.0,)))
    writer.flush()


def write_metrics(run_dir: RunDir, *lines: dict[str, object]) -> None:
    run_dir.metrics.write_text("".join(f"{json.dumps({'kind': 'both'} | line)}\n" for line in lines))


def test_conversations_and_metrics_of_samples_are_read(run_dir: RunDir) -> None:
    made = group(0)
    made.samples[0].metrics = {"tries": 2.0}
    made.samples[0].turns = [Turn("user", "again"), Turn("assistant", "a", 1, 2, "stop")]
    writer = PartWriter(run_dir, "train", 1, 1, 2, ORIGIN)
    run_dir.trajectories("train", 1).mkdir()
    writer.add(made)
    writer.flush()
    document, groups = manifest(run_dir.trajectories("train", 1), 1, Quota(1, 1), ORIGIN)
    publish_manifest(run_dir.manifest("train", 1), document, groups)
    (read,) = Run(run_dir.root).trajectories(1)
    assert read.samples[0].metrics == {"tries": 2.0} and read.samples[0].turns == made.samples[0].turns
    (line,) = map(json.loads, run_dir.groups("train", 1).read_text().splitlines())
    assert line["samples"][0]["metrics"] == {"tries": 2.0}
    assert [turn["text"] for turn in line["samples"][0]["turns"]] == ["again", "a"]


def test_path_may_be_relative_text(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.root.parent)
    run = Run("run")
    monkeypatch.chdir("/")
    assert run.run_dir.root == run_dir.root
    assert run.status()["run_id"] == "abc"


def test_metrics_are_the_whole_lines_in_order(run_dir: RunDir) -> None:
    run = Run(run_dir.root)
    assert (run.metrics(), run.iterations()) == ([], [])
    write_metrics(run_dir, {"iteration": 2, "reward": 0.5}, {"iteration": 1}, {"iteration": 2, "reward": 0.9})
    with run_dir.metrics.open("a") as file:
        file.write('{"iteration": 3, "rew')
    both = {"kind": "both"}
    assert run.metrics() == [both | {"iteration": 1}, both | {"iteration": 2, "reward": 0.5}]
    assert run.iterations() == [1, 2]


def test_trajectories_are_the_groups_that_count_by_slot(run_dir: RunDir) -> None:
    collect(run_dir, 4)
    found = Run(run_dir.root).trajectories(4)
    assert next(found).slot == 0
    assert [(made.slot, [sample.reward for sample in made.samples]) for made in found] == [
        (1, [1.0, 0.0]),
        (2, [1.0, 0.0]),
    ]


def test_iteration_without_trajectories_says_which_have_some(run_dir: RunDir) -> None:
    run = Run(run_dir.root)
    with pytest.raises(SettingsError, match="no train trajectories of iteration 1; there are none yet"):
        run.trajectories(1)
    for iteration in (4, 5, 6):
        collect(run_dir, iteration)
    run_dir.trajectories("train", 7).mkdir()
    with pytest.raises(SettingsError, match="of iteration 7; there are trajectories of iterations 4 to 6"):
        run.trajectories(7)
    with pytest.raises(SettingsError, match="no eval trajectories of iteration 4; there are none yet"):
        run.trajectories(4, "eval")


def test_damaged_part_is_named(run_dir: RunDir) -> None:
    collect(run_dir, 4)
    part = sorted(run_dir.trajectories("train", 4).glob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(Incomplete, match=part.name):
        Run(run_dir.root).trajectories(4)


def test_checkpoint_is_the_newest_whole_one_or_the_one_asked_for(run_dir: RunDir) -> None:
    run = Run(run_dir.root)
    with pytest.raises(SettingsError, match="no whole checkpoint"):
        run.checkpoint()
    for iteration in (5, 10, 15):
        write_checkpoint(run_dir.checkpoint(iteration), iteration)
    assert run.checkpoint() == run_dir.checkpoint(15)
    assert run.checkpoint(5) == run_dir.checkpoint(5)
    with pytest.raises(
        SettingsError, match="no checkpoint of iteration 7; there are checkpoints of iterations 5, 10, 15"
    ):
        run.checkpoint(7)
    (run_dir.checkpoint(15) / "model.safetensors").write_bytes(b"weighty")
    assert run.checkpoint() == run_dir.checkpoint(10)
    assert run.checkpoint(15, verify=False) == run_dir.checkpoint(15)
    with pytest.raises(SettingsError, match=r"of iteration 15; .*model\.safetensors is missing or differs"):
        run.checkpoint(15)


def test_reading_writes_nothing(run_dir: RunDir) -> None:
    collect(run_dir, 1)
    write_checkpoint(run_dir.checkpoint(1))
    before = tree(run_dir.root)
    run = Run(run_dir.root)
    _read = (run.status(), run.metrics(), list(run.trajectories(1)), run.checkpoint())
    assert tree(run_dir.root) == before


def run_python(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )


def test_importing_run_loads_nothing_that_is_heavy_or_not_needed() -> None:
    lines = (
        "import sys, coordinator",
        "late = 'coordinator.console.views.run' not in sys.modules",
        "from coordinator import Run",
        "print(late, Run.__name__, *{'torch', 'numpy', 'rich', 'aiohttp', 'jinja2'} & sys.modules.keys())",
    )
    assert run_python("; ".join(lines)).stdout.split() == ["True", "Run"]


def test_package_has_no_other_names() -> None:
    import coordinator

    with pytest.raises(AttributeError, match="module 'coordinator' has no attribute 'Runs'"):
        _absent = coordinator.Runs  # pyright: ignore


def test_status_of_a_long_run_is_quick(run_dir: RunDir) -> None:
    """200 iterations of 8 nodes: the flags of the last two iterations, old epochs, beats, and the metrics."""
    settings = build({"cluster.num_nodes": 8, "iterations": 400})
    write_metrics(
        run_dir, *({"iteration": i, "phase_seconds": {str(k): 1.0 for k in range(14)}} for i in range(1, 201))
    )
    for epoch in range(1, 6):
        claim(run_dir, record(epoch, members=dict.fromkeys(range(8), 1), settings=settings))
    for rank in range(8):
        for iteration in (199, 200):
            for phase in range(14):
                (run_dir.entry(Flag(5, iteration, phase, rank, "ok"))).write_text("{}")
        said = {"peer": {"identity": "elsewhere"}, "pid": os.getpid(), "host": "a", "phase": "training"}
        write_json(run_dir.entry(Beat(5, rank, 1, 9)), said | {"state": "running", "iteration": 201})
    Run(run_dir.root).status()  # what is imported late
    started_s = time.process_time()
    status = Run(run_dir.root).status()
    assert time.process_time() - started_s < 2.0
    assert (status["last_metrics"]["iteration"], len(status["nodes"])) == (200, 8)
