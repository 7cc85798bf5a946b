"""A node that cannot enter an epoch says so, and does not try for ever."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.file_names import Beat, Flag
from coordinator.directory.layout import RunDir
from coordinator.node import gathering
from coordinator.node.gathering import Gathering
from coordinator.protocol.exits import NodeEnded
from coordinator.protocol.heartbeat import TAKES, Heart
from coordinator.protocol.snapshot import parse
from rollout.storage import files, once
from tests.coordinator.examples import record


def test_epoch_that_stays_taken_by_nobody_who_shows_ends_the_master_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run_dir = RunDir(tmp_path)
    settings = SimpleNamespace(cluster=SimpleNamespace(poll_max_s=0.01))
    identity: Any = SimpleNamespace(run_dir=run_dir, root=tmp_path, newest_epoch=3, settings=settings)
    watch: Any = SimpleNamespace(look=lambda own_too: parse([]), incarnation=1)
    messages: Any = SimpleNamespace(doctor_command=lambda: "run doctor --log-path x")
    endings: Any = SimpleNamespace(check=lambda: None)
    me = Gathering(identity, SimpleNamespace(), watch, messages, endings, dict)  # type: ignore[arg-type]
    monkeypatch.setattr(me, "_new_record", lambda *_: None)
    monkeypatch.setattr(gathering, "claim", lambda *_: False)
    monkeypatch.setattr(gathering, "CACHED_S", 0.2)
    with pytest.raises(
        NodeEnded, match=r"epoch 4 is taken, and for .* no listing has shown by whom; run doctor"
    ):
        me.claim_next("lobby")
    assert "epoch 4 is taken: looking again" in caplog.text


@pytest.mark.parametrize(
    ("shown", "absent"),
    [
        ([], []),
        ([Flag(2, 1, 2, 2, "left")], [2]),
        ([Flag(2, 1, 2, 2, "left"), Beat(2, 2, 2, 1)], []),
        ([Flag(1, 1, 2, 2, "left")], []),
    ],
    ids=["all beat", "one died", "it is back", "it died before"],
)
def test_node_that_died_beside_the_lost_one_is_not_taken_in(
    shown: list[Beat | Flag], absent: list[int]
) -> None:
    """Its last beat is a moment old; only one of those that died at once is what ended the phase."""
    run_dir = SimpleNamespace(names=lambda ranks: ", ".join(map(str, ranks)))
    cluster = SimpleNamespace(num_nodes=3, node_timeout_s=30.0)
    identity: Any = SimpleNamespace(run_dir=run_dir, settings=SimpleNamespace(cluster=cluster))
    position: Any = SimpleNamespace(waiting_for=[], wait_for=lambda ranks: None)
    watch: Any = SimpleNamespace(silence=SimpleNamespace(silent_s={}))
    messages: Any = SimpleNamespace(node_command=lambda rank: f"run --worker {rank}")
    me = Gathering(identity, position, watch, messages, SimpleNamespace(), dict)  # type: ignore[arg-type]
    board = parse([entry.name for entry in (Beat(2, 1, 1, 9), Beat(2, 2, 1, 9), *shown)])
    assert me._absent(board, record(epoch=2)) == absent


def test_directory_that_takes_no_first_heartbeat_ends_the_node_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = RunDir(tmp_path)
    files.make_directory(run_dir.protocol_of(1))
    tried: list[Path] = []

    def create_once(path: Path, data: bytes) -> bool:
        tried.append(path)
        return False

    monkeypatch.setattr(once, "create_once", create_once)
    with pytest.raises(NodeEnded, match=r"lets no process of rank 1 show its first heartbeat.*run doctor"):
        Heart(run_dir, 1, dict).begin(0, 0)
    assert len(tried) == TAKES
