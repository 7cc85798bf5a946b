"""Copies of models on a machine: made once, believed only when whole, removed only when nobody uses them."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.published import Incomplete
from coordinator.machine import copy_entries
from coordinator.machine import store as module
from coordinator.machine.copy_entries import StoreError
from coordinator.machine.filesystems import Mount
from coordinator.machine.store import Store
from rollout.storage import delta, retry
from rollout.storage.files import SharedFsError, file_names
from rollout.storage.hashing import FileFacts, checksums, unheard
from rollout.storage.writer import FileSink

HOLDS = """
import os, sys, time
from pathlib import Path
from coordinator.machine import store
from coordinator.machine.filesystems import Mount
from rollout.storage.hashing import checksums
store.find_mount = lambda path: Mount("nfs4", "", "/")
source, below, pause_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
copied = 0
def moved(size):
    global copied
    copied += size
    if size:
        os.write(1, b"copying\\n")  # at once, from several threads
        time.sleep(pause_s)
files = checksums(source, names=[name for name in os.listdir(source) if not name.startswith(".")])
holder = store.Store(below)
path = holder.hold(source, files, moved)
print("held", copied, path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path counts as shared."""
    monkeypatch.setattr(module, "find_mount", lambda _path: Mount("nfs4", "server:/export", "/"))
    monkeypatch.setattr(retry, "RETRY_S", 0.2)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """The directory for copies."""
    path = tmp_path / "local"
    path.mkdir()
    return path


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    """Make a model's directory of 1,000 bytes and something that nobody needs."""

    def make(name: str) -> Path:
        path = tmp_path / "shared" / name
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(name.encode() * (990 // len(name)))
        (path / "config.json").write_bytes(b"{}".ljust(1000 - 990 // len(name) * len(name)))
        (path / ".verified.json").write_text("{}")
        return path

    return make


def files_of(source: Path) -> dict[str, FileFacts]:
    return checksums(source, names=[name for name in file_names(source) if not name.startswith(".")])


def test_model_beside_weights_in_another_layout_is_used_by_links_to_its_own_files(
    model: Callable[[str], Path], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_mount", lambda _path: Mount("ext4", "/dev/sda", "/"))
    source, store = model("a"), Store(str(local))
    assert hold(store, source) == source
    wanted = files_of(source)
    (source / "templates").mkdir()
    (source / "templates" / "tool.jinja").write_text("{{ tools }}")
    wanted |= checksums(source, names=["templates/tool.jinja"])
    (source / "consolidated.safetensors").write_bytes(b"the makers' own")
    linked = store.hold(source, wanted, unheard)
    assert sorted(path.name for path in linked.iterdir()) == ["config.json", "model.safetensors", "templates"]
    assert all((linked / name).is_symlink() and checksums(linked, names=[name]) for name in wanted)
    assert checksums(linked, names=list(wanted)) == wanted


def hold(store: Store, source: Path, moved: Callable[[int], object] = unheard) -> Path:
    return store.hold(source, files_of(source), moved)


def folder(local: Path) -> Path:
    return local / f"flagpost-store-{os.getuid()}"


def copies(local: Path) -> int:
    return len(list(folder(local).iterdir()))


@contextlib.contextmanager
def process(source: Path, local: Path, pause_s: float = 0.0) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the copy of `source`, and sleeps after each piece that it copies."""
    argv = [sys.executable, "-c", HOLDS, str(source), str(local), str(pause_s)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, cwd=Path(__file__).parents[3], **pipes) as other:
        try:
            yield other
        finally:
            other.kill()


def line(other: subprocess.Popen[str], word: str) -> list[str]:
    """Wait for the line of a process that begins with `word`."""
    assert other.stdout is not None
    return next(words for text in other.stdout if (words := text.split())[0] == word)


# ---- a copy


def test_copy_has_the_wanted_files_and_is_made_once(model: Callable[[str], Path], local: Path) -> None:
    source, moved = model("a"), list[int]()
    store = Store(str(local))
    copy = hold(store, source, moved.append)
    assert sorted(os.listdir(copy)) == ["config.json", "model.safetensors"] and sum(moved) == 1000
    assert files_of(copy) == files_of(source)
    assert folder(local) in copy.parents and folder(local).stat().st_mode & 0o777 == 0o700
    assert hold(store, source, moved.append) == hold(Store(str(local)), source, moved.append) == copy
    assert sum(moved) == 1000


def test_where_locks_are_refused_it_says_so_at_once_and_removes_nothing(
    model: Callable[[str], Path], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = hold(Store(str(local)), model("a"))

    def refuse(_descriptor: int, _kind: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    other = Store(str(local))
    with pytest.raises(StoreError, match=r"locks are refused .*No locks available.*cluster.local_dir=DIR"):
        hold(other, model("b"))
    with pytest.raises(StoreError, match="locks are refused"):
        other.begin(1)
    other.close()
    copy_entries.make_room(folder(local), 2**60)
    assert kept.is_dir() and not list(folder(local).glob(f"{copy_entries.NEW}*"))


def test_equal_files_of_two_directories_are_one_copy(model: Callable[[str], Path], local: Path) -> None:
    source = model("a")
    other = source.with_name("b")
    shutil.copytree(source, other)
    store = Store(str(local))
    assert hold(store, source) == hold(store, other)
    (other / "config.json").write_text('{"vocab_size": 7}')
    assert hold(store, source) != hold(store, other), "the same weights, but another configuration"


def test_model_on_a_local_filesystem_is_read_in_place_unless_its_files_are_links_to_a_shared_one(
    model: Callable[[str], Path], local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mount(path: Path) -> Mount:
        return Mount("nfs4" if path.is_relative_to(tmp_path / "shared") else "ext4", "", "/")

    monkeypatch.setattr(module, "find_mount", mount)
    source, here, links = model("a"), tmp_path / "here", tmp_path / "links"
    shutil.copytree(source, here)
    links.mkdir()
    for name in os.listdir(source):
        (links / name).symlink_to(source / name)
    store = Store(str(local))
    assert hold(store, here) == here and not folder(local).exists()
    copy = hold(store, links)
    assert folder(local) in copy.parents and not (copy / "model.safetensors").is_symlink()


def test_store_is_in_the_directory_for_temporary_files_unless_told_otherwise(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tmp_path / f"flagpost-store-{os.getuid()}" in hold(Store(), model("a")).parents


# ---- what is not believed


@pytest.mark.parametrize("damage", [b"x", b"", b"b" * 990], ids=["short", "empty", "other bytes"])
def test_file_with_another_checksum_is_refused_by_name_and_nothing_of_it_stays(
    model: Callable[[str], Path], local: Path, damage: bytes
) -> None:
    source = model("a")
    wanted = files_of(source)
    (source / "model.safetensors").write_bytes(damage)
    store = Store(str(local))
    with pytest.raises(Incomplete, match=rf"a/model.safetensors was read as {len(damage)} bytes.* 990 bytes"):
        store.hold(source, wanted, unheard)
    assert copies(local) == 0
    (source / "model.safetensors").write_bytes(b"a" * 990)
    assert checksums(store.hold(source, wanted, unheard)) == wanted


def test_file_that_is_gone_is_named(model: Callable[[str], Path], local: Path) -> None:
    source = model("a")
    wanted = files_of(source)
    (source / "config.json").unlink()
    with pytest.raises(Incomplete, match=r"a/config\.json is gone"):
        Store(str(local)).hold(source, wanted, unheard)


def test_copy_that_is_given_up_leaves_nothing(model: Callable[[str], Path], local: Path) -> None:
    class RowEnded(Exception):
        pass

    def moved(_size: int) -> None:
        raise RowEnded

    with pytest.raises(RowEnded):
        hold(Store(str(local)), model("a"), moved)
    assert copies(local) == 0


def test_error_of_the_shared_filesystem_is_no_want_of_room(
    model: Callable[[str], Path], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model("a")
    wanted = files_of(source)

    def fails(*_arguments: Any) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with pytest.raises(SharedFsError, match=r"cannot read .*shared/a/"):
        Store(str(local)).hold(source, wanted, unheard)


def test_killed_copier_leaves_nothing_that_is_believed(model: Callable[[str], Path], local: Path) -> None:
    source = model("a")
    with process(source, local, pause_s=1000) as other:
        line(other, "copying")
        other.kill()
        other.wait()
    [entry] = folder(local).iterdir()
    assert os.listdir(entry) == ["part"] and os.listdir(entry / "part")
    assert files_of(hold(Store(str(local)), source)) == files_of(source)
    assert os.listdir(entry) == ["copy"]


def test_what_was_copied_before_the_machine_was_started_is_not_believed(
    model: Callable[[str], Path], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = model("a")
    before = hold(Store(str(local)), source)
    monkeypatch.setattr(module, "boot", lambda: "another")
    assert hold(Store(str(local)), source) != before


# ---- deltas


@pytest.fixture
def changed(model: Callable[[str], Path]) -> tuple[Path, Path]:
    """Two models' directories, the second one with a delta to the first."""
    before, after = model("a"), model("ab")
    old, new = ((path / "model.safetensors").read_bytes() for path in (before, after))
    change = delta.encode([old], [new], worth=10.0)
    assert change is not None
    (after / ".model.safetensors.delta").write_bytes(change)
    return before, after


def hold_after(local: Path, before: Path, after: Path, moved: Callable[[int], object] = unheard) -> Path:
    """The copy of `after`, with the help of the copy of `before`."""
    older = {"model.safetensors": before / "model.safetensors"}
    return Store(str(local)).hold(after, files_of(after), moved, older)


def test_file_is_made_of_the_copy_before_and_the_delta_and_not_read(
    changed: tuple[Path, Path], local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = changed
    wanted = files_of(after)
    old = hold(Store(str(local)), before)
    (after / "model.safetensors").unlink()
    copy = Store(str(local)).hold(after, wanted, unheard, {"model.safetensors": old / "model.safetensors"})
    assert checksums(copy) == wanted
    assert "is of no use" not in caplog.text


def test_file_that_has_not_changed_is_linked_to_the_copy_before(
    changed: tuple[Path, Path], local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = changed
    (after / ".model.safetensors.delta").unlink()
    (after / "model.safetensors").write_bytes((before / "model.safetensors").read_bytes())
    (after / "config.json").write_bytes(b"{ }")
    wanted = files_of(after)
    old = hold(Store(str(local)), before)
    (after / "model.safetensors").unlink()
    copy = Store(str(local)).hold(after, wanted, unheard, {"model.safetensors": old / "model.safetensors"})
    assert checksums(copy) == wanted and "is of no use" not in caplog.text
    assert (copy / "model.safetensors").samefile(old / "model.safetensors")


@pytest.mark.parametrize(
    "what", ["copy is gone", "copy differs", "delta is damaged", "delta is cut", "delta is gone"]
)
def test_whole_file_is_read_where_copy_or_delta_is_of_no_use(
    changed: tuple[Path, Path], local: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    before, after = changed
    old = hold(Store(str(local)), before)
    weights, change = old / "model.safetensors", after / ".model.safetensors.delta"
    if what == "copy is gone":
        shutil.rmtree(old)
    elif what == "copy differs":
        weights.write_bytes(b"x" + weights.read_bytes()[1:])
    elif what == "delta is damaged":
        change.write_bytes(b"?" + change.read_bytes()[1:])
    elif what == "delta is cut":
        change.write_bytes(change.read_bytes()[:-20])
    else:
        change.unlink()
    assert files_of(hold_after(local, old, after)) == files_of(after)
    (line,) = [line.getMessage() for line in caplog.records if "is of no use" in line.getMessage()]
    assert str(change) in line and str(weights) in line and line.endswith("; the whole file is read")


def test_delta_helps_to_no_file_that_is_not_as_it_should_be(changed: tuple[Path, Path], local: Path) -> None:
    before, after = changed
    wanted = files_of(after)
    (after / "model.safetensors").write_bytes(b"c" * 990)
    (after / ".model.safetensors.delta").unlink()
    with pytest.raises(Incomplete, match="sha256"):
        Store(str(local)).hold(after, wanted, unheard, {"model.safetensors": before / "model.safetensors"})
    assert copies(local) == 0


def test_copy_is_found_by_its_files_if_it_is_there(model: Callable[[str], Path], local: Path) -> None:
    source, store = model("a"), Store(str(local))
    assert store.find(files_of(source)) is None
    assert hold(store, source) == store.find(files_of(source)) == Store(str(local)).find(files_of(source))


# ---- several threads of a process


def test_row_that_needs_what_is_being_fetched_waits_for_it_and_reads_nothing_twice(
    model: Callable[[str], Path], local: Path
) -> None:
    source, store = model("a"), Store(str(local))
    copying, go_on, sizes = threading.Event(), threading.Event(), list[int]()

    def fetched(size: int) -> None:
        sizes.append(size)
        copying.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=hold, args=(store, source, fetched))
    thread.start()
    assert copying.wait(30)

    def waited(size: int) -> None:
        sizes.append(size)
        go_on.set()

    copy = hold(store, source, waited)
    thread.join()
    assert sum(sizes) == 1000 and files_of(copy) == files_of(source)
    store.close()
    assert copy_entries.make_room(folder(local), 1 << 60) and copies(local) == 0, "no lock is left"


# ---- several processes of one machine


def test_processes_that_want_a_model_at_once_copy_it_once(model: Callable[[str], Path], local: Path) -> None:
    source = model("a")
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(process(source, local, pause_s=0.2)) for _ in range(3)]
        said = [line(other, "held") for other in others]
    assert sorted(int(copied) for _, copied, _ in said) == [0, 0, 1000]
    assert len({path for _, _, path in said}) == 1


def test_one_that_waits_for_anothers_copy_is_ended_by_its_check(
    model: Callable[[str], Path], local: Path
) -> None:
    class RowEnded(Exception):
        pass

    def moved(size: int) -> None:
        assert size == 0
        raise RowEnded

    source = model("a")
    with process(source, local, pause_s=1000) as other:
        line(other, "copying")
        with pytest.raises(RowEnded):
            hold(Store(str(local)), source, moved)
        assert other.poll() is None


# ---- room


@pytest.fixture
def disk(local: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk of `size` bytes for the directory for copies."""
    found = SimpleNamespace(size=1 << 40)

    def usage(path: Path) -> SimpleNamespace:
        assert path == folder(local)
        used = sum(file.stat().st_size for file in local.rglob("*") if file.is_file())
        return SimpleNamespace(free=found.size - used)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return found


def until_the_clock_goes_on(directory: Path) -> None:
    """Wait until a file of now is newer than one of before: a filesystem's clock may be coarse."""
    (mark := directory / "mark").touch()
    before = mark.stat().st_mtime_ns
    while mark.stat().st_mtime_ns == before:
        mark.touch()


def test_copies_that_no_process_uses_go_the_least_recently_used_first(
    model: Callable[[str], Path], local: Path, disk: SimpleNamespace
) -> None:
    disk.size = 3999
    sources, copied = [model(name) for name in "abcd"], list[Path]()
    for source in sources[:3]:
        store = Store(str(local))
        copied.append(hold(store, source))
        if source == sources[1]:
            until_the_clock_goes_on(local)
            hold(store, sources[0])  # used again: now b is the oldest
        for descriptor in store._held.values():  # as the end of a process does
            os.close(descriptor)
        until_the_clock_goes_on(local)
    copied.append(hold(Store(str(local)), sources[3]))
    assert [path.is_dir() for path in copied] == [True, False, True, True]


def test_full_disk_takes_what_nobody_uses_and_never_what_a_living_process_uses(
    model: Callable[[str], Path], local: Path, disk: SimpleNamespace
) -> None:
    disk.size = 2500
    used, unused, wanted = (model(name) for name in "abc")
    with process(used, local) as other:
        held = Path(line(other, "held")[2])
        gone = Store(str(local))
        free = hold(gone, unused)
        gone.close()
        copy = hold(Store(str(local)), wanted)
        assert held.is_dir() and copy.is_dir() and not free.exists()
        with pytest.raises(StoreError) as error:
            hold(Store(str(local)), model("d"))
        text = str(error.value)
        assert "shared/d cannot be copied" in text and str(folder(local)) in text
        assert "cluster.local_dir=DIR" in text and "\n" not in text
    assert held.is_dir(), "its process has ended, but there was no need of room"
    assert hold(Store(str(local)), model("e")).is_dir() and not held.exists()


def test_disk_with_room_for_what_is_held_is_enough(
    model: Callable[[str], Path], local: Path, disk: SimpleNamespace
) -> None:
    disk.size = module.HELD * 1000
    store = Store(str(local))
    for name in "abcdef":
        assert hold(store, model(name)).is_dir()
    assert copies(local) == module.HELD


def test_disk_that_fills_meanwhile_is_named(
    model: Callable[[str], Path], local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileSink, "write", write)
    with pytest.raises(StoreError, match=r"No space left on device: .*cluster\.local_dir=DIR"):
        hold(Store(str(local)), model("a"))
    assert copies(local) == 0


def test_store_holds_the_last_copies_and_leaves_few_behind(model: Callable[[str], Path], local: Path) -> None:
    store = Store(str(local))
    held = [hold(store, model(name)) for name in "abcdefg"]
    assert [path.is_dir() for path in held[-module.HELD :]] == [True] * module.HELD
    assert copies(local) <= module.HELD + copy_entries.UNUSED + 1
    store.close()
    assert copies(local) == copy_entries.UNUSED and held[-1].is_dir(), "the next start needs the last one"


# ---- copies that a trainer writes


def written(store: Store, content: bytes) -> dict[str, FileFacts]:
    """What a trainer has put where the store has told it to."""
    part = store.begin(1000)
    (part / "model.safetensors").write_bytes(content)
    return checksums(part)


def test_what_a_trainer_wrote_is_held_and_found_by_who_wants_these_files(
    model: Callable[[str], Path], local: Path
) -> None:
    source, store = model("one"), Store(str(local))
    wanted = files_of(source)
    part = store.begin(1000)
    shutil.copytree(source, part, dirs_exist_ok=True)
    copy = store.adopt(wanted)
    assert copy is not None and files_of(copy) == wanted and not part.exists()
    assert hold(store, source, moved=lambda size: pytest.fail(f"{size} bytes were copied again")) == copy
    assert hold(Store(str(local)), source) == copy, "nodes of one machine share it"
    store.remove(copy)
    assert copy.is_dir(), "another one uses it"


def test_nodes_of_one_machine_that_have_the_same_policy_keep_it_once(local: Path) -> None:
    stores = [Store(str(local)) for _ in range(3)]
    facts = [written(store, b"the same") for store in stores]
    copies_of = {store.adopt(of) for store, of in zip(stores, facts, strict=True)}
    assert len(copies_of) == 1 and copies(local) == 1
    [copy] = copies_of
    assert copy is not None and (copy / "model.safetensors").read_bytes() == b"the same"
    for store in stores:
        store.remove(copy)
    assert copies(local) == 0, "the last one has removed it"


def test_what_a_trainer_writes_goes_with_the_next_one_or_with_the_node(local: Path) -> None:
    store = Store(str(local))
    first = store.begin(1000)
    second = store.begin(1000)
    assert not first.exists() and second.is_dir()
    assert Store(str(local)).begin(1000).is_dir() and second.is_dir(), "it is locked"
    store.close()
    assert not second.exists()


def test_what_the_trainer_of_a_killed_node_wrote_goes_before_any_copy(
    model: Callable[[str], Path], local: Path
) -> None:
    copy = hold(other := Store(str(local)), model("one"))
    other.close()
    dead = Store(str(local))
    left = dead.begin(1000).parent
    assert dead._begun is not None
    os.close(dead._begun[1])  # as the end of a process does
    Store(str(local)).begin(1000)
    assert copy.is_dir() and not left.exists()


def test_copy_that_another_process_has_begun_and_left_is_not_believed(
    model: Callable[[str], Path], local: Path
) -> None:
    store = Store(str(local))
    facts = written(store, b"new")
    (folder(local) / module._key(facts) / "part").mkdir(parents=True)
    assert store.adopt(facts) is None and not store._held


def test_disk_that_takes_no_copy_is_named(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> str:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(StoreError, match="takes no copy: Disk quota exceeded"):
        Store(str(local)).begin(1000)


def test_policy_that_does_not_fit_is_refused(local: Path, disk: SimpleNamespace) -> None:
    disk.size = 500
    with pytest.raises(StoreError, match="has room for"):
        Store(str(local)).begin(1000)


def test_folder_that_does_not_show_what_is_made_there_is_named_and_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(path: Path, _flags: int) -> int:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(copy_entries, "LOOK_S", 0.0)
    monkeypatch.setattr("os.open", hidden)
    for ask in (
        lambda: copy_entries.begin_copy(tmp_path),
        lambda: copy_entries.acquire(tmp_path / "a", lambda: None, lambda _: None),
    ):
        with pytest.raises(StoreError, match=r"does not show .* cluster\.local_dir=DIR"):
            ask()
