"""The manifest over the parts: every group once, whatever else is there; and groups.jsonl beside it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory import manifests, parts
from coordinator.directory.file_names import PartName
from coordinator.directory.manifests import manifest, read_groups
from coordinator.directory.parts import read_parts
from coordinator.directory.published import Incomplete
from rollout.origin import Code
from rollout.quota import Quota
from rollout.storage import files
from tests.coordinator.directory.written_parts import rewards_of, slots_of, write
from tests.coordinator.examples import ORIGIN, POLICY, group, run_dir_at, tombstone, tree


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The training trajectories of iteration 3."""
    made = run_dir_at(tmp_path).trajectories("train", 3)
    made.mkdir()
    return made


def test_manifest_names_every_slot_once_and_adds_up(directory: Path) -> None:
    write(directory, group(0), group(2, rewards=(1.0,)), rank=0)
    write(directory, group(1, rewards=(0.0, 0.0, 1.0)), tombstone(3), rank=1)
    document, _ = manifest(directory, 3, Quota(4, 4), ORIGIN)
    data = (directory / "r0001.e0002.part0001.safetensors").read_bytes()
    assert document["parts"][1] == {
        "file": "r0001.e0002.part0001.safetensors",
        "rank": 1,
        "epoch": 2,
        "slots": [1, 3],
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "reward_digest": "e" * 16,
        "environment_digest": "5" * 16,
    }
    del document["parts"]
    assert document == {
        "iteration": 3,
        "slots": 4,
        "groups": 3,
        "samples": 6,
        "policy": POLICY,
        "origin": {
            "policy": POLICY,
            "policy_iteration": 0,
            "sampling": {
                **{"n": 2, "max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "stop": []},
                **{"top_k": 0, "min_p": 0.0},
                **{"tool_parser": "auto", "chat_template": {}, "history": "sampled"},
                **{"reasoning_end": None, "thinking_tokens": None},
            },
            "reward": {"name": "exact", "digest": "e" * 16},
            "environment": {"name": "single_turn", "digest": "5" * 16},
        },
        "mixed_code": 0,
        "given_up": [{"slot": 3, "reason": "it took too long"}],
        "unfinished": [],
        "generated": 18,
        "short": 0,
        "failed_samples": 0,
        "rewards": {"0": 0.5, "2": 1.0, "1": pytest.approx(1 / 3, abs=1e-6)},
        "reward": pytest.approx(3 / 6),
        "truncated": pytest.approx(3 / 6),
        "tokens": 18,
        "flat_groups": 0.0,
        "metrics": {},
    }


def test_groups_of_other_code_are_kept_and_counted_and_each_part_says_which_it_is(directory: Path) -> None:
    other = replace(ORIGIN, reward=Code("exact", "f" * 16))
    write(directory, group(0), group(1), epoch=2)
    write(directory, group(2), tombstone(3), epoch=3, origin=other)
    write(directory, group(4), rank=1, epoch=3)
    document, groups = manifest(directory, 3, Quota(5, 5), ORIGIN)
    assert len(groups) == 5 and document["mixed_code"] == 1, "a group that is given up has no score"
    assert [part["reward_digest"] for part in document["parts"]] == ["e" * 16, "f" * 16, "e" * 16]
    assert document["origin"]["reward"] == {"name": "exact", "digest": "e" * 16}
    only = manifest(directory, 3, Quota(5, 5), other)[0]
    assert only["origin"] == document["origin"], "it says what was used, not what would be used now"


def test_group_that_two_parts_hold_is_taken_from_the_first_epoch(directory: Path) -> None:
    write(directory, group(0, rewards=(0.25,)), group(1), rank=2, epoch=2)
    write(directory, group(0, rewards=(0.75,)), group(2), rank=0, epoch=3)
    document, _ = manifest(directory, 3, Quota(3, 3), ORIGIN)
    assert slots_of(document) == {
        "r0002.e0002.part0001.safetensors": [0, 1],
        "r0000.e0003.part0001.safetensors": [2],
    }
    assert rewards_of(read_groups(directory, document))[0] == [0.25]


def test_late_part_of_a_zombie_adds_nothing_to_what_was_published(directory: Path) -> None:
    write(directory, group(0, rewards=(0.75,)), group(1), rank=0, epoch=3)
    document, _ = manifest(directory, 3, Quota(2, 2), ORIGIN)
    write(directory, group(0, rewards=(0.25,)), group(1), rank=2, epoch=2)
    assert rewards_of(read_groups(directory, document)) == {0: [0.75], 1: [1.0, 0.0]}


def test_part_whose_groups_all_came_before_is_not_named(directory: Path) -> None:
    write(directory, group(0), rank=0, epoch=2)
    write(directory, group(0), rank=1, epoch=3)
    document, _ = manifest(directory, 3, Quota(1, 1), ORIGIN)
    assert list(slots_of(document)) == ["r0000.e0002.part0001.safetensors"]


def test_slots_beyond_the_iterations_are_not_taken(directory: Path) -> None:
    write(directory, group(0), group(7))
    document, _ = manifest(directory, 3, Quota(1, 1), ORIGIN)
    assert slots_of(document) == {"r0000.e0002.part0001.safetensors": [0]}
    assert rewards_of(read_groups(directory, document)).keys() == {0}


def test_missing_slots_are_counted_and_named(directory: Path) -> None:
    write(directory, group(0), group(5))
    with pytest.raises(Incomplete, match=r"iteration_000003: 8 groups .*\[1, 2, 3, 4, 6\]"):
        manifest(directory, 3, Quota(10, 10), ORIGIN)


def test_groups_that_nodes_say_they_could_not_make_are_not_waited_for(directory: Path) -> None:
    write(directory, group(0), group(5))
    assert manifest(directory, 3, Quota(3, 3), ORIGIN, short=2)[0]["groups"] == 1
    with pytest.raises(Incomplete, match="1 groups are not finished"):
        manifest(directory, 3, Quota(3, 3), ORIGIN, short=1)


def test_of_spare_groups_the_first_are_taken_and_those_that_do_not_count_besides(directory: Path) -> None:
    flat, spare = Quota(2, 6, replace_flat=True), Quota(2, 6)
    write(directory, group(0, rewards=(1.0, 1.0)), group(4), tombstone(5), rank=0)
    write(directory, group(1), group(2), rank=1)
    by_part = {"r0000.e0002.part0001.safetensors": [0, 4, 5], "r0001.e0002.part0001.safetensors": [1]}
    assert slots_of(manifest(directory, 3, flat, ORIGIN)[0]) == by_part
    first = {"r0000.e0002.part0001.safetensors": [0, 4, 5]}
    assert slots_of(manifest(directory, 3, spare, ORIGIN)[0]) == first


def test_sample_that_was_lost_to_its_reward_is_counted(directory: Path) -> None:
    lost = group(0)
    lost.failed.append("reward 'my:judge', task 'task-0': KeyError: 'answer'")
    write(directory, lost, group(1))
    document, _ = manifest(directory, 3, Quota(2, 2), ORIGIN)
    assert document["failed_samples"] == 1
    assert read_groups(directory, document)[0].failed == lost.failed


def test_group_that_was_made_again_takes_the_place_of_its_tombstone(directory: Path) -> None:
    broken = replace(ORIGIN, reward=Code("exact", "0" * 16))
    write(directory, tombstone(0), tombstone(1), epoch=2, origin=broken)
    write(directory, group(0), tombstone(1), epoch=3)
    document, groups = manifest(directory, 3, Quota(2, 2), ORIGIN)
    assert [entry["slot"] for entry in document["given_up"]] == [1]
    assert [(each.slot, each.given_up is None) for each in groups] == [(0, True), (1, False)]
    assert document["origin"]["reward"]["digest"] == ORIGIN.reward.digest and not document["mixed_code"]


def test_manifest_of_tombstones_alone_has_no_figures(directory: Path) -> None:
    write(directory, tombstone(0))
    document, _ = manifest(directory, 3, Quota(1, 1), ORIGIN)
    assert (document["groups"], document["samples"], document["tokens"]) == (0, 0, 0)
    assert document["reward"] is None and document["truncated"] is None


def test_groups_for_people_stand_beside_the_manifest_by_slot(directory: Path) -> None:
    write(directory, group(4), tombstone(1), rank=1)
    write(directory, group(0), group(7), rank=0)
    manifests.publish_manifest(
        directory / "manifest.json", *manifest(directory, 3, Quota(5, 5), ORIGIN, short=2)
    )
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
    first = manifest(directory, 3, Quota(1, 2), ORIGIN)
    manifests.publish_manifest(path, *first)
    write(directory, group(1), epoch=1)
    manifests.publish_manifest(path, *manifest(directory, 3, Quota(1, 2), ORIGIN))
    assert json.loads(path.read_text()) == first[0]
    assert [line["slot"] for line in for_people(directory)] == [0]


def test_groups_that_their_maker_did_not_come_to_write_follow_from_the_manifest(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "manifest.json"
    write(directory, group(0), group(4))
    manifests.ensure_readable(path)
    assert "groups.jsonl" not in tree(directory), "nothing is published yet"
    made = manifest(directory, 3, Quota(5, 5), ORIGIN, short=3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files, "publish", killed)
        manifests.publish_manifest(path, *made)
    assert "manifest.json" in tree(directory) and "groups.jsonl" not in tree(directory)
    manifests.ensure_readable(path)
    assert [line["slot"] for line in for_people(directory)] == [0, 4]


def test_old_master_that_wakes_replaces_no_groups(directory: Path) -> None:
    path = directory / "manifest.json"
    write(directory, group(0))
    old = manifest(directory, 3, Quota(1, 2), ORIGIN)
    write(directory, group(1), epoch=9)
    manifests.publish_manifest(path, *manifest(directory, 3, Quota(2, 2), ORIGIN))
    before = (directory / "groups.jsonl").read_bytes()
    manifests.publish_manifest(path, *old)
    assert (directory / "groups.jsonl").read_bytes() == before


def test_groups_without_their_part_are_left_out_and_the_run_goes_on(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = directory / "manifest.json"
    write(directory, group(0))
    manifests.publish_manifest(path, *manifest(directory, 3, Quota(1, 1), ORIGIN))
    (directory / "groups.jsonl").unlink()
    next(directory.glob("*.safetensors")).unlink()
    manifests.ensure_readable(path)
    assert "groups.jsonl" not in tree(directory) and "is not written" in caplog.text


def killed(*_arguments: object, **_more: object) -> None:
    raise KeyboardInterrupt


def for_people(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "groups.jsonl").read_text().splitlines()]


# ---- parts that nodes have named


def test_named_part_that_no_listing_shows_is_read_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, group(0))
    (part,) = read_parts(directory, ORIGIN)
    monkeypatch.setattr(parts, "names", lambda _directory: [])
    document, _ = manifest(directory, 3, Quota(1, 1), ORIGIN, {part.name.name: part.sha256})
    assert slots_of(document) == {"r0000.e0002.part0001.safetensors": [0]}


def test_named_part_that_is_not_there_is_told(directory: Path) -> None:
    name = PartName(2, 1, 1).name
    with pytest.raises(Incomplete, match=rf"{name} was named by its node, but is not there"):
        manifest(directory, 3, Quota(1, 1), ORIGIN, {name: "0" * 64})


def test_part_that_differs_from_what_its_node_named_is_set_aside(directory: Path) -> None:
    write(directory, group(0))
    name = PartName(2, 0, 1).name
    with pytest.raises(Incomplete, match="1 groups are not finished"):
        manifest(directory, 3, Quota(1, 1), ORIGIN, {name: "0" * 64})
    assert not (directory / name).exists() and (directory / name).with_suffix(".damaged").exists()
