"""Explain where the milliseconds of an iteration go, from the spans of a traced run (tracing.py).

    python scripts/bench/breakdown.py [--nodes 3 1] [--directory /tmp] [--settings key=value ...]

Runs what iteration.py runs, without its comparison, and prints a JSON line for each number of nodes: `ms` of
the median iteration, `rows_ms` as the master saw them, `cpu_ms` of all processes of a kind, `summary_ms`, and
`functions_ms`: [ms in the slowest process of the kind, calls]. Tracing costs some milliseconds.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tracing
from tracing import STEP, Span

SHOWN_MS = 0.5
"""Functions that take less time of an iteration are left out."""
BATCH = "rollout.engines.embedded.padded.PaddedBatch"


def median_ms(seconds: Iterable[float]) -> float:
    """Return the median in ms."""
    return round(1000 * statistics.median(seconds), 2)


def explain(spans: list[Span], skip: int) -> dict[str, Any]:
    """Return CPU ms of the processes, ms of the functions, and ms of the gaps between processes.

    They are medians over the iterations after `skip`, without the last one; for a function, the largest sum
    of a rank counts.
    """
    windows = _windows(spans)
    chosen = sorted(windows)[skip:-1]
    begins = {iteration: windows[iteration][0] for iteration in windows}
    inside: dict[int, list[Span]] = {
        iteration: [span for span in spans if begins[iteration] <= span.begin_s < begins[iteration + 1]]
        for iteration in chosen
    }
    return {
        "iterations": len(chosen),
        "ms": median_ms(begins[iteration + 1] - begins[iteration] for iteration in chosen),
        "cpu_ms": _cpu(spans, [(begins[iteration], begins[iteration + 1]) for iteration in chosen]),
        "summary_ms": _summary(inside),
        "functions_ms": _functions(inside),
    }


def _windows(spans: Iterable[Span]) -> dict[int, tuple[float, float]]:
    """By iteration, when the master's first row begins and its last row ends."""
    found: dict[int, tuple[float, float]] = {}
    for span in spans:
        if span.name == STEP and span.rank == 0:
            iteration = int(span.about.split()[0])
            begin_s, end_s = found.get(iteration, (span.begin_s, span.end_s))
            found[iteration] = (min(begin_s, span.begin_s), max(end_s, span.end_s))
    return found


def _cpu(spans: Iterable[Span], windows: list[tuple[float, float]]) -> dict[str, float]:
    """CPU ms of an iteration: all nodes' processes, all engines', all trainers'."""
    points: dict[str, list[tuple[float, float]]] = {}
    for span in spans:
        points.setdefault(span.process, []).extend(
            [(span.begin_s, span.begin_cpu_s), (span.end_s, span.end_cpu_s)]
        )
    sums: dict[str, float] = {}
    for process, seen in points.items():
        kind = process.partition(".")[0]
        if kind != "other":
            used = [_at(seen, end_s) - _at(seen, begin_s) for begin_s, end_s in windows]
            sums[kind] = round(sums.get(kind, 0.0) + median_ms(used), 1)
    return {**sums, "all": round(sum(sums.values()), 1)}


def _at(points: list[tuple[float, float]], when_s: float) -> float:
    """CPU seconds of a process at the last point before `when_s`."""
    return max((cpu_s for noted_s, cpu_s in points if noted_s <= when_s), default=0.0)


def _functions(inside: Mapping[int, list[Span]]) -> dict[str, dict[str, list[float]]]:
    """By kind of process and function: [ms of an iteration in the slowest process of the kind, calls]."""
    sums: dict[tuple[str, str], dict[int, dict[str, list[float]]]] = {}
    for iteration, spans in inside.items():
        for span in spans:
            kind = span.process.partition(".")[0]
            of = sums.setdefault((kind, f"{span.name} {span.about.partition(' ')[2]}".strip()), {})
            one = of.setdefault(iteration, {}).setdefault(span.process, [0.0, 0])
            one[0] += span.end_s - span.begin_s
            one[1] += 1
    rows: dict[str, dict[str, list[float]]] = {}
    for (kind, name), iterations in sums.items():
        slowest = [max(iterations.get(iteration, {"": [0.0, 0]}).values()) for iteration in inside]
        if (ms := median_ms(seconds for seconds, _calls in slowest)) >= SHOWN_MS:
            rows.setdefault(kind, {})[name] = [ms, statistics.median(calls for _seconds, calls in slowest)]
    return {kind: dict(sorted(found.items(), key=lambda row: -row[1][0])) for kind, found in rows.items()}


