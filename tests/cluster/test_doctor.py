"""`run doctor` between nodes: processes on one directory, on hosts of their own, on mounts with faults."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import faultfs, netns
from tests.cluster.doctors import PATIENCE_S, Doctors
from tests.coordinator.examples import tree, write_json
from tests.faultfs import FaultFs
from tests.netns import Hosts

NO_RACE_LOST = {"doubled": 0, "orphaned": 0}


@pytest.fixture
def doctors() -> Iterator[Callable[[int], Doctors]]:
    made: list[Doctors] = []

    def make(nodes: int) -> Doctors:
        made.append(Doctors(nodes))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if reason := netns.unavailable():
        pytest.skip(reason)
    with Hosts(3, decoy=True) as made:
        yield made


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := faultfs.unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as mounts:
        yield mounts


def until(ready: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline_s, f"{what} did not happen"
        time.sleep(0.01)


# ---- on one directory


def test_three_nodes_meet_and_rank_0_reports(tmp_path: Path, doctors: Callable[[int], Doctors]) -> None:
    three = doctors(3)
    three.start(2, tmp_path / "run")
    three.start(0, tmp_path / "run")
    three.start(1, tmp_path / "run", RANK="1")
    found = three.report()
    said = [three.end(rank)[0] for rank in (1, 2)]
    assert [process.returncode for process in three.started.values()] == [0, 0, 0]
    assert all("can carry a run, says rank 0" in text for text in said), said
    assert found["nodes"]["values"] == {"came": [0, 1, 2], "missing": []}
    for rank in (1, 2):
        assert any(name.startswith(f"rank {rank}") for name in found)
        delay, clock = found[f"delay 0-{rank}"]["values"], found[f"clock 0-{rank}"]["values"]
        assert 0 < delay["p50_s"] < 30
        assert abs(clock["offset_s"]) <= clock["uncertainty_s"], "it is one clock"
    assert found["all create once"]["values"] == {"names": 50, **NO_RACE_LOST, "hard_links": True}
    assert found["ports"]["values"] == {"connections": 6, "failed": []}
    assert found["same versions"]["verdict"] == "ok"
    assert tree(tmp_path) == set()


def test_rank_that_does_not_come_is_named_and_the_others_are_checked(
    tmp_path: Path, doctors: Callable[[int], Doctors]
) -> None:
    three = doctors(3)
    three.start(1, tmp_path)
    three.start(0, tmp_path, "--deadline", "10")
    found = three.report()
    typed = f"run doctor --peers 3 --worker 2 --log-path {tmp_path}"
    assert found["nodes"]["verdict"] == "fail"
    assert found["nodes"]["figure"].startswith("rank 2 did not come")
    assert f"on rank 2: {typed}" in found["nodes"]["what_to_do"]
    assert found["ports"]["values"] == {"connections": 2, "failed": []}
    assert "cannot carry a run" in three.end(1)[0] and three.started[1].returncode == 1
    assert tree(tmp_path) == set()


def test_worker_alone_says_what_to_type_on_the_first_node(
    tmp_path: Path, doctors: Callable[[int], Doctors]
) -> None:
    two = doctors(2)
    two.start(1, tmp_path / "run", "--deadline", "1")
    _, said = two.end(1)
    assert two.started[1].returncode == 1
    assert f"on the first node type: run doctor --peers 2 --log-path {tmp_path / 'run'}" in said
    assert tree(tmp_path) == set()


def test_session_that_died_long_ago_takes_nobody_in(
    tmp_path: Path, doctors: Callable[[int], Doctors]
) -> None:
    old = tmp_path / "doctor"
    write_json(old / "5d0c41f2.open", {})
    write_json(old / "5d0c41f2.r0001.9a07b3e8.hello", {"token": "9a07b3e8"})
    write_json(old / "5d0c41f2.s0001", {"do": "members", "members": {"0": "aaaaaaaa", "1": "9a07b3e8"}})
    write_json(old / "5d0c41f2.s0002", {"do": "end", "fit": False})
    before = tree(tmp_path)
    two = doctors(2)
    two.start(1, tmp_path)
    two.start(0, tmp_path)
    found = two.report()
    assert found["leftovers"]["verdict"] == "warn"
    assert found["nodes"]["values"]["missing"] == [] and found["ports"]["verdict"] == "ok"
    assert "can carry a run" in two.end(1)[0]
    assert {name for name in tree(tmp_path) - before if ".hello" not in name} == set()


def test_worker_that_is_killed_is_named_and_its_files_are_removed(
    tmp_path: Path, doctors: Callable[[int], Doctors]
) -> None:
    two = doctors(2)
    two.start(0, tmp_path, patch="import coordinator.console.doctor.meeting as m; m.STEP_S = 20.0")
    worker = two.start(1, tmp_path)
    until(lambda: list(tmp_path.glob("doctor/*.r0001.work/flags")), "the worker's own checks")
    os.killpg(worker.pid, signal.SIGKILL)
    found = two.report()
    assert found["lost nodes"]["verdict"] == "fail"
    assert found["lost nodes"]["figure"] == "rank 1 at step 'checks'"
    assert tree(tmp_path) == set()


def test_interrupted_rank_0_frees_the_workers(tmp_path: Path, doctors: Callable[[int], Doctors]) -> None:
    two = doctors(2)
    two.start(1, tmp_path)
    two.start(0, tmp_path)
    until(lambda: list(tmp_path.glob("doctor/*.r0001.work/flags")), "the worker's own checks")
    two.started[0].send_signal(signal.SIGINT)
    two.end(0)
    two.end(1)
    assert (two.started[0].returncode, two.started[1].returncode) == (130, 1)


# ---- on hosts of their own


def test_each_host_is_reached_where_it_would_train_and_a_pair_that_cannot_connect_is_named(
    tmp_path: Path, hosts: Hosts, doctors: Callable[[int], Doctors]
) -> None:
    nobody = ["lladdr", "02:00:00:00:00:99", "nud", "permanent"]
    neighbour = ["ip", "neigh", "replace", hosts[0].address, *nobody, "dev", "lan0"]
    subprocess.run(hosts[1].argv(neighbour), check=True, timeout=30)
    three = doctors(3)
    for rank in (1, 2, 0):
        three.start(rank, tmp_path, prefix=hosts[rank].argv([]))
    found = three.report()
    assert found["addresses"]["figure"] == ("0: 10.77.0.1 (lan0), 1: 10.77.0.2 (lan0), 2: 10.77.0.3 (lan0)")
    assert found["ports"]["verdict"] == "fail"
    assert found["ports"]["values"] == {
        "connections": 6,
        "failed": ["0 to 1 (10.77.0.2): no answer in 5 s", "1 to 0 (10.77.0.1): no answer in 5 s"],
    }


# ---- on mounts with faults


def test_mount_that_copies_where_it_should_rename_and_has_no_hard_links_is_found_out_and_creates_once(
    shared: FaultFs, doctors: Callable[[int], Doctors]
) -> None:
    shared.set(halves_s=0.4, no_links="EPERM")
    two = doctors(2)
    two.start(1, shared[1].path / "run")
    two.start(0, shared[0].path / "run")
    found = two.report()
    assert found["big rename"]["verdict"] == "warn" and "copies" in found["big rename"]["what_to_do"]
    assert found["create once"]["verdict"] == "warn"
    assert "no hard links" in found["create once"]["figure"]
    assert found["all create once"]["values"] == {"names": 50, **NO_RACE_LOST, "hard_links": False}
    two.end(1)
    assert tree(shared.backing) == set()


def test_old_listings_that_a_name_of_the_nodes_own_makes_fresh_are_said_with_the_mount_options(
    shared: FaultFs, doctors: Callable[[int], Doctors]
) -> None:
    shared.set(listing_s=20.0)
    two = doctors(2)
    two.start(1, shared[1].path / "run")
    two.start(0, shared[0].path / "run")
    found = two.report()
    assert found["listings"]["verdict"] == "slow" and found["listings"]["values"]["1"]["unchanged_s"] > 0.1
    assert "lookupcache=none" in found["listings"]["what_to_do"]
    assert found["delay 0-1"]["values"]["p50_s"] < 10.0, "half of what the listings are old"
    two.end(1)
    assert tree(shared.backing) == set()


def test_listings_that_are_outdated_between_nodes_are_slow_with_the_mount_options(
    shared: FaultFs, doctors: Callable[[int], Doctors]
) -> None:
    shared.set(attributes_s=1.5, negative_s=1.5, listing_s=1.5, keeps_listing=True)
    two = doctors(2)
    two.start(1, shared[1].path / "run")
    two.start(0, shared[0].path / "run")
    found = two.report()
    assert found["delay 0-1"]["verdict"] == "slow"
    assert 0.5 < found["delay 0-1"]["values"]["max_s"] < 30
    assert "lookupcache=none" in found["delay 0-1"]["what_to_do"]
    assert found["clock 0-1"]["values"]["uncertainty_s"] > 0.5
    two.end(1)
    assert tree(shared.backing) == set()


def test_mount_that_takes_no_file_cannot_carry_a_run(
    shared: FaultFs, doctors: Callable[[int], Doctors]
) -> None:
    shared.set(full=True)
    one = doctors(1)
    one.start(0, shared[0].path / "run")
    found = one.report()
    assert list(found) == ["directory"] and found["directory"]["verdict"] == "fail"
    assert "No space left" in found["directory"]["figure"]


def test_errors_that_pass_do_not_stop_the_doctor(shared: FaultFs, doctors: Callable[[int], Doctors]) -> None:
    shared.set(error_rate=0.01, errors=("ESTALE", "EIO", "EINTR", "EBUSY"))
    two = doctors(2)
    two.start(1, shared[1].path / "run")
    two.start(0, shared[0].path / "run")
    found = two.report()
    assert found["nodes"]["values"] == {"came": [0, 1], "missing": []}
    assert found["all create once"]["values"]["doubled"] == 0


def test_mount_that_hangs_is_told_while_it_hangs(shared: FaultFs, doctors: Callable[[int], Doctors]) -> None:
    root = shared[0].path / "run"
    one = doctors(1)
    process = one.start(0, root, patch="import coordinator.console.doctor.report as r; r.HANG_S = 3.0")
    until(lambda: list(shared.backing.glob("run/doctor/*.work/replaced")), "the first check")
    shared.freeze()
    assert process.stdout is not None
    report = json.loads(process.stdout.readline())
    shared.thaw()
    assert process.wait(PATIENCE_S) == 1
    last = report["checks"][-1]
    assert (report["fit"], last["verdict"]) == (False, "fail")
    assert last["figure"] == f"no answer from {root} for 3 s" and "the mount hangs" in last["what_to_do"]
