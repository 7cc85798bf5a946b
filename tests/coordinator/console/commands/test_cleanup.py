"""What `run cleanup` removes and what it keeps; on a made-up run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.console.commands import cleanup as module
from coordinator.console.commands.cleanup import cleanup, refuse_unnamed
from coordinator.console.views.run import Run
from coordinator.directory import manifests, parts, published
from coordinator.directory.file_names import Beat, Flag, Record, parse_protocol_name
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.keeping import resume
from coordinator.protocol.phase import Phase
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement, run_dirs
from coordinator.protocol.records import Records
from coordinator.settings.tree import SettingsError
from rollout.storage import files, once
from tests.commands import run_forked
from tests.coordinator.console.commands.interrupted_run import (
    GIVEN,
    SETTINGS,
    N,
    beat,
    everything,
    interrupted_run,
    mid_rollout,
    refused,
)
from tests.coordinator.examples import group, origin, tree, write_json


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    return interrupted_run(tmp_path / "run")


def test_nodes_that_have_all_ended_are_not_looked_for(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(run_dir.entry(Beat(3, 0, 1, 6)), {"state": "ended"})
    write_json(run_dir.entry(Flag(3, 0, 0, 1, "left")), {"text": "interrupted"})
    cleanup(run_dir.root, N, dry_run=True)
    assert "whether a node still beats" in capsys.readouterr().out, "one that leaves may be writing still"
    write_json(run_dir.entry(Beat(3, 1, 1, 6)), {"state": "ended"})
    cleanup(run_dir.root, N, dry_run=True)
    assert "still beats" not in capsys.readouterr().out
    beat(run_dir, 1, 2)
    cleanup(run_dir.root, N, dry_run=True)
    assert "still beats" in capsys.readouterr().out, "rank 1 was started again"


def test_unknown_files_stay_and_are_named(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    mine = run_dir.trajectories("train", N) / "notes.txt"
    mine.write_text("mine")
    (run_dir.trajectories("train", N) / "r0001.e0002.part0001.damaged").touch()
    (run_dir.trajectories("train", N) / "manifest.damaged").touch()
    cleanup(run_dir.root, N)
    assert (
        "stays: train_trajectories/iteration_000002/notes.txt (not a file of flagpost)"
        in capsys.readouterr().out
    )
    assert tree(run_dir.trajectories("train", N)) == {"notes.txt"}


# ---- the removal


def test_removal_takes_what_the_dry_run_names_and_nothing_else(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(run_dir.root)
    cleanup(run_dir.root, N, dry_run=True)
    assert everything(run_dir.root) == before
    announced = capsys.readouterr().out.splitlines()
    cleanup(run_dir.root, N)
    said = capsys.readouterr().out.splitlines()
    assert said == [line.replace("would remove", "removed") for line in announced]
    after = everything(run_dir.root)
    paths = [line.split()[1] for line in said if line.startswith("removed") and "(" in line]
    gone = {path for path in before if any(path == name or path.startswith(f"{name}/") for name in paths)}
    assert before.keys() - after.keys() == gone
    assert after.keys() - before.keys() == {
        "protocol/main/master/e0004.epoch.json",
        "protocol/main/master/e0004.i000000.p00.r0000.stopped",
    }
    assert all(after[path] == content for path, content in before.items() if path not in gone)
    total = sum(len(before[path]) for path in gone)
    assert said[-1] == f"removed {len(paths)} paths, {total:,} bytes"
    assert resume.resume_at(run_dir, SETTINGS, N) is Phase.TRAIN_PLAN


def test_staging_directory_that_is_a_link_goes_and_what_it_leads_to_stays(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = tmp_path / "archive"
    staging = run_dir.staging(N, 3)
    staging.rename(archive)
    (archive / "large").write_bytes(b"x" * 1_000_000)
    staging.symlink_to(archive)
    before = tree(archive)
    cleanup(run_dir.root, N)
    assert tree(archive) == before and not staging.is_symlink()
    assert "1,000," not in capsys.readouterr().out, "what stays is not counted"


def test_epoch_is_claimed_before_anything_goes(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_first(path: Path) -> None:
        assert Records(run_dir).newest([4]) is not None, f"{path} would go before the epoch is claimed"
        remove(path)

    remove = files.remove
    monkeypatch.setattr(files, "remove", check_first)
    cleanup(run_dir.root, N)
    claimed = Records(run_dir).newest([4])
    assert claimed and (claimed.kind, claimed.members, claimed.master_incarnation) == ("lobby", {}, 0)
    assert claimed.settings == SETTINGS.model_dump(mode="json") and claimed.given == GIVEN
    assert claimed.run_id == "made-up"
    status = Run(run_dir.root).status()
    assert (status["state"], status["epoch"]) == ("stopped", 4)


def test_cleanup_twice_finds_nothing_to_do_and_says_so_at_once(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleanup(run_dir.root, N)
    before = everything(run_dir.root)
    monkeypatch.setattr(module.time, "sleep", lambda _s: pytest.fail("it waits for nothing"))
    cleanup(run_dir.root, N)
    assert "iteration 2 has left nothing" in capsys.readouterr().out
    assert everything(run_dir.root) == before


def in_two_crews(root: Path) -> list[RunDir]:
    """The run that was interrupted, with a machine that generates and one that trains."""
    one = interrupted_run(root)
    publish_placement(root, Placement(2, ("rollout=0", "train=1")))
    for machine in (0, 1):
        publish_devices(root, machine, f"node-{machine}", 1)
    crews = list(run_dirs(root))
    for crew in crews:
        for directory in crew.protocol:
            directory.mkdir(parents=True)
    for path in [*one.master.iterdir(), *one.workers.iterdir()]:
        entry = parse_protocol_name(path.name)
        of_both = crews if isinstance(entry, Record) else crews[1:] if "r0001" in path.name else crews[:1]
        for crew in of_both:
            shutil.copy(path, crew.master / path.name.replace("r0001", "r0000"))
    shutil.rmtree(one.master.parent)
    return crews


def test_cleanup_claims_an_epoch_of_each_crew_and_takes_the_leftovers_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    root = tmp_path / "run"
    rollout, train = in_two_crews(root)
    cleanup(root, N)
    said = capsys.readouterr().out
    assert "removed protocol/rollout/master/e0003.i000002.p04.r0000.ok" in said
    assert "removed protocol/train/master/e0002.i000000.p00.r0000.enter" in said
    assert "removed checkpoints/.iteration_000002.e0003" in said
    for crew in (rollout, train):
        claimed = Records(crew).newest([4])
        assert claimed and claimed.members == {}, "a suspended node of either crew has to be replaced"
    status = Run(root).status()
    assert (status["state"], [crew["state"] for crew in status["crews"]]) == ("stopped", ["stopped"] * 2)


def test_node_of_either_crew_that_beats_refuses_the_cleanup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    root = tmp_path / "run"
    rollout, train = in_two_crews(root)
    monkeypatch.setattr(module.time, "sleep", lambda _s: beat(train, 0, 2, 0, 3))
    before = everything(root)
    assert refused(rollout).startswith(
        "train rank 1 (node-0) still beats: stop the run first: kill -INT 4711"
    )
    assert everything(root).items() >= before.items()


def test_crew_that_nobody_has_started_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    root = tmp_path / "run"
    _rollout, train = in_two_crews(root)
    shutil.rmtree(train.master)
    cleanup(root, N)
    assert not train.master.exists()


@pytest.mark.parametrize("keep_partial", [False, True])
def test_cleanup_cut_off_anywhere_leaves_a_state_that_resumes_or_cleans_again(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_partial: bool
) -> None:
    """Cut off before its k-th change of the directory, for every k."""
    if keep_partial:
        mid_rollout(run_dir, group(0), group(3))
    original = everything(run_dir.root)
    changes = {name: getattr(files, name) for name in ("remove", "remove_tree", "rename")}
    changes["create_once"] = once.create_once
    left = [1 << 30]

    def counted(name: str) -> Callable[..., object]:
        def change(*arguments: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return changes[name](*arguments, **more)

        return change

    for name in changes:
        monkeypatch.setattr(once if name == "create_once" else files, name, counted(name))
    cleanup(run_dir.root, N, keep_partial=keep_partial)
    count, ends = (1 << 30) - left[0], data_of(run_dir.root)
    assert count > 10
    for k in range(count):
        root = tmp_path / f"cut-{k}"
        for name, content in original.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        cut = RunDir(root)
        left[0] = k
        with pytest.raises(KeyboardInterrupt):
            cleanup(root, N, keep_partial=keep_partial)
        left[0] = 1 << 30
        resumable(cut)
        cleanup(root, N, keep_partial=keep_partial)
        assert data_of(root) == ends, f"cut off before change {k}"


def data_of(root: Path) -> dict[str, bytes]:
    """All but protocol/."""
    return {name: data for name, data in everything(root).items() if not name.startswith("protocol/")}


def resumable(run_dir: RunDir) -> None:
    """What is there rests on what is there too."""
    if (staging := published.complete_staging(run_dir, N)) is not None:
        published.verify_checkpoint(staging)
    document = published.read_manifest(run_dir, "train", N)
    if document is not None:
        assert manifests.read_groups(run_dir.trajectories("train", N), document)
    made_with = origin(published.policy_of(run_dir, 1).digest)
    if parts.finished_groups(run_dir.trajectories("train", N), made_with):
        assert published.read_json(run_dir.iteration_json(N))


# ---- --keep-partial


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--iteration", "0"], "--iteration"),
        (["--iteration", "-1"], "--iteration"),
        (["--iteration", "two"], "--iteration"),
        ([], "no run there"),
        (["--iteration", "1"], "no run there"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run_forked(("cleanup", "--log-path", "run", *arguments), tmp_path, os.environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("begun", [(), (1, 12)])
def test_without_an_iteration_the_last_that_was_begun_is_named(
    tmp_path: Path, begun: tuple[int, ...]
) -> None:
    write_json(RunDir(tmp_path).run_json, {"format": FORMAT, "run_id": "abc"})
    for number in begun:
        write_json(RunDir(tmp_path).iteration_json(number), {})
    text = "the last that was begun is 12" if begun else "none was begun"
    with pytest.raises(SettingsError, match=f"^--iteration N is missing: the interrupted iteration; {text};"):
        refuse_unnamed(tmp_path)