def _summary(inside: Mapping[int, list[Span]]) -> dict[str, float]:
    """ms of each part of rollout and training, of the slowest rank, and of the gaps between processes."""

    def longest(name: str) -> float:
        return median_ms(_longest(spans, name) for spans in inside.values())

    def gap(measure: Callable[[list[Span], list[Span]], float]) -> float:
        asked, served = "coordinator.machine.trainer.TrainerHost.train", "trainer.job.rank.TrainerRank.run"
        return median_ms(measure(_named(spans, asked), _named(spans, served)) for spans in inside.values())

    rows = {
        phase: median_ms(
            sum(s.end_s - s.begin_s for s in _named(spans, STEP, f" {phase}") if s.rank == 0)
            for spans in inside.values()
        )
        for phase in ("train_config", "training", "checkpoint", "engine_restarted")
    }
    training = longest("trainer.update.step.train")
    return {
        "rollout_collect": longest("rollout.collect.Collector.run"),
        "rollout_engine_busy": round(longest(f"{BATCH}.join") + longest(f"{BATCH}.step"), 2),
        "request_to_last_trainer": gap(lambda asked, run: max(s.begin_s for s in run) - asked[0].begin_s),
        "last_trainer_to_last_node": gap(
            lambda asked, run: max(s.end_s for s in asked) - max(s.end_s for s in run)
        ),
        "take_over_policy": longest("trainer.job.rank.TrainerRank._learner"),
        "agree": longest("trainer.job.rank.TrainerRank._agree"),
        "optimizer_steps": training,
        "forward_backward": longest("trainer.update.step._accumulate"),
        "add_up": longest("trainer.model.model.Learner.add_up"),
        "optimizer": longest("trainer.model.model.Learner.apply"),
        "checkpoint_write": longest("trainer.checkpoint.checkpoint.write"),
        "checkpoint_fsync": median_ms(
            max(_by_process([s for s in _named(spans, "os.fsync") if s.process.startswith("trainer")]))
            for spans in inside.values()
        ),
        "verify": longest("coordinator.directory.published.verify_checkpoint"),
        "reload": longest("coordinator.machine.weights.Loader._reload"),
        "probe": longest("coordinator.machine.weights.Loader._probe"),
        "phases_9_to_12_besides_training": round(sum(rows.values()) - training, 2),
    }


def _named(spans: Iterable[Span], name: str, about: str = "") -> list[Span]:
    return [span for span in spans if span.name == name and span.about.endswith(about)]


def _longest(spans: Iterable[Span], name: str) -> float:
    return max(_by_process(_named(spans, name)))


def _by_process(spans: Iterable[Span]) -> list[float]:
    """Seconds of each process; [0] without any."""
    sums: dict[str, float] = {}
    for span in spans:
        sums[span.process] = sums.get(span.process, 0.0) + span.end_s - span.begin_s
    return [*sums.values()] or [0.0]


def main() -> None:
    """Read the options, run, and print the lines."""
    from iteration import of_rows, run_nodes  # which uses this module

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=[3, 1])
    parser.add_argument("--directory", type=Path, default=Path("/tmp"), help="on a local disk; default: /tmp")
    parser.add_argument("--iterations", type=int, default=14)
    parser.add_argument("--skip", type=int, default=3, help="of them that do not count: engines start")
    parser.add_argument("--settings", nargs="*", default=[], help="further key=value")
    options = parser.parse_args()
    for nodes in options.nodes:
        with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.directory) as directory:
            root, trace = Path(directory) / "run", Path(directory) / "trace"
            trace.mkdir()
            run_nodes(options, nodes, root, tracing.environment(trace))
            explained = explain(tracing.read_spans(trace), options.skip)
            print(json.dumps({"nodes": nodes, **of_rows(root, options.skip), **explained}), flush=True)


if __name__ == "__main__":
    main()
