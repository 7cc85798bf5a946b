"""What an open iteration is finished with, and which change of code is refused."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.directory.layout import RunDir
from coordinator.directory.manifests import manifest, publish_manifest
from coordinator.directory.parts import PartWriter
from coordinator.directory.published import Policy
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases import rollout
from coordinator.phases.provenance import (
    agreed_functions,
    changes,
    chosen,
    codes_of,
    is_begun,
    origin_of,
    refuse_changed_code,
)
from coordinator.protocol.exits import Exit, NodeEnded
from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from coordinator.settings.tree import SettingsError
from coordinator.start.inputs import load_inputs
from coordinator.start.user_functions import load_functions
from rollout.origin import Code, Origin, Sampling, origin_document
from rollout.quota import Quota
from rollout.trajectory import UNFINISHED, Group
from tests.coordinator import examples
from tests.coordinator.examples import POLICY, group, opened, run_dir_at, tombstone, write_json

NOW = load_functions("exact", "single_turn")
ORIGIN = Origin(POLICY, 0, Sampling(n=2, max_tokens=8), NOW.reward, NOW.environment)
OLDER = replace(ORIGIN, reward=Code("exact", "0" * 16))
SETTINGS = build({"model": "Qwen/Qwen3-4B", "rl_phase": "rollout"})


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    """A run whose first iteration is open: nothing of it is finished."""
    made = run_dir_at(tmp_path)
    made.trajectories("eval", 1).mkdir()
    write_json(made.iteration_json(1), opened(1, ORIGIN, slots=4, eval_slots=4))
    return made


def finish(run_dir: RunDir, kind: Any, origin: Origin, *groups: Group, epoch: int = 2) -> None:
    writer = PartWriter(run_dir, kind, 1, 0, epoch, origin)
    for each in groups:
        writer.add(each)
    writer.flush()


def conclude(run_dir: RunDir, kind: Any) -> None:
    """Publish the manifest over what is there."""
    made = manifest(run_dir.trajectories(kind, 1), 1, Quota(4, 4), ORIGIN, short=None)
    publish_manifest(run_dir.manifest(kind, 1), *made)


def test_code_of_finished_groups_must_be_todays(run_dir: RunDir) -> None:
    refuse_changed_code(run_dir, SETTINGS)  # nothing is finished
    finish(run_dir, "train", ORIGIN, group(0))
    refuse_changed_code(run_dir, SETTINGS)
    finish(run_dir, "train", OLDER, group(1), epoch=3)
    with pytest.raises(SettingsError) as refused:
        refuse_changed_code(run_dir, SETTINGS)
    said = str(refused.value)
    assert f"(digest {'0' * 16})" in said and f"(digest {NOW.reward.digest})" in said
    assert "--reward exact has changed" in said and "\n" not in said
    finish(run_dir, "train", ORIGIN, group(2), epoch=4)  # the change was accepted, and is not a new one
    refuse_changed_code(run_dir, SETTINGS)


def test_code_of_an_environment_counts_as_a_rewards_does(run_dir: RunDir) -> None:
    finish(run_dir, "train", replace(ORIGIN, environment=Code("single_turn", "0" * 16)), group(0))
    with pytest.raises(SettingsError, match="--environment single_turn has changed"):
        refuse_changed_code(run_dir, SETTINGS)


def test_only_what_is_not_generated_yet_binds_to_a_code(run_dir: RunDir) -> None:
    finish(run_dir, "train", OLDER, *(group(slot) for slot in range(4)))
    refused = pytest.raises(SettingsError, match="has changed")
    with refused:
        refuse_changed_code(run_dir, SETTINGS)
    conclude(run_dir, "train")
    refuse_changed_code(run_dir, SETTINGS)  # its evaluation is not begun: all of it will be of one code
    finish(run_dir, "eval", replace(OLDER, sampling=replace(OLDER.sampling, temperature=0.0)), group(0))
    with pytest.raises(SettingsError, match="has changed"):
        refuse_changed_code(run_dir, SETTINGS)
    refuse_changed_code(run_dir, build({"model": "Qwen/Qwen3-4B", "rl_phase": "update"}))
    conclude(run_dir, "eval")
    refuse_changed_code(run_dir, SETTINGS)


def test_finished_iteration_binds_to_nothing(run_dir: RunDir) -> None:
    finish(run_dir, "train", OLDER, group(0))
    run_dir.metrics.write_text(json.dumps({"iteration": 1, "kind": "rollout"}) + "\n")
    refuse_changed_code(run_dir, SETTINGS)


def test_reward_that_an_open_iteration_needs_and_nobody_finds_is_named(run_dir: RunDir) -> None:
    gone = replace(ORIGIN, reward=Code("gone_module:score", "0" * 16))
    write_json(run_dir.iteration_json(1), opened(1, gone, slots=4))
    refuse_changed_code(run_dir, SETTINGS)  # it will be opened anew
    finish(run_dir, "train", gone, group(0))
    with pytest.raises(SettingsError, match=r"iteration 1 is open .* module 'gone_module'") as refused:
        refuse_changed_code(run_dir, SETTINGS)
    assert "run cleanup --iteration 1" in str(refused.value)


def test_iteration_is_begun_with_its_first_finished_group(run_dir: RunDir) -> None:
    assert not is_begun(run_dir, 1)
    finish(run_dir, "eval", ORIGIN, group(0))
    assert is_begun(run_dir, 1)
    conclude(run_dir, "eval")
    assert not is_begun(run_dir, 1), "an evaluation that is complete says itself how it was made"
    finish(run_dir, "train", ORIGIN, group(0))
    assert is_begun(run_dir, 1)
    conclude(run_dir, "train")
    assert is_begun(run_dir, 1)


def test_iteration_is_not_begun_by_groups_that_were_given_up(run_dir: RunDir) -> None:
    finish(run_dir, "train", OLDER, tombstone(0), tombstone(1))
    assert not is_begun(run_dir, 1)
    refuse_changed_code(run_dir, SETTINGS)  # the reward may have been mended


def test_every_setting_of_the_sampling_is_kept_and_a_change_is_said() -> None:
    given = {
        "rollout.samples_per_task": 3,
        "rollout.max_tokens": 11,
        "rollout.temperature": 0.5,
        "rollout.top_p": 0.9,
        "rollout.top_k": 20,
        "rollout.min_p": 0.05,
        "rollout.stop": ["\n", "###"],
        "rollout.tool_parser": "hermes",
        "rollout.chat_template.enable_thinking": False,
        "rollout.reasoning_end": "</think>",
        "rollout.thinking_tokens": 4,
        "rollout.history": "template",
        "eval.samples_per_task": 5,
        "eval.temperature": 0.25,
        "eval.top_k": 7,
        "eval.max_tokens": 12,
    }
    settings = build(given)
    then = chosen(settings, load_inputs(settings, {}))
    stop = ["\n", "###"]
    chat = {"tool_parser": "hermes", "chat_template": {"enable_thinking": False}}
    chat |= {"reasoning_end": "</think>", "thinking_tokens": 4, "history": "template"}
    assert then["sampling"] == {
        "n": 3, "max_tokens": 11, "temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05,
        "stop": stop, **chat,
    }  # fmt: skip
    assert then["eval_sampling"] == {
        "n": 5, "max_tokens": 12, "temperature": 0.25, "top_p": 1.0, "top_k": 7, "min_p": 0.0,
        "stop": stop, **chat,
    }  # fmt: skip
    number = {"groups": 4, "replace_flat": False, "max_async_level": 0}
    before = json.loads(json.dumps({**then, **number}))
    assert changes(before, {**then, **number}) == []
    older = json.loads(json.dumps(before))
    del older["sampling"]["chat_template"], older["sampling"]["tool_parser"], older["sampling"]["top_k"]
    del older["eval_sampling"]["top_k"]
    assert changes(older, {**then, **number}) == [
        "rollout.top_k=0 (now 20)",
        "rollout.tool_parser=auto (now hermes)",
        'rollout.chat_template={} (now {"enable_thinking": false})',
        "eval.top_k=0 (now 7)",
    ]
    other = build({**given, "rollout.stop": [], "eval.temperature": 0.0, "rollout.reward": "numeric"})
    now = {**chosen(other, load_inputs(other, {})), **number, "groups": 5, "max_async_level": 2}
    assert changes(before, now) == [
        r'rollout.stop=["\n", "###"] (now [])',
        "eval.temperature=0.25 (now 0)",
        "--reward=exact (now numeric)",
        "rollout.tasks_per_iteration=4 (now 5)",
        "--max-async-level=0 (now 2)",
    ]
    one, two = ({**now, "teacher": f"http://{host}:8000/v1"} for host in ("a", "b"))
    assert changes(one, two) == [], "it is asked where it is now"
    assert changes(one, now) == ["rollout.teacher=http://a:8000/v1 (now not set)"]
    assert changes(one, {**two, "teachers": {"math": "http://a:8000/v1"}}) == [
        'rollout.teachers=[] (now ["math"])'
    ]
    itself = {**now, "teacher": "self:a", "teacher_template": "{hint} {prompt}"}
    assert changes(itself, {**itself, "teacher": "self:b"}) == ["rollout.teacher=self:a (now self:b)"]
    assert changes(itself, {**itself, "teacher_template": "{hint}{prompt}"}) == [
        "rollout.teacher_template={hint} {prompt} (now {hint}{prompt})"
    ]


# ---- an iteration that is opened anew


def master_of(run_dir: RunDir, replaced: bool = False) -> Any:
    """As much of a master as opening an iteration looks at; it would take 3 tokens a sample."""
    settings = build(
        {"rollout.max_tokens": 3, "rollout.samples_per_task": 2, "rollout.tasks_per_iteration": 4}
    )

    def check() -> None:
        if replaced:
            raise NodeEnded(Exit.SUPERSEDED, "replaced", None)

    return SimpleNamespace(
        run_dir=run_dir,
        settings=settings,
        identity=SimpleNamespace(inputs=load_inputs(settings, {})),
        watch=SimpleNamespace(look=lambda: None),
        check=check,
    )


def test_iteration_of_which_nothing_is_finished_is_opened_anew(run_dir: RunDir) -> None:
    base = Policy(0, run_dir.base_model, POLICY)
    made, policy = rollout._open(master_of(run_dir), Iteration(1), base)
    assert policy == base
    assert made["sampling"]["max_tokens"] == 3
    assert json.loads(run_dir.iteration_json(1).read_bytes()) == made
    finish(run_dir, "train", ORIGIN, group(0))
    node = master_of(run_dir)
    node.settings = build({"rollout.max_tokens": 5})
    assert rollout._open(node, Iteration(1), base) == (made, base)


def test_iteration_that_an_evaluation_has_opened_early_takes_what_is_left_unfinished_since(
    run_dir: RunDir,
) -> None:
    """Its settings are those of today, but iteration 1 had no manifest then."""
    base = Policy(0, run_dir.base_model, POLICY)
    first, _ = rollout._open(master_of(run_dir), Iteration(1), base)
    run_dir.trajectories("train", 2).mkdir()
    early, _ = rollout._open(master_of(run_dir), Iteration(2), base)
    assert (early["begun"], len(early["tasks"])) == ([], 4)
    made = origin_of(first, "train", POLICY, 0)
    cut = group(3)
    for sample in cut.samples:
        sample.reward, sample.finish_reason = None, UNFINISHED
    finish(run_dir, "train", made, group(0), group(1), group(2), cut)
    document = manifest(run_dir.trajectories("train", 1), 1, Quota(4, 4), made)
    publish_manifest(run_dir.manifest("train", 1), *document)
    opened_now, _ = rollout._open(master_of(run_dir), Iteration(2), base)
    assert [one["file_slot"] for one in opened_now["begun"]] == [3]
    assert opened_now["tasks"] == [first["tasks"][3], *early["tasks"]]
    assert rollout._open(master_of(run_dir), Iteration(2), base)[0] == opened_now


def test_master_that_was_replaced_opens_nothing_anew(run_dir: RunDir) -> None:
    before = run_dir.iteration_json(1).read_bytes()
    with pytest.raises(NodeEnded):
        rollout._open(master_of(run_dir, replaced=True), Iteration(1), Policy(0, run_dir.base_model, POLICY))
    assert run_dir.iteration_json(1).read_bytes() == before


def test_rows_go_by_what_the_master_has_opened_though_a_client_shows_what_was_there_before(
    run_dir: RunDir,
) -> None:
    anew = replace(ORIGIN, sampling=replace(ORIGIN.sampling, max_tokens=3))
    finish(run_dir, "train", anew, group(0))
    header = {"opened": opened(1, anew, slots=4), "policy": POLICY, "policy_iteration": 0}
    node: Any = SimpleNamespace(run_dir=run_dir, rank=0)
    assert rollout.part_checksums(node, Iteration(1, documents={Phase.ITERATION_START: header}))


# ---- all nodes have the same


def test_worker_whose_code_is_not_the_masters_ends_the_run_before_it_generates() -> None:
    node: Any = SimpleNamespace(
        record=SimpleNamespace(master_host="node-a"),
        messages=SimpleNamespace(failure=lambda error: f"rank 1 (node-b) failed: {error}"),
    )
    about = opened(1, ORIGIN, slots=4)
    codes = NOW.codes()
    iteration = Iteration(
        1, documents={Phase.ITERATION_START: {"code": codes_as_json(codes), "opened": about}}
    )
    assert codes_of(agreed_functions(node, iteration)) == codes
    other = {**codes, "rollout.environment": Code("single_turn", "f" * 16)}
    iteration = Iteration(
        1, documents={Phase.ITERATION_START: {"code": codes_as_json(other), "opened": about}}
    )
    with pytest.raises(NodeEnded, match=r"--environment single_turn is not the same on .* node-a") as end:
        agreed_functions(node, iteration)
    assert (end.value.code, end.value.tell) == (Exit.FAILED, "failed")
    assert "f" * 16 in end.value.text and codes["rollout.environment"].digest in end.value.text


def codes_as_json(codes: dict[str, Code]) -> dict[str, Any]:
    return {key: asdict(code) for key, code in codes.items()}


def worker(settings: Any) -> Any:
    """As much of a worker as entering an epoch looks at."""
    identity = SimpleNamespace(inputs=load_inputs(settings, {}))
    messages = SimpleNamespace(failure=lambda error: f"rank 1 (node-b) failed: {error}")
    return SimpleNamespace(identity=identity, settings=settings, messages=messages)


def enter(node: Any, settings: Any, **inputs: Code) -> None:
    """The worker enters an epoch of a master with these settings, which has loaded `inputs`."""
    node.settings = settings
    theirs = {name.replace("__", "."): code for name, code in inputs.items()}
    codes = {**load_inputs(settings, {}).codes(), **theirs}
    Node.take_over_inputs(node, examples.record(settings=settings).model_copy(update={"inputs": codes}))


def test_worker_takes_over_reward_environment_and_evaluation_tasks_of_a_new_start(tmp_path: Path) -> None:
    tasks = tmp_path / "eval.jsonl"
    tasks.write_text('{"prompt": "1+2=", "answer": "3"}\n')
    node = worker(build({}))
    settings = build({"eval_tasks": str(tasks), "rollout.reward": "numeric",
                      "rollout.environment": "calculator"})  # fmt: skip
    enter(node, settings)
    found = node.identity.inputs
    assert found.functions.reward.name == "numeric"
    assert found.functions.environment.name == "calculator"
    assert [task["prompt"] for task in found.eval_tasks.tasks] == ["1+2="]
    tasks.write_text('{"prompt": "2+2=", "answer": "4"}\n')  # the same name, and the master has read it anew
    enter(node, settings)
    assert [task["prompt"] for task in node.identity.inputs.eval_tasks.tasks] == ["2+2="]


@pytest.mark.parametrize(
    ("given", "inputs", "said"),
    [
        ({}, {"rollout__reward": Code("exact", "f" * 16)}, "--reward exact is not the same on"),
        ({}, {"eval_tasks": Code("builtin:arithmetic", "f" * 16)}, "--eval-tasks builtin:arithmetic is not"),
    ],
)
def test_worker_that_holds_other_code_than_the_new_master_ends_the_run(
    given: dict[str, Any], inputs: dict[str, Code], said: str
) -> None:
    node = worker(build({}))
    with pytest.raises(NodeEnded, match=said) as end:
        enter(node, build(given), **inputs)
    assert (end.value.code, end.value.tell) == (Exit.FAILED, "failed")


def test_worker_that_does_not_find_the_new_reward_ends_the_run() -> None:
    node, settings = worker(build({})), build({"rollout.reward": "gone_module:score"})
    node.settings = settings
    with pytest.raises(NodeEnded, match=r"--reward gone_module:score: .*cannot be imported") as end:
        Node.take_over_inputs(node, examples.record(settings=settings))
    assert end.value.tell == "failed"


def test_what_one_request_asks_for_is_not_recorded() -> None:
    assert origin_document(Sampling(more={"logprobs": 0}, seed=3)) == origin_document(Sampling())
