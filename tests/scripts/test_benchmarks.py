"""The benchmarks run and measure what they say; how fast anything is, a person reads."""

import ast
import json
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.directory.layout import RunDir
from coordinator.machine.filesystems import Mount
from coordinator.node.iteration import Iteration
from coordinator.protocol.phases import Phase
from rollout.origin import Sampling
from tests.imports import shared_imports

BENCH = Path(__file__).parents[2] / "scripts" / "bench"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(BENCH / name), *arguments]
    env = os.environ | shared_imports()
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)


def test_overhead_of_the_collector_is_one_line_of_json() -> None:
    ended = run("overhead.py", "--samples", "80")
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    rows = json.loads(line)["rows"]
    assert {row["parts"] for row in rows} == {False, True} and {row["n"] for row in rows} == {1, 8}
    for row in rows:
        assert [int(samples) for samples in row["memory_mb"]] == [8, 40, 80]
        assert row["samples_per_s"] > 0 and row["server_samples_per_s"] > 0


def test_balance_of_unequal_nodes_is_a_table(tmp_path: Path) -> None:
    ended = run("balance.py", "--seeds", "2", "--groups", "90", "--dir", str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    _, *rows = ended.stdout.splitlines()
    medians = {line[:34].strip(): float(line[34:].split()[0]) for line in rows}
    assert len(medians) == 14 and min(medians.values()) >= 1.0
    assert max(medians[f"{kind}, iteration 2"] for kind in ("claims", "tools")) <= 1.15


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


def test_endurance_notes_every_tenth_of_a_real_run() -> None:
    ended = run("endurance.py", "--iterations", "20", "trajectories.keep_last=5")
    line = json.loads(ended.stdout)
    assert line["codes"] == [0, 0], ended.stderr
    done = [mark["iteration"] for mark in line["marks"]]
    assert done == sorted(set(done)) and 20 <= done[-1] <= 30
    for mark in line["marks"]:
        assert all(len(mark[name]) == 2 for name in ("memory_mb", "descriptors", "cpu_ms"))
        assert mark["protocol_names"] < 60 and mark["files"] > 4 * mark["iteration"]


def test_empty_iterations_of_two_nodes_are_one_line_of_json(tmp_path: Path) -> None:
    ended = run("protocol.py", "--nodes", "2", "--iterations", "3", "--dir", str(tmp_path / "run"))
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stdout.splitlines()
    found = json.loads(line)
    assert (found["nodes"], found["iterations"], found["codes"]) == (2, 3, [0])
    assert 0 < found["seconds_median"] <= found["seconds_p99"]
    assert found["operations_worker"] == pytest.approx(
        sum(found["operations_worker_by_name"].values()), abs=0.05
    )
    assert found["operations_worker"] >= 2.0, "a row of all nodes raises a flag and lists"
    assert found["operations_master"] > 0 and 0 < found["files_left"] < 60 and found["bytes_left"] > 0


def test_row_without_a_document_reads_none_and_no_row_removes_a_flag(tmp_path: Path) -> None:
    ended = run("protocol.py", "--nodes", "3", "--iterations", "4", "--dir", str(tmp_path / "run"), "--rows")
    assert ended.returncode == 0, ended.stderr
    _, *table = ended.stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]
    calls = {row: (master, worker) for row, master, _, worker, _ in cells}
    by_master = {"iteration_start", "train_plan", "eval_decision", "train_config"}
    by_workers = {"train_rollout", "train_files_ready", "iteration_end"}
    for phase in (each.label for each in Phase):
        master, worker = calls[phase]
        assert ("read" in master) is (phase in by_workers), master
        assert ("read" in worker) is (phase in by_master), worker
        assert "remove" not in master + worker
    assert "remove" in calls["beside"][0] and "remove" in calls["beside"][1]


def test_collector_and_bare_client_generate_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    collector, overhead = import_module("collector"), import_module("overhead")
    with overhead.instant_server(n=4, tokens=5, core=[]) as port:
        url = f"http://127.0.0.1:{port}"
        for side in (collector.through_collector, collector.bare):
            tokens, seconds = side(url, collector.slots_of(samples=24, n=4), Sampling(n=4, max_tokens=5))
            assert tokens == 24 * 5 and seconds > 0
        sides = {
            "collector": partial(collector.through_collector, url),
            "bare": partial(collector.bare, url),
        }
        row = collector.compare(sides, samples=24, n=4, tokens=5, rounds=3)
    low, high = row["collector_of_bare"]["range"]
    assert 0 < low <= row["collector_of_bare"]["median"] <= high


def test_new_weights_are_served_in_each_way_and_deltas_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    prefetch, tiny = import_module("prefetch"), import_module("trainer.model.tiny")
    run_dir = RunDir(tmp_path / "run")
    run_dir.checkpoints.mkdir(parents=True)
    monkeypatch.setattr(
        prefetch.store,
        "find_mount",
        lambda path: Mount("nfs4" if run_dir.root in path.parents else "ext4", "", "/"),
    )
    tiny.build(seed=0, steps=0, out=tmp_path / "model")
    trainer = prefetch.Trainer(tmp_path / "model", run_dir)
    slow, fast = (prefetch.measure_delta(trainer, rate, 1 + 2 * k) for k, rate in enumerate((1e-6, 1e-2)))
    assert 0 < slow["size"] < 0.1 < fast["size"] and 0 < slow["changed"] < 0.2 < fast["changed"]
    assert slow["is_written"] and not fast["is_written"]
    served = prefetch.measure_served(run_dir, tmp_path, rounds=1)
    assert len(served) == 5 and all(found["seconds"] > 0 for found in served.values())
    assert [way for way, found in served.items() if found["fetch_s"]] == ["fetched", "fetched, delta"]


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


