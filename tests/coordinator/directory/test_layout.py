"""Names on disk: what is built is what is parsed, and what is not ours parses to nothing."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.directory.file_names import (
    Beat,
    Flag,
    PartName,
    Record,
    parse_iteration_name,
    parse_part_name,
    parse_protocol_name,
    parse_staging_name,
)
from coordinator.directory.layout import RunDir

NUMBER = st.one_of(st.integers(0, 20), st.integers(0, 10**9))
KIND = st.sampled_from(
    ["ok", "ok.json", "enter", "enter.json", "failed", "left", "stopped", "gave_up", "trainer_failed"]
)
BEATS = st.builds(Beat, NUMBER, NUMBER, NUMBER, NUMBER)
FLAGS = st.builds(Flag, NUMBER, NUMBER, st.integers(0, 13), NUMBER, KIND)
RECORDS = st.builds(Record, NUMBER)


@given(st.one_of(BEATS, FLAGS, RECORDS))
def test_protocol_name_parses_to_what_it_was_built_from(entry: Beat | Flag | Record) -> None:
    parsed = parse_protocol_name(entry.name)
    assert parsed == entry and type(parsed) is type(entry)


@given(st.builds(PartName, NUMBER, NUMBER, NUMBER))
def test_part_name_parses_to_what_it_was_built_from(name: PartName) -> None:
    assert parse_part_name(name.name) == name


@given(iteration=NUMBER, epoch=NUMBER)
def test_directory_names_parse_to_what_they_were_built_from(iteration: int, epoch: int) -> None:
    run_dir = RunDir(Path("/run"))
    assert parse_iteration_name(run_dir.checkpoint(iteration).name) == iteration
    assert parse_staging_name(run_dir.staging(iteration, epoch).name) == (iteration, epoch)


@given(st.one_of(st.text(), st.from_regex(r"e\d{3,6}\.(r\d{3,6}\.n\d+\.b\d{5,8}|epoch\.json)(\n|x)?")))
def test_name_that_parses_is_the_one_name_of_what_it_means(name: str) -> None:
    # Else two files would stand for one record, and the one that is read might not be there.
    entry = parse_protocol_name(name)
    assert entry is None or entry.name == name


FOREIGN = [
    ".nfs000000000a1b2c3d00000001",
    ".e0002.epoch.json.1a2b3c4d.tmp",
    ".e0002.r0001.n3.b000123.1a2b3c4d.tmp",
    ".e0002.i000005.p07.r0001.ok.1a2b3c4d.tmp",
    "e0002.epoch.json~",
    "e0002.epoch.json\n",
    "e0002.epoch",
    "e2.epoch.json",
    "e00002.epoch.json",
    "e٠٠٠٢.epoch.json",  # noqa: RUF001 (digits that int() takes, and no name of ours has)
    "e0002.r0001.n3",
    "e0002.r0001.n3.b123",
    "e0002.r0001.n03.b000123",
    "e0002.i000005.p7.r0001.ok",
    "e0002.i000005.p07.r0001.ok.jso",
    "e0002.i000005.p07.r0001.failed.json",
    "e0002.i000005.p07.r0001.OK",
    "e0002.i000005.p07.r0001.",
    "e-002.epoch.json",
    "",
    "lost+found",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_name_in_protocol_is_ignored(name: str) -> None:
    assert parse_protocol_name(name) is None


@pytest.mark.parametrize(
    ("parse", "name"),
    [
        (parse_part_name, "r0001.e0002.part0003.jsonl"),
        (parse_part_name, "r0001.e0002.part0003.damaged"),
        (parse_part_name, ".r0001.e0002.part0003.safetensors.1a2b3c4d.tmp"),
        (parse_part_name, "manifest.json"),
        (parse_iteration_name, "LATEST"),
        (parse_iteration_name, ".iteration_000005.e0002"),
        (parse_iteration_name, ".removed_iteration_000005"),
        (parse_iteration_name, "iteration_5"),
        (parse_staging_name, "iteration_000005"),
        (parse_staging_name, ".iteration_000005.e0002.foreign"),
        (parse_staging_name, ".iteration_000005"),
    ],
)
def test_foreign_name_beside_outputs_is_ignored(parse: Callable[[str], object], name: str) -> None:
    assert parse(name) is None


@given(st.lists(st.builds(PartName, NUMBER, NUMBER, NUMBER), max_size=20, unique=True))
def test_parts_are_ordered_by_epoch_then_rank_then_number(names: list[PartName]) -> None:
    shuffled = random.sample(names, len(names))
    assert sorted(shuffled) == sorted(names, key=lambda name: (name.epoch, name.rank, name.part))


def test_part_of_a_zombie_comes_after_those_of_earlier_epochs_and_before_those_of_later_ones() -> None:
    mine, zombie = PartName(epoch=3, rank=0, part=1), PartName(epoch=2, rank=9, part=12000)
    assert sorted([mine, zombie]) == [zombie, mine]


def test_every_path_of_a_run_lies_below_its_directory() -> None:
    run_dir = RunDir(Path("/run"))
    assert run_dir.manifest("eval", 5) == Path("/run/eval_trajectories/iteration_000005/manifest.json")
    assert run_dir.iteration_json(5) == Path("/run/train_trajectories/iteration_000005/iteration.json")
    assert run_dir.staging(5, 2) == Path("/run/checkpoints/.iteration_000005.e0002")
    assert run_dir.logs(1) == Path("/run/logs/rank_0001")
    assert run_dir.entry(Record(2)) == Path("/run/protocol/main/master/e0002.epoch.json")
    assert run_dir.entry(Beat(2, 0, 1, 5)).parent == run_dir.master
    assert run_dir.entry(Flag(2, 5, 7, 1, "ok")).parent == run_dir.workers
    assert set(run_dir.protocol) < set(run_dir.fixed_directories)
