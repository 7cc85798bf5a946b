"""A file is created once where calls fail, replies are lost and creators die."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout.storage import files, once
from rollout.storage.once import create_once
from tests.faultfs import FaultFs
from tests.rollout.storage.test_files_faults import FAILING, LYING

pytestmark = pytest.mark.usefixtures("soon_settled")


def race(shared: FaultFs, rounds: int) -> None:
    """Two clients claim the same numbers; of each, exactly one has won, and its record is whole."""
    claimed = [shared[mount].path for mount in range(2)]
    barrier = threading.Barrier(2)

    def claim(mount: int) -> list[bool]:
        won: list[bool] = []
        for number in range(rounds):
            barrier.wait(60)
            record = json.dumps({"by": mount, "number": number, "more": "x" * 200})
            won.append(create_once(claimed[mount] / f"{number}", record.encode()))
        return won

    with ThreadPoolExecutor(2) as pool:
        winners = list(pool.map(claim, range(2)))
    shared.set(error_rate=0, lie_rate=0)
    for number in range(rounds):
        by = json.loads((shared.backing / f"{number}").read_bytes())["by"]
        assert [winners[0][number], winners[1][number]] == [by == 0, by == 1]


@pytest.mark.parametrize("faults", [{}, FAILING, LYING], ids=["calm", "errors", "lies"])
@pytest.mark.parametrize("no_links", ["", "EPERM"], ids=["links", "no links"])
def test_race_has_one_winner_who_knows_it(shared: FaultFs, no_links: str, faults: dict[str, float]) -> None:
    shared.set(no_links=no_links, **faults)
    race(shared, 40 if no_links and faults else 100)


@pytest.mark.parametrize("torn", [b"", b'{"iteration": 1, "ta'], ids=["empty", "half"])
@pytest.mark.parametrize("no_links", ["", "EPERM"], ids=["links", "no links"])
def test_torn_file_is_created_anew(shared: FaultFs, no_links: str, torn: bytes) -> None:
    shared.set(no_links=no_links)
    path = shared[0].path / "iteration.json"
    path.write_bytes(torn)
    assert create_once(path, b'{"iteration": 1}')
    assert files.read(path) == b'{"iteration": 1}'


def test_file_that_appears_slowly_is_waited_for(shared: FaultFs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "TORN_S", 30.0)
    one, two = (mount.path / "a" for mount in shared.mounts)
    with open(one, "xb", buffering=0) as slow, ThreadPoolExecutor(1) as pool:
        other = pool.submit(create_once, two, b'{"by": 2}')
        slow.write(b'{"by"')
        assert not other.done()
        slow.write(b": 1}")
        assert other.result(60) is False
    assert files.read(two) == b'{"by": 1}'


@pytest.mark.parametrize("claim", [b"", b"half of a claim"], ids=["empty", "half"])
def test_claim_of_a_dead_creator_is_skipped(shared: FaultFs, claim: bytes) -> None:
    shared.set(no_links="EPERM")
    path = shared[0].path / "a"
    path.with_name(".a.claim0.tmp").write_bytes(claim)
    assert create_once(path, b'{"by": 2}')
    assert files.read(path) == b'{"by": 2}'


def test_file_is_published_for_a_creator_that_died_before_it_could(shared: FaultFs) -> None:
    shared.set(no_links="EPERM")
    one, two = (mount.path / "a" for mount in shared.mounts)
    assert create_once(one, b'{"by": 1}')
    one.unlink()
    assert create_once(two, b'{"by": 2}') is False
    assert files.read(one) == b'{"by": 1}'


def test_withdrawn_file_is_created_again(shared: FaultFs) -> None:
    shared.set(no_links="EPERM")
    path = shared[0].path / "manifest.json"
    assert create_once(path, b'{"parts": 1}')
    once.withdraw(path, path.with_suffix(".damaged"))
    assert create_once(path, b'{"parts": 2}')
    assert files.read(path.with_suffix(".damaged")) == b'{"parts": 1}'