def test_a_reload_of_the_embedded_engine_is_measured_beside_a_copy_and_a_restart() -> None:
    ended = run("reload.py", "--embedded", "--parameters", "1e7", "--reloads", "2", "--restarts", "1")
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(ended.stdout)["rows"]
    assert row["copy_s"] > 0 and 0 < row["reload_s"] < row["restart_s"] and row["proof_s"] > 0


def test_filesystem_that_is_not_known_is_named_with_those_that_are() -> None:
    ended = run("filesystems.py", "lustre")
    assert ended.returncode == 2 and ended.stdout == ""
    assert "no such filesystem: lustre; there are: local disk, sshfs, " in ended.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
@pytest.mark.parametrize("name", ["collector.py", "reload.py"])
def test_benchmark_that_needs_vllm_says_so(name: str) -> None:
    ended = run(name)
    assert ended.returncode == 2 and "vLLM is not installed" in ended.stderr


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed")
@pytest.mark.parametrize("name", ["iteration.py", "real.py", "train_step.py"])
def test_benchmark_that_needs_trl_says_so(name: str) -> None:
    ended = run(name)
    assert ended.returncode == 2 and "TRL is not installed" in ended.stderr


def test_every_traced_function_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    spans: dict[str, tuple[str, ...]] = import_module("tracing").SPANS
    for module, names in spans.items():
        if module == "os":
            continue
        tree = ast.parse((BENCH.parents[1] / f"{module.replace('.', '/')}.py").read_text())
        functions = {name for node in tree.body for name in _functions(node)}
        assert set(names) <= functions, module


def _functions(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [f"{node.name}.{name}" for inner in node.body for name in _functions(inner)]
    return [node.name] if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else []


def test_traced_process_writes_the_spans_of_its_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    tracing = import_module("tracing")
    program = "import pathlib, sys, rollout.storage.files as fs; fs.publish(pathlib.Path(sys.argv[1]), b'1')"
    argv = [sys.executable, "-c", program, str(tmp_path / "file")]
    subprocess.run(argv, env={**os.environ, **tracing.environment(tmp_path)}, check=True, timeout=60)
    spans = {span.name: span for span in tracing.read_spans(tmp_path)}
    published, synced = spans["rollout.storage.files.publish"], spans["os.fsync"]
    assert published.begin_s <= synced.begin_s <= synced.end_s <= published.end_s
    assert published.rank is None and published.process.startswith("other.")


def test_row_is_traced_with_its_iteration_and_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    tracing, said = import_module("tracing"), list[str]()
    writer = SimpleNamespace(add=lambda _name, _began, about: said.append(about))
    tracing._wrapped(tracing.STEP, lambda *_: None, writer)(None, Iteration(3), Phase.TRAINING)
    assert said == ["3 training"]


def test_breakdown_is_the_median_over_iterations_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCH)
    tracing, breakdown = import_module("tracing"), import_module("breakdown")
    training_s = {1: 9.0, 2: 0.1, 3: 0.2, 4: 0.3, 5: 9.0}  # the first does not count, the last is not whole
    spans = []
    for iteration, seconds in training_s.items():

        def add(process: str, name: str, begin_s: float, end_s: float, cpu_s: float, about: str = "") -> None:
            begin_s, end_s, cpu_s = (value + 10 * iteration for value in (begin_s, end_s, cpu_s))  # noqa: B023
            rank = int(process[-1])
            spans.append(tracing.Span(process, rank, name, begin_s, end_s, cpu_s, cpu_s, about))

        about = f"{iteration} training"
        add("node.0", tracing.STEP, 0.0, seconds + 0.05, 0.0, about)
        add("node.0", "coordinator.machine.trainer.TrainerHost.train", 0.0, seconds + 0.03, 0.0)
        for rank in (0, 1):
            add(f"trainer.{rank}", "trainer.job.rank.TrainerRank.run", 0.01 * (1 + rank), seconds + 0.01, 0.0)
            add(f"trainer.{rank}", "trainer.update.step.train", 0.02, seconds * (1 + rank) / 2, 0.0)
    explained = breakdown.explain(spans, skip=1)
    assert explained["iterations"] == 3 and explained["ms"] == 10_000
    assert explained["cpu_ms"] == {"node": 10_000, "trainer": 20_000, "all": 30_000}
    summary = explained["summary_ms"]
    assert summary["optimizer_steps"] == pytest.approx(180)
    assert summary["request_to_last_trainer"] == pytest.approx(20)
    assert summary["last_trainer_to_last_node"] == pytest.approx(20)
    assert summary["phases_9_to_12_besides_training"] == pytest.approx(250 - 180)


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
