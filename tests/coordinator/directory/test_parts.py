"""Part files: what is written is read, and nothing but a whole part of the policy."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.directory import parts
from coordinator.directory.file_names import PartName
from coordinator.directory.manifests import manifest, read_groups
from coordinator.directory.parts import finished_groups, read_parts
from coordinator.directory.published import Incomplete
from rollout.origin import Code, Origin
from rollout.part_file import PartHeader, encode_part
from rollout.quota import Quota
from tests.coordinator.directory.written_parts import write, writer
from tests.coordinator.examples import ORIGIN, POLICY, group, origin, run_dir_at, tombstone, tree


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The training trajectories of iteration 3."""
    made = run_dir_at(tmp_path).trajectories("train", 3)
    made.mkdir()
    return made


# ---- writing


def test_groups_are_written_when_the_writer_is_flushed(directory: Path) -> None:
    made = writer(directory)
    made.add(group(0))
    made.add(group(1))
    assert tree(directory) == set() and made.is_waiting
    written = made.flush()
    assert written is not None and [one.slot for one in written.groups] == [0, 1]
    assert made.flush() is None and not made.is_waiting
    assert tree(directory) == {written.name} == {"r0000.e0002.part0001.safetensors"}
    assert hashlib.sha256((directory / written.name).read_bytes()).hexdigest() == written.sha256


# ---- reading


def test_parts_are_read_by_epoch_then_rank_then_number(directory: Path) -> None:
    for rank, epoch in [(2, 3), (0, 10), (1, 2), (0, 3)]:
        write(directory, group(rank), rank=rank, epoch=epoch)
    order = [(part.name.epoch, part.name.rank) for part in read_parts(directory, ORIGIN)]
    assert order == [(2, 1), (3, 0), (3, 2), (10, 0)]


def test_directory_that_is_not_there_has_no_parts(directory: Path) -> None:
    assert list(read_parts(directory / "absent", ORIGIN)) == []
    assert finished_groups(directory / "absent", ORIGIN) == {}


def test_foreign_names_are_no_parts(directory: Path) -> None:
    write(directory, group(0))
    for name in (".nfs0001", ".r0000.e0002.part0002.safetensors.aa.tmp", "iteration.json", "x.safetensors"):
        (directory / name).write_bytes(b"x")
    assert set(finished_groups(directory, ORIGIN)) == {0}


def test_tombstone_finishes_its_slot(directory: Path) -> None:
    write(directory, group(0), tombstone(2))
    assert set(finished_groups(directory, ORIGIN)) == {0, 2}


def test_tombstone_of_an_earlier_start_finishes_nothing(directory: Path) -> None:
    write(directory, group(0), tombstone(1), tombstone(2))
    write(directory, tombstone(3), epoch=3)
    write(directory, group(2), epoch=4)
    assert set(finished_groups(directory, ORIGIN, started_after=2)) == {0, 2, 3}


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
        assert set(finished_groups(directory, ORIGIN)) == {0}
    assert f"{path} is damaged and set aside" in caplog.text
    assert not path.exists() and path.with_suffix(".damaged").exists()
    caplog.clear()
    assert set(finished_groups(directory, ORIGIN)) == {0}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (origin("f" * 16), f"policy {'f' * 16}, not {POLICY}"),
        (origin(POLICY, temperature=0.7), "temperature 0.7, not 1.0"),
        (origin(POLICY, max_tokens=16), "max_tokens 16, not 8"),
        (origin(POLICY, n=4), "n 4, not 2"),
        (origin(POLICY, stop=("\n",)), r"stop ['\n'], not []"),
        (replace(ORIGIN, reward=Code("numeric", "e" * 16)), "reward numeric, not exact"),
        (
            replace(ORIGIN, environment=Code("calculator", "5" * 16)),
            "environment calculator, not single_turn",
        ),
    ],
)
def test_part_that_was_made_with_something_else_is_left_out_and_named(
    directory: Path, caplog: pytest.LogCaptureFixture, other: Origin, said: str
) -> None:
    write(directory, group(0))
    write(directory, group(1), rank=1, origin=other)
    with caplog.at_level(logging.WARNING):
        assert set(finished_groups(directory, ORIGIN)) == {0}
    assert f"was made with {said}: left out" in caplog.text
    assert (directory / "r0001.e0002.part0001.safetensors").exists()


def test_part_that_another_node_sets_aside_meanwhile_is_passed_over(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(directory, group(0), rank=0)
    listed = [PartName(2, 0, 1).name, PartName(2, 1, 1).name]
    monkeypatch.setattr(parts, "names", lambda _directory: listed)
    assert set(finished_groups(directory, ORIGIN)) == {0}


# ---- groups


def test_groups_read_back_by_slot_as_they_were_generated(directory: Path) -> None:
    write(directory, group(3, mark=33), group(0, mark=30), rank=0)
    write(directory, group(1, mark=31), tombstone(2), rank=1)
    document, taken = manifest(directory, 3, Quota(4, 4), ORIGIN)
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
    document, _ = manifest(directory, 3, Quota(1, 1), ORIGIN)
    path = directory / "r0000.e0002.part0001.safetensors"
    if harm == "gone":
        path.unlink()
    elif harm == "altered":
        path.write_bytes(path.read_bytes() + b"x")
    else:
        path.write_bytes(encode_part([group(0, mark=99)], PartHeader("train", 3, 0, 2, 1, **vars(ORIGIN))))
    with pytest.raises(Incomplete, match=r"r0000\.e0002\.part0001\.safetensors"):
        read_groups(directory, document)
