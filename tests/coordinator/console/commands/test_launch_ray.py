"""`run launch --ray` without a cluster: what is asked for, and the life of a rank beside its actor."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.console.commands import launch_ray as module
from coordinator.console.commands import ray_cluster
from coordinator.console.commands.launch_ray import RayNode, is_death
from coordinator.console.commands.parse import COMMANDS
from coordinator.console.commands.ray_machines import Machine
from coordinator.console.commands.relay import Relay
from coordinator.settings.tree import SettingsError
from tests.bash import READY_TO_WAIT, WAIT

# ---- what is asked for


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "give --hosts A,B,C or --ray ADDRESS"),
        (["--hosts", "a", "--ray", "auto"], "give --hosts A,B,C or --ray ADDRESS"),
        (["--hosts", "a", "--num-nodes", "2"], "leave --num-nodes out; it does not go with --hosts"),
        (["--hosts", "a", "--gpus-per-node", "2"], "leave --gpus-per-node out"),
        (["--ray", "auto", "--num-nodes", "2", "--ssh", "x"], "leave --ssh out; it does not go with --ray"),
        (["--ray", "auto"], "--num-nodes is missing"),
        (["--ray", "auto", "--num-nodes", "two"], "--num-nodes two"),
        (["--ray", "auto", "--num-nodes", "2", "--master"], "leave --master out"),
        (["--ray", "127.0.0.1:1", "--num-nodes", "2"], "--ray 127.0.0.1:1: "),
        (["--ray", "nonsense:x", "--num-nodes", "2"], "--ray nonsense:x: "),
    ],
)
def test_bad_words_are_refused_in_one_line(words: list[str], expected: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError) as refused:
        COMMANDS["launch"]([*words, "--log-path", str(tmp_path / "run")], standalone_mode=False)
    assert expected in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_of_a_traceback_of_its_server_the_cause_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = 'File "proxier.py", line 765, in Datapath\n' * 20
    cause = "RuntimeError: Starting Ray client server failed. See ray_client_server_23000.err"

    def init(*_args: object, **_kwargs: object) -> None:
        text = f"Initialization failure from server:\nTraceback (most recent call last):\n{frames}{cause}\n"
        raise ConnectionAbortedError(text)

    server = SimpleNamespace(init=init, is_initialized=lambda: False)
    monkeypatch.setattr(ray_cluster, "import_module", lambda _name: server)
    with pytest.raises(SettingsError) as refused:
        ray_cluster.connect("ray://head")
    said = f"--ray ray://head: Initialization failure from server: {cause}; start a cluster"
    assert str(refused.value).startswith(said)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"flagpost\[ray\]"):
        ray_cluster.connect("auto")


# ---- the life of a rank


class Actor:
    """A Relay in this process, whose calls answer at once; a dead one raises."""

    def __init__(self) -> None:
        self._relay = Relay()
        self.is_dead = self.is_out_of_reach = False

    def __getattr__(self, name: str) -> Any:
        def remote(*given: Any) -> Callable[[], Any]:
            return lambda: self._call(name, *given)

        return SimpleNamespace(remote=remote)

    def _call(self, name: str, *given: Any) -> Any:
        if self.is_out_of_reach and name == "exchange":
            raise Unavailable("the actor is temporarily unavailable")
        if self.is_dead:
            raise Died("the actor died")
        return getattr(self._relay, name)(*given)


class Died(Exception):
    pass


class Unavailable(Died):
    pass


class Cluster:
    """A cluster of one machine, in this process."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = ["rank 0"]
        self.down: set[int] = set()
        self.ended: dict[int, int] = {}
        self.actors: list[Actor] = []
        self.has_machine = True
        self.relays: list[Any] = [self.new_relay(0)]
        self.ray = SimpleNamespace(
            get=lambda asked, timeout=None: asked(),
            wait=lambda asked, timeout: (asked, []) if self.has_machine else (time.sleep(0.01) or [], asked),
            kill=lambda actor: setattr(actor, "is_dead", True),
            exceptions=SimpleNamespace(RayError=Died, ActorUnavailableError=Unavailable),
        )

    def new_relay(self, _rank: int) -> Actor:
        self.actors.append(Actor())
        return self.actors[-1]

    def others_see(self, _rank: int, _path: str) -> bool:
        return False


class Rank:
    """A node that is a few words of bash; each of its starts is noted."""

    def __init__(self, place: Path, text: str) -> None:
        self._starts = place / "starts"
        program = place / "node"
        program.write_text(f"#!/bin/bash\necho >> {self._starts}\nn=$(wc -l < {self._starts})\n{text}\n")
        program.chmod(0o755)
        self.cluster = Cluster(place)
        self.node = RayNode(self.cluster, 0, [str(program)], self.cluster.relays[0])  # type: ignore[arg-type]
        self.until(lambda: self.node.is_ready)
        self.node.tell("go")

    def until(self, ready: Callable[[], Any]) -> None:
        deadline_s = time.monotonic() + 60.0
        while not ready():
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def end(self) -> int | None:
        self.until(lambda: self.node.poll() is not None)
        return self.node.poll()

    @property
    def starts(self) -> int:
        return len(self._starts.read_text().splitlines()) if self._starts.exists() else 0


@pytest.fixture
def begin(tmp_path: Path) -> Callable[[str], Rank]:
    return lambda text: Rank(tmp_path, text)


@pytest.mark.parametrize("code", [0, 1, 2, 4, 130])
def test_rank_that_ended_by_itself_is_not_started_again(begin: Callable[[str], Rank], code: int) -> None:
    rank = begin(f"exit {code}")
    assert (rank.end(), rank.starts) == (code, 1)


