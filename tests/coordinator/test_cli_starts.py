"""What a start goes by: what is typed, what the last start was given, what the master has published."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.protocol.records import GivenSettings, claim
from coordinator.settings.loading import build, flatten
from rollout.storage import files
from tests.coordinator.examples import record, run_dir_at, tree, write_json
from tests.coordinator.typed_command import FIXED, Run, refusal


def test_dry_run_prints_the_settings_and_writes_nothing(run: Run, place: Path) -> None:
    (place / "config.toml").write_text("[rollout]\nseed = 3\nmax_tokens = 5\n")
    before = tree(place)
    ended = run(
        *("--master", "--num-nodes", "3", "--rank-weights", "2,1,1", "--config", "config.toml", "--dry-run"),
        *("rollout.seed=4", "--reward", "numeric", "trainer.learning_rate=1e-6"),
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert tree(place) == before
    expected = build(
        {
            "cluster.num_nodes": 3,
            "cluster.rank_weights": [2, 1, 1],
            "rollout.seed": 4,
            "rollout.max_tokens": 5,
            "rollout.reward": "numeric",
            "trainer.learning_rate": 1e-6,
        }
    )
    assert json.loads(ended.stdout) == expected.model_dump(mode="json")


def test_columns_of_data_are_mapped_alike_on_the_command_line_and_in_a_file(run: Run, place: Path) -> None:
    (place / "made.csv").write_text("question,final\n1+2=,3\n")
    (place / "made.toml").write_text('tasks = "made.csv"\n[columns]\nprompt = "question"\nanswer = "final"\n')
    typed = ["--tasks", "made.csv", "columns.prompt=question", "columns.answer=final"]
    shown = [run(*words, "--dry-run").stdout for words in (typed, ["--config", "made.toml"])]
    assert shown[0] == shown[1]
    assert json.loads(shown[0])["columns"] == {"prompt": "question", "answer": "final"}
    said = refusal(run, place, "--log-path", "none", "--tasks", "made.csv", "columns.prompt=text")
    problem = "nothing in the column 'text' (columns.prompt); there is question, final"
    assert said == f"{place}/made.csv, row 1: {problem}"
    said = refusal(run, place, "--log-path", "none", "columns.prompt=question")
    assert "columns.prompt names a column of data, but --tasks is builtin:arithmetic" in said
    said = refusal(run, place, "--log-path", "none", *typed, "eval.columns.prompt=question")
    assert "eval.columns.prompt names a column of data, but --eval-tasks is not given" in said


def test_option_of_the_reward_may_come_several_times(run: Run) -> None:
    typed = ["--reward", "exact=1", "--reward", "length=-0.1"]
    several, together = (
        run(*words, "--settings-only") for words in (typed, ["rollout.reward=exact=1 + length=-0.1"])
    )
    assert json.loads(several.stdout)["rollout"]["reward"] == "exact=1 + length=-0.1"
    assert several.stdout == together.stdout
    wrong = run("--reward", "exact=1", "--reward", "length=much")
    assert wrong.returncode == 2 and "the weight 'much' of length is not a finite number" in wrong.stderr


def test_dry_run_looks_at_what_the_settings_name_and_fetches_nothing(run: Run, place: Path) -> None:
    (place / "bad.jsonl").write_text('{"prompt": "1+2="}\n')
    for words, reason in (
        (["--reward", "nosuch"], "reward 'nosuch': there is exact"),
        (["--tasks", "nosuch.jsonl"], "nosuch.jsonl: no such file"),
        (["--tasks", "bad.jsonl"], "--reward exact cannot score this task"),
        (["--model", "./nosuch"], "--model ./nosuch: no such directory"),
        (["--tasks", "hf:"], "hf:: write hf:NAME, hf:NAME:SPLIT or"),
        (["--tasks", "hf:a/b", "--eval-tasks", "nosuch.jsonl"], "nosuch.jsonl: no such file"),
        (["--eval-tasks", "hf:a/b", "--tasks", "broken.jsonl"], "broken.jsonl:2"),
        (["--model", "a/b", "--tasks", "bad.jsonl"], "--reward exact cannot score this task"),
        (["--data-path", "nosuch", "--tasks", "hf:a/b"], "--data-path nosuch: no such directory"),
        (["--log-path", "a file"], "a file; give a directory"),
        (["--log-path", "s3://bucket/run"], "'s3:' is not a directory; give one that is mounted here"),
        (["--model", "hf:a/b"], "--model hf:a/b: is neither a directory nor a name on Hugging Face"),
        (["--model", "https://hf.co/a/b"], "is neither a directory nor a name on Hugging Face"),
        (["rollout.max_tokens=5000"], "rollout.max_tokens=5000 leaves no room for a prompt"),
        (["--model", "./empty", "eval.interval=0"], "/empty/config.json: is missing; give"),
        (["rollout.teacher=nosuch"], "rollout.teacher=nosuch: 'nosuch' is "),
        (["engine.kind=vllm", "engine.args.dtype=nosuch"], "engine.args.dtype=nosuch: vLLM knows bfloat16"),
        (["engine.kind=vllm", "engine.args.dtype=half"], "compute with weights in half"),
    ):
        ended = run(*words, "--dry-run")
        assert ended.returncode == 2 and reason in ended.stderr and not ended.stdout, ended
        assert run(*words, "--settings-only").returncode == 0
    ended = run("--model", "nobody/no-such-model", "--dry-run")
    assert ended.returncode == 0 and "a start would fetch it: nobody/no-such-model" in ended.stderr
    assert run("--worker", "1", "--tasks", "nosuch.jsonl", "--dry-run").returncode == 0
    for word, absent in (
        ("engine.kind=vllm", "vLLM is not installed"),
        ("engine.kind=vllm engine.args.dtype=bfloat16", "or give trainer.compute_dtype=bfloat16"),
        ("metrics.sinks=wandb", "wandb is not"),
    ):
        ended = run(*word.split(), "--dry-run")  # the plan may be for other machines
        assert ended.returncode == 0 and json.loads(ended.stdout), ended
        assert "a start on this machine would be refused" in ended.stderr and absent in ended.stderr
    ended = run("trainer.kl_coefficient=0.1", "--dry-run")
    assert ended.returncode == 0 and "does nothing with trainer.kl=off" in ended.stderr


def test_dry_run_of_all_nodes_prints_the_same(run: Run) -> None:
    ended = run("local", "--num-nodes", "3", "--dry-run")
    assert json.loads(ended.stdout) == build({"cluster.num_nodes": 3}).model_dump(mode="json")


def test_debug_mode_is_the_server_on_the_default_port(run: Run) -> None:
    settings = dict(flatten(json.loads(run("--debug-mode", "--dry-run").stdout)))
    assert settings["engine.url"] == "http://127.0.0.1:8000"
    other = ("--engine-url", "http://127.0.0.1:8001")
    settings = dict(flatten(json.loads(run(*other, "--debug-mode", "--dry-run").stdout)))
    assert settings["engine.url"] == other[1]


def test_scheduler_says_rank_and_number_of_nodes(run: Run) -> None:
    slurm = {"SLURM_NNODES": "4", "SLURM_NODEID": "0"}
    assert json.loads(run("--dry-run", env=slurm).stdout)["cluster"]["num_nodes"] == 4
    ended = run("--dry-run", "--num-nodes", "2", env=slurm)
    assert json.loads(ended.stdout)["cluster"]["num_nodes"] == 2


def test_master_addr_that_names_this_machine_makes_the_master(run: Run) -> None:
    assert run("--num-nodes", "2", "--dry-run", env={"MASTER_ADDR": "localhost"}).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            "tiny.warmup_steps=1",
            "--model is builtin:tiny, tiny.warmup_steps=1, but this run was started with",
        ),
        ("--tasks good.jsonl", "good.jsonl, but this run was started with builtin:arithmetic"),
        ("--tasks good.jsonl --eval-interval 2", "good.jsonl, but this run was started with builtin:"),
        ("rollout.seed=7", "was started with"),
    ],
)
def test_what_may_not_change_between_starts_is_refused(
    run: Run, place: Path, arguments: str, expected: str
) -> None:
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    text = refusal(run, place, "--log-path", "run", *arguments.split())
    assert expected in text and text.endswith("to start over, use another log path")


LAST = {"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "rollout.max_tokens": 64, "iterations": 5}


@pytest.fixture
def begun(place: Path) -> RunDir:
    """A run that was started with LAST, and stopped."""
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    last = record(1, "lobby", {}, settings=build(LAST))
    given = GivenSettings(host=socket.gethostname(), settings=LAST)
    assert claim(run_dir, last.model_copy(update={"given": given}))
    return run_dir


@pytest.mark.parametrize(
    ("arguments", "changed", "said"),
    [
        ("--master", {}, []),
        ("local", {}, []),
        (
            "--master --num-nodes 2",
            {"cluster.num_nodes": 2, "cluster.rank_weights": None},
            [
                "--num-nodes is 2, at the last start it was 3",
                "--rank-weights is not set, at the last start it was 2,1,1",
            ],
        ),
        (
            "local --config given.toml --reset-settings iterations",
            {"rollout.temperature": 0.5, "iterations": 16},
            [
                "--iterations is 16, at the last start it was 5",
                "rollout.temperature is 0.5, at the last start it was 1",
            ],
        ),
    ],
)
def test_dry_run_shows_what_a_start_would_go_by_and_what_it_changes(
    run: Run, place: Path, begun: RunDir, arguments: str, changed: dict[str, Any], said: list[str]
) -> None:
    (place / "given.toml").write_text("[rollout]\ntemperature = 0.5\n")
    ended = run(*arguments.split(), "--log-path", "run", "--dry-run")
    assert ended.stderr.splitlines() == said
    assert json.loads(ended.stdout) == build({**LAST, **changed}).model_dump(mode="json")


def test_dry_run_refuses_other_tasks_of_a_run_that_was_begun(run: Run, begun: RunDir) -> None:
    ended = run("--master", "--tasks", "good.jsonl", "--log-path", "run", "--dry-run")
    assert ended.returncode == 2 and "but this run was started with builtin:arithmetic" in ended.stderr
    ended = run("--master", "--model", "small", "--log-path", "run", "--dry-run", "rollout.seed=0")
    assert ended.returncode == 2 and "but this run was started with builtin:tiny" in ended.stderr
    for hub in (["--tasks", "hf:a/b"], ["--model", "a/b"]):
        ended = run("--master", *hub, "--log-path", "run", "--dry-run")
        assert (
            ended.returncode == 2 and f"{hub[0]} is {hub[1]}, but this run was started with" in ended.stderr
        )


def test_dry_run_compares_names_of_models_that_it_does_not_fetch(run: Run, place: Path) -> None:
    for name in ("a/b", "/mnt/models/b"):  # what another machine has may be the same
        run_dir = run_dir_at(place / f"run-{len(name)}")
        fixed = {**FIXED, "model": {"name": name, "digest": "0"}}
        write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": fixed})
        same = ("--master", "--model", "a/b", "--dry-run", "--log-path", str(run_dir.root))
        assert run(*same).returncode == 0
        ended = run(*same, "--model", "a/c")
        assert (ended.returncode == 2) == (name == "a/b"), ended.stderr
        ended = run(*same, "--tasks", "good.jsonl")
        assert ended.returncode == 2 and "good.jsonl, but this run was started with builtin:" in ended.stderr


@pytest.mark.parametrize("words", [["--reset-settings"], ["--reset-settings", "rollout.seed=0"]])
def test_reset_without_a_name_is_of_all_settings(run: Run, begun: RunDir, words: list[str]) -> None:
    ended = run("--dry-run", "--log-path", "run", *words)
    assert json.loads(ended.stdout) == build({}).model_dump(mode="json"), ended.stderr
    assert "--num-nodes is 1, at the last start it was 3" in ended.stderr.splitlines()


def test_start_without_a_role_in_a_run_of_several_nodes_is_refused(
    run: Run, place: Path, begun: RunDir
) -> None:
    assert "this node has no role in a run of 3 nodes" in refusal(run, place, "--log-path", "run")


@pytest.fixture
def reward() -> str:
    """The reward that the master has published."""
    return "exact"


@pytest.fixture
def master(place: Path, reward: str) -> Iterator[RunDir]:
    """A run whose master beats, with three nodes of weights 2,1,1."""
    run_dir = run_dir_at(place / "run")
    write_json(run_dir.run_json, {"run_id": "abc", "format": FORMAT, "fixed": FIXED})
    cluster = {"cluster.num_nodes": 3, "cluster.rank_weights": "2,1,1", "cluster.rejoin_timeout_s": 30}
    settings = build({**cluster, "rollout.reward": reward})
    assert claim(run_dir, record(1, "lobby", {}, settings=settings))
    over = threading.Event()

    def beat() -> None:
        counter = 0
        while not over.wait(0.05):
            counter += 1
            path = run_dir.entry(Beat(1, 0, 1, counter))
            files.publish(path, b"{}", durable=False)
            if counter > 1:
                files.remove(run_dir.entry(Beat(1, 0, 1, counter - 1)))

    beating = threading.Thread(target=beat)
    beating.start()
    yield run_dir
    over.set()
    beating.join(timeout=60)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--worker 1 --num-nodes 2", "--num-nodes is 2 here, but the master published 3"),
        ("--worker 1 --rank-weights 1,1,1", "--rank-weights is 1,1,1 here, but the master published 2,1,1"),
        ("--worker 1 --tasks good.jsonl", "good.jsonl here, but the master published builtin:"),
        ("--worker 1 rollout.seed=9", "rollout.seed is 9 here, but the master published 0"),
        ("--worker 3", "--worker 3 is outside the master's --num-nodes 3 (workers are 1 to 2)"),
    ],
)
def test_worker_that_contradicts_its_master_is_refused_and_writes_nothing(
    run: Run, master: RunDir, arguments: str, expected: str
) -> None:
    def without_beats() -> set[str]:
        return {path for path in tree(master.root) if ".b0" not in path}

    before = without_beats()
    ended = run("--log-path", "run", "--rejoin-timeout", "30", *arguments.split())
    assert ended.returncode == 2, ended.stderr
    assert expected in ended.stderr.splitlines()[-1]
    assert without_beats() == before


@pytest.mark.parametrize("reward", ["of_the_master:score"])
def test_worker_that_cannot_import_the_masters_reward_says_so_before_it_joins(
    run: Run, place: Path, master: RunDir
) -> None:
    ended = run("--worker", "1", "--log-path", "run", "--rejoin-timeout", "30")
    assert ended.returncode == 2, ended.stderr
    said = ended.stderr.splitlines()[-1]
    assert said.startswith("run: --reward of_the_master:score: module 'of_the_master' cannot be ")
    assert f"looked for in {place}, on PYTHONPATH" in said
    assert "n1.b" not in "".join(tree(master.workers))
