"""The slots of a share that grows: what a node claims, and how long it leaves the rest to others."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from coordinator.collector.claimed_slots import ClaimedSlots
from coordinator.collector.guest_chunks import Contribution, GuestChunks, GuestsPresent, OwnChunks
from coordinator.directory.claims import Claims
from coordinator.directory.layout import GUESTS, RunDir
from coordinator.protocol.chunks import Pace, cut_into_chunks
from rollout.engine_places import Meter
from rollout.slots import Slot
from rollout.storage import files

FAST, SLOW = Pace(1000, 1.0, 4), Pace(1, 1.0, 4)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    files.make_directory(made.claims)
    return made


async def slots_of(numbers: Sequence[int]) -> list[Slot]:
    return [Slot(number, {"id": f"t{number}", "prompt": "1", "answer": "1"}, 0) for number in numbers]


def source(run_dir: RunDir, rank: int, slots: int, paces: dict[int, Pace]) -> ClaimedSlots:
    plan = {**cut_into_chunks(range(slots), {}, [0, 1], paces).as_json(), "spare": []}
    claims = Claims(run_dir, 2, 1, 2, rank)
    return ClaimedSlots(plan, claims, rank, 0, [], slots_of, Meter(4), 0.05, lambda: None)


async def next_of(claimed: ClaimedSlots) -> int | None:
    """Take a slot, and end its group at once."""
    slot = await claimed.take(lambda: False)
    if slot is None:
        return None
    claimed.end(slot.tombstone("over"))
    return slot.number


def test_node_that_leaves_the_rest_to_others_waits_and_does_not_work(run_dir: RunDir) -> None:
    slow = source(run_dir, 1, 4, {0: FAST, 1: SLOW})
    fast = Claims(run_dir, 2, 1, 2, 0)

    async def others() -> None:
        await asyncio.sleep(0.2)
        while fast.take([number for number in range(4) if number not in fast.look().claimed]) is not None:
            pass

    async def main() -> None:
        taking = asyncio.create_task(next_of(slow))
        await others()
        assert await taking is None

    asyncio.run(main())
    assert slow.waited_s > 0.1 and not slow.is_open


def test_claims_that_a_newer_epoch_has_removed_are_not_made_again(run_dir: RunDir) -> None:
    claimed = source(run_dir, 0, 6, {})

    async def main() -> list[int]:
        made: list[int] = []
        while (number := await next_of(claimed)) is not None:
            made.append(number)
            for path in run_dir.claims.iterdir():
                path.unlink()
        return made

    assert sorted(asyncio.run(asyncio.wait_for(main(), 60))) == list(range(6))


def test_guest_that_leaves_gives_out_no_slot_more(run_dir: RunDir) -> None:
    claims = Claims(run_dir, 2, 1, 2, GUESTS)
    plan = {**cut_into_chunks(range(12), {}, [0], {}).as_json(), "spare": [12, 13]}
    own_chunks = OwnChunks(claims, Meter(4), lambda _group: True)
    guest = ClaimedSlots(
        plan, claims, GUESTS, 0, [], slots_of, Meter(4), 0.05, lambda: None, own_chunks=own_chunks
    )

    async def main() -> list[int | None]:
        first = await next_of(guest)
        guest.leave()
        return [first, await next_of(guest)]

    first, second = asyncio.run(main())
    assert first is not None and second is None
    assert guest.needed <= 1 and not guest.is_open and not guest.has_spare


def test_master_waits_for_a_late_guest_no_longer_than_for_late_groups_of_its_own(run_dir: RunDir) -> None:
    """The collector ends what is not open, once enough of the needed groups count, after the grace period."""
    guest, mine = Claims(run_dir, 2, 1, 2, GUESTS), Claims(run_dir, 2, 1, 2, 0)
    plan = {**cut_into_chunks(range(4), {}, [0], {}).as_json(), "spare": []}
    presence = GuestsPresent((), {GUESTS: 0})
    guests = GuestChunks(mine, lambda: presence, 60.0)
    master = ClaimedSlots(
        plan, mine, 0, 0, [], slots_of, Meter(4), 0.01, lambda: None,
        rest_of=lambda chunk: (chunk.slots, Contribution()), guests=guests,
    )  # fmt: skip
    guest.take_part(GUESTS)
    assert guest.take([3]) == 3

    async def main() -> None:
        nonlocal presence
        assert [await next_of(master) for _ in range(3)] == [0, 1, 2] and master.is_open
        last = asyncio.create_task(next_of(master))
        while master.is_open:
            await asyncio.sleep(0)
        assert master.needed == 4 and master.expected == 3 and not last.done()
        presence = GuestsPresent([GUESTS], {})
        assert await last == 3, "the guest was lost after all"
        assert await next_of(master) is None and master.needed == 4

    asyncio.run(asyncio.wait_for(main(), 60))
