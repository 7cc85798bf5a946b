"""The benchmarks run and measure what they say; how fast anything is, a person reads."""

import json
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coordinator.protocol.phase import Phase
from coordinator.settings.loading import build
from rollout.engines.model_facts import count_experts
from tests.imports import shared_imports
from trainer.model.tiny import EOS_ID

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(BENCH / name), *arguments]
    env = os.environ | shared_imports()
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_balance_of_unequal_nodes_is_a_table(tmp_path: Path) -> None:
    ended = run("balance.py", "--seeds", "2", "--groups", "90", "--dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    _, *rows = ended.stdout.splitlines()
    medians = {line[:34].strip(): float(line[34:].split()[0]) for line in rows}
    assert len(medians) == 14 and min(medians.values()) >= 1.0
    assert max(medians[f"{kind}, iteration 2"] for kind in ("claims", "tools")) <= 1.15


def test_rollouts_with_guests_that_come_and_go_are_a_table() -> None:
    ended = run("guests.py", "--seeds", "1", "--groups", "60")
    assert ended.returncode == 0, ended.stderr
    _, *rows = ended.stdout.splitlines()
    medians = {line[:52].strip(): float(line[52:].split()[0]) for line in rows}
    assert len(medians) == 12 and medians["2 guests, known, leave in order"] <= 1.15


def test_two_crews_are_measured_with_rollouts_of_uneven_lengths(tmp_path: Path) -> None:
    words = ("--lengths", "segments", "--seconds", "0.5", "--iterations", "2", "--dir", str(tmp_path / "run"))
    ended = run("overlap.py", *words)
    assert ended.returncode == 0, ended.stderr
    line = json.loads(ended.stdout)
    assert line["codes"] == [0, 0, 0] and line["seconds"] >= 0.5 and 0 < line["busy"] < 1


def test_rollouts_in_segments_leave_fewer_slots_empty() -> None:
    overlap = import_module("scripts.bench.overlap")
    busy = {}
    for lengths in ("whole", "segments"):
        taken = overlap.rollouts(lengths, 40, 10.0)
        assert all(work <= seconds for seconds, work in taken)
        busy[lengths] = sum(work for _, work in taken) / sum(seconds for seconds, _ in taken)
    assert busy["segments"] > 0.9 > busy["whole"]


def test_what_a_level_does_to_learning_is_measured_on_held_out_tasks(tmp_path: Path) -> None:
    words = ("--levels", "1", "--seeds", "0", "--dir", str(tmp_path / "made"), "iterations=1")
    ended = run("asynchrony.py", *words, "tiny.warmup_steps=0")
    assert ended.returncode == 0, ended.stderr
    line, means = map(json.loads, ended.stdout.splitlines())
    assert (line["level"], line["seed"]) == (1, 0) and 0 <= line["greedy"] <= 1
    assert means == {name: line[name] for name in ("level", "reward", "sampled", "greedy")}


def reads(calls: str) -> bool:
    """Return whether a row reads in each iteration: a node that waits long looks at who keeps it waiting."""
    found = re.search(r"([\d.]+) read", calls)
    return found is not None and float(found[1]) >= 1


def test_phase_without_a_document_reads_none_and_none_removes_a_flag(tmp_path: Path) -> None:
    ended = run(
        "protocol.py", "--nodes", "3", "--iterations", "4", "--dir", str(tmp_path / "run"), "--phases"
    )
    assert ended.returncode == 0, ended.stderr
    line, *table = ended.stdout.splitlines()
    figures = json.loads(line)
    assert (figures["nodes"], figures["iterations"], figures["codes"]) == (3, 4, [0])
    assert 0 < figures["seconds_median"] <= figures["seconds_p99"]
    assert figures["operations_worker"] >= 2.0, "a row of all nodes raises a flag and lists"
    assert figures["operations_master"] > 0 and 0 < figures["files_left"] < 60 and figures["bytes_left"] > 0
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    calls = {row: (master, worker) for row, master, _, worker, _ in cells}
    by_master = {"iteration_start", "train_plan", "eval_decision", "train_config"}
    by_workers = {"train_rollout", "train_files_ready", "iteration_end"}
    for phase in (each.label for each in Phase):
        master, worker = calls[phase]
        assert reads(master) is (phase in by_workers), master
        assert reads(worker) is (phase in by_master), worker
        assert "remove" not in master + worker
    assert "remove" in calls["beside"][0] and "remove" in calls["beside"][1]


def test_a_start_is_measured_until_the_first_sample_and_the_first_policy() -> None:
    ended = run("start.py", "--nodes", "1", "--rounds", "1")
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(ended.stdout)["rows"]
    stages = row["now"]["stages_s"]
    assert list(stages) == sorted(stages, key=stages.get) and stages.keys() >= {
        "node",
        "engine_ready",
        "trained",
    }
    assert (
        row["now"]["cpu_s"]["nodes"] > 0 and row["now"]["cpu_s"]["all"] < row["now"]["cpu_to_policy_s"]["all"]
    )
    assert 0 < row["now"]["first_sample_s"][0] < row["now"]["first_policy_s"][0]


def test_self_distillation_begins_with_hints_that_are_copied(tmp_path: Path) -> None:
    bench = import_module("scripts.bench.self_distillation")
    bench.write_demonstrations(tmp_path / "shown.jsonl", 0)
    rows = [json.loads(line) for line in (tmp_path / "shown.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * bench.SHOWN
    assert all(row["prompt"].startswith(f"{row['answer']};") for row in rows[::2])
    assert 0.7 < sum(row["answer"].startswith("(") for row in rows[1::2]) / bench.SHOWN < 0.9
    for words in bench.ARMS.values():
        build(dict(word.split("=", 1) for word in f"{bench.LEARNS} {words}".split()))


def test_arms_share_seed_model_and_settings_and_differ_in_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = import_module("scripts.bench.learning_curves")
    given: dict[str, dict[str, Any]] = {}

    def learn(directory: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
        given[directory.name] = settings
        build(settings)
        apart = {"kl_engine": 0.0123, "effective_samples": 1.0, "mismatch_max": 0.0}
        return [{"reward": 0.411, **apart}, {"reward": 0.5, **dict.fromkeys(apart)}]  # nothing to train on

    monkeypatch.setattr(bench, "learn", learn)
    monkeypatch.setattr(bench, "make_experts", lambda seed, directory: directory)
    words = ["--arm", "default=", "--arm", "a=trainer.algorithm=sapo trainer.eps=0.1", "iterations=2"]
    monkeypatch.setattr(
        sys, "argv", ["x", "--dir", str(tmp_path / "runs"), "--seeds", "3", "--experts", *words]
    )
    bench.main()
    own = {"trainer.algorithm": "sapo", "trainer.eps": "0.1"}
    assert given["a_3"] == given["default_3"] | own and given["a_3"]["iterations"] == "2"
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["arm"], line["right"], line["kl_engine"]) for line in lines] == [
        ("default", [0.41, 0.5], 0.012),
        ("a", [0.41, 0.5], 0.012),
    ]


def test_mixture_that_is_taught_as_the_built_in_model_has_experts(tmp_path: Path) -> None:
    bench = import_module("scripts.bench.learning_curves")
    model = bench.make_experts(0, tmp_path / "model", steps=1)
    assert count_experts(model)[0] == 8
    assert json.loads((model / "generation_config.json").read_text())["eos_token_id"] == EOS_ID


def test_page_of_gpus_has_the_estimated_seconds_of_an_iteration() -> None:
    ended = run("iteration_estimate.py")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout in (BENCH.parents[1] / "docs" / "gpus.md").read_text()
    estimate = import_module("scripts.bench.iteration_estimate")
    small, large = map(estimate.seconds, estimate.CASES)
    twice = estimate.seconds(replace(estimate.CASES[0], nodes=2))
    assert all(small[name] <= large[name] for name in small)
    assert twice["train"] == small["train"] / 2 and twice["generate"] < small["generate"]


def test_filesystem_that_is_not_known_is_named_with_those_that_are() -> None:
    ended = run("filesystems.py", "lustre")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "no such filesystem: lustre; there are: local disk, sshfs, " in ended.stderr


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
@pytest.mark.parametrize("name", ["iteration.py", "real.py", "train_step.py"])
def test_benchmark_that_needs_trl_says_so(name: str) -> None:
    ended = run(name)
    assert ended.returncode == 2 and "TRL is not installed" in ended.stderr


def test_turn_without_an_iteration_to_count_is_refused_before_it_is_measured() -> None:
    ended = run("real.py", "--iterations", "2")
    assert ended.returncode == 2 and "--iterations 2: of two none is left to count" in ended.stderr


def test_both_sides_of_train_step_get_the_same_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    train_step = import_module("train_step")
    for kind, prompt in (("uniform", 8), ("log-uniform", 8), ("uniform", 100)):
        options = Namespace(longest=1024, sequences=64, prompt_tokens=prompt, samples=4, shape="10m")
        lengths = options.tokens = train_step.draw_lengths(kind, options)
        assert (lengths.min(), lengths.max(), len(lengths)) == (prompt + 8, prompt + 1016, 64)
        (ids, advantages), (again, same) = (train_step.draw_sequences(options) for _ in range(2))
        assert [len(one) for one in ids] == lengths.tolist() and (advantages == same).all()
        assert all((one == other).all() for one, other in zip(ids, again, strict=True))
        assert (ids[4][:prompt] == ids[7][:prompt]).all() and (ids[3][:prompt] != ids[4][:prompt]).any()
    assert train_step.parameters("10m") == pytest.approx(10e6, rel=0.02)
    assert train_step.parameters("0.6b") == pytest.approx(0.6e9, rel=0.02)
