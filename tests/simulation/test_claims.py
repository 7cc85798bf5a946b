"""Claims and groups in flight, in simulated runs: what is made twice, and whether a broken rule is found."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.collector import claimed_slots as claimed
from coordinator.directory import claims as claims_of_a_row
from coordinator.directory.claims import TRIES, ClaimListing, Claims
from coordinator.node import node
from coordinator.phases import rollout_steps
from rollout.engines.completion import Completion
from rollout.origin import Sampling
from rollout.storage import files
from tests.simulation.engines import EngineClient
from tests.simulation.faults import Fault
from tests.simulation.test_simulation import NODES, SEEDS, run, undisturbed


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("claims", [True, False])
@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_only_what_a_killed_node_had_in_flight_is_asked_for_again(
    lost: int, claims: bool, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[tuple[str, int | None], set[int]] = defaultdict(set)
    kept: list[int] = []
    plan_kept, generate = rollout_steps._kept, EngineClient.generate

    def note_kept(*args: Any) -> dict[int, list[int]]:
        found = plan_kept(*args)
        kept.extend(slot for slots in found.values() for slot in slots)
        return found

    async def note(client: EngineClient, prompt: Any, sampling: Sampling) -> list[Completion]:
        process: Any = client._engines[client._url].scheduler.process.acts_for
        asked[str(prompt), sampling.seed].add(process.rank)
        return await generate(client, prompt, sampling)

    monkeypatch.setattr(rollout_steps, "_kept", note_kept)
    monkeypatch.setattr(EngineClient, "generate", note)
    for seed in range(3):
        happens = [Fault("kill", lost, 1, 2, 6 + seed, 3.0)]
        options = {"cluster__on_node_failure": policy, "rollout__claims": claims}
        assert run(NODES, seed, happens, **options, rollout__tasks_per_iteration=12 if claims else 36)
        again = {request: ranks for request, ranks in asked.items() if len(ranks) > 1}
        assert all(lost in ranks for ranks in again.values()), again
        asked.clear()
    if claims or lost == 0:  # else each healthy node has made its share when the loss is noticed
        assert kept, "no group outlived a change of the epoch"


def test_nodes_that_never_see_the_claims_of_others_try_each_chunk_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[tuple[int, ...]] = []
    real = Claims.take

    def take(claims: Claims, chunks: Sequence[int]) -> int | None:
        if (made := real(claims, chunks)) is None:
            refused.append(claims._phase)
        return made

    monkeypatch.setattr(Claims, "take", take)
    blind = SimpleNamespace(**{**vars(files), "listing": lambda _directory: []})
    monkeypatch.setattr(claims_of_a_row, "files", blind)
    for seed in range(3):
        run(NODES, seed, (), rollout__tasks_per_iteration=24)
    assert refused and max(Counter(refused).values()) < 3 * 24 * NODES / TRIES, Counter(refused)


def every_epochs_claims_count(patch: pytest.MonkeyPatch) -> None:
    """A chunk that was claimed before an epoch is made by nobody."""
    real = Claims.look

    def look(claims: Claims) -> ClaimListing:
        epoch, iteration, phase = claims._phase
        found: set[int] = set()
        for older in range(1, epoch + 1):
            claims._phase = (older, iteration, phase)
            found |= real(claims).claimed
        claims._phase = (epoch, iteration, phase)
        return ClaimListing(found, set(), set(), set())

    patch.setattr(Claims, "look", look)
    patch.setattr(node.claims, "left_over", lambda *_: [])  # else there are none when it matters


def a_chunk_is_everybodys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Claims, "take", lambda _claims, chunks: chunks[0])
    patch.setattr(
        Claims, "look", lambda claims: ClaimListing(set(range(claims_made(claims))), set(), set(), set())
    )


def claims_made(claims: Any) -> int:
    """As many as this node has looked: it goes through all chunks, whoever has them."""
    claims.looks = getattr(claims, "looks", -1) + 1
    return claims.looks


def nobody_takes_the_last(patch: pytest.MonkeyPatch) -> None:
    real = claimed.choose_chunks

    def choose(chunks: Any, rank: int, free: Any, me: Any) -> list[int]:
        return real(chunks, rank, free, me) if len(free) > 1 else []

    patch.setattr(claimed, "choose_chunks", choose)


@pytest.mark.parametrize("broken", [every_epochs_claims_count, a_chunk_is_everybodys, nobody_takes_the_last])
def test_a_broken_rule_of_claims_is_found(broken: Callable[[pytest.MonkeyPatch], None]) -> None:
    with pytest.raises(AssertionError, match=r"at \d+\.\d+ s: |did not end|has not ended"):
        for seed in range(SEEDS):
            run(NODES, seed, [Fault("kill", 0, 1, 2, 8, 3.0)], broken, rollout__tasks_per_iteration=12)


def test_weights_and_claims_come_to_the_same_policy() -> None:
    weights = (3.0, 1.0, 1.0)
    assert run(NODES, 3, (), cluster__rank_weights=weights) == undisturbed()
    assert run(NODES, 3, (), cluster__rank_weights=weights, rollout__claims=True) == undisturbed()
