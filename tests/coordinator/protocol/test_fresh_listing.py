"""Listings on a client that believes an old one of its own: when it is doubted, and what then helps."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.protocol import fresh_listing
from coordinator.protocol.fresh_listing import FreshListing
from rollout.storage import files
from tests.faultfs import FaultFs, unavailable


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[FaultFs]:
    if reason := unavailable():
        pytest.skip(reason)
    with FaultFs(tmp_path / "fs", 2) as shared:
        yield shared


def seen_after_s(listings: FreshListing, reader: Path, writer: Path, name: str) -> float:
    """Return how long another client's name stays hidden from one that lists every 10 ms."""
    (writer / name).touch()
    began_s = time.monotonic()
    while name not in listings.names(reader):
        assert time.monotonic() < began_s + 60
        time.sleep(0.01)
    return time.monotonic() - began_s


def test_client_that_believes_its_own_listing_is_found_out_and_seen_through(shared: FaultFs) -> None:
    shared.set(listing_s=8.0)
    reader, writer = (mount.path for mount in shared.mounts)
    listings = FreshListing(1)
    for number in range(4):
        seen_after_s(listings, reader, writer, f"early{number}")
    assert listings.is_doubted and listings.unchanged_s >= 0.5
    assert max(seen_after_s(listings, reader, writer, f"later{number}") for number in range(3)) < 4.0
    assert not [name for name in os.listdir(shared.backing) if name.startswith(".look")]


def test_each_directory_is_doubted_by_itself(shared: FaultFs) -> None:
    """Two crews wait for each other's files, and look at their own nodes meanwhile."""
    shared.set(listing_s=30.0)
    reader, writer = (mount.path for mount in shared.mounts)
    for name in ("nodes", "checkpoints"):
        (writer / name).mkdir()
    listings = FreshListing(1)

    def sees(name: str) -> bool:
        listings.names(reader / "nodes")
        return name in listings.names(reader / "checkpoints")

    assert not sees("iteration_000001")
    (writer / "checkpoints" / "iteration_000001").touch()
    began_s = time.monotonic()
    while not sees("iteration_000001"):
        assert time.monotonic() < began_s + 20.0, "that is long before the client lists by itself"
        time.sleep(0.01)


def test_client_whose_listings_are_true_is_believed(shared: FaultFs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_listing, "FIRST_LOOK_S", 60.0)
    reader, writer = (mount.path for mount in shared.mounts)
    listings = FreshListing(1)
    for number in range(5):
        seen_after_s(listings, reader, writer, f"name{number}")
    assert listings.refreshed == 0
    for number in range(3):  # what is made between the two listings of a doubt is no proof
        monkeypatch.setattr(files, "mark", lambda _path, n=number: (writer / f"late{n}").touch())
        listings._last[reader].look_s = 0.0
        listings.names(reader)
        seen_after_s(listings, reader, writer, f"true{number}")
    assert listings.refreshed == 3
    assert not listings.is_doubted


def test_client_whose_own_names_do_not_help_is_asked_more_and_more_rarely(shared: FaultFs) -> None:
    """As rclone does, it puts what it makes itself into the listing that it has."""
    shared.set(listing_s=3.0, keeps_listing=True)
    reader, writer = (mount.path for mount in shared.mounts)
    listings = FreshListing(1)
    listings.names(reader)
    assert seen_after_s(listings, reader, writer, "name") > 1.0
    assert not listings.is_doubted and 1 <= listings.refreshed <= 5


def test_listing_is_worth_it_where_no_name_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fresh_listing, "FIRST_LOOK_S", -1.0)
    (tmp_path / ".look.r0001.tmp").mkdir()
    (tmp_path / "name").touch()
    listings = FreshListing(1)
    assert all("name" in listings.names(tmp_path) for _ in range(3)) and listings.refreshed == 2
