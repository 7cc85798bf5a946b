"""Nodes of one machine that are followed to their end."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.console.commands import local
from coordinator.console.commands.alone import alone
from coordinator.machine.children import Children
from coordinator.protocol import placement_records
from coordinator.protocol.exits import Exit
from coordinator.protocol.placement_records import Placement
from coordinator.settings.tree import SettingsError
from coordinator.start.request import StartRequest


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[bytes]]:
    """A worker that waits for a master."""
    node = subprocess.Popen(["sleep", "60"])
    yield node
    node.kill()
    node.wait()


@pytest.mark.parametrize("code", [Exit.USAGE, Exit.FAILED, Exit.INTERRUPTED, -signal.SIGKILL])
def test_workers_do_not_wait_for_a_master_that_cannot_start(
    waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    ends = f"raise SystemExit({int(code)})" if code > 0 else f"import os; os.kill(os.getpid(), {-code})"
    master = subprocess.Popen([sys.executable, "-c", ends])
    master.wait(60)  # the looks below are to be those of the wait that follows
    monkeypatch.setattr(local, "GRACE_S", 1.0)
    nodes: Any = [master, waiting]
    interrupts: Any = SimpleNamespace(has_new=lambda: False, end_all=False)
    looks = iter(range(100))
    sleep = local.time.sleep

    def look(seconds: float) -> None:
        assert next(looks, None) is not None, "the worker is still waiting"
        sleep(seconds)

    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=look))
    assert local.follow(nodes, interrupts)[0] == code
    assert waiting.poll() is not None


def test_interrupt_ends_the_other_nodes_when_the_master_has_ended(
    waiting: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has taken over its rank: it tells nobody."""
    master = subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"])
    master.wait()
    nodes: Any = [master, waiting]
    interrupts: Any = SimpleNamespace(has_new=lambda: True, end_all=False)
    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=lambda _s: waiting.wait(60)))
    assert local.follow(nodes, interrupts) == [4, -signal.SIGTERM]


def test_second_run_local_on_a_directory_is_refused_while_the_first_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, same = tmp_path / "run", tmp_path / "link" / "run"
    (tmp_path / "link").symlink_to(tmp_path)
    script = f"""if True:
        from pathlib import Path
        from coordinator.console.commands.alone import alone
        with alone("run local", "--log-path", Path({str(root)!r}), "stop it"):
            print("at work", flush=True)
            input()
    """
    first = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert first.stdin and first.stdout and first.stdout.readline() == b"at work\n"
    refused = rf"run local is at work there, pid {first.pid}; stop it"
    with Children() as children, pytest.raises(SettingsError, match=refused):
        local.run_local(children, StartRequest(same))
    assert not root.exists()
    with alone("run local", "--log-path", tmp_path / "another", ""):
        pass
    first.kill()  # it leaves its pid behind
    first.communicate()
    with alone("run local", "--log-path", same, ""):
        pass


def test_nodes_without_the_devices_of_the_last_placement_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "count_devices", lambda: 1)
    placement = Placement(3, ("rollout=0", "train=1"))
    with pytest.raises(SettingsError, match=r"no device of rank 2 .*as at the last start; --reset-settings"):
        local._refuse_placement(tmp_path, placement, is_kept=True)
    with pytest.raises(SettingsError, match=r"there is no device 1; .*to 0$"):
        local._refuse_placement(tmp_path, Placement(1, placement.place), is_kept=False)
    local._refuse_placement(tmp_path, Placement(2, placement.place), is_kept=True)
    assert not list(tmp_path.iterdir())


def test_workers_start_after_the_master_has_placed_the_devices_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the older placement the third one refuses its rank, and the others wait for it."""
    placement_records.publish_placement(tmp_path, Placement(2, ("rollout=0", "train=1")))
    placement = Placement(3, ("rollout=0", "train=1,2"))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        placement_records.publish_placement(tmp_path, placement)

    monkeypatch.setattr(local, "time", SimpleNamespace(sleep=sleep))
    master: Any = SimpleNamespace(poll=lambda: None)
    interrupts: Any = SimpleNamespace(received=[])
    local._await_placement(tmp_path, placement, master, interrupts)
    assert len(slept) == 1
    ended: Any = SimpleNamespace(poll=lambda: Exit.USAGE)
    local._await_placement(tmp_path, Placement(1, ()), ended, interrupts)
    interrupts.received.append(signal.SIGINT)
    local._await_placement(tmp_path, Placement(1, ()), master, interrupts)
    assert len(slept) == 1, "nobody waits on for a master that has ended, or after Ctrl+C"
