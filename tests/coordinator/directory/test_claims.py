"""Claims: one owner for each chunk, in a few operations, with hard links and without."""

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.claims import Claims, left_over
from coordinator.directory.file_names import Claim, parse_claim_name
from coordinator.directory.layout import RunDir
from rollout.storage import files

LINKS_OF_GLUSTERFS = 35
"""Hard links to one file, where its brick is on ext4."""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path)
    files.make_directory(made.claims)
    return made


@pytest.fixture(params=["hard links", "no hard links"])
def _links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    if request.param == "no hard links":
        monkeypatch.setattr(os, "link", refuse)


def claims(run_dir: RunDir, rank: int, epoch: int = 2) -> Claims:
    return Claims(run_dir, epoch, 5, 2, rank)


def test_a_claims_name_is_parsed_as_it_is_written() -> None:
    claim = Claim(2, 5, 2, 17)
    assert claim.name == "e0002.i000005.p02.c000017" and parse_claim_name(claim.name) == claim
    assert parse_claim_name("e0002.i000005.p02.r0017.ok") is None


@pytest.mark.usefixtures("_links")
def test_a_chunk_has_one_owner(run_dir: RunDir) -> None:
    first, second = claims(run_dir, 0), claims(run_dir, 1)
    assert first.take([3, 4]) == 3
    assert second.take([3, 4]) == 4
    assert second.look().claimed == {3, 4} and claims(run_dir, 2).take([3, 4]) is None


@pytest.mark.usefixtures("_links")
def test_a_chunk_that_was_refused_is_taken_although_a_listing_does_not_show_it_yet(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claims(run_dir, 0), claims(run_dir, 1)
    assert [first.take([number]) for number in (3, 4, 5)] == [3, 4, 5]
    monkeypatch.setattr(files, "listing", lambda _directory: [])
    assert second.take([3, 4, 5, 6]) is None and second.look().claimed == {3, 4}
    assert second.take([5, 6]) == 6


def test_a_claim_whose_file_a_newer_epoch_has_removed_is_made_with_another(run_dir: RunDir) -> None:
    mine = claims(run_dir, 0)
    assert mine.take([0]) == 0
    for path in left_over(run_dir, 3):
        path.unlink()
    assert mine.take([1]) == 1 and mine.look().claimed == {1}


@pytest.mark.usefixtures("_links")
def test_claims_of_another_epoch_move_nothing(run_dir: RunDir) -> None:
    assert claims(run_dir, 0, epoch=1).take([0]) == 0
    now = claims(run_dir, 0)
    assert now.look().claimed == set() and now.take([0]) == 0
    old = left_over(run_dir, 2)
    assert old and {files.published_name(path.name) for path in old} == {Claim(1, 5, 2, 0).name}
    assert left_over(run_dir, 2, 5) == old and len(left_over(run_dir, 2, 6)) == 2 * len(old)


@pytest.mark.usefixtures("_links")
@pytest.mark.parametrize("wanted", [1, 40])
def test_many_that_want_the_same_get_each_chunk_once_in_six_operations_a_claim(
    run_dir: RunDir, wanted: int
) -> None:
    got: list[list[int]] = [[] for _ in range(8)]
    ready = threading.Barrier(8)

    def want(rank: int) -> None:
        mine = claims(run_dir, rank)
        ready.wait()
        while free := sorted(set(range(wanted)) - mine.look().claimed):
            if (number := mine.take(free)) is not None:
                got[rank].append(number)

    files.operations.clear()
    threads = [threading.Thread(target=want, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for of in got for number in of) == list(range(wanted))


@pytest.mark.parametrize("loses", ["nothing", "the reply"])
def test_one_call_makes_at_most_six_operations(
    run_dir: RunDir, loses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing included, after the first, which also writes the file that all claims are links to."""
    for number in (1, 2, 3):
        assert claims(run_dir, 0).take([number]) == number
    mine = claims(run_dir, 1)
    assert mine.take([7]) == 7
    if loses == "the reply":
        monkeypatch.setattr(os, "link", _link_that_loses_its_reply(os.link))
    files.operations.clear()
    mine.look()
    assert mine.take([1, 2, 3]) is None  # all were claimed between the listing and the link
    assert sum(files.operations.values()) <= 6
    files.operations.clear()
    mine.look()
    assert mine.take([9]) == 9
    assert sum(files.operations.values()) <= 3


def _link_that_loses_its_reply(link: Callable[..., None]) -> Callable[..., None]:
    def lose(source: Path, target: Path) -> None:
        link(source, target)
        raise OSError(errno.EIO, "the reply was lost")

    return lose


def test_what_a_rank_has_made_is_told(run_dir: RunDir) -> None:
    told: list[Path] = []
    Claims(run_dir, 2, 5, 2, 1, told.append).take([4])
    assert sorted(told) == sorted(run_dir.claims.iterdir())


def test_rank_claims_more_chunks_than_a_file_may_have_links(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: Any, target: Any) -> None:
        if os.stat(source).st_nlink > LINKS_OF_GLUSTERFS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    told: list[Path] = []
    mine = Claims(run_dir, 2, 5, 2, 1, told.append)
    assert [mine.take([chunk]) for chunk in range(100)] == list(range(100))
    assert mine.look().claimed == set(range(100))
    for path in told:
        path.unlink()
    assert not list(run_dir.claims.iterdir())


def test_a_mount_that_has_a_new_file_only_once_it_is_fsynced_takes_claims(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it shows the file some time after its close, and refuses links to it until then."""
    real_link, real_fsync, fsynced = os.link, os.fsync, set[int]()

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        fsynced.add(os.fstat(descriptor).st_ino)

    def link(source: Any, target: Any) -> None:
        if os.stat(source).st_ino not in fsynced:
            raise FileNotFoundError(errno.ENOENT, "not there yet", source)
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr("rollout.storage.retry.is_listed", lambda _path: False)
    mine = claims(run_dir, 0)
    assert [mine.take([chunk]) for chunk in range(4)] == [0, 1, 2, 3]


def test_a_mount_that_denies_the_file_of_each_link_takes_claims_all_the_same(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may try again and again what never works."""
    links = 0

    def link(source: Any, _target: Any) -> None:
        nonlocal links
        links += 1
        raise FileNotFoundError(errno.ENOENT, "not there yet", source)

    monkeypatch.setattr(os, "link", link)
    monkeypatch.setattr("rollout.storage.retry.is_listed", lambda _path: False)
    mine, other = claims(run_dir, 0), claims(run_dir, 1)
    assert [mine.take([chunk]) for chunk in range(4)] == [0, 1, 2, 3] and links == 2
    assert other.take([3, 4]) == 4
