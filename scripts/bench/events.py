"""Measure what a node's events cost: CPU time of one event, and events of an iteration of a real run.

    .venv/bin/python scripts/bench/events.py --dir runs/demo

counts the events that the nodes of this run wrote, and reads from its metrics how long iterations took.
Prints one JSON line: microseconds of one event (all threads, writing included), events and milliseconds per
iteration and node, and their share of the median iteration.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from coordinator.directory import published
from coordinator.directory.layout import RunDir
from coordinator.directory.line_writer import QUEUE_LINES
from coordinator.journal.events import Events

EVENTS = QUEUE_LINES // 2
"""As many events as may wait for the file at once; more would be dropped."""


def microseconds() -> float:
    """Measure the CPU time of one event."""
    with tempfile.TemporaryDirectory() as directory:
        events, path = Events(), Path(directory) / "rank_0000.jsonl"
        events.open(path, lambda: (1, 2))
        began_s = time.process_time()
        for number in range(EVENTS // 2):
            events.add("begin", it=number, row="train_rollout")
            events.add("end", it=number, row="train_rollout", work_s=0.1234)
        events.end()
        spent_s = time.process_time() - began_s
        assert path.read_bytes().count(b'"t"') == EVENTS
        return spent_s / EVENTS * 1e6


def main() -> None:
    """Read the options, measure, and print the line."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--dir", type=Path, required=True, help="A run that has finished iterations.")
    run_dir = RunDir(parser.parse_args().dir.absolute())
    iterations = [line["seconds"] for line in published.metrics_lines(run_dir)]
    files = sorted(run_dir.events(0).parent.glob("rank_*.jsonl"))
    if not iterations or not files:
        parser.error(f"--dir {run_dir.root}: no finished iteration, or no events, there")
    written = sum(line.count(b'"t"') for file in files for line in file.read_bytes().splitlines())
    each, cost_us = written / len(files) / len(iterations), microseconds()
    median_s = statistics.median(iterations)
    figures = {
        "event_us": round(cost_us, 2),
        "events_per_iteration_and_node": round(each, 1),
        "ms_per_iteration": round(each * cost_us / 1e3, 3),
        "median_iteration_s": round(median_s, 3),
        "share_percent": round(100 * each * cost_us / 1e6 / median_s, 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
