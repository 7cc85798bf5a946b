"""What `run cleanup --keep-partial` keeps; on a made-up run."""

import json
from pathlib import Path

import pytest

from coordinator.console.commands import cleanup as module
from coordinator.console.commands.cleanup import cleanup
from coordinator.directory import manifests, published
from coordinator.directory.layout import RunDir
from coordinator.keeping import resume
from coordinator.protocol.phase import Phase
from rollout.trajectory import Group
from tests.coordinator.console.commands.interrupted_run import (
    SETTINGS,
    N,
    everything,
    interrupted_run,
    mid_rollout,
    refused,
    write_parts,
)
from tests.coordinator.examples import group, opened, origin, tombstone, tree


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(module, "patience_s", lambda _cluster: 0.06)
    return interrupted_run(tmp_path / "run")


def test_keep_partial_keeps_groups_of_the_policy_that_samples_the_iteration(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    mid_rollout(run_dir)
    base = json.loads(run_dir.iteration_json(1).read_text())["policy"]
    opening = run_dir.iteration_json(N)
    opening.write_text(json.dumps(opened(N, origin(base), slots=4)))
    write_parts(run_dir, N, 1, 3, [group(2)])
    cleanup(run_dir.root, N, keep_partial=True)
    assert "keeps 1 of 4 groups" in capsys.readouterr().out, "it was opened with max_async_level=1"


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
    assert [each.slot for each in manifests.read_groups(train, document) if not each.given_up] == [1, 3]
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
    assert len(manifests.read_groups(path.parent, json.loads(manifest))) == 4
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


def test_keep_partial_keeps_what_a_manifest_names_though_a_part_is_damaged(run_dir: RunDir) -> None:
    directory = run_dir.trajectories("train", N)
    part = directory / "r0000.e0002.part0001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    (directory / "groups.jsonl").unlink()
    cleanup(run_dir.root, N, keep_partial=True)
    assert tree(directory) >= {"manifest.json", "iteration.json", part.name}, "row 8 makes the part anew"
    assert "groups.jsonl" not in tree(directory), "it cannot be told what the part held"
