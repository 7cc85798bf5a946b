"""Judge what `run doctor` measures of a directory. Pure; each limit has a reason."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.machine.filesystems import Mount
from coordinator.settings.cluster import ClusterSettings
from coordinator.settings.keeping import CheckpointSettings

Verdict = Literal["ok", "slow", "warn", "fail"]

_CLUSTER = ClusterSettings()
PROMPT_S = _CLUSTER.poll_max_s
"""A waiting node sleeps up to this long between two listings; a shorter delay costs a run nothing."""
VISIBLE_S = _CLUSTER.node_timeout_s - 2 * _CLUSTER.beat_s
"""Where listings are outdated by more than this, a heartbeat may come too late, and nodes that live are taken
for lost.
"""
FLAG_S = 0.05
"""An iteration raises 28 flags in sequence (14 phases, one of a worker, one of the master): 1.4 s."""
LIST_S = 0.05
"""A waiting node lists every 1 to 500 ms; a slower listing delays it."""
COPY_S = 0.15
"""A rename, with the directory's fsync, that always takes longer copies data. Sizes in between show this too,
but the kernel may hide them from the node that renames."""
BYTES_PER_PARAMETER = 14
"""Bytes of a checkpoint a parameter: weights in bfloat16; master weights and two moments in float32."""
CHECKPOINTS = CheckpointSettings().keep_last + 1
"""The checkpoints that are kept, and one that is being written."""
LITTLE_BYTES = 0.6e9 * BYTES_PER_PARAMETER * CHECKPOINTS
"""Bytes of the checkpoints of the smallest models that people post-train."""
NO_BYTES = 256 * 2**20
"""With less, not even a run of the built-in model fits."""
FEW_INODES, NO_INODES = 100_000, 1_000
"""A run keeps about ten files per iteration and rank for ever."""
WRITE_BYTES_PER_S = 100e6
"""At this rate a checkpoint of a 7 B model (98 GB) takes 16 minutes, longer than most training phases."""
CLOCK_S = 1.0
"""Nothing relies on equal clocks, but with a larger difference logs are hard to read side by side."""


@dataclass(frozen=True)
class Check:
    """A row of the report."""

    name: str
    figure: str
    verdict: Verdict = "ok"
    advice: str = ""
    """What to do; empty if there is nothing to do."""
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The figures for programs; units are in the names."""

    def to_dict(self) -> dict[str, Any]:
        """Write the check for JSON; `from_dict` reads it."""
        names = {"check": self.name, "figure": self.figure, "verdict": self.verdict}
        return {**names, "what_to_do": self.advice, "values": dict(self.values)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Check":
        """Read what `to_dict` wrote."""
        return cls(data["check"], data["figure"], data["verdict"], data["what_to_do"], data["values"])


@dataclass(frozen=True)
class Latency:
    """Seconds of one action, repeated several times; `inf` for one that did not happen in time."""

    seconds: tuple[float, ...]

    @property
    def p50(self) -> float:
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        return sorted(self.seconds)[math.ceil(0.99 * len(self.seconds)) - 1]

    @property
    def worst(self) -> float:
        return max(self.seconds)

    def values(self) -> dict[str, Any]:
        """Write the figures for programs; null for an action that did not happen in time."""
        figures = {"p50_s": self.p50, "p99_s": self.p99, "max_s": self.worst, "count": len(self.seconds)}
        return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def cache_advice(mount: Mount) -> str:
    """Say how to turn off the caches that delay what other nodes write."""
    nfs = "lookupcache=none (or positive) and actimeo=1"
    blob = "--disable-kernel-cache --attr-cache-timeout=0 --file-cache-timeout=0"
    if mount.kind.startswith("nfs"):
        return f"mount it with {nfs}"
    if mount.kind == "fuse.sshfs":
        return "mount it with -o dir_cache=no,entry_timeout=0,attr_timeout=0"
    if "blobfuse" in f"{mount.kind} {mount.source}".lower():
        return f"mount it with {blob}"
    return f"turn the mount's caches off (NFS: {nfs}; BlobFuse2: {blob})"


def duration(seconds: float) -> str:
    """Write a duration for a person; `never` for inf."""
    if not math.isfinite(seconds):
        return "never"
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.01 else f"{1000 * seconds:.2g} ms"


def size(count: float) -> str:
    """Write a number of bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit != "GiB" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def judge_directory(is_new: bool, mode: int, file_mode: int, owner: str) -> Check:
    """Judge `mode` of the run directory, and `file_mode` of a file made in it, as a run makes its files."""
    figure = f"{'made' if is_new else 'there'}, mode {mode:04o}; a new file {file_mode:04o}, {owner}"
    values = {"made": is_new, "mode": f"{mode:04o}", "file_mode": f"{file_mode:04o}"}
    if file_mode & 0o007:
        advice = "this mount opens new files to every user; mount it with a umask, e.g. umask=007"
        return Check("directory", figure, "warn", advice, values)
    if mode & 0o002:
        advice = "every user may write here, so a run refuses it: chmod o-w, or add --allow-shared-dir"
        return Check("directory", figure, "warn", advice, values)
    return Check("directory", figure, values=values)


def judge_mount(mount: Mount) -> Check:
    """Show which filesystem it is; no kind is good or bad by its name."""
    figure = f"{mount.kind}, {mount.source} at {mount.point}"
    return Check("filesystem", figure, values={"kind": mount.kind, "source": mount.source})


def judge_space(free: int, total: int) -> Check:
    """Judge free and total bytes; `total` is 0 where the mount does not say."""
    values = {"free_bytes": free, "total_bytes": total}
    if not total:
        return Check("free space", "the mount does not say", values=values)
    billions = free / (BYTES_PER_PARAMETER * CHECKPOINTS) / 1e9
    parameters = f"{billions:.1f} B" if billions >= 1 else f"{1000 * billions:.0f} M"
    figure = f"{size(free)} of {size(total)}, {CHECKPOINTS} checkpoints of {parameters} parameters"
    if free < NO_BYTES:
        return Check("free space", figure, "fail", "make room, or use another log path", values)
    if free < LITTLE_BYTES:
        advice = f"make room for {CHECKPOINTS} checkpoints of {BYTES_PER_PARAMETER} bytes per parameter each"
        return Check("free space", figure, "warn", advice, values)
    return Check("free space", figure, values=values)


def judge_inodes(free: int, total: int) -> Check:
    """Judge free and total inodes; `total` is 0 where they are not limited."""
    values = {"free_inodes": free, "total_inodes": total}
    if not total:
        return Check("free inodes", "not limited here", values=values)
    figure = f"{free:,} of {total:,}"
    if free < FEW_INODES:
        verdict: Verdict = "fail" if free < NO_INODES else "warn"
        return Check("free inodes", figure, verdict, "remove small files there, or raise the quota", values)
    return Check("free inodes", figure, values=values)


def judge_replace(renames: int, reads: int, missing: int, torn: int) -> Check:
    """Judge what a reader saw of one file while another process renamed new versions over it."""
    figure = f"{reads:,} reads, {renames:,} renames: {missing} found no file, {torn} a part"
    values = {"reads": reads, "renames": renames, "missing": missing, "torn": torn}
    if missing or torn:
        advice = "readers check size and checksum, so a run works; NFS, Lustre or GlusterFS do it right"
        return Check("atomic rename", figure, "warn", advice, values)
    return Check("atomic rename", figure, values=values)


def judge_move(count: int, seconds: float, partial_sizes: int, is_whole: bool, written_s: float) -> Check:
    """Judge the rename of a file of `count` bytes, which took `written_s` to write.

    `partial_sizes`: how many sizes in between were seen. `is_whole`: whether the file had all of it.
    """
    values = {"bytes": count, "seconds": seconds, "partial_sizes": partial_sizes}
    figure = f"{size(count)} in {duration(seconds)}"
    if partial_sizes:
        figure += f", seen growing ({partial_sizes} sizes in between)"
    if not is_whole:
        advice = "the renamed file is not complete, or not shown so: use another filesystem"
        return Check("big rename", figure, "fail", advice, values)
    if partial_sizes or seconds > max(COPY_S, 0.2 * written_s):
        advice = (
            "this mount copies instead of renaming: every checkpoint is written three times, and seen half; "
            "on object storage use a hierarchical namespace"
        )
        return Check("big rename", figure, "warn", advice, values)
    return Check("big rename", figure, values=values)


def judge_create(names: int, doubled: int, orphaned: int, hard_links: bool, nodes: int = 0) -> Check:
    """Judge `names` that all `nodes` (0: two processes) created at once: how many had two winners, or
    none."""
    name = "all create once" if nodes else "create once"
    by = f"{nodes} nodes" if nodes else "2 processes"
    way = "hard links" if hard_links else "O_EXCL (no hard links)"
    figure = f"{names} names, {by}, {way}: "
    values = {"names": names, "doubled": doubled, "orphaned": orphaned, "hard_links": hard_links}
    if doubled or orphaned:
        figure += f"{doubled} have two winners, {orphaned} have none"
        advice = "two masters could both lead here: use a filesystem that creates a name once (NFS, Lustre)"
        return Check(name, figure, "fail", advice, values)
    figure += "each has one winner"
    if not hard_links and not nodes:
        advice = "O_EXCL may hold within one node only: let all nodes try it with --peers N"
        return Check(name, figure, "warn", advice, values)
    return Check(name, figure, values=values)


def judge_visible(name: str, delays: Latency, mount: Mount, subject: str) -> Check:
    """Judge the delay from publishing until another process sees it; a run tolerates VISIBLE_S."""
    figure = f"{subject}: median {duration(delays.p50)}, longest {duration(delays.worst)}"
    values = delays.values()
    if delays.worst > VISIBLE_S:
        allowed = f"a run allows {VISIBLE_S:.0f} s with cluster.node_timeout_s={_CLUSTER.node_timeout_s:g}"
        advice = f"{allowed}; {cache_advice(mount)}"
        return Check(name, figure, "fail", advice, values)
    if delays.worst > PROMPT_S:
        advice = f"each of the 14 phases waits that long; {cache_advice(mount)}"
        return Check(name, figure, "slow", advice, values)
    return Check(name, figure, values=values)


def judge_stale(name: str, delays: Latency, limit_s: float, mount: Mount, subject: str) -> Check:
    """Judge how long outdated state is seen that no run relies on; `inf` for longer than `limit_s`."""
    worst = duration(delays.worst) if math.isfinite(delays.worst) else f"more than {duration(limit_s)}"
    verdict: Verdict = "slow" if delays.worst > PROMPT_S else "ok"
    advice = f"a run does not rely on it, but it shows a cache; {cache_advice(mount)}"
    return Check(name, f"{subject} {worst}", verdict, advice if verdict == "slow" else "", delays.values())


def judge_write(count: int, seconds: float) -> Check:
    """Judge the time to write and sync `count` bytes."""
    rate = count / seconds
    figure = f"{rate / 1e6:.0f} MB/s ({size(count)}, synced)"
    values = {"bytes": count, "seconds": seconds, "bytes_per_s": rate}
    if rate < WRITE_BYTES_PER_S:
        minutes = 7e9 * BYTES_PER_PARAMETER / rate / 60
        advice = f"a checkpoint of a 7 B model (98 GB) takes {minutes:.0f} min; fine for small models"
        return Check("write speed", figure, "slow", advice, values)
    return Check("write speed", figure, values=values)


def judge_flags(publishing: Latency) -> Check:
    """Judge publishing a small file without fsync, as for flags and heartbeats."""
    figure = f"median {duration(publishing.p50)}, p99 {duration(publishing.p99)}"
    if publishing.p99 > _CLUSTER.node_timeout_s:
        advice = "a heartbeat takes longer than node_timeout, so every node would count as lost"
        return Check("flags", figure, "fail", advice, publishing.values())
    if publishing.p50 > FLAG_S or publishing.p99 > _CLUSTER.beat_s:
        advice = f"28 flags an iteration take {duration(28 * publishing.p50)}: is the server busy, or far?"
        return Check("flags", figure, "slow", advice, publishing.values())
    return Check("flags", figure, values=publishing.values())


def judge_listing(names: int, listing: Latency, own_s: float, mount: Mount) -> Check:
    """Judge listing `names` files; `own_s`: seconds until all files of this process were listed."""
    figure = f"{names} names in {duration(listing.p50)}, its own after {duration(own_s)}"
    values = {**listing.values(), "names": names, "own_s": own_s if math.isfinite(own_s) else None}
    if own_s > _CLUSTER.node_timeout_s:
        advice = f"a node that does not see its own heartbeat stops training; {cache_advice(mount)}"
        return Check("listing", figure, "fail", advice, values)
    if listing.p50 > LIST_S or own_s > PROMPT_S:
        return Check("listing", figure, "slow", cache_advice(mount), values)
    return Check("listing", figure, values=values)


def failed(name: str, error: OSError) -> Check:
    """Report a check that could not be done."""
    text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    return Check(name, text, "fail", "a run does the same calls; see what the mount, or its server, says")
