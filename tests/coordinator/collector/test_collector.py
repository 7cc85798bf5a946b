"""A node and its collector: what is ordered is made and becomes durable, also when the collector ends."""

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.collector import host as host_module
from coordinator.collector import making, process
from coordinator.collector.host import CollectorHost, InFlight
from coordinator.collector.listener import Listener
from coordinator.collector.order import CollectorFailed, EngineAddress, Order, RecipeNames
from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter, read_parts
from coordinator.machine import host_lock
from rollout.collect import AllGivenUp, Stopped
from rollout.engines.answers import EngineError, EngineFacts
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.origin import Sampling
from rollout.quota import Quota
from rollout.settings import RolloutSettings
from rollout.storage import files
from tests.coordinator.examples import ORIGIN

HERE = "tests.coordinator.collector.test_collector"


class Machine:
    """Runs collectors as threads of this process, and is the engine that they ask."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self.children: list[Any] = []
        self.may_answer = {f"{k}": threading.Event() for k in range(6)}
        self.asked: list[str] = []
        self.most_at_once = self.at_once = 0
        self.deadly: set[str] = set()
        """Prompts at which the collector ends."""
        self.deadly_once: set[str] = set()

    # as coordinator.machine.children.Children

    def new_spool(self, name: str) -> Path:
        spool = self.spool / f"{name}-{len(list(self.spool.glob('*')))}"
        spool.mkdir(parents=True)
        return spool

    def start(self, _name: str, argv: Sequence[str], **_more: Any) -> Any:
        ended = threading.Event()
        self.process = process.CollectorProcess(Path(argv[-1]))

        def run() -> None:
            try:
                asyncio.run(process.live(self.process))
            except BaseException:
                pass
            finally:
                ended.set()

        child = SimpleNamespace(
            spool=Path(argv[-1]), poll=lambda: 9 if ended.is_set() else None, tail=lambda _lines=20: "oh",
            kill=ended.set, kill_now=ended.set,
        )  # fmt: skip
        self.children.append(child)
        threading.Thread(target=run, daemon=True).start()
        return child

    def die(self) -> None:
        """End the newest collector, which says nothing more."""
        self.process._box = cast(Any, SimpleNamespace(send=lambda _message: None, receive=lambda: []))
        self.process._collection = None
        task = next(task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "live")  # type: ignore[union-attr]
        task.cancel()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path / "spool")

    class Client(EngineClient):
        async def __aenter__(self) -> "Client":
            return self

        async def __aexit__(self, *_error: object) -> None:
            """Has opened nothing."""

        async def generate(self, prompt: Any, sampling: Any) -> list[Completion]:
            made.asked.append(prompt)
            made.at_once += 1
            made.most_at_once = max(made.at_once, made.most_at_once)
            try:
                if prompt in made.deadly | made.deadly_once:
                    made.deadly_once.discard(prompt)
                    made.die()
                while not made.may_answer[prompt].is_set():
                    await asyncio.sleep(0.005)
                return [Completion([3], [4], [-0.5], prompt, "stop") for _ in range(sampling.n)]
            finally:
                made.at_once -= 1

    monkeypatch.setattr(making, "EngineClient", Client)
    return made


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    for directory in (made.claims, made.trajectories("train", 1)):
        files.make_directory(directory)
    return made


@pytest.fixture
def collector(machine: Machine, run_dir: RunDir) -> Iterator[CollectorHost]:
    made = CollectorHost(cast(Any, machine), run_dir, 1, lambda _what, **_more: None)
    yield made
    made.drop()


@pytest.fixture
def listener() -> Listener:
    def slots(numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [
            {"number": k, "task": {"id": f"t{k}", "prompt": f"{k}", "answer": f"{k}"}, "seed": k, "kind": ""}
            for k in numbers
        ]

    def nothing(*_: Any) -> None:
        """Hears it."""

    return Listener(
        stop=threading.Event(), slots=slots, verify=nothing, is_engine_lost=nothing, reach=nothing,
        step=nothing, full=nothing, claimed=nothing, waited=nothing, check_self=nothing,
        others_are_done=lambda: False, lost=set[int],
    )  # fmt: skip


def stop_of(listener: Listener) -> threading.Event:
    assert isinstance(listener.stop, threading.Event)
    return listener.stop


def order_for(run_dir: RunDir, slots: Sequence[int], reward: str = "exact", **settings: Any) -> Order:
    return Order(
        key="key", kind="train", iteration=1, epoch=2, rank=1, incarnation=1, phase=2,
        root=str(run_dir.root), crew="main",
        quota=Quota(6, 6), origin=ORIGIN, recipes={"": RecipeNames(reward, "single_turn", Sampling(n=1))},
        sources={}, settings=RolloutSettings(**{"concurrency": 8, "part_interval_s": 0.01, **settings}),
        engine=EngineAddress("http://127.0.0.1:1", None, 10.0, 1.0, EngineFacts()), start_model="",
        claim_pause_s=0.05, slots=slots, needed=len(slots),
    )  # fmt: skip


def durable(run_dir: RunDir, deaths: bool = False) -> dict[int, str | None]:
    """By slot of the groups on disk, each there once: why it was given up. A collector of which there were
    `deaths` may have ended when it had written a group, and had not said so: the manifest names it once.
    """
    groups = [group for part in read_parts(run_dir.trajectories("train", 1), ORIGIN) for group in part.groups]
    assert deaths or len({group.slot for group in groups}) == len(groups), "a group is there twice"
    return {group.slot: group.given_up for group in groups}


def let(machine: Machine, *numbers: int) -> None:
    for number in numbers or range(6):
        machine.may_answer[f"{number}"].set()


def stop_when(listener: Listener, ready: Callable[[], bool]) -> None:
    def watch() -> None:
        while not ready():
            time.sleep(0.01)
        stop_of(listener).set()

    threading.Thread(target=watch, daemon=True).start()


def test_what_is_in_flight_is_finished_in_the_next_epoch(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    let(machine, 0)
    stop_when(listener, lambda: len(machine.asked) == 4 and 0 in durable(run_dir))
    with pytest.raises(Stopped):
        collector.collect(order_for(run_dir, [0, 1, 2, 3]), listener)
    collector.flush(listener)
    assert collector.in_flight == InFlight("key", 1, [1, 2, 3])
    # ---- what is finished between two epochs is published by nobody
    let(machine)
    time.sleep(0.5)
    assert set(durable(run_dir)) == {0}
    # ---- a new epoch: slot 3 is another node's now, slot 4 is this one's
    stop_of(listener).clear()
    order = replace(order_for(run_dir, [4]), epoch=3, in_flight=[1, 2])
    assert collector.collect(order, listener)["short"] == 0
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 1, 2, 4}
    assert sorted(machine.asked) == ["0", "1", "2", "3", "4"], "a group in flight was begun again"


@pytest.mark.timeout(30)
def test_row_ends_once_somebody_has_removed_the_spool(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    def remove_once_begun() -> None:
        while not machine.asked:
            time.sleep(0.01)
        machine.spool.rename(machine.spool.with_name("removed"))

    threading.Thread(target=remove_once_begun, daemon=True).start()
    with pytest.raises(FileNotFoundError):
        collector.collect(order_for(run_dir, [0, 1]), listener)
    machine.spool.with_name("removed").rename(machine.spool)  # for the end of this test


@pytest.mark.parametrize("claims", [True, False])
def test_what_the_plan_leaves_with_a_node_that_has_lost_it_is_made_again(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir, claims: bool
) -> None:
    let(machine)
    order = replace(order_for(run_dir, [3]), in_flight=[1, 2])
    if claims:
        claimed = {"chunks": [[[3], [1.0]]], "first": {"1": 0}, "paces": {}, "spare": []}
        order = replace(order, claimed=claimed, slots=[], needed=0)
    assert collector.collect(order, listener)["short"] == 0
    collector.flush(listener)
    assert set(durable(run_dir)) == {1, 2, 3}


def test_node_whose_groups_are_late_takes_the_spare_slots_that_others_leave(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    let(machine, 0, 3)
    claimed = {"chunks": [[[0, 1], [1.0, 1.0]]], "first": {"1": 0}, "paces": {}, "spare": [2, 3, 4, 5]}
    order = replace(order_for(run_dir, [], over_sample=1.5), claimed=claimed, quota=Quota(2, 6))
    assert collector.collect(order, listener)["short"] == 0
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 3}


def test_a_slow_node_waits_for_nobody_who_is_lost(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    let(machine)
    fast, slow = [1e6, 1.0, 4], [1.0, 1e3, 4]  # it would leave both groups to the other for 20 minutes
    claimed = {"chunks": [[[0], [1.2]], [[1], [1.2]]], "first": {"0": 0, "1": 1}, "spare": []}
    order = replace(order_for(run_dir, []), claimed={**claimed, "paces": {"0": fast, "1": slow}})
    listener = replace(listener, lost=lambda: {0})
    limit = threading.Timer(60.0, stop_of(listener).set)
    limit.start()
    assert collector.collect(order, listener)["short"] == 0
    limit.cancel()
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 1}


def test_a_node_claims_chunk_after_chunk_until_none_is_left(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    let(machine)
    told: list[Path] = []
    listener = replace(listener, claimed=told.append)
    chunks = {"chunks": [[[0, 1], [1.0] * 2], [[2], [1.0]], [[3, 4, 5], [1.0] * 3]], "spare": []}
    (run_dir.claims / "e0002.i000001.p02.c000001").touch()  # of another node
    (run_dir.claims / "e0001.i000001.p02.c000000").touch()  # of an epoch before
    order = replace(order_for(run_dir, []), claimed={**chunks, "first": {"0": 0, "1": 2}, "paces": {}})
    ended = collector.collect(order, listener)
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 1, 3, 4, 5} and ended["short"] == 0
    seconds, width = ended["made"]
    assert set(seconds) == {"0", "1", "3", "4", "5"} and min(seconds.values()) > 0 and width == 8
    assert {path.name for path in told} >= {"e0002.i000001.p02.c000000", "e0002.i000001.p02.c000002"}


def test_what_was_lost_is_counted_before_the_end_of_the_row_is_said(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    caplog: pytest.LogCaptureFixture,
) -> None:
    let(machine, 0, 1, 2)
    stop_when(listener, lambda: len(durable(run_dir)) == 3)
    with pytest.raises(Stopped):
        collector.collect(order_for(run_dir, [0, 1, 2, 3], f"{HERE}:broken"), listener)
    lines = [record.getMessage() for record in caplog.records]
    assert any(re.search(r"more samples? (was|were) lost like this: .*broken", text) for text in lines), lines


async def broken(task: Mapping[str, Any], _completion: str) -> float:
    if task["id"] == "t2":
        return 1.0
    raise RuntimeError("this reward is broken")


def test_share_that_is_begun_ahead_is_held_and_goes_on_in_its_row(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    let(machine, 0, 3)
    asked_s: list[float] = []

    def is_over() -> bool:
        if len(machine.asked) == 4 and not asked_s:
            asked_s.append(time.monotonic())
        return bool(asked_s) and time.monotonic() > asked_s[0] + 0.5  # longer than the grace period

    begun = order_for(run_dir, [0, 1, 2, 3], completion_threshold=0.5, grace_period_s=0.1)
    error = collector.begin(replace(begun, is_held=True), listener, is_over)
    in_flight = collector.in_flight
    assert error is None and in_flight is not None and not durable(run_dir)
    assert in_flight.slots == [0, 1, 2, 3], "nothing is handed over or given up"
    assert 0.3 <= in_flight.ahead_s < 60.0
    # ---- the phase: slot 3 is left to another node, slot 4 is new
    let(machine, 1, 2, 4)
    order = replace(order_for(run_dir, [4]), in_flight=[0, 1, 2])
    assert collector.collect(order, listener)["short"] == 0
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 1, 2, 4}
    assert sorted(machine.asked) == ["0", "1", "2", "3", "4"], "a group was begun twice"


def test_share_that_cannot_be_begun_ahead_leaves_nothing_and_the_node_waits_on(
    collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    def is_lost() -> None:
        raise EngineError("it died three times")

    looks: list[float] = []

    def is_over() -> bool:
        looks.append(time.monotonic())
        return looks[-1] > looks[0] + 0.5

    order = replace(order_for(run_dir, [0, 1]), is_held=True)
    error = collector.begin(order, replace(listener, is_engine_lost=is_lost), is_over)
    assert "it died three times" in str(error) and collector.in_flight is None
    assert looks[-1] > looks[0] + 0.5, "the checkpoint is waited for all the same"


def test_what_ends_the_row_ends_the_head_start_too(
    collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    def is_over() -> bool:
        raise EngineError("the job lost a peer")

    with pytest.raises(EngineError, match="lost a peer"):
        collector.begin(replace(order_for(run_dir, [0, 1]), is_held=True), listener, is_over)
    collector.drop()
    assert collector.in_flight is None


# ---- collectors that end


@pytest.mark.parametrize("claims", [True, False])
def test_collector_that_ends_once_costs_what_was_not_durable(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir, claims: bool
) -> None:
    let(machine)
    machine.deadly_once = {"2"}
    order = order_for(run_dir, [*range(6)])
    if claims:
        chunks = [[[0, 1, 2, 3], [1.0] * 4], [[4, 5], [1.0] * 2]]
        claimed = {"chunks": chunks, "first": {"1": 0}, "paces": {}, "spare": []}
        order = replace(order, claimed=claimed, slots=[], needed=0)
    assert collector.collect(order, listener)["short"] == 0
    collector.flush(listener)
    assert durable(run_dir, deaths=True) == dict.fromkeys(range(6)) and len(machine.children) == 2


@pytest.mark.parametrize("claims", [True, False])
def test_group_that_ends_each_collector_is_given_up_and_the_others_are_made(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir, claims: bool
) -> None:
    let(machine)
    machine.deadly = {"4"}
    order = order_for(run_dir, [*range(6)])
    if claims:
        claimed = {"chunks": [[[*range(6)], [1.0] * 6]], "first": {"1": 0}, "paces": {}, "spare": []}
        order = replace(order, claimed=claimed, slots=[], needed=0)
    collector.collect(order, listener)
    collector.flush(listener)
    there = durable(run_dir, deaths=True)
    given_up = {slot: why for slot, why in there.items() if why is not None}
    assert set(there) == set(range(6)) and set(given_up) == {4}
    assert "ended while it made this group alone: ended with exit status 9" in str(given_up[4])


def test_collector_that_cannot_even_begin_ends_the_row_with_its_last_words(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    def start(_name: str, argv: Sequence[str], **_more: Any) -> Any:
        return SimpleNamespace(
            spool=Path(argv[-1]), poll=lambda: 1, tail=lambda _lines=20: "ImportError: no module", kill=str
        )

    machine.start = start  # type: ignore[method-assign]
    with pytest.raises(CollectorFailed, match="exit status 1; its last line: ImportError: no module"):
        collector.collect(order_for(run_dir, [0, 1]), listener)


def test_run_ends_where_every_group_ends_its_collector(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    machine.deadly = set(machine.may_answer)
    with pytest.raises(AllGivenUp, match="all 4 groups were given up"):
        collector.collect(order_for(run_dir, [*range(6)]), listener)


@pytest.mark.parametrize("is_last", [True, False])
def test_collector_that_fails_as_nobody_expects_is_replaced(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_last: bool,
) -> None:
    let(machine, *range(6 if is_last else 5))
    flush, failures = PartWriter.flush, [RuntimeError("threading.excepthook is None")]

    def fail_once(writer: PartWriter) -> Any:
        let(machine)
        if failures:
            raise failures.pop()
        return flush(writer)

    monkeypatch.setattr(PartWriter, "flush", fail_once)
    order = order_for(run_dir, [*range(6)], part_interval_s=600.0 if is_last else 0.01)
    collector.collect(order, listener)
    collector.flush(listener)
    if is_last:  # the phase finds out what is not there
        collector.collect(order, listener)
        collector.flush(listener)
    assert durable(run_dir, deaths=True) == dict.fromkeys(range(6)) and len(machine.children) == 2
    assert "has failed (RuntimeError: threading.excepthook is None): " in caplog.text


def test_module_that_exits_when_a_collector_imports_it_ends_the_row(
    collector: CollectorHost, listener: Listener, run_dir: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(_name: str) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(making, "resolve_reward", leave)
    with pytest.raises(CollectorFailed, match=r"the collector has failed \(SystemExit: 3\)"):
        collector.collect(order_for(run_dir, [*range(6)]), listener)


def test_collector_that_may_start_no_thread_ends_the_row(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_writer: PartWriter) -> Any:
        raise RuntimeError("can't start new thread")

    let(machine, *range(5))
    monkeypatch.setattr(PartWriter, "flush", fail)
    with pytest.raises(CollectorFailed, match="can't start new thread"):
        collector.collect(order_for(run_dir, [*range(6)]), listener)


def test_collector_that_does_not_react_is_killed_and_the_row_ends(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_module, "REACT_S", 0.5)
    let(machine)
    stop_when(listener, lambda: bool(machine.asked))
    began_s = time.monotonic()
    with pytest.raises(Stopped):
        collector.collect(order_for(run_dir, [0, 1], f"{HERE}:blocking"), listener)
    assert time.monotonic() - began_s < 60.0 and collector.in_flight is None
    assert machine.children[0].poll() is not None


async def blocking(_task: Mapping[str, Any], _completion: str) -> float:
    time.sleep(600.0)
    return 0.0


def test_hung_collector_is_replaced(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(host_module, "LATE_S", 0.5)
    let(machine)
    order = order_for(run_dir, [*range(6)], f"{HERE}:hanging_once", group_timeout_s=3.5)
    with caplog.at_level(logging.ERROR):
        collector.collect(order, listener)
    collector.flush(listener)
    assert durable(run_dir, deaths=True) == dict.fromkeys(range(6)) and len(machine.children) == 2
    assert "did not answer for 4 s, and was killed: " in caplog.text


_hung: list[str] = []


async def hanging_once(task: Mapping[str, Any], _completion: str) -> float:
    if task["id"] == "t5" and not _hung:
        _hung.append("once")
        time.sleep(600.0)
    return 0.0


def test_engine_that_serves_another_policy_ends_the_row_before_anything_is_written(
    machine: Machine, collector: CollectorHost, listener: Listener, run_dir: RunDir
) -> None:
    def verify() -> None:
        raise EngineError("it serves another policy now")

    let(machine, 0)
    with pytest.raises(EngineError, match="serves another policy"):
        collector.collect(order_for(run_dir, [0, 1]), replace(listener, verify=verify))
    assert not durable(run_dir)


def test_requests_go_on_while_a_part_is_written(
    machine: Machine,
    collector: CollectorHost,
    listener: Listener,
    run_dir: RunDir,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, writing = files.publish, threading.Event()

    def publish(path: Path, data: bytes, **more: Any) -> Any:
        if not writing.is_set():
            writing.set()
            assert machine.may_answer["1"].wait(60.0), "no other group ends while this part is written"
        return real(path, data, **more)

    monkeypatch.setattr("coordinator.directory.parts.files.publish", publish)
    let(machine, 0)

    def go_on() -> None:
        writing.wait(60.0)
        let(machine, 1)

    threading.Thread(target=go_on, daemon=True).start()
    assert collector.collect(order_for(run_dir, [0, 1]), listener)["short"] == 0
    collector.flush(listener)
    assert set(durable(run_dir)) == {0, 1}


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_fork_that_comes_back_from_user_code_says_nothing_to_the_node(
    tmp_path: Path, run_dir: RunDir
) -> None:
    collector = process.CollectorProcess(tmp_path)
    fork = os.fork()
    if fork == 0:
        try:
            asyncio.run(collector._obey(order_for(run_dir, [])))
        finally:
            os._exit(7)
    assert os.waitpid(fork, 0)[1] == 0
    assert all("ended" not in report.read_text() for report in tmp_path.glob("report_*"))


def test_newer_process_of_a_rank_leaves_an_older_one_the_time_to_end_a_collector_that_does_not_stop() -> None:
    assert host_lock.HOLDER_PATIENCE_S >= host_module.REACT_S + 5.0
