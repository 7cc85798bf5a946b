"""`run launch` without a network: in place of ssh a shell of this machine, in place of nodes a few words."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.console.commands import launch as launch_module
from coordinator.console.commands.launch import RemoteNode, is_over
from coordinator.console.commands.launch_ssh import launch_ssh
from tests.bash import WAIT
from tests.coordinator.console.commands.shell_as_ssh import NODE, SSH, program


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    return str(program(tmp_path / "ssh", SSH))


@pytest.fixture
def start(
    tmp_path: Path, ssh: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[int, Callable[[int], list[str]]]]]:
    """`start(hosts, node, *words)`: the exit code, and what the node of a rank has noted."""
    monkeypatch.setattr(launch_module, "_understood", lambda *_: "")
    monkeypatch.setattr(launch_module, "POLL_S", 0.01)
    monkeypatch.setenv("PLACE", str(tmp_path))
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]

    def noted(rank: int) -> list[str]:
        path = tmp_path / str(rank)
        return path.read_text().split() if path.exists() else []

    def begin(hosts: str, node: str, *words: str) -> tuple[int, Callable[[int], list[str]]]:
        path = program(tmp_path / "node", NODE + node)
        return launch_ssh(hosts, tmp_path / "run", words, ssh, str(path)), noted

    yield begin
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


def soon(ready: Callable[[], bool], then: Callable[[], Any]) -> None:
    """Do something once `ready()`, beside the launcher."""

    def run() -> None:
        deadline_s = time.monotonic() + 60.0
        while not ready() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        then()

    threading.Thread(target=run, daemon=True).start()


def interrupt(number: int = signal.SIGINT) -> None:
    """What the terminal does."""
    os.kill(os.getpid(), number)


# ---- words


Start = Callable[..., tuple[int, Callable[[int], list[str]]]]


def test_users_words_reach_the_node_as_they_are(start: Start, tmp_path: Path) -> None:
    words = (
        "it's",
        '"so"',
        "$(touch was_here)",
        "`touch was_here`",
        "a\nb",
        "; touch was_here #",
        "[a]*",
        "",
    )
    code, _ = start("a", 'shift 5; printf "%s\\0" "$@" > "$PLACE/words"\n', *words)
    assert code == 0
    assert tuple((tmp_path / "words").read_text().split("\0")[:-1]) == words
    assert not list(tmp_path.rglob("was_here")) and not Path("was_here").exists()


# ---- output, directory, exit codes


def test_lines_are_marked_unless_they_say_their_rank(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = start("a,b,a", 'echo "[rank $rank it 7 training] step"; echo "[rank" >&2; pwd\n')
    said = capfd.readouterr()
    assert (code, said.err) == (0, "")
    for rank, host in enumerate("aba"):
        mine = [line for line in said.out.splitlines() if line.startswith(f"[rank {rank}")]
        assert mine == [
            f"[rank {rank} it 7 training] step",
            f"[rank {rank}, {host}] [rank",
            f"[rank {rank}, {host}] {os.getcwd()}",
        ]
    assert len(said.out.splitlines()) == 9


@pytest.mark.parametrize("code", [1, 4])
def test_first_code_that_is_not_0_is_that_of_all(start: Start, code: int) -> None:
    node = f'[ $rank = 1 ] && exit {code}; until [ -s "$PLACE/1" ]; do sleep 0.02; done; sleep 0.1; exit 3\n'
    assert start("a,b", node)[0] == code


def test_no_node_is_started_unless_every_host_answers(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    code, noted = start("a,down1,b,down2", "")
    assert code == 3 and noted(0) == noted(2) == []
    assert capfd.readouterr().err.splitlines() == [
        "run: rank 1, down1: ssh: connect to host down1 port 22: Connection refused",
        "run: rank 3, down2: ssh: connect to host down2 port 22: Connection refused",
        "run: no node was started",
    ]


def test_host_without_the_program_is_named(
    ssh: str, start: Start, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch_ssh("a", tmp_path, [], ssh, "/absent/run") == 2
    assert "no program /absent/run there; say where it is with --run PATH" in capfd.readouterr().err


def test_node_that_cannot_take_part_ends_the_others(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    node = f'[ $rank = 1 ] && {{ until [ -s "$PLACE/0" ]; do sleep 0.02; done; exit 2; }}\n{WAIT}'
    code, noted = start("a,b", node)
    assert (code, noted(0)) == (2, ["started", "TERM"])
    assert capfd.readouterr().err == "run: rank 1, b: cannot take part; the others are ended\n"


def test_others_of_a_failed_node_have_a_while_to_end_by_themselves(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "GRACE_S", 0.5)
    node = f'[ $rank = 0 ] && {{ until [ -s "$PLACE/1" ]; do sleep 0.02; done; exit 1; }}\n{WAIT}'
    code, noted = start("a,b", node)
    assert (code, noted(1)) == (1, ["started", "TERM"])


@pytest.mark.parametrize(
    ("codes", "interrupted", "over"),
    [
        ({}, True, False),
        ({0: 1}, False, True),
        ({2: 1}, False, True),
        ({0: 130}, True, True),
        ({1: 130}, True, False),
        ({0: 0}, False, False),  # the others hear of it, or wait node_timeout for a master
        ({1: 3}, False, False),  # the others may hold for it
        ({0: 130}, False, False),
        ({1: 4}, False, False),
    ],
)
def test_run_is_over_when_nobody_can_go_on(codes: dict[int, int], interrupted: bool, over: bool) -> None:
    assert is_over(codes, interrupted) is over


# ---- signals


def test_interrupt_goes_to_the_master_which_tells_the_others(start: Start, tmp_path: Path) -> None:
    tells = 'while [ $rank = 1 ]; do grep -qs INT "$PLACE/0" && exit 130; sleep 0.02; done\n'
    soon(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), interrupt)
    code, noted = start("a,b", tells + WAIT)
    assert (code, noted(0), noted(1)) == (130, ["started", "INT"], ["started"])


def test_second_interrupt_ends_all_and_the_command_that_resumes_is_shown(
    start: Start, ssh: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deaf").touch()

    def heard() -> bool:
        return "INT" in (tmp_path / "0").read_text()

    def then() -> None:
        interrupt()
        soon(heard, interrupt)

    soon(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), then)
    code, noted = start("a,b", WAIT)
    assert (code, noted(0), noted(1)) == (130, ["started", "INT", "TERM"], ["started", "TERM"])
    assert capfd.readouterr().err.splitlines() == [
        "run: interrupted: the master ends the run on all nodes; once more ends every node at once",
        "run: ending every node, which may take 15 s; once more: without waiting for it",
        f"run: to resume: run launch --hosts a,b --ssh {ssh} --log-path {tmp_path}/run --run {tmp_path}/node",
    ]


CUT_OFF = "a," + ",".join(f"cut{number}" for number in range(8))


def test_hosts_that_are_cut_off_are_waited_for_together(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "GRACE_S", 0.1)
    monkeypatch.setattr(launch_module, "CUT_OFF_S", 3.0)
    started_s = time.monotonic()
    assert start(CUT_OFF, "exit 2\n")[0] == 2
    assert time.monotonic() - started_s < 8 * 3.0, "once 3 s, not for each of 8 hosts"


@pytest.mark.parametrize("grace_s", [60.0, 0.1])
def test_one_more_interrupt_ends_the_wait_for_those_that_are_cut_off(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    monkeypatch.setattr(launch_module, "GRACE_S", grace_s)
    monkeypatch.setattr(launch_module, "CUT_OFF_S", 600.0)
    (tmp_path / "deaf").touch()

    def has(word: str) -> Callable[[], bool]:
        return lambda: (tmp_path / "0").exists() and word in (tmp_path / "0").read_text()

    def second() -> None:
        interrupt()
        soon(has("TERM"), interrupt)

    def first() -> None:
        interrupt()
        soon(has("INT"), second)

    soon(has("started"), first)
    assert start(CUT_OFF, WAIT)[0] in {3, 130}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_all_at_once(start: Start, tmp_path: Path, number: int) -> None:
    soon(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists(), lambda: interrupt(number))
    code, noted = start("a,b", WAIT)
    assert (code, noted(0), noted(1)) == (130, ["started", "TERM"], ["started", "TERM"])


def test_interrupt_without_a_master_ends_all(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    note_ended = launch_module._note_ended

    def note(nodes: Sequence[RemoteNode], codes: dict[int, int]) -> None:
        note_ended(nodes, codes)
        ended[:] = codes

    monkeypatch.setattr(launch_module, "_note_ended", note)
    soon(lambda: ended == [0] and (tmp_path / "1").exists(), interrupt)
    code, noted = start("a,b", f"[ $rank = 0 ] && exit 3\n{WAIT}")
    assert (code, noted(1)) == (3, ["started", "TERM"])


def test_interrupt_while_a_host_is_asked_starts_nothing(
    ssh: str, start: Start, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    program(Path(ssh), f"#!/bin/sh\ntouch {tmp_path}/asked; exec sleep 60\n")
    soon((tmp_path / "asked").exists, interrupt)
    assert start("a", "")[0] == 130
    assert not (tmp_path / "0").exists()
