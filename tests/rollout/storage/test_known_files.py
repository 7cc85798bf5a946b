"""What a machine remembers of files that it has hashed."""

import os
import threading
from pathlib import Path

import pytest

from rollout.storage import hashing, known_files


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flagpost" / "checksums"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Every file that is read to be hashed."""
    read: list[Path] = []
    real = hashing.file_facts

    def facts(path: Path, moved: hashing.CountBytes = hashing.unheard) -> hashing.FileFacts:
        read.append(path)
        return real(path, moved)

    monkeypatch.setattr(hashing, "file_facts", facts)
    return read


def old_file(path: Path, content: bytes = b"weights") -> Path:
    """One that has stood still: no clock can age its ctime, so the limit is what changes."""
    path.write_bytes(content)
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_files, "SETTLED_S", -1.0)


@pytest.mark.usefixtures("settled")
def test_file_is_read_once_while_nothing_about_it_changes(tmp_path: Path, reads: list[Path]) -> None:
    path = old_file(tmp_path / "a")
    assert [known_files.file_facts(path) for _ in range(3)] == [hashing.facts_of(b"weights")] * 3
    assert reads == [path]
    other = tmp_path / "b"
    os.link(path, other)  # another name, and the old one's ctime has changed
    assert known_files.checksums(tmp_path, ["a", "b"])["b"] == hashing.facts_of(b"weights")
    assert sorted(reads[1:]) == [path, other]


@pytest.mark.usefixtures("settled")
def test_change_that_keeps_size_and_mtime_is_seen(tmp_path: Path, reads: list[Path]) -> None:
    path = old_file(tmp_path / "a")
    known_files.file_facts(path)
    about = path.stat()
    path.write_bytes(b"WEIGHTS")
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert known_files.file_facts(path) == hashing.facts_of(b"WEIGHTS")
    replacement = old_file(tmp_path / "new", b"weighty")
    os.utime(replacement, ns=(about.st_atime_ns, about.st_mtime_ns))
    replacement.replace(path)
    assert known_files.file_facts(path) == hashing.facts_of(b"weighty")
    assert reads == [path] * 3


def test_young_file_is_not_remembered(tmp_path: Path, reads: list[Path]) -> None:
    path = old_file(tmp_path / "a")
    known_files.file_facts(path)
    known_files.file_facts(path)
    assert reads == [path, path]


@pytest.mark.usefixtures("settled")
def test_file_that_changes_while_it_is_hashed_is_not_remembered(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = old_file(tmp_path / "a")
    monkeypatch.setattr(hashing, "CHUNK_BYTES", 4)
    known_files.file_facts(path, lambda _size: path.write_bytes(b"weights and more"))
    known_files.file_facts(path)
    assert reads == [path, path]


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"mark": 1}'])
def test_damaged_memory_is_as_none(tmp_path: Path, cache: Path, content: bytes) -> None:
    path = old_file(tmp_path / "a")
    facts = known_files.file_facts(path)
    (entry,) = cache.iterdir()
    entry.write_bytes(content)
    assert known_files.file_facts(path) == facts


@pytest.mark.usefixtures("settled")
def test_without_a_cache_directory_files_are_hashed(tmp_path: Path, cache: Path) -> None:
    cache.parent.parent.write_bytes(b"a file is in its place")
    assert known_files.file_facts(old_file(tmp_path / "a")) == hashing.facts_of(b"weights")


@pytest.mark.usefixtures("settled")
@pytest.mark.usefixtures("settled")
def test_user_without_a_home_has_files_hashed(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)  # raises KeyError
    path = old_file(tmp_path / "file", b"1")
    for _ in range(2):
        assert known_files.file_facts(path) == hashing.facts_of(b"1")
    assert len(reads) == 2 and [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("settled")
def test_old_memories_are_forgotten(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_files, "MOST", 8)
    for number in range(30):
        known_files.file_facts(old_file(tmp_path / f"{number}"))
    assert 1 <= len(list(cache.iterdir())) <= 8


@pytest.mark.usefixtures("settled")
def test_many_at_once_agree(tmp_path: Path) -> None:
    path = old_file(tmp_path / "a", os.urandom(1 << 20))
    found: list[hashing.FileFacts] = []
    threads = [threading.Thread(target=lambda: found.append(known_files.file_facts(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [hashing.file_facts(path)] * 8