@pytest.mark.parametrize("end", ["kill -9 $$", "exit 3"])
def test_rank_that_was_killed_or_lost_another_comes_back(begin: Callable[[str], Rank], end: str) -> None:
    rank = begin(f"((n < 3)) && {end}; exit 0")
    assert (rank.end(), rank.starts) == (0, 3)


def test_rank_comes_back_ten_times_at_most(begin: Callable[[str], Rank]) -> None:
    rank = begin("kill -9 $$")
    assert (rank.end(), rank.starts) == (-9, 11)


def test_nobody_is_started_again_after_3_while_a_machine_is_missing(begin: Callable[[str], Rank]) -> None:
    rank = begin('until [ -e "${0%/*}/go" ]; do sleep 0.02; done; exit 3')
    rank.until(lambda: rank.starts)
    rank.cluster.down.add(1)
    (rank.cluster.root / "go").touch()
    assert (rank.end(), rank.starts) == (3, 1)


def test_rank_whose_machine_died_waits_for_another_until_it_is_told_to_end(
    begin: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SAY_AGAIN_S", 0.05)
    monkeypatch.setattr(module, "machines", lambda _ray: [Machine("a", 8, 64)])
    rank = begin(f"{READY_TO_WAIT}trap 'exit 130' TERM\n{WAIT}")
    rank.until(lambda: rank.starts)
    rank.cluster.needs = lambda _rank: "8 GPUs"  # type: ignore[attr-defined]
    rank.cluster.has_machine = False
    rank.cluster.actors[0].is_dead = True
    said = ""

    def waits() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "waits for a machine with 8 GPUs; alive: a (8 GPUs, 64 CPUs)" in said

    rank.until(waits)
    assert "its machine or its actor died; starting it again (1 of 10)" in said
    assert rank.cluster.down == {0} and rank.node.poll() is None
    rank.node.tell("TERM")
    assert (rank.end(), rank.starts) == (130, 1)
    rank.cluster.actors[0]._relay.exchange(["TERM"], 0.0)


def test_actor_that_ray_does_not_reach_is_waited_for_and_counts_as_dead_after_a_while(
    begin: Callable[[str], Rank], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "SAY_AGAIN_S", 0.02)
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    rank = begin(f"((n == 2)) && exit 0\n{READY_TO_WAIT}trap 'exit 130' TERM\n{WAIT}")
    rank.until(lambda: rank.starts)
    actor = rank.cluster.actors[0]
    actor.is_out_of_reach, said = True, ""

    def waits() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "waits until it answers or is dead, at most 300 s" in said

    rank.until(waits)
    assert rank.node.poll() is None and rank.starts == 1
    actor.is_out_of_reach = False
    rank.until(lambda: not rank.node._words)
    monkeypatch.setattr(module, "UNREACHED_S", 0.05)
    actor.is_out_of_reach = True
    assert (rank.end(), rank.starts) == (0, 2)
    actor._relay.exchange(["TERM"], 0.0)


@pytest.mark.parametrize("code", [0, 3])
def test_rank_without_a_machine_ends_as_the_master_when_all_others_have(
    begin: Callable[[str], Rank], code: int
) -> None:
    rank = begin(f"{READY_TO_WAIT}trap 'exit 130' TERM\n{WAIT}")
    rank.until(lambda: rank.starts)
    rank.cluster.names = ["rank 1", "rank 0"]  # in this test the other one is the master
    rank.node._rank = 1
    rank.cluster.has_machine = False
    rank.cluster.actors[0].is_dead = True
    rank.cluster.relays.append(rank.cluster.relays[0])
    rank.until(lambda: rank.cluster.down == {1})
    time.sleep(0.2)
    assert rank.node.poll() is None
    rank.cluster.ended[0] = code
    assert (rank.end(), rank.starts) == (code, 1)
    rank.cluster.actors[0]._relay.exchange(["TERM"], 0.0)


def test_rank_whose_cluster_is_gone_is_lost_and_nobody_waits_for_it(
    begin: Callable[[str], Rank], capfd: pytest.CaptureFixture[str]
) -> None:
    rank = begin(f"{READY_TO_WAIT}trap 'exit 130' TERM\n{WAIT}")
    rank.until(lambda: rank.starts)

    def gone(*_given: Any, **_named: Any) -> Any:
        raise ConnectionError("the client has lost\nits server")

    actor = rank.cluster.actors[0]
    rank.cluster.ray.get = rank.cluster.ray.kill = gone
    assert rank.end() == 3 and "rank 0" in (said := capfd.readouterr().err) and "lost its server" in said
    rank.node.kill()
    actor._relay.exchange(["TERM"], 0.0)


def test_rank_that_comes_back_late_is_not_ended_by_what_it_was_told_meanwhile(
    begin: Callable[[str], Rank],
) -> None:
    rank = begin('until [ -e "${0%/*}/go" ]; do sleep 0.02; done; ((n < 2)) && kill -9 $$; exit 0')
    rank.until(lambda: rank.starts)
    rank.cluster.has_machine = False
    (rank.cluster.root / "go").touch()
    rank.until(lambda: len(rank.cluster.actors) == 2)
    rank.node.tell("0")
    rank.cluster.has_machine = True
    assert (rank.end(), rank.starts) == (0, 2)


@pytest.mark.parametrize(
    ("code", "death"),
    [(None, True), (3, True), (-9, True), (137, True), (0, False), (1, False), (127, False)],
)
def test_is_death(code: int | None, death: bool) -> None:
    assert is_death(code) is death


# ---- what runs on the machine
