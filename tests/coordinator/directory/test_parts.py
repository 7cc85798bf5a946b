"""Part files and the manifest over them: every group once, whatever else lies there."""

import hashlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.directory import parts
from coordinator.directory.layout import PartName, RunDir
from coordinator.directory.parts import PartWriter, finished_groups, manifest, read_groups, read_parts
from coordinator.directory.published import Incomplete
from rollout.quota import Quota
from rollout.storage import files
from rollout.trajectory import Group, PartHeader, encode_part
from tests.coordinator.made_up import POLICY, group, run_dir_at, tombstone, tree


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The training trajectories of iteration 3."""
    made = run_dir_at(tmp_path).trajectories("train", 3)
    made.mkdir()
    return made


def writer(
    directory: Path, rank: int = 0, epoch: int = 2, policy: str = POLICY, interval_s: float = 1e9
) -> PartWriter:
    return PartWriter(RunDir(directory.parents[1]), "train", 3, rank, epoch, policy, interval_s)


def write(directory: Path, *groups: Group, rank: int = 0, epoch: int = 2, policy: str = POLICY) -> None:
    """One part with these groups."""
    made = writer(directory, rank, epoch, policy)
    for each in groups:
        made.add(each)
    made.flush()


def slots_of(document: dict[str, Any]) -> dict[str, list[int]]:
    return {part["file"]: part["slots"] for part in document["parts"]}


def rewards_of(groups: list[Group]) -> dict[int, list[float | None]]:
    return {each.slot: [sample.reward for sample in each.samples] for each in groups}


# ---- writing


def test_groups_are_written_when_the_writer_is_flushed(directory: Path) -> None:
    made = writer(directory)
    made.add(group(0))
    made.add(group(1))
    assert tree(directory) == set() and made.done == 2
    made.flush()
    made.flush()
    assert tree(directory) == {"r0000.e0002.part0001.safetensors"}


def test_groups_are_written_as_they_come_once_the_interval_is_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    made = writer(directory, interval_s=2.0)
    for slot, now_s in enumerate([100.5, 101.9, 102.0, 102.5, 104.5]):
        clock[0] = now_s
        made.add(group(slot))
    assert slots_of(manifest(directory, 3, Quota(5, 5), POLICY)[0]) == {
        "r0000.e0002.part0001.safetensors": [0, 1, 2],
        "r0000.e0002.part0002.safetensors": [3, 4],
    }


# ---- reading


def test_parts_are_read_by_epoch_then_rank_then_number(directory: Path) -> None:
    for rank, epoch in [(2, 3), (0, 10), (1, 2), (0, 3)]:
        write(directory, group(rank), rank=rank, epoch=epoch)
    order = [(part.name.epoch, part.name.rank) for part in read_parts(directory, POLICY)]
    assert order == [(2, 1), (3, 0), (3, 2), (10, 0)]


def test_directory_that_is_not_there_has_no_parts(directory: Path) -> None:
    assert list(read_parts(directory / "absent", POLICY)) == []
    assert finished_groups(directory / "absent", POLICY) == {}


def test_foreign_names_are_no_parts(directory: Path) -> None:
    write(directory, group(0))
    for name in (".nfs0001", ".r0000.e0002.part0002.safetensors.aa.tmp", "iteration.json", "x.safetensors"):
        (directory / name).write_bytes(b"x")
    assert set(finished_groups(directory, POLICY)) == {0}


def test_tombstone_finishes_its_slot(directory: Path) -> None:
    write(directory, group(0), tombstone(2))
    assert set(finished_groups(directory, POLICY)) == {0, 2}


@pytest.mark.parametrize("harm", ["truncated", "altered", "empty"])
def test_damaged_part_is_set_aside_and_named(
    directory: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(directory, group(0), rank=0)
    write(directory, group(1), rank=1)
    path = directory / "r0001.e0002.part0001.safetensors"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-1], "altered": data[:-1] + b"?", "empty": b""}[harm])
    with caplog.at_level(logging.WARNING):
        assert set(finished_groups(directory, POLICY)) == {0}
    assert f"{path} is damaged and set aside" in caplog.text
    assert not path.exists() and path.with_suffix(".damaged").exists()
    caplog.clear()
    assert set(finished_groups(directory, POLICY)) == {0}
    assert caplog.text == ""


def test_part_of_another_policy_is_left_out_and_named(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(directory, group(0))
    write(directory, group(1), rank=1, policy="f" * 16)
    with caplog.at_level(logging.WARNING):
        assert set(finished_groups(directory, POLICY)) == {0}
    assert f"was made by policy {'f' * 16}, not {POLICY}" in caplog.text
    assert (directory / "r0001.e0002.part0001.safetensors").exists()


def test_part_that_another_node_sets_aside_meanwhile_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, group(0), rank=0)
    listed = [PartName(2, 0, 1).name, PartName(2, 1, 1).name]
    monkeypatch.setattr(parts, "names", lambda _directory: listed)
    assert set(finished_groups(directory, POLICY)) == {0}


# ---- manifest


def test_manifest_names_every_slot_once_and_adds_up(directory: Path) -> None:
    write(directory, group(0), group(2, rewards=(1.0,)), rank=0)
    write(directory, group(1, rewards=(0.0, 0.0, 1.0)), tombstone(3), rank=1)
    document, _ = manifest(directory, 3, Quota(4, 4), POLICY)
    data = (directory / "r0001.e0002.part0001.safetensors").read_bytes()
    assert document["parts"][1] == {
        "file": "r0001.e0002.part0001.safetensors",
        "rank": 1,
        "epoch": 2,
        "slots": [1, 3],
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    del document["parts"]
    assert document == {
        "iteration": 3,
        "slots": 4,
        "groups": 3,
        "samples": 6,
        "policy": POLICY,
        "given_up": [{"slot": 3, "reason": "it took too long"}],
        "short": 0,
        "failed_samples": 0,
        "rewards": {"0": 0.5, "2": 1.0, "1": pytest.approx(1 / 3, abs=1e-6)},
        "reward": pytest.approx(3 / 6),
        "truncated": pytest.approx(3 / 6),
        "tokens": 18,
    }


def test_group_that_two_parts_hold_is_taken_from_the_first_epoch(directory: Path) -> None:
    write(directory, group(0, rewards=(0.25,)), group(1), rank=2, epoch=2)
    write(directory, group(0, rewards=(0.75,)), group(2), rank=0, epoch=3)
    document, _ = manifest(directory, 3, Quota(3, 3), POLICY)
    assert slots_of(document) == {
        "r0002.e0002.part0001.safetensors": [0, 1],
        "r0000.e0003.part0001.safetensors": [2],
    }
    assert rewards_of(read_groups(directory, document))[0] == [0.25]


def test_late_part_of_a_zombie_adds_nothing_to_what_was_published(directory: Path) -> None:
    write(directory, group(0, rewards=(0.75,)), group(1), rank=0, epoch=3)
    document, _ = manifest(directory, 3, Quota(2, 2), POLICY)
    write(directory, group(0, rewards=(0.25,)), group(1), rank=2, epoch=2)
    assert rewards_of(read_groups(directory, document)) == {0: [0.75], 1: [1.0, 0.0]}


def test_part_whose_groups_all_came_before_is_not_named(directory: Path) -> None:
    write(directory, group(0), rank=0, epoch=2)
    write(directory, group(0), rank=1, epoch=3)
    document, _ = manifest(directory, 3, Quota(1, 1), POLICY)
    assert list(slots_of(document)) == ["r0000.e0002.part0001.safetensors"]


def test_slots_beyond_the_iterations_are_not_taken(directory: Path) -> None:
    write(directory, group(0), group(7))
    document, _ = manifest(directory, 3, Quota(1, 1), POLICY)
    assert slots_of(document) == {"r0000.e0002.part0001.safetensors": [0]}
    assert rewards_of(read_groups(directory, document)).keys() == {0}


def test_missing_slots_are_counted_and_named(directory: Path) -> None:
    write(directory, group(0), group(5))
    with pytest.raises(Incomplete, match=r"iteration_000003: 8 groups .*\[1, 2, 3, 4, 6\]"):
        manifest(directory, 3, Quota(10, 10), POLICY)


def test_groups_that_nodes_say_they_could_not_make_are_not_waited_for(directory: Path) -> None:
    write(directory, group(0), group(5))
    assert manifest(directory, 3, Quota(3, 3), POLICY, short=2)[0]["groups"] == 1
    with pytest.raises(Incomplete, match="1 groups are not finished"):
        manifest(directory, 3, Quota(3, 3), POLICY, short=1)


def test_of_spare_groups_the_first_are_taken_and_those_that_do_not_count_besides(directory: Path) -> None:
    flat, spare = Quota(2, 6, replace_flat=True), Quota(2, 6)
    write(directory, group(0, rewards=(1.0, 1.0)), group(4), tombstone(5), rank=0)
    write(directory, group(1), group(2), rank=1)
    by_part = {"r0000.e0002.part0001.safetensors": [0, 4, 5], "r0001.e0002.part0001.safetensors": [1]}
    assert slots_of(manifest(directory, 3, flat, POLICY)[0]) == by_part
    first = {"r0000.e0002.part0001.safetensors": [0, 4, 5]}
    assert slots_of(manifest(directory, 3, spare, POLICY)[0]) == first


def test_sample_that_was_lost_to_its_reward_is_counted(directory: Path) -> None:
    lost = group(0)
    lost.failed.append("reward 'my:judge', task 'task-0': KeyError: 'answer'")
    write(directory, lost, group(1))
    document, _ = manifest(directory, 3, Quota(2, 2), POLICY)
    assert document["failed_samples"] == 1
    assert read_groups(directory, document)[0].failed == lost.failed


def test_manifest_of_tombstones_alone_has_no_figures(directory: Path) -> None:
    write(directory, tombstone(0))
    document, _ = manifest(directory, 3, Quota(1, 1), POLICY)
    assert (document["groups"], document["samples"], document["tokens"]) == (0, 0, 0)
    assert document["reward"] is None and document["truncated"] is None


def test_groups_for_people_stand_beside_the_manifest_by_slot(directory: Path) -> None:
    write(directory, group(4), tombstone(1), rank=1)
    write(directory, group(0), group(7), rank=0)
    parts.publish_manifest(directory / "manifest.json", *manifest(directory, 3, Quota(5, 5), POLICY, short=2))
    lines = for_people(directory)
    assert [(line["slot"], line["rank"]) for line in lines] == [(0, 0), (1, 1), (4, 1)]
    assert lines[1]["given_up"] == "it took too long" and lines[1]["samples"] == []
    assert lines[2]["samples"][0] == {"text": "abc", "reward": 1.0, "tokens": 3, "finish_reason": "stop"}
    assert {name: lines[2][name] for name in ("task_id", "prompt", "model_version")} == {
        "task_id": "task-4", "prompt": group(4).prompt, "model_version": POLICY,
    }  # fmt: skip


def test_first_manifest_stays_and_with_it_its_groups(directory: Path) -> None:
    path = directory / "manifest.json"
    write(directory, group(0))
    first = manifest(directory, 3, Quota(1, 2), POLICY)
    parts.publish_manifest(path, *first)
    write(directory, group(1), epoch=1)
    parts.publish_manifest(path, *manifest(directory, 3, Quota(1, 2), POLICY))
    assert json.loads(path.read_text()) == first[0]
    assert [line["slot"] for line in for_people(directory)] == [0]


def test_manifest_is_never_without_its_groups_wherever_its_maker_dies(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, group(0))
    made = manifest(directory, 3, Quota(1, 1), POLICY)
    for operation in ("publish", "create_once"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files, operation, killed)
            parts.publish_manifest(directory / "manifest.json", *made)
        assert "manifest.json" not in tree(directory)
    parts.publish_manifest(directory / "manifest.json", *made)
    assert tree(directory) >= {"manifest.json", "groups.jsonl"}


def killed(*_arguments: object, **_more: object) -> None:
    raise KeyboardInterrupt


def for_people(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "groups.jsonl").read_text().splitlines()]


# ---- groups


def test_groups_read_back_by_slot_as_they_were_generated(directory: Path) -> None:
    write(directory, group(3, mark=33), group(0, mark=30), rank=0)
    write(directory, group(1, mark=31), tombstone(2), rank=1)
    document, taken = manifest(directory, 3, Quota(4, 4), POLICY)
    groups = read_groups(directory, document)
    assert [each.slot for each in groups] == [each.slot for each in taken] == [0, 1, 2, 3]
    assert [sample.token_ids[2] for each in groups for sample in each.samples] == [30, 30, 31, 31, 33, 33]
    original, found = group(3, mark=33).samples[0], groups[3].samples[0]
    for name in ("token_ids", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(original, name), getattr(found, name))
    assert groups[2].given_up == "it took too long"


@pytest.mark.parametrize("harm", ["gone", "altered", "exchanged"])
def test_part_that_is_not_the_one_the_manifest_names_is_refused(directory: Path, harm: str) -> None:
    write(directory, group(0))
    document, _ = manifest(directory, 3, Quota(1, 1), POLICY)
    path = directory / "r0000.e0002.part0001.safetensors"
    if harm == "gone":
        path.unlink()
    elif harm == "altered":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.write_bytes(encode_part([group(0, mark=99)], PartHeader("train", 3, 0, 2, 1, POLICY)))
    with pytest.raises(Incomplete, match=r"r0000\.e0002\.part0001\.safetensors"):
        read_groups(directory, document)


# ---- parts that nodes have named


def test_named_part_that_no_listing_shows_is_read_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, group(0))
    (part,) = read_parts(directory, POLICY)
    monkeypatch.setattr(parts, "names", lambda _directory: [])
    document, _ = manifest(directory, 3, Quota(1, 1), POLICY, {part.name.name: part.sha256})
    assert slots_of(document) == {"r0000.e0002.part0001.safetensors": [0]}


def test_named_part_that_is_not_there_is_told(directory: Path) -> None:
    name = PartName(2, 1, 1).name
    with pytest.raises(Incomplete, match=rf"{name} was named by its node, but is not there"):
        manifest(directory, 3, Quota(1, 1), POLICY, {name: "0" * 64})


def test_part_that_differs_from_what_its_node_named_is_set_aside(directory: Path) -> None:
    write(directory, group(0))
    name = PartName(2, 0, 1).name
    with pytest.raises(Incomplete, match="1 groups are not finished"):
        manifest(directory, 3, Quota(1, 1), POLICY, {name: "0" * 64})
    assert not (directory / name).exists() and (directory / name).with_suffix(".damaged").exists()
