"""A run whose tasks and environment show pictures: two nodes, killed once, with a model that sees."""

import json
import re

import pytest

from coordinator.console.report import write_report
from coordinator.console.views.samples import show_samples
from rollout.pictures import digest_of
from tests.cluster.cluster import FAST, Cluster

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

SETTINGS = (
    "--tasks",
    "builtin:shapes",
    "--iterations",
    "2",
    *FAST,
    "rollout.max_tokens=8",
    "eval.interval=1",
)


def test_pictures_are_files_that_samples_list_and_the_trainer_computes_what_the_engines_did(
    cluster: Cluster,
) -> None:
    cluster.start(0, "--num-nodes", "2", *SETTINGS, "--environment", "tests.cluster.plugins:looking_twice")
    cluster.start(1)
    cluster.until(
        lambda: cluster.run_dir.images.exists() and any(cluster.run_dir.images.iterdir()), "a picture"
    )
    cluster.kill(1)
    cluster.nodes[1].wait()
    (cluster.run_dir.images / f".{'0' * 64}.0011aabb.tmp").write_bytes(b"what it was about to publish")
    cluster.start(1)
    assert cluster.wait() == [0, 0], cluster.everything_said()
    shown, turns = set[str](), list[int]()
    for iteration in (1, 2):
        for kind in ("train", "eval"):
            for group in cluster.groups(iteration, kind).values():
                for sample in group.samples:
                    shown |= {picture.digest for picture in sample.pictures}
                    assert all(picture.end - picture.begin == 17 for picture in sample.pictures)
                    turns.append(len(sample.pictures))
                assert len({sample.pictures[0] for sample in group.samples}) == 1
    pictures = list(cluster.run_dir.images.iterdir())
    assert shown <= {path.name for path in pictures} and turns.count(2) > turns.count(1) > 0
    assert all(digest_of(path.read_bytes()) == path.name for path in pictures)
    for iteration in (1, 2):
        metrics = json.loads((cluster.run_dir.checkpoint(iteration) / "result.json").read_text())["metrics"]
        assert metrics["mismatch_max"] < 1e-4 and metrics["grad_norm"] > 0


def test_pictures_are_seen_in_the_report_and_named_in_the_terminal(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster.run(1, *SETTINGS[:3], "1", *SETTINGS[4:]) == [0]
    show_samples(cluster.run_dir.root, 1, 1, "spread", "train")
    shown = re.findall(r"^\[image (\w{8}) 32x32\]", capsys.readouterr().out, re.MULTILINE)
    assert shown and any(path.name.startswith(shown[0]) for path in cluster.run_dir.images.iterdir())
    page = cluster.root / "page.html"
    write_report(cluster.run_dir.root, page)
    assert 'src="data:image/png;base64,' in page.read_text()
    for path in cluster.run_dir.images.iterdir():
        path.unlink()
    show_samples(cluster.run_dir.root, 1, 1, "spread", "train")
    assert f"[image {shown[0]}]" in capsys.readouterr().out
    write_report(cluster.run_dir.root, page)
    assert "data:image/png;base64," not in page.read_text()


def test_picture_that_has_changed_ends_the_run_with_its_name(cluster: Cluster) -> None:
    assert cluster.run(1, *SETTINGS[:3], "1", *SETTINGS[4:]) == [0]
    for path in cluster.run_dir.images.iterdir():
        path.write_bytes(b"another")
    assert cluster.run(1, "--iterations", "3") != [0]  # it evaluates on the same tasks again
    assert "does not hold the picture that its name says; remove it" in cluster.output(0)
