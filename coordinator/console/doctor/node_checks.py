"""Judge what `run doctor` measures of nodes and between them. Pure, like `checks`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.console.doctor.checks import (
    CLOCK_S,
    Check,
    Latency,
    cache_advice,
    duration,
    judge_visible,
    size,
)
from coordinator.machine.filesystems import Mount
from coordinator.machine.network import ONLY_IPV6


@dataclass(frozen=True)
class RoundTrip:
    """A message from rank 0 to a worker and its answer."""

    delay_s: float
    """Half of the time of the round trip, on one clock."""
    offset_s: float
    """By how much the worker's clock is ahead, plus or minus `delay_s`."""


def judge_addresses(addresses: Sequence[str], ipv6_alone: bool = False) -> Check:
    """Judge the addresses of this node, each with its interface, without loopback."""
    if ipv6_alone:
        return Check("address", "IPv6 alone", "warn", f"this node has {ONLY_IPV6}")
    if not addresses:
        advice = "enough for a run on this machine alone; for more, connect it to the others"
        return Check("address", "none but loopback", "warn", advice)
    return Check("address", ", ".join(addresses), values={"addresses": list(addresses)})


def judge_machine(oddities: Sequence[str]) -> Check:
    """Report what this machine lacks that a run can do without."""
    if not oddities:
        return Check("machine", "lacks nothing")
    return Check("machine", "; ".join(oddities), "warn", "a run does without", {"lacks": list(oddities)})


def judge_processes(startable: int, least: int) -> list[Check]:
    """Judge how many more processes and threads can be started; no row if a run has at `least` enough."""
    if startable >= least:
        return []
    advice = f"a run has {least} on the smallest machine: raise ulimit -u, docker --pids-limit or pids.max"
    figure = f"{startable} more can be started, threads included"
    return [Check("processes", figure, "fail", advice, {"startable": startable})]


def judge_gpus(gpus: Sequence[Mapping[str, Any]], usable: int, problem: str, machine: str) -> Check:
    """Judge GPUs, {"name", "memory_bytes" or None} from the driver, and how many this process may use."""
    values = {"gpus": [dict(gpu) for gpu in gpus], "usable": usable}
    if problem:
        advice = "repair the driver; until then the CPU is used"
        return Check("GPUs", f"nvidia-smi: {problem}", "warn", advice, values)
    if not gpus:
        return Check("GPUs", f"none: the CPU is used ({machine})", values=values)
    memory = [size(gpu["memory_bytes"]) if gpu["memory_bytes"] else "shared memory" for gpu in gpus]
    kinds = [f"{gpu['name']}, {amount}" for gpu, amount in zip(gpus, memory, strict=True)]
    figure = "; ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    if usable == len(gpus):
        return Check("GPUs", figure, values=values)
    advice = f"CUDA_VISIBLE_DEVICES leaves {usable} of {len(gpus)} to this node"
    return Check("GPUs", figure, "ok" if usable else "warn", advice, values)


def judge_versions(versions: Mapping[str, str | None], needed: Sequence[str]) -> Check:
    """Judge the versions of the packages on this node; those `needed` must be installed."""
    figure = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing := [name for name in needed if not versions[name]]:
        advice = f"install {', '.join(missing)} in the environment that `run` comes from"
        return Check("versions", figure, "fail", advice, versions)
    return Check("versions", figure, values=versions)


# ---- between nodes


def judge_nodes(hosts: Mapping[int, str], missing: Mapping[int, str]) -> Check:
    """Judge which ranks came (with their host names), and which are `missing` (with what to type there)."""
    came = ", ".join(f"{rank} on {host}" for rank, host in sorted(hosts.items()))
    values = {"came": sorted(hosts), "missing": sorted(missing)}
    if not missing:
        return Check("nodes", f"all {len(hosts)} came: {came}", values=values)
    absent = ", ".join(map(str, sorted(missing)))
    figure = f"rank {absent} did not come" if len(missing) == 1 else f"ranks {absent} did not come"
    typed = "; ".join(f"on rank {rank}: {text}" for rank, text in sorted(missing.items()))
    advice = f"{typed} (if it runs there, the log path is not the same directory, or listings are outdated)"
    return Check("nodes", f"{figure}; {came}", "fail", advice, values)


def judge_lost(lost: Mapping[int, str]) -> Check:
    """Report the ranks that stopped answering, and at which step."""
    figure = ", ".join(f"rank {rank} at step {do!r}" for rank, do in sorted(lost.items()))
    return Check("lost nodes", figure, "fail", "see what the doctor says there", {"lost": sorted(lost)})


def judge_their_checks(rank: int, host: str, checks: Sequence[Check]) -> list[Check]:
    """Report the checks that a worker did by itself: one row if all are ok, else one for each that is not."""
    bad = [check for check in checks if check.verdict != "ok"]
    if not bad:
        return [Check(f"rank {rank}", f"{host}: its own {len(checks)} checks are ok")]
    return [
        Check(f"rank {rank}: {check.name}", check.figure, check.verdict, check.advice, check.values)
        for check in bad
    ]


