"""What a run directory shows as done: every start, after anything, goes on where its outputs say."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.metrics_file import FinishedIterations
from coordinator.directory.published import Incomplete, verify_checkpoint
from coordinator.keeping.resume import next_iteration, resume_at
from coordinator.protocol.phase import Phase, phases_of
from coordinator.settings.loading import build
from coordinator.settings.tree import RunSettings
from rollout.storage import files
from rollout.tasks.pictures import publish_picture
from tests.coordinator.examples import POLICY, write_checkpoint, write_json
from tests.paths import REPOSITORY

KINDS: dict[str, dict[str, Any]] = {
    "both": {},
    "rollout": {"rl_phase": "rollout"},
    "train-only": {"rl_phase": "rollout", "rollout_split": "train-only"},
    "update": {"rl_phase": "update"},
    "eval": {"rl_phase": "rollout", "rollout_split": "eval-only"},
}


def settings(kind: str) -> RunSettings:
    return build(KINDS[kind])


def write_lines(run_dir: RunDir, *lines: dict[str, Any] | str) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    run_dir.metrics.write_text("".join(texts))


# ---- next_iteration


@pytest.mark.parametrize("kind", KINDS)
def test_first_iteration_is_1(run_dir: RunDir, kind: str) -> None:
    assert next_iteration(FinishedIterations(run_dir), settings(kind)) == 1


@pytest.mark.parametrize(
    ("kind", "following"), [("both", 7), ("update", 7), ("rollout", 6), ("train-only", 6), ("eval", 8)]
)
def test_next_iteration_follows_the_last_that_this_kind_of_run_has_finished(
    run_dir: RunDir, kind: str, following: int
) -> None:
    # A rollout followed by an update makes the same iterations as both at once.
    write_lines(
        run_dir,
        {"iteration": 4, "kind": "both"},
        {"iteration": 5, "kind": "rollout"},
        {"iteration": 6, "kind": "update"},
        {"iteration": 7, "kind": "eval"},
    )
    assert next_iteration(FinishedIterations(run_dir), settings(kind)) == following


def test_torn_and_foreign_lines_are_left_out(run_dir: RunDir) -> None:
    write_lines(
        run_dir,
        {"iteration": 2, "kind": "both"},
        '{"iteration": 3, "ki\n',
        "\n",
        "[3]\n",
        "9\n",
        '{"iteration": "9"}\n',
        '{"reward": 1}\n',
        '{"iteration": 3, "reward": 1}\n',
        '{"iteration": 9, "kind": "bo',
    )
    assert [line["iteration"] for line in published.metrics_lines(run_dir)] == [2]
    assert next_iteration(FinishedIterations(run_dir), settings("both")) == 3


def test_line_that_misses_only_its_newline_counts(run_dir: RunDir) -> None:
    write_lines(run_dir, json.dumps({"iteration": 2, "kind": "both"}))
    assert next_iteration(FinishedIterations(run_dir), settings("both")) == 3


def test_bytes_that_are_no_text_do_not_hide_the_other_lines(run_dir: RunDir) -> None:
    run_dir.metrics.write_bytes(b'\xff\xfe\n{"iteration": 2, "kind": "both"}\n\x00\x00\x00')
    assert next_iteration(FinishedIterations(run_dir), settings("both")) == 3


# ---- resume_at


def opened(run_dir: RunDir, eval_slots: int) -> None:
    write_json(run_dir.iteration_json(3), {"iteration": 3, "tasks": [0, 1], "eval_slots": eval_slots})


OUTPUTS: dict[str, Callable[[RunDir], object]] = {
    "opened, eval due": lambda run_dir: opened(run_dir, 4),
    "opened, no eval": lambda run_dir: opened(run_dir, 0),
    "train": lambda run_dir: write_json(run_dir.manifest("train", 3), {"slots": 2}),
    "torn train": lambda run_dir: run_dir.manifest("train", 3).write_text('{"slots'),
    "eval": lambda run_dir: write_json(run_dir.manifest("eval", 3), {"slots": 4}),
    "begun staging": lambda run_dir: run_dir.staging(3, 2).mkdir(),
    "staging": lambda run_dir: write_checkpoint(run_dir.staging(3, 2), 3),
    "other staging": lambda run_dir: write_checkpoint(run_dir.staging(2, 2), 2),
    "checkpoint": lambda run_dir: write_checkpoint(run_dir.checkpoint(3), 3),
    "other checkpoint": lambda run_dir: write_checkpoint(run_dir.checkpoint(2), 2),
}

PHASES = {
    "nothing": ((), [1, 1, 1, 7, 5]),
    "opened, eval due": (("opened, eval due",), [1, 1, 1, 7, 5]),
    "opened, no eval": (("opened, no eval",), [1, 1, 1, 7, 5]),
    "torn manifest": (("opened, no eval", "torn train"), [1, 1, 1, 7, 5]),
    "train manifest, eval due": (("opened, eval due", "train"), [5, 5, 5, 7, 5]),
    "train manifest, no eval": (("opened, no eval", "train"), [7, 13, 13, 7, 5]),
    "both manifests": (("opened, eval due", "train", "eval"), [7, 13, 13, 7, 13]),
    "eval manifest alone": (("opened, eval due", "eval"), [1, 1, 1, 7, 13]),
    "begun staging": (("opened, no eval", "train", "begun staging"), [7, 13, 13, 7, 5]),
    "complete staging": (("opened, no eval", "train", "staging"), [11, 13, 13, 11, 5]),
    "checkpoint": (("opened, no eval", "train", "checkpoint"), [12, 13, 13, 12, 5]),
    "checkpoint and staging": (("opened, no eval", "train", "staging", "checkpoint"), [12, 13, 13, 12, 5]),
    "those of another iteration": (("other staging", "other checkpoint"), [1, 1, 1, 7, 5]),
}
"""For what lies there, the first phase that is left for each of KINDS; 13: nothing is left but the end."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", PHASES)
def test_run_resumes_at_the_first_row_whose_output_is_missing(run_dir: RunDir, there: str, kind: str) -> None:
    names, expected = PHASES[there]
    for name in names:
        OUTPUTS[name](run_dir)
    wanted = settings(kind)
    phase = resume_at(run_dir, wanted, 3)
    # Phases that do not run in this kind are passed over anyway.
    phases = phases_of(wanted.kind)
    assert min(left for left in phases if left >= phase) == expected[list(KINDS).index(kind)]


