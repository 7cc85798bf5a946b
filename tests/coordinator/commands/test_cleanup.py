"""What `run cleanup` removes, what it never touches, and when it refuses; on made-up runs."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.commands import cleanup as module
from coordinator.commands.cleanup import cleanup, moved
from coordinator.commands.leftovers import What, look, plan
from coordinator.config import build
from coordinator.directory import parts, published
from coordinator.directory.layout import FORMAT, Beat, Flag, Record, RunDir
from coordinator.directory.parts import PartWriter
from coordinator.protocol.exits import Ended, Exit
from coordinator.protocol.phases import Phase
from coordinator.protocol.records import Records, claim
from coordinator.protocol.snapshot import parse
from coordinator.rows import resume
from coordinator.settings import SettingsError
from coordinator.views.run import Run
from rollout.quota import Quota
from rollout.storage import files
from rollout.trajectory import Group
from tests.coordinator.made_up import (
    POLICY,
    group,
    record,
    run_dir_at,
    tombstone,
    tree,
    write_checkpoint,
    write_json,
)
from tests.paths import REPOSITORY

SETTINGS = build({"cluster.num_nodes": 2, "cluster.beat_s": 0.01})
N = 2
"""The interrupted iteration; 1 is finished."""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run whose nodes were killed in the training of iteration 2, epoch 3; iteration 1 is finished."""
    monkeypatch.setattr(module, "LOOK_AT_LEAST_S", 0.02)
    made = run_dir_at(tmp_path / "run")
    write_json(made.run_json, {"run_id": "made-up", "format": FORMAT, "fixed": {}})
    made.metrics.write_text(json.dumps({"iteration": 1, "kind": "both"}) + "\n")
    for epoch, kind in [(1, "lobby"), (2, "full"), (3, "full")]:
        assert claim(made, record(epoch, kind, {0: 1, 1: 1}, settings=SETTINGS))  # pyright: ignore
    for rank in (0, 1):
        beat(made, rank)
    for flag in (Flag(2, 0, 0, 1, "enter"), Flag(2, 1, 4, 0, "ok"), Flag(3, 2, 4, 0, "ok")):
        write_json(made.protocol / flag.name, {})
    iteration_of(made, 1, POLICY)
    iteration_of(made, N, write_checkpoint(made.checkpoint(1)).policy)
    made.latest.write_text("iteration_000001\n")
    write_checkpoint(made.staging(N, 3), N)
    for epoch in (2, 3):
        write_json(made.trainer_state(epoch - 1, epoch) / "state.json", {})
    for trash in (f".{made.latest.name}.0011aabb.tmp", f"{made.staging(N, 2).name}.damaged/x", ".nfs00"):
        (made.checkpoints / trash).parent.mkdir(exist_ok=True)
        (made.checkpoints / trash).write_text("x")
    return made


def beat(run_dir: RunDir, rank: int, incarnation: int = 1, counter: int = 5, epoch: int = 3) -> None:
    content = {"host": f"node-{rank}", "pid": 4711 + rank, "peer": {"identity": "elsewhere"}}
    write_json(run_dir.protocol / Beat(epoch, rank, incarnation, counter).name, content)


def iteration_of(run_dir: RunDir, iteration: int, policy: str) -> None:
    """The trajectories, manifest and batch of an iteration of four slots."""
    opened = {"iteration": iteration, "policy": policy, "tasks": [0, 1, 2, 3]}
    write_json(run_dir.iteration_json(iteration), opened)
    for rank in (0, 1):
        write_parts(run_dir, iteration, rank, 2, [group(2 * rank), group(2 * rank + 1)])
    directory = run_dir.trajectories("train", iteration)
    document, groups = parts.manifest(directory, iteration, Quota(4, 4), policy)
    parts.publish_manifest(run_dir.manifest("train", iteration), document, groups)
    write_json(run_dir.batch(iteration) / "batch.json", {})
    (run_dir.batch(iteration) / "batch.safetensors").write_bytes(b"batch")
    write_json(run_dir.manifest("eval", iteration), {"policy": POLICY})


def write_parts(run_dir: RunDir, iteration: int, rank: int, epoch: int, groups: list[Group]) -> None:
    policy = json.loads(run_dir.iteration_json(iteration).read_text())["policy"]
    writer = PartWriter(run_dir, "train", iteration, rank, epoch, policy, 1e9)
    for each in groups:
        writer.add(each)
    writer.flush()


