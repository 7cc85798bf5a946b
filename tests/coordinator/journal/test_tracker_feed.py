"""Trackers beside metrics.jsonl: they get every line once, go on after a restart, and never hold a run."""

import json
import logging
import struct
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]

from coordinator.directory.layout import GROUPS, RunDir
from coordinator.journal import tracker_feed
from coordinator.journal.sample_tables import COLUMNS, LONGEST, columns, rows
from coordinator.journal.tracker_feed import RunFacts, Sinks, check_sinks, scalars
from coordinator.journal.tracker_kinds import WandB
from coordinator.settings.loading import build
from coordinator.settings.metrics import MetricsSettings
from coordinator.settings.tree import SettingsError
from rollout.trajectory import line_for_people
from tests.coordinator import examples

LINES: list[dict[str, Any]] = [
    {
        "iteration": n,
        "kind": "both",
        "reward": n / 10,
        "eval_reward": None,
        "phase_seconds": {"training": 0.5},
    }
    for n in range(1, 5)
]


def about(directory: Path, names: str) -> RunFacts:
    return RunFacts("c0ffee", directory, build({"metrics.sinks": names}))


class Recorded:
    """A tracker that keeps what it gets."""

    def __init__(self, _about: RunFacts) -> None:
        self.got: list[tuple[int, Mapping[str, float]]] = []
        self.tables: list[tuple[int, str, Sequence[Sequence[Any]]]] = []
        self.closed = False

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        self.got.append((iteration, values))

    def write_samples(self, iteration: int, name: str, rows: Sequence[Sequence[Any]]) -> None:
        self.tables.append((iteration, name, rows))

    def close(self) -> None:
        self.closed = True


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of all event files, by name."""

    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted((directory / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += length + 16
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, round(value.simple_value, 6)))
    return {name: sorted(points) for name, points in found.items()}


def test_scalars_are_the_numbers_of_a_line_by_name() -> None:
    assert scalars(LINES[0]) == {"reward": 0.1, "phase_seconds/training": 0.5}


def test_tensorboard_has_the_curves_of_a_run_and_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    first = Sinks(about(tmp_path, "tensorboard"))
    first.write(LINES[:1])
    first.write(LINES[:2])
    first.close()
    # Its master died after line 3 was written and before it was sent.
    second = Sinks(about(tmp_path, "tensorboard"))
    second.write(LINES[2:4])
    second.close()
    assert events(tmp_path)["reward"] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert events(tmp_path)["phase_seconds/training"] == [(n, 0.5) for n in (1, 2, 3, 4)]


def test_tracker_that_raises_is_said_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Recorded):
        def write(self, iteration: int, values: Mapping[str, float]) -> None:
            raise ConnectionError(f"no route for iteration {iteration}")

    made: list[Recorded] = []
    monkeypatch.setitem(tracker_feed.SINKS, "trackio", (Broken, "json"))
    monkeypatch.setitem(
        tracker_feed.SINKS, "wandb", (lambda told: made.append(Recorded(told)) or made[0], "json")
    )
    with caplog.at_level(logging.WARNING):
        both = Sinks(about(tmp_path, "trackio,wandb"))
        both.write(LINES[:1])
        both.write(LINES[:3])
        both.close()
    assert [iteration for iteration, _ in made[0].got] == [1, 2, 3] and made[0].closed
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("trackio failed") and "no route for iteration 1" in said


def test_tracker_that_hangs_holds_neither_an_iteration_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()

    class Hanging(Recorded):
        def write(self, iteration: int, values: Mapping[str, float]) -> None:
            release.wait(60)

    monkeypatch.setitem(tracker_feed.SINKS, "wandb", (Hanging, "json"))
    hanging = Sinks(about(tmp_path, "wandb"))
    hanging.write(LINES[:1])
    hanging.write(LINES[:4])
    hanging.close(timeout_s=0.05)
    release.set()
    assert "wandb did not take all metrics within 0 s" in caplog.text


def test_run_without_trackers_starts_no_thread(tmp_path: Path) -> None:
    before = {*threading.enumerate()}  # one of another test may be about to end
    none = Sinks(about(tmp_path, ""))
    none.write(LINES)
    assert {*threading.enumerate()} <= before
    none.close()


def test_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker_feed.SINKS, "trackio", (Recorded, "no_such_module"))
    with pytest.raises(SettingsError, match=r"metrics.sinks=trackio: .* pip install -e '\.\[trackio\]'"):
        check_sinks(MetricsSettings(sinks=("trackio",)))


def test_unknown_tracker_is_refused_with_those_that_there_are() -> None:
    there = "tensorboard, wandb, trackio or mlflow"
    with pytest.raises(SettingsError, match=rf"metrics.sinks=comet: .*{there}"):
        build({"metrics.sinks": "comet"})


def test_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracker_feed.SINKS, "mlflow", (Recorded, "json"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(SettingsError, match="set the environment variable MLFLOW_TRACKING_URI"):
        check_sinks(MetricsSettings(sinks=("mlflow",)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_sinks(MetricsSettings(sinks=("mlflow",)))


# ---- samples


def with_samples(directory: Path, iteration: int, kind: Any, groups: int) -> None:
    path = RunDir(directory).manifest(kind, iteration).with_name(GROUPS)
    path.parent.mkdir(parents=True)
    made = [examples.group(slot, rewards=(1.0, 0.5)) for slot in range(groups)]
    path.write_text("".join(line_for_people(group, rank=0, model_version="p") for group in made))


def sending(directory: Path, names: str, samples: int) -> Sinks:
    settings = build({"metrics.sinks": names, "metrics.samples": samples})
    return Sinks(RunFacts("c0ffee", directory, settings))


def test_first_groups_of_an_iteration_and_of_its_evaluation_are_sent_as_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Recorded] = []
    monkeypatch.setitem(
        tracker_feed.SINKS, "wandb", (lambda told: made.append(Recorded(told)) or made[0], "json")
    )
    with_samples(tmp_path, 1, "train", groups=3)
    with_samples(tmp_path, 1, "eval", groups=1)
    with_samples(tmp_path, 2, "train", groups=1)
    broken = RunDir(tmp_path).manifest("train", 3).with_name(GROUPS)
    broken.parent.mkdir(parents=True)
    broken.write_text("{")
    sinks = sending(tmp_path, "wandb", samples=2)
    sinks.write(LINES)
    sinks.close()
    sent = [(iteration, name, len(rows)) for iteration, name, rows in made[0].tables]
    assert sent == [(1, "train", 4), (1, "eval", 2), (2, "train", 2)]
    row = dict(zip(COLUMNS, made[0].tables[0][2][1], strict=True))
    assert (row["iteration"], row["task"], row["reward"]) == (1, examples.group(0).task_id, 0.5)
    assert [iteration for iteration, _ in made[0].got] == [1, 2, 3, 4], "metrics go on without samples"
    assert "the samples of iteration 3 are not sent" in caplog.text


def test_samples_stay_here_unless_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Recorded] = []
    monkeypatch.setitem(
        tracker_feed.SINKS, "wandb", (lambda told: made.append(Recorded(told)) or made[0], "json")
    )
    with_samples(tmp_path, 1, "train", groups=3)
    sinks = Sinks(about(tmp_path, "wandb"))
    sinks.write(LINES[:1])
    sinks.close()
    assert made[0].got and not made[0].tables


def test_tensorboard_gets_samples_as_a_text(tmp_path: Path) -> None:
    with_samples(tmp_path, 1, "train", groups=1)
    sinks = sending(tmp_path, "tensorboard", samples=1)
    sinks.write(LINES[:1])
    sinks.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"samples/train" in file.read_bytes() and b"reward: 0.5" in file.read_bytes()


def test_long_text_of_a_sample_is_cut_in_the_middle(tmp_path: Path) -> None:
    with_samples(tmp_path, 1, "train", groups=1)
    path = RunDir(tmp_path).manifest("train", 1).with_name(GROUPS)
    group = json.loads(path.read_text())
    group["samples"][0]["text"] = "a" * LONGEST + "end"
    path.write_text(json.dumps(group))
    text = rows(tmp_path, "train", 1, 1)[0][COLUMNS.index("sample")]
    assert text.endswith("end") and " [...] " in text and len(text) < LONGEST + 20


def test_pictures_of_prompts_are_pictures_in_the_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, made = RunDir(tmp_path), list[list[list[Any]]]()
    run_dir.images.mkdir(parents=True)
    for name, size in (("a", (40, 20)), ("b", (512, 256))):
        Image.new("RGB", size, "red").save(run_dir.images / name, "PNG")
    path = run_dir.manifest("train", 1).with_name(GROUPS)
    path.parent.mkdir(parents=True)
    groups = [json.loads(line_for_people(examples.group(k), rank=0, model_version="p")) for k in range(3)]
    groups[0]["images"], groups[1]["images"] = ["a", "b"], ["gone"]
    path.write_text("".join(f"{json.dumps(group)}\n" for group in groups))
    table = rows(tmp_path, "train", 1, 3)
    assert columns(table) == [*COLUMNS, "pictures"]
    assert {row[1]: row[-1] and row[-1].size for row in table} == {
        group["task_id"]: size for group, size in zip(groups, ((296, 128), None, None), strict=True)
    }
    wandb = SimpleNamespace(Image=lambda shown: ("picture", shown.size), Table=lambda columns, data: data)
    sink = object.__new__(WandB)
    sink._wandb, sink._run = wandb, SimpleNamespace(log=lambda values: made.append(values["samples/train"]))
    sink.write_samples(1, "train", table)
    assert {str(row[-1]) for row in made[0]} == {"('picture', (296, 128))", "None"}
    sinks = sending(tmp_path, "tensorboard", samples=3)
    sinks.write(LINES[:1])
    sinks.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"samples/train/0" in file.read_bytes() and b"PNG" in file.read_bytes()