# ---- documents


@pytest.mark.parametrize("content", [None, b"", b'{"a": ', b"[1]", b"\xff", b"null"])
def test_document_that_is_missing_or_torn_is_none(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "a.json").write_bytes(content)
    assert published.read_json(tmp_path / "a.json") is None
    assert published.read_json(tmp_path / "absent" / "a.json") is None


def test_checkpoints_are_the_published_ones_in_order(run_dir: RunDir) -> None:
    for name in (
        "iteration_000010",
        "iteration_000009",
        ".iteration_000011.e0002",
        ".removed_iteration_000001",
    ):
        (run_dir.checkpoints / name).mkdir()
    run_dir.latest.write_text("iteration_000010\n")
    assert published.checkpoints(run_dir) == [9, 10]
    assert [published.latest_before(run_dir, n) for n in (1, 9, 10, 11)] == [0, 0, 9, 10]


# ---- checkpoints


def test_whole_checkpoint_verifies(tmp_path: Path) -> None:
    result = write_checkpoint(tmp_path / "c")
    assert verify_checkpoint(tmp_path / "c") == result


def test_further_files_do_no_harm(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / ".nfs0001").touch()
    assert verify_checkpoint(tmp_path / "c").iteration == 1


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "trainer_state/optimizer.safetensors"])
@pytest.mark.parametrize("harm", ["missing", "altered", "truncated"])
def test_file_that_is_not_as_it_was_written_is_named(tmp_path: Path, name: str, harm: str) -> None:
    write_checkpoint(tmp_path / "c")
    file = tmp_path / "c" / name
    data = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if harm == "truncated" else bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(Incomplete, match=rf"{name} is missing or differs from result\.json"):
        verify_checkpoint(tmp_path / "c")


