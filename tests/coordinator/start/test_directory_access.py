"""The group may write in a run if that is wanted, nobody else may."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.settings.tree import SettingsError
from coordinator.start import directory_access
from coordinator.start.directory_access import refuse_strangers, share_with_group
from coordinator.start.request import StartRequest
from coordinator.start.start import start_master, start_worker
from rollout.storage import files
from tests.coordinator.examples import tree


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("umask", "setgid", "result"),
    [
        (0o077, False, 0o077),
        (0o077, True, 0o077),
        (0o067, True, 0o067),
        (0o027, False, 0o027),
        (0o027, True, 0o007),
        (0o007, False, 0o007),
        (0o007, True, 0o007),
    ],
)
@pytest.mark.parametrize("below", ["", "exp/1"])
def test_group_may_write_where_the_directory_is_its_own_and_the_umask_hides_nothing_from_it(
    tmp_path: Path, umask: int, setgid: bool, result: int, below: str
) -> None:
    tmp_path.chmod(0o2770 if setgid else 0o770)
    os.umask(umask)
    share_with_group(tmp_path / below)
    assert os.umask(0o077) == result


def test_what_is_made_then_has_these_modes(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    share_with_group(tmp_path / "run")
    files.make_directory(tmp_path / "run")
    files.publish(tmp_path / "run" / "file", b"x")
    made = (tmp_path / "run", tmp_path / "run" / "file")
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o2770, 0o660]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o775, 0o2770, 0o755])
def test_own_directory_that_others_cannot_write_is_fine(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    refuse_strangers(tmp_path, False)
    refuse_strangers(tmp_path / "not there yet", False)
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_directory_that_every_user_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(
        SettingsError, match=rf"every user \(mode {mode:04o}\).*--allow-shared-dir"
    ) as refused:
        refuse_strangers(tmp_path, False)
    assert "\n" not in str(refused.value) and tree(tmp_path) == set()
    refuse_strangers(tmp_path, True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory to another user")
def test_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    with pytest.raises(SettingsError, match="belongs to user 65534, and this process to user 0"):
        refuse_strangers(tmp_path, False)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_directory_of_root_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    refuse_strangers(tmp_path, False)


@pytest.mark.parametrize("shown", [(65534, 0o640), (None, 0o777)])
def test_mount_that_shows_new_files_otherwise_than_they_were_made_gets_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shown: tuple[int | None, int],
) -> None:
    uid, mode = shown
    tmp_path.chmod(0o777)
    invented = SimpleNamespace(st_uid=os.geteuid() if uid is None else uid, st_mode=stat.S_IFREG | mode)
    look = directory_access._look
    monkeypatch.setattr(directory_access, "_look", lambda path: invented if path != tmp_path else look(path))
    refuse_strangers(tmp_path, False)
    assert "it does not tell who can write there" in caplog.text and tree(tmp_path) == set()


def test_both_kinds_of_nodes_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SettingsError, match="--allow-shared-dir"):
        start_master(StartRequest(tmp_path))
    monkeypatch.setattr("coordinator.start.start.await_master", lambda *_: None)
    with pytest.raises(SettingsError, match="--allow-shared-dir"):
        start_worker(StartRequest(tmp_path, rank=1))
