"""Files of the shared directory over a filesystem that misbehaves: what `files` makes of each fault."""

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rollout.storage import files, hashing, retry
from rollout.storage.files import SharedFsError, make_directory, publish, remove_tree
from rollout.storage.lines import append_line
from rollout.storage.once import create_once
from rollout.storage.writer import copy_of, write
from tests.faultfs import FaultFs

LONG_S = 1000.0
LYING = {"lie_rate": 0.3}
FAILING = {"error_rate": 0.1}
pytestmark = pytest.mark.usefixtures("soon_settled")


def facts_of(directory: Path) -> dict[str, dict[str, Any]]:
    """Size and sha256 of the files in `directory`, by other means."""
    found = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    return {
        name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)} for name, data in found.items()
    }


def eventually(call: Callable[[], object], limit_s: float = 60.0) -> float:
    """Seconds until `call()` is true."""
    started_s = time.monotonic()
    while not call():
        assert time.monotonic() - started_s < limit_s
        time.sleep(0.02)
    return time.monotonic() - started_s


# ---- what a client remembers


def test_file_that_was_absent_is_read_at_once_where_listing_asks_the_server(shared: FaultFs) -> None:
    one, two = (mount.path / "a" for mount in shared.mounts)
    shared.set(negative_s=LONG_S)
    assert not two.exists()
    publish(one, b"data")
    assert not two.exists()
    assert files.read(two) == b"data"


def test_listed_file_is_waited_for_until_the_client_no_longer_denies_it(shared: FaultFs) -> None:
    two = shared[1].path / "a"
    shared.set(negative_s=2, stubborn=True)
    assert not two.exists()
    (shared.backing / "a").write_bytes(b"data")  # at once: what is published goes to the disk first
    with pytest.raises(FileNotFoundError):
        files.read(two, fleeting=True)
    assert files.read(two) == b"data"


def test_listed_file_that_is_denied_for_too_long_is_not_found(
    shared: FaultFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "CACHED_S", 0.3)
    one, two = (mount.path / "a" for mount in shared.mounts)
    shared.set(negative_s=LONG_S, stubborn=True)
    assert not two.exists()
    publish(one, b"data")
    with pytest.raises(FileNotFoundError):
        files.read(two)


def test_file_that_is_gone_is_not_waited_for(shared: FaultFs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _s: pytest.fail("waits"))
    for gone in (shared[0].path / "a", shared[0].path / "b" / "a"):
        with pytest.raises(FileNotFoundError):
            files.read(gone)
        with pytest.raises(FileNotFoundError):
            files.listing(gone)
        files.remove(gone)
        remove_tree(gone)


def test_own_publishing_refreshes_an_old_listing(shared: FaultFs) -> None:
    one, two = (mount.path for mount in shared.mounts)
    shared.set(listing_s=LONG_S)
    assert files.listing(two) == []
    publish(one / "flag", b"1", durable=False)
    assert files.listing(two) == []
    publish(two / "beat", b"1", durable=False)
    assert sorted(files.listing(two)) == ["beat", "flag"]


def test_document_that_grew_is_read_whole_with_old_attributes(shared: FaultFs) -> None:
    one, two = (mount.path / "a" for mount in shared.mounts)
    shared.set(attributes_s=LONG_S)
    publish(one, b"x")
    assert two.stat().st_size == 1
    publish(one, b"y" * 300_000)
    assert files.read(two) == b"y" * 300_000
    assert hashing.checksums(two.parent) == facts_of(shared.backing)


def test_two_clients_make_the_same_directories_at_once(shared: FaultFs) -> None:
    shared.set(negative_s=1, attributes_s=1, listing_s=1, **FAILING)

    def make(mount: int) -> None:
        for number in range(30):
            directory = shared[mount].path / f"{number}" / "a"
            make_directory(directory)
            publish(directory / f"{mount}", b"x", durable=False)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(make, range(2))) == [None, None]
    for number in range(30):
        assert sorted(os.listdir(shared.backing / f"{number}" / "a")) == ["0", "1"]


# ---- what is reported, and what happened


