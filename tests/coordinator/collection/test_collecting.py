"""A node's share of a rollout: parts are written beside it, and what is in flight outlives an epoch."""

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coordinator.collection import makers
from coordinator.collection.collecting import begin_share, drop_outdated, key_of
from coordinator.collection.node_share import Share
from coordinator.collection.ongoing import Ongoing
from coordinator.directory.layout import RunDir
from coordinator.node.iteration import Iteration
from coordinator.node.position import Position
from coordinator.protocol.exits import TrainerFailed
from coordinator.protocol.phases import Phase
from coordinator.settings.loading import build
from rollout.collect import Stopped
from rollout.engines.answers import EngineError
from rollout.engines.client import EngineClient
from rollout.engines.completion import Completion
from rollout.environments.environment import single_turn
from rollout.quota import Quota
from rollout.rewards.builtin import Reward, resolve_reward
from rollout.settings import RolloutSettings
from rollout.storage import files
from rollout.tasks.task_set import TaskSet
from rollout.trajectory import Group
from tests.coordinator.examples import ORIGIN

TASKS = TaskSet(tuple({"id": f"t{k}", "prompt": f"{k}", "answer": f"{k}"} for k in range(6)), "none")


class Client(EngineClient):
    """Answers each prompt when it may, and keeps count of the requests."""

    def __init__(self, may_answer: Mapping[str, threading.Event]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.may_answer = may_answer
        self.asked: list[str] = []

    async def generate(self, prompt: Any, sampling: Any) -> list[Completion]:
        self.asked.append(prompt)
        while not self.may_answer[prompt].is_set():
            await asyncio.sleep(0.005)
        return [Completion([3], [4], [-0.5], prompt, "stop") for _ in range(sampling.n)]


class Writer:
    def __init__(self) -> None:
        self.slots: list[int] = []
        self.when_added: Callable[[], object] = lambda: None

    def add(self, group: Group) -> None:
        self.slots.append(group.slot)
        self.when_added()

    def flush(self) -> None:
        """Writes nothing."""


@pytest.fixture
def node(tmp_path: Path) -> Any:
    run_dir = RunDir(tmp_path)
    files.make_directory(run_dir.claims)
    settings = build({"model": "any"})
    made = SimpleNamespace(
        run_dir=run_dir, rank=1, in_flight=None, position=Position(), settings=settings,
        record=SimpleNamespace(epoch=2), watch=SimpleNamespace(stop=threading.Event()),
        flags=SimpleNamespace(leave=lambda _paths: None),
    )  # fmt: skip

    def drop() -> None:
        dropped, made.in_flight = made.in_flight, None
        if dropped is not None:
            dropped.end()

    made.drop_in_flight = drop
    return made


@pytest.fixture
def iteration() -> Iteration:
    return Iteration(1, documents={Phase.ITERATION_START: {"policy": "p", "opened": {}, "code": {}}})


def share(plan: dict[str, Any], **settings: Any) -> Share:
    functions: Any = SimpleNamespace(reward=resolve_reward("exact"), environment=single_turn)
    rollout = RolloutSettings(**{"concurrency": 8, "part_interval_s": 0.01, **settings})
    return Share("train", plan, Quota(6, 6), range(6), TASKS, ORIGIN, functions, rollout)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client({f"{k}": threading.Event() for k in range(6)})
    monkeypatch.setattr(makers, "client_of", lambda *_: made)
    monkeypatch.setattr(makers, "generates", lambda *_: False)  # there is no engine to mind
    return made


def plan(shares: list[int], kept: list[int]) -> dict[str, Any]:
    return {"shares": {"1": shares}, "needed": {"1": len(shares)}, "kept": {"1": kept} if kept else {}}


def test_what_is_in_flight_is_finished_in_the_next_epoch(
    node: Any, iteration: Iteration, client: Client
) -> None:
    first, second = Writer(), Writer()
    ongoing = Ongoing(node, share(plan([0, 1, 2, 3], [])), "key")
    client.may_answer["0"].set()
    first.when_added = node.watch.stop.set
    with pytest.raises(Stopped):
        ongoing.run(node, iteration, share(plan([0, 1, 2, 3], [])), cast(Any, first))
    assert first.slots == [0] and ongoing.slots == [1, 2, 3]
    # ---- a new epoch: slot 3 is another node's now, slot 4 is this one's
    node.watch.stop.clear()
    for number in "1234":
        client.may_answer[number].set()
    said = ongoing.run(node, iteration, share(plan([4], [1, 2])), cast(Any, second))
    ongoing.end()
    assert sorted(second.slots) == [1, 2, 4] and said["short"] == 0
    assert sorted(client.asked) == ["0", "1", "2", "3", "4"], "a group in flight was begun again"


@pytest.mark.parametrize("claims", [True, False])
def test_what_the_plan_leaves_with_a_node_that_has_lost_it_is_made_again(
    node: Any, iteration: Iteration, client: Client, claims: bool
) -> None:
    for event in client.may_answer.values():
        event.set()
    mine = plan([3], [1, 2])
    if claims:
        mine = {"chunks": [[[3], 1.0, 1.0]], "first": {"1": 0}, "paces": {}, "spare": [], **mine}
    writer, ongoing = Writer(), Ongoing(node, share(mine), "key")
    said = ongoing.run(node, iteration, share(mine), cast(Any, writer))
    ongoing.end()
    assert sorted(writer.slots) == [1, 2, 3] and said["short"] == 0


def test_node_whose_groups_are_late_takes_the_spare_slots_that_others_leave(
    node: Any, iteration: Iteration, client: Client
) -> None:
    for number in "03":
        client.may_answer[number].set()
    mine = {"chunks": [[[0, 1], 2.0, 1.0]], "first": {"1": 0}, "paces": {}, "spare": [2, 3, 4, 5], "kept": {}}
    work = replace(share(mine, over_sample=1.5), quota=Quota(2, 6))
    writer, ongoing = Writer(), Ongoing(node, work, "key")
    said = ongoing.run(node, iteration, work, cast(Any, writer))
    ongoing.end()
    assert sorted(writer.slots) == [0, 3] and said["short"] == 0


def test_nothing_times_out_while_the_node_is_between_two_epochs(
    node: Any, iteration: Iteration, client: Client
) -> None:
    writer, mine = Writer(), share(plan([0], []), group_timeout_s=1.0)
    ongoing = Ongoing(node, mine, "key")
    threading.Timer(0.3, node.watch.stop.set).start()
    with pytest.raises(Stopped):
        ongoing.run(node, iteration, mine, cast(Any, writer))
    time.sleep(1.5)
    node.watch.stop.clear()
    client.may_answer["0"].set()
    said = ongoing.run(node, iteration, share(plan([], [0]), group_timeout_s=1.0), cast(Any, writer))
    ongoing.end()
    assert said["short"] == 0 and client.asked == ["0"]


def test_what_was_lost_is_counted_before_the_end_of_the_row_is_said(
    node: Any, iteration: Iteration, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(task: Any, _completion: str) -> float:
        if task["id"] == "t2":
            return 1.0
        raise RuntimeError("this reward is broken")

    mine, writer = share(plan([0, 1, 2, 3], [])), Writer()
    cast(Any, mine.functions).reward = Reward("my:broken", broken)
    writer.when_added = lambda: len(writer.slots) == 3 and node.watch.stop.set()
    ongoing = Ongoing(node, mine, "key")
    for number in "012":
        client.may_answer[number].set()
    with pytest.raises(Stopped):
        ongoing.run(node, iteration, mine, cast(Any, writer))
    said = [record.getMessage() for record in caplog.records]
    ongoing.end()
    assert any(re.search("more samples were lost like this: .*broken", text) for text in said), said


def test_what_is_in_flight_is_given_up_when_the_iteration_is_another(node: Any, iteration: Iteration) -> None:
    ended: list[str] = []
    for key, kept in ((key_of(node, iteration, "train"), True), ("another", False)):
        node.in_flight = SimpleNamespace(key=key, iteration=1, end=lambda: ended.append("ended"))
        drop_outdated(node, iteration)
        assert (node.in_flight is not None) is kept
    assert ended == ["ended"]


@pytest.mark.parametrize(
    ("row", "kept"), [(Phase.TRAINING, False), (Phase.CHECKPOINT, True), (Phase.ENGINE_RESTARTED, True)]
)
def test_what_is_in_flight_of_the_next_iteration_outlives_no_training(
    node: Any, iteration: Iteration, row: Phase, kept: bool
) -> None:
    node.in_flight = SimpleNamespace(key="of the next", iteration=2, end=lambda: None)
    iteration.resume_at = row
    drop_outdated(node, iteration)
    assert (node.in_flight is not None) is kept


def test_share_that_is_begun_ahead_is_held_and_goes_on_in_its_row(
    node: Any, iteration: Iteration, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.unresponsive, node.children = SimpleNamespace(guarding=lambda *_: nullcontext()), None
    minding: list[bool] = []

    async def mind(*_: Any) -> None:
        minding.append(True)
        await asyncio.Event().wait()

    node.engine, node.check = SimpleNamespace(mind=mind), lambda: None
    for number in "03":
        client.may_answer[number].set()
    began_s = time.monotonic()
    begun = share(plan([0, 1, 2, 3], []), completion_threshold=0.5, grace_period_s=0.1)
    begin_share(node, iteration, begun, lambda: time.monotonic() > began_s + 1.0)
    ongoing, writer = node.in_flight, Writer()
    assert ongoing.slots == [0, 1, 2, 3], "nothing is handed over or given up"
    assert minding and 0.5 <= ongoing.ahead_s < 10.0
    # ---- the row: slot 3 is left to another node, slot 4 is new
    for number in "124":
        client.may_answer[number].set()
    said = ongoing.run(node, iteration, share(plan([4], [0, 1, 2])), cast(Any, writer))
    ongoing.end()
    assert sorted(writer.slots) == [0, 1, 2, 4] and said["short"] == 0
    assert sorted(client.asked) == ["0", "1", "2", "3", "4"], "a group was begun twice"


def test_share_that_cannot_be_begun_ahead_leaves_nothing_and_the_node_waits_on(
    node: Any, iteration: Iteration, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    node.unresponsive, node.children = SimpleNamespace(guarding=lambda *_: nullcontext()), None

    async def mind(*_: Any) -> None:
        raise EngineError("it died three times")

    node.engine, node.check = SimpleNamespace(mind=mind), lambda: None
    looks: list[float] = []

    def is_over() -> bool:
        looks.append(time.monotonic())
        return looks[-1] > looks[0] + 0.5

    with caplog.at_level(logging.INFO):
        begin_share(node, iteration, share(plan([0, 1], [])), is_over)
    assert node.in_flight is None and "it died three times" in caplog.text
    assert looks[-1] > looks[0] + 0.5, "the checkpoint is waited for all the same"


def test_what_ends_the_row_ends_the_head_start_too(node: Any, iteration: Iteration, client: Client) -> None:
    node.unresponsive, node.children = SimpleNamespace(guarding=lambda *_: nullcontext()), None
    node.engine, node.check = SimpleNamespace(mind=lambda *_: asyncio.Event().wait()), lambda: None

    def is_over() -> bool:
        raise TrainerFailed("the job lost a peer")

    with pytest.raises(TrainerFailed):
        begin_share(node, iteration, share(plan([0, 1], [])), is_over)
    node.drop_in_flight()
    assert node.in_flight is None


def test_other_settings_make_other_groups(node: Any, iteration: Iteration) -> None:
    keys = {key_of(node, iteration, "train"), key_of(node, iteration, "eval")}
    node.settings = build({"model": "any", "rollout.temperature": 0.5})
    keys.add(key_of(node, iteration, "train"))
    iteration.documents[Phase.ITERATION_START]["policy"] = "q"
    keys.add(key_of(node, iteration, "train"))
    assert len(keys) == 4


def test_a_node_claims_chunk_after_chunk_until_none_is_left(
    node: Any, iteration: Iteration, client: Client
) -> None:
    for event in client.may_answer.values():
        event.set()
    chunks = {"chunks": [[[0, 1], 2.0, 1.0], [[2], 1.0, 1.0], [[3, 4, 5], 3.0, 1.0]], "spare": [], "kept": {}}
    claimed = {**chunks, "first": {"0": 0, "1": 2}, "paces": {}}
    (node.run_dir.claims / "e0002.i000001.p02.c000001").touch()  # of another node
    (node.run_dir.claims / "e0001.i000001.p02.c000000").touch()  # of an epoch before
    writer = Writer()
    ongoing = Ongoing(node, share(claimed), "key")
    said = ongoing.run(node, iteration, share(claimed), cast(Any, writer))
    ongoing.end()
    assert sorted(writer.slots) == [0, 1, 3, 4, 5] and said["short"] == 0
    assert said["pace"].width == 4 and said["pace"].tokens == 5


def test_requests_go_on_while_a_part_is_written(
    node: Any, iteration: Iteration, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    class SlowFilesystem:
        def add(self, _group: Group) -> None:
            """Takes it."""

        def flush(self) -> None:
            time.sleep(0.5)
            written.set()

    steps = 0

    class Requests(Client):
        async def generate(self, prompt: Any, sampling: Any) -> list[Completion]:
            nonlocal steps
            while not written.is_set():
                await asyncio.sleep(0.01)
                steps += 1
            return [Completion([3], [4], [-0.5], prompt, "stop") for _ in range(sampling.n)]

    monkeypatch.setattr(makers, "client_of", lambda *_: Requests({}))
    monkeypatch.setattr(makers, "generates", lambda *_: False)
    writer: Any = SlowFilesystem()
    mine = share(plan([0], []))
    ongoing = Ongoing(node, mine, "key")
    ongoing.run(node, iteration, mine, writer)
    ongoing.end()
    assert steps > 10