def mid_rollout(run_dir: RunDir, *groups: Group) -> None:
    """Take iteration N back to its rollout, with these groups finished, in one part of rank 1."""
    for path in (run_dir.manifest("train", N), run_dir.staging(N, 3) / "result.json"):
        path.unlink()
    train = run_dir.trajectories("train", N)
    for path in train.glob("r*"):
        path.unlink()
    if groups:
        write_parts(run_dir, N, 1, 3, list(groups))


def everything(root: Path) -> dict[str, bytes]:
    """Every file below `root`, with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def refused(run_dir: RunDir, **how: bool) -> str:
    """What a cleanup says that refuses with exit code 1."""
    with pytest.raises(Ended) as end:
        cleanup(run_dir.root, N, **how)
    assert end.value.code is Exit.FAILED and "\n" not in end.value.text
    return end.value.text


# ---- the plan


def test_plan_names_all_that_the_iteration_left_what_was_made_last_first(run_dir: RunDir) -> None:
    planned = plan(run_dir, N, 4, look(run_dir, N))
    assert [(str(left.path.relative_to(run_dir.root)), left.what) for left in planned.leftovers] == [
        ("protocol/e0003.i000002.p04.r0000.ok", What.FLAG),
        ("protocol/e0002.i000000.p00.r0001.enter", What.ENDED),
        ("protocol/e0002.i000001.p04.r0000.ok", What.ENDED),
        ("checkpoints/.LATEST.0011aabb.tmp", What.TEMPORARY),
        ("checkpoints/.iteration_000002.e0002.damaged", What.STAGING),
        ("checkpoints/.iteration_000002.e0003", What.STAGING),
        ("trainer_states/iteration_000002.e0003", What.STATE),
        ("batches/iteration_000002/batch.json", What.BATCH),
        ("batches/iteration_000002/batch.safetensors", What.BATCH),
        ("eval_trajectories/iteration_000002/manifest.json", What.MANIFEST),
        ("train_trajectories/iteration_000002/manifest.json", What.MANIFEST),
        ("train_trajectories/iteration_000002/groups.jsonl", What.GROUPS),
        ("train_trajectories/iteration_000002/r0000.e0002.part0001.safetensors", What.PART),
        ("train_trajectories/iteration_000002/r0001.e0002.part0001.safetensors", What.PART),
        ("train_trajectories/iteration_000002/iteration.json", What.OPENING),
    ]
    assert not planned.unknown


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (Record(3).name, None),
        (Flag(3, 9, 0, 0, "failed").name, What.ENDED),
        (Flag(3, N, 10, 0, "trainer_failed").name, What.FLAG),
        (Flag(4, N, 0, 0, "ok").name, None),
        (Beat(3, 1, 1, 5).name, None),
        (Beat(3, 1, 1, 4).name, What.BEAT),
        (Beat(0, 1, 1, 0).name, What.BEAT),
        (f".{Beat(3, 1, 1, 6).name}.00ff00ff.tmp", What.TEMPORARY),
        (f".{Beat(0, 1, 2, 0).name}.00ff00ff.tmp", None),  # of a process that starts just now
        (f".{Flag(3, 1, 0, 0, 'ok').name}.00ff00ff.tmp", What.TEMPORARY),
        (f".{Flag(4, 1, 0, 0, 'ok').name}.00ff00ff.tmp", None),
        (f".{Record(3).name}.00ff00ff.tmp", What.TEMPORARY),
        (f".{Record(4).name}.00ff00ff.tmp", None),
        (".nfs0000", None),
    ],
)
def test_in_protocol_only_what_has_ended_goes(tmp_path: Path, name: str, what: What | None) -> None:
    run_dir = RunDir(tmp_path)
    listed = look(run_dir, N) | {run_dir.protocol: [Beat(3, 1, 1, 5).name, name]}
    assert plan(run_dir, N, 4, listed).leftovers == ([(run_dir.protocol / name, what)] if what else [])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("iteration_000002", None),
        ("iteration_000002.damaged", None),
        ("LATEST", None),
        (".iteration_000002.e0010", What.STAGING),
        (".iteration_000002.e0010.foreign", What.STAGING),
        (".removed_iteration_000002.e0010", What.STAGING),
        (".removed_iteration_000001.e0010", None),
        (".iteration_000020.e0010", None),
        (".iteration_000001.e0002", None),
    ],
)
def test_in_checkpoints_only_what_was_never_published_of_this_iteration_goes(
    tmp_path: Path, name: str, what: What | None
) -> None:
    run_dir = RunDir(tmp_path)
    listed = look(run_dir, N) | {run_dir.checkpoints: [name]}
    planned = plan(run_dir, N, 4, listed)
    assert planned.leftovers == ([(run_dir.checkpoints / name, what)] if what else [])
    assert not planned.unknown


def test_unknown_files_stay_and_are_named(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    mine = run_dir.trajectories("train", N) / "notes.txt"
    mine.write_text("mine")
    (run_dir.trajectories("train", N) / "r0001.e0002.part0001.damaged").touch()
    (run_dir.trajectories("train", N) / "manifest.damaged").touch()
    cleanup(run_dir.root, N)
    assert (
        "stays: train_trajectories/iteration_000002/notes.txt (not a file of ours)" in capsys.readouterr().out
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
        "protocol/e0004.epoch.json",
        "protocol/e0004.i000000.p00.r0000.stopped",
    }
    assert all(after[path] == content for path, content in before.items() if path not in gone)
    total = sum(len(before[path]) for path in gone)
    assert said[-1] == f"removed {len(paths)} paths, {total:,} bytes"
    assert resume.resume_at(run_dir, SETTINGS, N) is Phase.TRAIN_PLAN


def test_epoch_is_claimed_before_anything_goes(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_first(path: Path) -> None:
        assert Records(run_dir).newest([4]) is not None, f"{path} would go before the epoch is claimed"
        remove(path)

    remove = files.remove
    monkeypatch.setattr(files, "remove", check_first)
    cleanup(run_dir.root, N)
    claimed = Records(run_dir).newest([4])
    assert claimed and (claimed.kind, claimed.members, claimed.master_incarnation) == ("lobby", {}, 0)
    assert claimed.settings == SETTINGS.model_dump(mode="json") and claimed.run_id == "made-up"
    status = Run(run_dir.root).status()
    assert (status["state"], status["epoch"]) == ("stopped", 4)


def test_cleanup_twice_finds_nothing_to_do(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    cleanup(run_dir.root, N)
    before = everything(run_dir.root)
    cleanup(run_dir.root, N)
    assert "iteration 2 has left nothing" in capsys.readouterr().out
    assert everything(run_dir.root) == before


@pytest.mark.parametrize("keep_partial", [False, True])
def test_cleanup_cut_off_anywhere_leaves_a_state_that_resumes_or_cleans_again(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_partial: bool
) -> None:
    """Cut off before its k-th change of the directory, for every k."""
    if keep_partial:
        mid_rollout(run_dir, group(0), group(3))
    original = everything(run_dir.root)
    changes = {name: getattr(files, name) for name in ("remove", "remove_tree", "rename", "create_once")}
    left = [1 << 30]

    def counted(name: str) -> Callable[..., object]:
        def change(*arguments: object, **more: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return changes[name](*arguments, **more)

        return change

    for name in changes:
        monkeypatch.setattr(files, name, counted(name))
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
        assert parts.read_groups(run_dir.trajectories("train", N), document)
    if parts.finished_groups(run_dir.trajectories("train", N), published.policy_of(run_dir, 1).digest):
        assert published.read_json(run_dir.iteration_json(N))


# ---- refusals


@pytest.mark.parametrize("by", ["metrics", "checkpoint"])
def test_finished_iteration_is_refused(run_dir: RunDir, by: str) -> None:
    if by == "metrics":
        run_dir.metrics.write_text(json.dumps({"iteration": N, "kind": "both"}) + "\n")
    else:
        write_checkpoint(run_dir.checkpoint(N), N)
    before = everything(run_dir.root)
    with pytest.raises(SettingsError, match=r"^iteration 2 is finished, nothing is removed$"):
        cleanup(run_dir.root, N)
    with pytest.raises(SettingsError, match=r"^iteration 1 is finished, nothing is removed$"):
        cleanup(run_dir.root, 1, keep_partial=True)
    assert everything(run_dir.root) == before


def test_iteration_that_a_node_finishes_as_its_last_deed_is_refused(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        module.time,
        "sleep",
        lambda _s: run_dir.metrics.write_text(json.dumps({"iteration": N, "kind": "both"}) + "\n"),
    )
    with pytest.raises(SettingsError, match="iteration 2 is finished"):
        cleanup(run_dir.root, N)
    assert run_dir.manifest("train", N).exists() and not (run_dir.protocol / Record(4).name).exists()


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("rollout", {"train_trajectories", "eval_trajectories"}),
        ("eval", {"eval_trajectories", "train_trajectories/iteration_000002/iteration.json"}),
    ],
)
def test_what_another_kind_of_run_has_finished_stays(run_dir: RunDir, kind: str, kept: set[str]) -> None:
    with run_dir.metrics.open("a") as file:
        file.write(json.dumps({"iteration": N, "kind": kind}) + "\n")
    before = everything(run_dir.root)
    cleanup(run_dir.root, N)
    gone = before.keys() - everything(run_dir.root).keys()
    of_it = {path for path in before if "iteration_000002" in path}
    assert of_it - gone == {path for path in of_it if any(path.startswith(name) for name in kept)}


@pytest.mark.parametrize("epoch", [0, 4])
def test_node_that_beats_is_refused_by_name(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """A beat that moves, or the first one of a new process."""
    monkeypatch.setattr(module.time, "sleep", lambda _s: beat(run_dir, 1, 2, 0, epoch))
    assert refused(run_dir) == (
        "rank 1 (node-1) still beats: stop the run first: kill -INT 4712 on node-1, or Ctrl+C there"
    )
    assert run_dir.manifest("train", N).exists() and not (run_dir.protocol / Record(4).name).exists()


def test_where_the_master_beats_it_is_the_one_to_stop(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both_beat(_s: float) -> None:
        beat(run_dir, 0, 1, 6)
        beat(run_dir, 1, 1, 6)

    monkeypatch.setattr(module.time, "sleep", both_beat)
    text = refused(run_dir, dry_run=True)
    assert "rank 0 (node-0), rank 1 (node-1) still beat" in text and text.endswith(
        "first: kill -INT 4711 on node-0, or Ctrl+C there"
    )


def test_beat_that_stands_still_or_an_older_listing_is_no_movement() -> None:
    board, older = (parse([Beat(3, 0, 2, counter).name]) for counter in (5, 4))
    assert moved(board, board) == moved(board, older) == []
    assert moved(older, board) == [0]
    assert moved(board, parse([Beat(0, 0, 3, 0).name])) == [0]


@pytest.mark.parametrize("what", ["beat", "epoch"])
def test_node_that_comes_back_while_the_epoch_is_claimed_stops_it_before_anything_goes(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    def claim_and_come_back(*arguments: object) -> bool:
        claimed = claim(*arguments)  # pyright: ignore[reportArgumentType]
        beat(run_dir, 0, 2, 0, 0) if what == "beat" else claim(run_dir, record(5, "lobby", {}))
        return claimed

    monkeypatch.setattr(module, "claim", claim_and_come_back)
    before = everything(run_dir.root)
    beginning = {"beat": "rank 0 (node-0) still beats", "epoch": "epoch 5 of"}[what]
    assert refused(run_dir).startswith(beginning)
    assert before.items() <= everything(run_dir.root).items()


def test_lost_claim_removes_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def claim_second(*arguments: object) -> bool:
        claim(run_dir, record(4, "lobby", {}, master_incarnation=2, token="another"))
        return claim(*arguments)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(module, "claim", claim_second)
    before = everything(run_dir.root)
    text = refused(run_dir)
    assert "epoch 4" in text and "a node has started" in text
    assert before.items() <= everything(run_dir.root).items()


def test_node_that_comes_back_in_the_middle_stops_it(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_AGAIN_S", 0.0)
    remove = files.remove

    def remove_and_come_back(path: Path) -> None:
        remove(path)
        beat(run_dir, 1, 2, 0, 4)

    monkeypatch.setattr(files, "remove", remove_and_come_back)
    assert refused(run_dir).startswith("rank 1 (node-1) still beats")
    assert resume.resume_at(run_dir, SETTINGS, N) is Phase.CHECKPOINT


def test_iteration_that_was_never_opened_is_nothing_to_do(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(run_dir.root)
    cleanup(run_dir.root, 3, keep_partial=True)
    assert "iteration 3 has left nothing" in capsys.readouterr().out
    assert everything(run_dir.root) == before


# ---- --keep-partial


def test_keep_partial_keeps_the_finished_groups_and_what_names_them(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    mid_rollout(run_dir, group(3), group(1), tombstone(2))
    before = everything(run_dir.root)
    cleanup(run_dir.root, N, keep_partial=True, dry_run=True)
    assert everything(run_dir.root) == before
    announced = capsys.readouterr().out
    assert "keeps 2 of 4 groups, named by its manifest.json" in announced
    cleanup(run_dir.root, N, keep_partial=True)
    assert capsys.readouterr().out == announced.replace("would remove", "removed")
    train = run_dir.trajectories("train", N)
    part = "r0001.e0003.part0001.safetensors"
    assert tree(train) == {"iteration.json", "manifest.json", "groups.jsonl", part}
    lines = [json.loads(line) for line in run_dir.groups("train", N).read_text().splitlines()]
    assert [(line["slot"], line["rank"]) for line in lines] == [(1, 1), (2, 1), (3, 1)]
    document = published.read_manifest(run_dir, "train", N) or {}
    assert {name: document[name] for name in ("slots", "groups", "samples", "given_up")} == {
        "slots": 4, "groups": 2, "samples": 4, "given_up": [{"slot": 2, "reason": "it took too long"}],
    }  # fmt: skip
    assert [each.slot for each in parts.read_groups(train, document) if not each.given_up] == [1, 3]
    assert resume.resume_at(run_dir, SETTINGS, N) is Phase.ENGINE_STOPPED
    assert not tree(run_dir.batch(N)) and published.complete_staging(run_dir, N) is None


@pytest.mark.parametrize("groups", [(), (tombstone(1),)])
def test_keep_partial_without_a_finished_group_removes_nothing(
    run_dir: RunDir, groups: tuple[Group, ...]
) -> None:
    mid_rollout(run_dir, *groups)
    before = everything(run_dir.root)
    assert "holds no finished group of iteration 2" in refused(run_dir, keep_partial=True)
    assert everything(run_dir.root) == before


def test_keep_partial_adopts_a_manifest_that_is_there(run_dir: RunDir) -> None:
    path, for_people = run_dir.manifest("train", N), run_dir.groups("train", N)
    manifest, lines = path.read_bytes(), for_people.read_bytes()
    for_people.unlink()
    write_parts(run_dir, N, 0, 3, [group(0)])  # of a late zombie: the manifest does not name it
    cleanup(run_dir.root, N, keep_partial=True)
    assert path.read_bytes() == manifest and for_people.read_bytes() == lines
    assert len(parts.read_groups(path.parent, json.loads(manifest))) == 4
    assert not list(path.parent.glob("*.e0003.*"))


def test_keep_partial_leaves_out_a_damaged_part_and_replaces_a_damaged_manifest(run_dir: RunDir) -> None:
    path = run_dir.manifest("train", N)
    path.write_text("{")
    damaged = path.parent / "r0000.e0002.part0001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = everything(run_dir.root)
    cleanup(run_dir.root, N, keep_partial=True, dry_run=True)
    assert everything(run_dir.root) == before
    cleanup(run_dir.root, N, keep_partial=True)
    document = published.read_manifest(run_dir, "train", N) or {}
    assert [part["slots"] for part in document["parts"]] == [[2, 3]]
    assert not damaged.exists()


def test_keep_partial_refuses_a_manifest_whose_part_is_damaged(run_dir: RunDir) -> None:
    part = run_dir.trajectories("train", N) / "r0000.e0002.part0001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    before = everything(run_dir.root)
    assert f"{part} differs from the manifest's checksum; nothing was removed" in refused(
        run_dir, keep_partial=True
    )
    assert everything(run_dir.root) == before


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--iteration", "0"], "--iteration"),
        (["--iteration", "-1"], "--iteration"),
        (["--iteration", "two"], "--iteration"),
        ([], "--iteration"),
        (["--iteration", "1"], "no run there"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    command = [sys.executable, "-m", "coordinator.cli", "cleanup", "--log-path", str(tmp_path / "run")]
    done = subprocess.run([*command, *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr
    assert not list(tmp_path.iterdir())