@pytest.mark.parametrize("faults", [FAILING, LYING, FAILING | LYING], ids=["errors", "lies", "both"])
def test_nothing_is_lost_or_done_twice(shared: FaultFs, faults: dict[str, float]) -> None:
    shared.set(**faults)
    root = shared[0].path / "run"
    make_directory(root)
    for number in range(30):
        name = f"{number:02d}"
        assert create_once(root / f"once_{name}", json.dumps({"number": number}).encode())
        publish(root / name, name.encode() * 1000)
        assert files.read(root / name) == name.encode() * 1000
        make_directory(root / f"staging_{name}" / "below")
        files.rename(root / f"staging_{name}", root / f"final_{name}")
        append_line(root / "metrics.jsonl", json.dumps({"number": number}))
        if number % 2:
            files.remove(root / name)
            remove_tree(root / f"final_{name}")
    shared.set(error_rate=0, lie_rate=0)
    even = [f"{number:02d}" for number in range(0, 30, 2)]
    once = [f"once_{number:02d}" for number in range(30)]
    left = sorted(name for name in os.listdir(shared.backing / "run") if not files.is_temporary(name))
    assert left == sorted([*even, *once, *(f"final_{name}" for name in even), "metrics.jsonl"])
    found: list[int] = []
    for line in (shared.backing / "run" / "metrics.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line)["number"])
        except ValueError:
            continue  # what a failed attempt left, which readers pass over
    assert found == list(range(30))


def test_line_whose_reply_was_lost_is_not_appended_twice(shared: FaultFs) -> None:
    shared.set(lie_rate=0.6, lies=("write", "fsync", "create"))
    lines = [f'{{"number": {number}}}' for number in range(30)]
    for line in lines:
        append_line(shared[0].path / "metrics.jsonl", line)
    assert (shared.backing / "metrics.jsonl").read_text().splitlines() == lines


def test_error_that_stays_says_how_long_it_was_tried(
    shared: FaultFs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "RETRY_S", 0.3)
    publish(shared[0].path / "a", b"data")
    shared.set(error_rate=1.0, errors=("ESTALE",), errors_below="/a")
    with pytest.raises(SharedFsError, match=r"cannot read .*/a: Stale file handle \(tried for \d+\.\d s\)"):
        files.read(shared[0].path / "a")


def test_checksums_survive_errors(shared: FaultFs) -> None:
    (shared.backing / "below").mkdir()
    for name in "abc":
        (shared.backing / name).write_bytes(random.randbytes(500_000))
    shared.set(**FAILING)
    assert hashing.checksums(shared[0].path) == facts_of(shared.backing)


def test_what_is_there_is_not_denied_where_calls_fail(shared: FaultFs) -> None:
    (shared.backing / "below").mkdir()
    (shared.backing / "a file").touch()
    shared.set(error_rate=0.3)
    place = shared[0].path
    for _ in range(50):
        assert files.is_directory(place) and files.is_directory(place / "below")
        assert files.exists(place / "a file") and not files.is_directory(place / "a file")


def test_what_is_not_there_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "a file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    started_s = time.monotonic()
    for path in ("nothing", "no/thing", "a file/below", "dangling", "dangling/below"):
        assert not files.exists(tmp_path / path) and not files.is_directory(tmp_path / path)
    assert time.monotonic() - started_s < 15.0


# ---- who has created it


def test_large_file_is_copied_and_hashed_where_no_attempt_could_read_all_of_it(
    shared: FaultFs, tmp_path: Path
) -> None:
    data = random.randbytes(1 << 25)  # 256 reads of a client at least
    (shared.backing / "model").write_bytes(data)
    shared.set(error_rate=0.1, errors=("EIO", "ESTALE"))
    assert hashing.file_facts(shared[0].path / "model") == hashing.facts_of(data)
    assert write(tmp_path / "copy", copy_of(shared[1].path / "model")) == hashing.facts_of(data)


# ---- a filesystem that does not take it


def test_frozen_filesystem_is_waited_for(shared: FaultFs) -> None:
    shared.freeze()
    with ThreadPoolExecutor(1) as pool:
        published = pool.submit(publish, shared[0].path / "a", b"data")
        time.sleep(0.3)
        assert not published.done()
        shared.thaw()
        published.result(60)
    assert files.read(shared[1].path / "a") == b"data"


def test_rename_that_copies_ends_with_the_whole_file_and_directory(shared: FaultFs) -> None:
    one, two = (mount.path for mount in shared.mounts)
    shared.set(halves_s=0.1, lie_rate=0.5, lies=("rename",))
    make_directory(one / "staging")
    for name in "abcd":
        publish(one / "staging" / name, name.encode() * 1000)
    files.rename(one / "staging", one / "final")
    for name in "abcd":
        assert files.read(two / "final" / name) == name.encode() * 1000
    assert files.listing(two) == ["final"]


def test_what_another_client_holds_open_is_left_for_the_next_time(
    shared: FaultFs, caplog: pytest.LogCaptureFixture
) -> None:
    tree = shared[0].path / "old"
    (tree / "below").mkdir(parents=True)
    for name in ("a", ".nfs0001", "below/b"):
        (tree / name).touch()
    with caplog.at_level(logging.WARNING):
        remove_tree(tree)
    assert "old is left for the next time: " in caplog.text
    assert os.listdir(tree) == [".nfs0001"]
    (tree / ".nfs0001").unlink()
    remove_tree(tree)
    assert os.listdir(shared.backing) == []


def test_clocks_do_not_matter(shared: FaultFs) -> None:
    shared[0].set(clock_offset_s=3600)
    shared[1].set(clock_offset_s=-3600)
    publish(shared[0].path / "a", b"one")
    publish(shared[1].path / "a", b"two")
    append_line(shared[0].path / "b", "1")
    assert files.read(shared[0].path / "a") == b"two"
    assert not create_once(shared[1].path / "b", b"{}")