def test_checkpoint_without_its_trainer_state_is_not_whole(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "trainer_state" / "optimizer.safetensors").unlink()
    (tmp_path / "c" / "trainer_state").rmdir()
    with pytest.raises(Incomplete, match=r"trainer_state/optimizer\.safetensors is missing"):
        verify_checkpoint(tmp_path / "c")


def test_checkpoint_without_a_result_was_not_finished(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "result.json").unlink()
    with pytest.raises(Incomplete, match=r"has no result\.json: it was not finished"):
        verify_checkpoint(tmp_path / "c")


@pytest.mark.parametrize("content", [b"", b"{}", b'{"iteration": 1'])
def test_damaged_result_is_named(tmp_path: Path, content: bytes) -> None:
    write_checkpoint(tmp_path / "c")
    (tmp_path / "c" / "result.json").write_bytes(content)
    with pytest.raises(Incomplete, match=r"result\.json is damaged"):
        verify_checkpoint(tmp_path / "c")


def test_policy_of_an_iteration_is_what_its_result_says(run_dir: RunDir) -> None:
    result = write_checkpoint(run_dir.checkpoint(3), 3)
    assert published.policy_of(run_dir, 3) == published.Policy(3, run_dir.checkpoint(3), result.policy)
    assert result.policy != POLICY


def test_complete_staging_is_that_of_the_newest_epoch(run_dir: RunDir) -> None:
    assert published.complete_staging(run_dir, 3) is None
    for epoch in (2, 10, 9):
        write_checkpoint(run_dir.staging(3, epoch), 3)
    run_dir.staging(3, 11).mkdir()
    write_checkpoint(run_dir.staging(4, 12), 4)
    write_checkpoint(run_dir.checkpoints / ".iteration_000003.e0013.foreign", 3)
    assert published.complete_staging(run_dir, 3) == run_dir.staging(3, 10)


def test_rows_that_follow_a_checkpoint_are_those_of_the_table() -> None:
    assert [Phase(phase) for phase in (5, 7, 11, 12)] == [
        Phase.EVAL_DECISION,
        Phase.ENGINE_STOPPED,
        Phase.CHECKPOINT,
        Phase.ENGINE_RESTARTED,
    ]


def test_node_killed_while_it_writes_a_picture_leaves_a_file_that_is_found_and_hinders_nobody(
    run_dir: RunDir,
) -> None:
    (run_dir.root / "a.png").write_bytes(data := png())
    program = (
        "import os, sys; from pathlib import Path; from rollout.tasks.pictures import publish_picture\n"
        "os.link = lambda *_: os.kill(os.getpid(), 9)\n"
        "publish_picture(sys.argv[1], Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, str(run_dir.root / "a.png"), str(run_dir.images)]
    assert subprocess.run(command, cwd=REPOSITORY).returncode == -signal.SIGKILL
    (half,) = published.half_pictures(run_dir)
    assert list(run_dir.images.iterdir()) == [half]
    digest = publish_picture(data, run_dir.images)
    files.remove(half)
    assert (run_dir.images / digest).read_bytes() == data and published.half_pictures(run_dir) == []


def test_picture_whose_temporary_file_is_swept_meanwhile_is_written_again(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, link = list[Path](), os.link

    def swept_once(source: Path, target: Path) -> None:
        if not swept:
            swept.extend(published.half_pictures(run_dir))
            files.remove(swept[0])
        link(source, target)

    monkeypatch.setattr(os, "link", swept_once)
    digest = publish_picture(png(), run_dir.images)
    assert len(swept) == 1 and (run_dir.images / digest).read_bytes() == png()


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def test_half_picture_is_found_beside_pictures_and_what_creators_agreed_by(run_dir: RunDir) -> None:
    assert published.half_pictures(run_dir) == []
    picture = run_dir.images / ("ab" * 32)
    files.make_directory(run_dir.images)
    half = files.write_temporary(picture, b"half")
    for name in (picture.name, f".{picture.name}.claim0.tmp", f".{picture.name}.verdict0.tmp"):
        (run_dir.images / name).write_bytes(b"x")
    assert published.half_pictures(run_dir) == [half]