def judge_delay(rank: int, delays: Latency, mount: Mount) -> Check:
    """Judge the delay between rank 0 and `rank`, half of a round trip."""
    return judge_visible(f"delay 0-{rank}", delays, mount, "there and back, halved")


def judge_listings(listings: Mapping[int, Mapping[str, float]], mount: Mount) -> list[Check]:
    """Judge how old the listings of each node's client were, by FreshListing.facts; no row if none was."""
    old = {rank: facts["unchanged_s"] for rank, facts in sorted(listings.items()) if facts}
    if not old:
        return []
    ages = ", ".join(f"rank {rank} {seconds:.1f} s" for rank, seconds in old.items())
    figure = f"hid others' names, unchanged for up to: {ages}; a name made and removed first shows them"
    advice = f"a run does so by itself, with two more calls for each listing; {cache_advice(mount)}"
    values = {str(rank): dict(facts) for rank, facts in listings.items()}
    return [Check("listings", figure, "slow", advice, values)]


def judge_clock(rank: int, best: RoundTrip) -> Check:
    """Compare the clock of `rank` with rank 0's; nothing relies on it."""
    figure = f"{1000 * best.offset_s:+.3g} ms, give or take {duration(best.delay_s)}"
    values = {"offset_s": best.offset_s, "uncertainty_s": best.delay_s}
    if abs(best.offset_s) - best.delay_s > CLOCK_S:
        advice = "a run does not rely on it, but logs are hard to compare: let chrony or ntpd set both clocks"
        return Check(f"clock 0-{rank}", figure, "warn", advice, values)
    return Check(f"clock 0-{rank}", figure, values=values)


def judge_training_addresses(doors: Mapping[int, Mapping[str, Any]]) -> Check:
    """Judge the address and interface that each node would train on: {"ip", "interface", "problem"}."""
    values = {str(rank): dict(door) for rank, door in doors.items()}
    if bad := {rank: door["problem"] for rank, door in sorted(doors.items()) if door["problem"]}:
        figure = ", ".join(f"rank {rank}: none" for rank in bad)
        advice = "; ".join(f"rank {rank}: {' '.join(problem.split())}" for rank, problem in bad.items())
        return Check("addresses", figure, "fail", advice, values)
    figure = ", ".join(f"{rank}: {door['ip']} ({door['interface']})" for rank, door in sorted(doors.items()))
    return Check("addresses", figure, values=values)


def judge_ports(doors: Mapping[int, Mapping[str, Any]], reached: Mapping[int, Mapping[str, str]]) -> Check:
    """Judge what each rank met at the doors of the others; an empty text means that it connected."""
    connections = [
        (rank, int(other), text) for rank, met in sorted(reached.items()) for other, text in met.items()
    ]
    bad = [f"{rank} to {other} ({doors[other]['ip']}): {text}" for rank, other, text in connections if text]
    values = {"connections": len(connections), "failed": bad}
    if not bad:
        return Check("ports", f"all {len(connections)} connections between nodes work", values=values)
    advice = "training needs any free TCP port between all nodes: open the firewall, or repair the route"
    return Check("ports", "; ".join(bad), "fail", advice, values)


def judge_equal_versions(versions: Mapping[int, Mapping[str, str | None]]) -> Check:
    """Compare the packages of all ranks."""
    first = versions[min(versions)]
    names = {name: [versions[rank].get(name) for rank in sorted(versions)] for name in first}
    differ = {name: by_rank for name, by_rank in names.items() if len(set(by_rank)) > 1}
    values = {str(rank): dict(installed) for rank, installed in versions.items()}
    if not differ:
        return Check("same versions", f"equal on {len(versions)} nodes", values=values)
    figure = "; ".join(
        f"{name} "
        + ", ".join(f"{rank}: {text or 'none'}" for rank, text in zip(sorted(versions), by_rank, strict=True))
        for name, by_rank in differ.items()
    )
    advice = "install the same on all nodes: trainers of different versions may not find each other"
    return Check("same versions", figure, "warn", advice, values)


def judge_all_gpus(counts: Mapping[int, int]) -> Check:
    """Compare the GPUs of all ranks, and propose weights."""
    figure = ", ".join(f"rank {rank}: {count or 'CPU'}" for rank, count in sorted(counts.items()))
    values = {str(rank): count for rank, count in counts.items()}
    if len(set(counts.values())) == 1:
        return Check("all GPUs", figure, values=values)
    if not all(counts.values()):
        advice = "training takes GPUs on all nodes or on none"
        return Check("all GPUs", figure, "warn", advice, values)
    weights = ",".join(str(counts[rank]) for rank in sorted(counts))
    return Check("all GPUs", figure, "ok", f"if they are alike: --rank-weights {weights}", values)
