"""What ends the one crew of a run ends the other; what was said in an earlier start does not."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.directory.file_names import Flag
from coordinator.directory.layout import MASTER, RunDir
from coordinator.node.identity import Identity
from coordinator.node.other_crew import OtherCrew
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.settings.loading import build
from rollout.storage import files


def say(run_dir: RunDir, epoch: int, kind: str) -> None:
    files.make_directory(run_dir.master)
    document = json.dumps({"text": f"said in epoch {epoch}"}).encode()
    files.publish(run_dir.entry(Flag(epoch, 0, 0, MASTER, kind)), document)


def other_of(root: Path, crew: Any, followed_epoch: int = 0, **settings: Any) -> OtherCrew:
    """What a leader of `crew` sees, of a run whose rollout crew has the master."""
    mine = placement_records.run_dir(root, crew)
    about = {"root": root, "run_dir": mine, "followed_epoch": followed_epoch, "is_master": True}
    return OtherCrew(cast(Identity, SimpleNamespace(**about, run_id="made-up", settings=build(settings))))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    placement_records.publish_placement(tmp_path, placement_records.Placement(2, ("rollout=0", "train=1")))
    for machine in range(2):
        placement_records.publish_devices(tmp_path, machine, "node", 1)
    return tmp_path


@pytest.mark.parametrize(("kind", "code"), [("failed", Exit.FAILED), ("stopped", Exit.INTERRUPTED)])
def test_leader_ends_with_a_master_that_has_ended_while_the_leader_started(
    root: Path, kind: str, code: Exit
) -> None:
    say(placement_records.run_dir(root, "rollout"), 4, kind)
    with pytest.raises(NodeEnded, match="the rollout crew has ended: said in epoch 4") as ended:
        other_of(root, "train", followed_epoch=4).hear()
    assert (ended.value.code, ended.value.tell) == (code, kind)


def test_leader_does_not_end_with_what_the_master_said_in_an_earlier_start(root: Path) -> None:
    say(placement_records.run_dir(root, "rollout"), 3, "failed")
    other_of(root, "train", followed_epoch=4).hear()


def test_master_ends_with_what_the_other_crew_says_from_its_own_start_on(root: Path) -> None:
    say(placement_records.run_dir(root, "train"), 3, "failed")
    other = other_of(root, "rollout")
    other.hear()
    say(placement_records.run_dir(root, "train"), 5, "gave_up")
    with pytest.raises(NodeEnded, match="the train crew has ended: said in epoch 5"):
        other.hear()


@pytest.mark.parametrize("policy", ["wait", "abort"])
def test_silent_crew_is_held_for_only_where_nodes_are(
    root: Path, policy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    other = other_of(root, "rollout", **{"cluster.on_node_failure": policy, "cluster.rejoin_timeout_s": 60})
    other.check()
    monkeypatch.setattr(other._silence, "observe", lambda *_: other._silence.silent_s.update({MASTER: 40.0}))
    if policy == "wait":
        other.check()
        assert "holding: the train crew (led by rank 1, which was not seen yet)" in caplog.text
        other._silence.silent_s[MASTER] = 61.0
        monkeypatch.setattr(other._silence, "observe", lambda *_: None)
    with pytest.raises(NodeEnded, match="start all again; there: run --worker 1 --log-path") as ended:
        other.check()
    assert ended.value.code == Exit.LOST
    assert ("holding" in caplog.text) == (policy == "wait")
