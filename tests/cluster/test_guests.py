"""Guests of real runs: they come in the middle, make groups, are killed, are asked to leave."""

import json
import signal
from collections.abc import Callable

from coordinator.directory.file_names import Claim, parse_claim_name
from coordinator.directory.layout import GUESTS
from coordinator.protocol.exits import Exit
from tests.cluster.cluster import FAST, Cluster, finish
from tests.cluster.weights import farthest

SETTINGS = (
    *FAST, "--iterations", "3", "--eval-interval", "0", "rollout.tasks_per_iteration=10",
    "rollout.concurrency=2", "rollout.environment=tests.cluster.plugins:slow", "cluster.node_timeout_s=3",
)  # fmt: skip
FIRST, SECOND = GUESTS, GUESTS + 1


def come(cluster: Cluster, rank: int) -> None:
    cluster.start(rank, "--name", f"guest {rank}", role=["guest"])


def rank_of(cluster: Cluster, guest: int) -> int:
    """The rank of a guest: they have them in the order in which they came."""
    records = cluster.run_dir.guests.glob("r*.json") if cluster.run_dir.guests.exists() else ()
    names = {json.loads(path.read_text())["name"]: int(path.stem[1:]) for path in records}
    return names.get(f"guest {guest}", 0)


def begun(cluster: Cluster, guest: int, iteration: int) -> list[Claim]:
    """The chunks of an iteration, or a later one, that a guest has claimed and not made."""
    rank = rank_of(cluster, guest)
    if not cluster.run_dir.claims.exists():
        return []
    claims = [claim for path in cluster.run_dir.claims.iterdir() if (claim := parse_claim_name(path.name))]
    made = {claim[:4] for claim in claims if claim.kind == "m"}
    return [
        claim
        for claim in claims
        if claim.kind == "c" and claim.iteration >= iteration and claim[:4] not in made
        and json.loads((cluster.run_dir.claims / claim.name).read_text() or "{}").get("rank") == rank > 0
    ]  # fmt: skip


def makers(cluster: Cluster) -> set[int]:
    return {part["rank"] for number in range(1, 4) for part in cluster.manifest(number)["parts"]}


def test_guests_that_are_killed_or_leave_cost_nothing_and_change_no_weight(
    cluster: Cluster, beside: Callable[[str], Cluster]
) -> None:
    alone = beside("alone")
    alone.environment["SLOW_S"] = "0"
    finish(alone, *SETTINGS)
    cluster.environment["SLOW_S"] = "0.8"
    cluster.start(0, *SETTINGS)
    for guest in (FIRST, SECOND):
        come(cluster, guest)
    cluster.until(lambda: begun(cluster, FIRST, 2), "a claim of the first guest")
    first, second = rank_of(cluster, FIRST), rank_of(cluster, SECOND)
    assert f"\n{first} " in cluster.command("status")
    cluster.kill(FIRST)
    cluster.until(lambda: begun(cluster, SECOND, 3), "a claim of the second guest")
    cluster.kill(SECOND, signal.SIGTERM)
    codes = cluster.wait()
    assert codes == [Exit.DONE, -signal.SIGKILL, Exit.INTERRUPTED], cluster.everything_said()
    assert "was interrupted by SIGTERM" in cluster.output(SECOND)
    assert "To bring it back, on that machine: run guest --log-path" in cluster.output(SECOND)
    assert f"guest {first} (" in cluster.output(0) and "has gone" in cluster.output(0)
    assert second in makers(cluster)
    assert farthest(cluster.run_dir.checkpoint(3), alone.run_dir.checkpoint(3)) == 0.0
    left = [path.name for path in cluster.run_dir.claims.iterdir()]
    assert not [name for name in left if (claim := parse_claim_name(name)) and claim.iteration < 3], left


def test_guest_of_a_run_without_claims_is_refused(cluster: Cluster) -> None:
    cluster.start(0, "--num-nodes", "1", *SETTINGS, "--rank-weights", "1")
    come(cluster, FIRST)
    assert cluster.nodes[FIRST].wait(120) == Exit.USAGE
    assert "start its master again with rollout.claims=true" in cluster.output(FIRST)
    assert not cluster.run_dir.guests.exists()
