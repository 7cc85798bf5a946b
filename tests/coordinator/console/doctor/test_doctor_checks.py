"""What `run doctor` makes of its figures: verdicts and what to do. Nothing is measured here."""

import json
import math
from typing import Any

import pytest

from coordinator.console.doctor import checks as judge
from coordinator.console.doctor import node_checks as judge_node
from coordinator.console.doctor.checks import Check, Latency
from coordinator.console.doctor.run import doctor_rank
from coordinator.machine.filesystems import Mount
from coordinator.settings.tree import SettingsError

DISK, NFS = Mount("ext4", "/dev/sda", "/"), Mount("nfs4", "server:/export", "/shared")
BLOB = Mount("fuse", "blobfuse2", "/shared")
SSHFS = Mount("fuse.sshfs", "server:/export", "/shared")
GIB = 2**30


# ---- what a figure means


@pytest.mark.parametrize(
    ("check", "verdict", "words"),
    [
        (judge.judge_directory(True, 0o770, 0o660, "a:b"), "ok", ""),
        (judge.judge_directory(False, 0o775, 0o660, "a:b"), "ok", ""),
        (judge.judge_directory(False, 0o777, 0o660, "a:b"), "warn", "chmod o-w"),
        (judge.judge_directory(False, 0o770, 0o666, "a:b"), "warn", "umask=007"),
        (judge.judge_space(100 * GIB, 200 * GIB), "ok", ""),
        (judge.judge_space(20 * GIB, 200 * GIB), "warn", "4 checkpoints"),
        (judge.judge_space(GIB // 8, 200 * GIB), "fail", "make room"),
        (judge.judge_space(0, 0), "ok", ""),
        (judge.judge_inodes(10**6, 10**7), "ok", ""),
        (judge.judge_inodes(5_000, 10**7), "warn", "remove small files"),
        (judge.judge_inodes(10, 10**7), "fail", "remove small files"),
        (judge.judge_inodes(0, 0), "ok", ""),
        (judge.judge_replace(100, 1000, 0, 0), "ok", ""),
        (judge.judge_replace(100, 1000, 1, 0), "warn", "checksum"),
        (judge.judge_replace(100, 1000, 0, 1), "warn", "checksum"),
        (judge.judge_move(64 * 2**20, 0.001, 0, True, 0.3), "ok", ""),
        (judge.judge_move(64 * 2**20, 0.001, 2, True, 0.3), "warn", "copies"),
        (judge.judge_move(64 * 2**20, 0.9, 0, True, 0.3), "warn", "copies"),
        (judge.judge_move(64 * 2**20, 0.9, 0, True, 30.0), "ok", ""),
        (judge.judge_move(64 * 2**20, 0.001, 0, False, 0.3), "fail", "not complete"),
        (judge.judge_create(100, 0, 0, True), "ok", ""),
        (judge.judge_create(100, 0, 0, False), "warn", "--peers N"),
        (judge.judge_create(50, 0, 0, False, nodes=3), "ok", ""),
        (judge.judge_create(100, 1, 0, True), "fail", "two masters"),
        (judge.judge_create(100, 0, 1, True), "fail", "two masters"),
        (judge.judge_write(64 * 2**20, 0.2), "ok", ""),
        (judge.judge_write(64 * 2**20, 2.0), "slow", "takes 49 min"),
        (judge.judge_flags(Latency((0.001, 0.1))), "slow", "28 flags"),
        (judge.judge_flags(Latency((0.001, 0.001, 0.1))), "ok", ""),
        (judge.judge_flags(Latency((0.001, 0.001, 3.0))), "slow", "28 flags"),
        (judge.judge_flags(Latency((0.001, 0.001, 31.0))), "fail", "node_timeout"),
        (judge.judge_listing(500, Latency((0.001,)), 0.01, DISK), "ok", ""),
        (judge.judge_listing(500, Latency((0.1,)), 0.1, NFS), "slow", "lookupcache"),
        (judge.judge_listing(500, Latency((0.001,)), 1.0, NFS), "slow", "lookupcache"),
        (judge.judge_listing(500, Latency((0.001,)), math.inf, NFS), "fail", "its own heartbeat"),
        (judge_node.judge_addresses(["10.0.0.1/24 (eth0)"]), "ok", ""),
        (judge_node.judge_addresses([]), "warn", "connect it"),
        (judge_node.judge_versions({"python": "3.12", "torch": "2.13"}, ["python", "torch"]), "ok", ""),
        (judge_node.judge_versions({"python": "3.12", "torch": None}, ["torch"]), "fail", "install torch"),
        (judge.failed("flags", OSError(5, "Input/output error", "/a")), "fail", "the same calls"),
    ],
)
def test_figure_has_a_verdict_and_what_to_do(check: Check, verdict: str, words: str) -> None:
    assert (check.verdict, words in check.advice) == (verdict, True), check
    assert bool(check.advice) == (verdict != "ok")


@pytest.mark.parametrize(
    ("seconds", "mount", "verdict", "words"),
    [
        ((0.001, 0.4), DISK, "ok", ""),
        ((0.001, 0.6), NFS, "slow", "mount it with lookupcache=none (or positive) and actimeo=1"),
        ((0.001, 25.0), BLOB, "slow", "--attr-cache-timeout=0"),
        ((0.001, 10.6), SSHFS, "slow", "mount it with -o dir_cache=no,entry_timeout=0,attr_timeout=0"),
        ((0.001, 27.0), NFS, "fail", "a run allows 26 s with cluster.node_timeout_s=30"),
        ((0.001, math.inf), DISK, "fail", "turn the mount's caches off"),
    ],
)
def test_name_that_shows_late_is_slow_and_too_late_a_failure(
    seconds: tuple[float, ...], mount: Mount, verdict: str, words: str
) -> None:
    check = judge.judge_visible("visibility", Latency(seconds), mount, "another's file")
    assert (check.verdict, words in check.advice) == (verdict, True), check
    assert json.loads(json.dumps(check.to_dict()))["values"]["count"] == 2


def test_cache_that_no_run_relies_on_never_speaks_against_the_directory() -> None:
    check = judge.judge_stale("stale lookup", Latency((math.inf,)), 10.0, NFS, "hidden for")
    assert (check.verdict, check.figure) == ("slow", "hidden for more than 10.0 s")
    assert "actimeo=1" in check.advice
    assert judge.judge_stale("stale lookup", Latency((0.1,)), 10.0, NFS, "hidden for").verdict == "ok"


def test_check_survives_its_way_through_json() -> None:
    check = judge.judge_flags(Latency((0.2, 0.3)))
    assert Check.from_dict(json.loads(json.dumps(check.to_dict()))) == check


def test_gpus_are_counted_by_kind() -> None:
    gpus = [{"name": "H200", "memory_bytes": 139 * GIB}] * 2 + [{"name": "GB10", "memory_bytes": None}]
    check = judge_node.judge_gpus(gpus, 3, "", "")
    assert check.figure == "2 x H200, 139.0 GiB; 1 x GB10, shared memory" and check.verdict == "ok"
    assert judge_node.judge_gpus(gpus, 1, "", "").advice == "CUDA_VISIBLE_DEVICES leaves 1 of 3 to this node"
    assert judge_node.judge_gpus(gpus, 0, "", "").verdict == "warn"
    assert judge_node.judge_gpus([], 0, "", "2 cores").figure == "none: the CPU is used (2 cores)"
    assert judge_node.judge_gpus([], 0, "no driver", "").verdict == "warn"


# ---- between nodes


def test_missing_rank_is_named_with_what_to_type_there() -> None:
    check = judge_node.judge_nodes({0: "node-a", 1: "node-b"}, {2: "run doctor --peers 3 --worker 2"})
    assert check.verdict == "fail" and check.figure.startswith("rank 2 did not come")
    assert "on rank 2: run doctor --peers 3 --worker 2" in check.advice
    assert judge_node.judge_nodes({0: "a", 1: "b"}, {}).figure == "all 2 came: 0 on a, 1 on b"


def test_worker_whose_checks_are_ok_takes_one_row() -> None:
    good, bad = judge.judge_replace(1, 1, 0, 0), judge.judge_replace(1, 1, 1, 0)
    assert [row.name for row in judge_node.judge_their_checks(1, "b", [good, good])] == ["rank 1"]
    assert [row.name for row in judge_node.judge_their_checks(1, "b", [good, bad])] == [
        "rank 1: atomic rename"
    ]


@pytest.mark.parametrize(
    ("offset_s", "delay_s", "verdict"),
    [(0.1, 0.001, "ok"), (-3600.0, 0.001, "warn"), (3.0, 2.5, "ok"), (4.0, 2.5, "warn")],
)
def test_clock_counts_as_wrong_only_beyond_what_is_uncertain(
    offset_s: float, delay_s: float, verdict: str
) -> None:
    check = judge_node.judge_clock(1, judge_node.RoundTrip(delay_s, offset_s))
    assert check.verdict == verdict, check


def door(ip: str, problem: str = "") -> dict[str, Any]:
    return {"ip": ip, "port": 1234, "interface": "eth0", "problem": problem}


def test_port_that_is_not_reached_is_named_with_both_ends() -> None:
    doors = {0: door("10.0.0.1"), 1: door("10.0.0.2")}
    assert judge_node.judge_ports(doors, {0: {"1": ""}, 1: {"0": ""}}).verdict == "ok"
    check = judge_node.judge_ports(doors, {0: {"1": ""}, 1: {"0": "no answer in 5 s"}})
    assert (check.verdict, check.figure) == ("fail", "1 to 0 (10.0.0.1): no answer in 5 s")


def test_node_without_an_address_towards_the_others_fails() -> None:
    check = judge_node.judge_training_addresses({0: door("10.0.0.1"), 1: door("", "no route")})
    assert (check.verdict, check.figure, check.advice) == ("fail", "rank 1: none", "rank 1: no route")


def test_versions_that_differ_are_named() -> None:
    same = {0: {"torch": "2.13", "vllm": None}, 1: {"torch": "2.13", "vllm": None}}
    assert judge_node.judge_equal_versions(same).verdict == "ok"
    check = judge_node.judge_equal_versions(same | {2: {"torch": "2.12", "vllm": None}})
    assert (check.verdict, check.figure) == ("warn", "torch 0: 2.13, 1: 2.13, 2: 2.12")


def test_unequal_gpus_suggest_weights() -> None:
    assert judge_node.judge_all_gpus({0: 8, 1: 4, 2: 4}).advice.endswith("--rank-weights 8,4,4")
    assert judge_node.judge_all_gpus({0: 8, 1: 8}).advice == ""
    assert judge_node.judge_all_gpus({0: 8, 1: 0}).verdict == "warn"


@pytest.mark.parametrize(
    ("worker", "nodes", "variables", "rank"),
    [
        (None, 1, {"RANK": "2"}, 0),
        (None, 3, {}, 0),
        ("2", 3, {}, 2),
        (None, 3, {"NODE_RANK": "1"}, 1),
        (None, 3, {"RANK": "0"}, 0),
    ],
)
def test_rank_is_resolved_as_run_does(
    worker: str | None, nodes: int, variables: dict[str, str], rank: int
) -> None:
    assert doctor_rank(worker, nodes, variables) == rank


@pytest.mark.parametrize(
    ("worker", "nodes", "words"),
    [("1", 1, "add --peers N"), ("3", 3, "rank 3 is outside --peers 3"), ("x", 3, "not a rank")],
)
def test_rank_that_cannot_be_is_refused(worker: str, nodes: int, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        doctor_rank(worker, nodes, {})
