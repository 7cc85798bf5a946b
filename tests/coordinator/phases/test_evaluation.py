"""What an open iteration is evaluated on after a restart with other evaluation tasks."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter
from coordinator.directory.published import Policy
from coordinator.node.iteration import Iteration
from coordinator.phases import evaluation, rollout, rollout_steps
from coordinator.phases.provenance import origin_of
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from coordinator.start.inputs import load_inputs
from tests.coordinator.examples import POLICY, group, run_dir_at

COUNTS = {"own": 3, "a": 2, "b": 4, "more": 6}


def write_tasks(folder: Path, name: str, first: int, count: int) -> str:
    path = folder / f"{name}.jsonl"
    numbers = range(first, first + count)
    path.write_text("".join(f'{{"prompt": "{k}+1=", "answer": "{k + 1}"}}\n' for k in numbers))
    return str(path)


class Run:
    """A master, as far as it opens an iteration and decides on its evaluation; each call is another start."""

    def __init__(self, root: Path) -> None:
        self.run_dir: RunDir = run_dir_at(root)
        self.run_dir.trajectories("train", 1).mkdir(parents=True, exist_ok=True)
        self.tasks = {
            name: write_tasks(root, name, 200 * k, count)
            for k, (name, count) in enumerate(COUNTS.items(), start=1)
        }
        self.opened: dict[str, Any] = {}

    def start(self, *sets: str, own: bool = True, interval: int = 1, **given: Any) -> Any:
        """A start with these named sets, `NAME` or `NAME=TASKS`, and with --eval-tasks unless not `own`."""
        pairs = [(name, of or name) for name, _, of in (one.partition("=") for one in sets)]
        settings = build(
            {
                "rollout.tasks_per_iteration": 4,
                "rollout.samples_per_task": 2,
                "eval.interval": interval,
                **({"eval_tasks": self.tasks["own"]} if own else {}),
                **{f"eval.sets.{name}.tasks": self.tasks[of] for name, of in pairs},
                **given,
            }
        )
        node: Any = SimpleNamespace(
            settings=settings,
            run_dir=self.run_dir,
            identity=SimpleNamespace(inputs=load_inputs(settings, {})),
            watch=SimpleNamespace(look=lambda: None),
            check=lambda: None,
        )
        return node

    def slots(self, node: Any) -> int:
        """The slots of the evaluation of iteration 1, which has a group from its first start on."""
        base = Policy(0, self.run_dir.base_model, POLICY)
        opened, _ = rollout._open(node, Iteration(1), base)
        if not self.opened:
            self.opened = opened
            writer = PartWriter(self.run_dir, "train", 1, 0, 1, origin_of(opened, "train", POLICY, 0))
            writer.add(group(0))
            writer.flush()
        assert opened == self.opened
        header = {"opened": opened, "policy": POLICY, "policy_iteration": 0}
        return evaluation.decide_eval(node, Iteration(1, documents={Phase.ITERATION_START: header}))["slots"]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Run:
    monkeypatch.setattr(rollout_steps, "plan", lambda *_about: {})
    caplog.set_level(logging.WARNING)
    return Run(tmp_path)


def test_set_that_is_new_leaves_an_open_iteration_its_evaluation(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.slots(run.start("b")) == 7
    assert run.slots(run.start("a", "b", "more")) == 7
    (line,) = caplog.messages
    assert line.startswith("iteration 1 is finished as it was begun: eval.sets.a=not set (now tasks ")


def test_iteration_that_was_opened_without_named_sets_is_evaluated_without_them(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if only a later start makes its evaluation due."""
    assert run.slots(run.start(interval=0)) == 0
    assert run.slots(run.start("a")) == 3
    assert "is not evaluated" not in caplog.text


def test_iteration_that_had_no_evaluation_tasks_gets_none(tmp_path: Path, run: Run) -> None:
    tasks = write_tasks(tmp_path, "train", 1, 8)
    assert run.slots(run.start(own=False, tasks=tasks, interval=0)) == 0
    assert run.slots(run.start("a", own=False, tasks=tasks)) == 0


@pytest.mark.parametrize(
    ("sets", "said"),
    [
        ((), "eval.sets.a was dropped or renamed since"),
        (("c=a",), "eval.sets.a was dropped or renamed since"),
        (("a=b",), "the tasks of eval.sets.a have changed since"),
    ],
)
def test_iteration_whose_set_is_not_there_any_more_is_not_evaluated_and_one_warning_says_so(
    sets: tuple[str, ...], said: str, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.slots(run.start("a")) == 5
    assert run.slots(run.start(*sets)) == 0
    assert caplog.messages[-1] == f"{said} iteration 1 was opened: that iteration is not evaluated"
    assert not any("eval.sets.a=" in line for line in caplog.messages)


def test_own_tasks_that_have_changed_are_seen_beside_named_sets(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    assert run.slots(run.start("a")) == 5
    assert run.slots(run.start("a", "b", eval_tasks=run.tasks["more"])) == 0
    assert caplog.messages[-1].startswith("the evaluation tasks have changed since iteration 1 was opened")
    assert run.slots(run.start("a", "b")) == 5


def test_parts_of_others_are_listed_anew_before_the_evaluation_is_summed_up(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that believes its own listing for 20 s, as sshfs, has none of those that others made since."""
    calls: list[Any] = []
    node = run.start()
    node.watch.listings = SimpleNamespace(list_anew=calls.append)
    monkeypatch.setattr(evaluation, "made_with", lambda *_about: None)
    monkeypatch.setattr(rollout_steps, "sum_short", lambda *_about: {})
    monkeypatch.setattr(rollout_steps, "aggregate", lambda *_about: calls.append("the manifest"))
    documents = {Phase.ITERATION_START: {"opened": {}}, Phase.EVAL_DECISION: {"slots": 4}}
    evaluation.aggregate_eval(node, Iteration(1, documents=documents), {})
    assert calls == [run.run_dir.trajectories("eval", 1), "the manifest"]
