"""Measure how long `run report` and `run status` take on a long run, and how big the page is.

    .venv/bin/python scripts/bench/report.py [--iterations 200] [--nodes 8] [--repeats 5] [--keep DIR]

Prints one JSON line: the median seconds of whole processes, the bytes of the page, and the bytes of the
events that were read. The run is made up (tests/coordinator/example_run.py), in a temporary directory or in
DIR.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' run, which is not installed

from tests.coordinator.example_run import make_run


def seconds_of(words: list[str], repeats: int) -> float:
    """Return the median seconds of `run WORDS`, from its start to its end."""
    spent: list[float] = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-m", "coordinator.cli", *words], check=True, capture_output=True)
        spent.append(time.perf_counter() - started_s)
    return round(statistics.median(spent), 3)


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for the run and its page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = given.keep or Path(directory) / "run"
        make_run(root, given.iterations, given.nodes, lost=given.iterations // 2)
        report_s = seconds_of(["report", "--log-path", str(root)], given.repeats)
        status_s = seconds_of(["status", "--log-path", str(root)], given.repeats)
        result = {
            "bench": "report",
            "iterations": given.iterations,
            "nodes": given.nodes,
            "report_s": report_s,
            "status_s": status_s,
            "page_bytes": (root / "report.html").stat().st_size,
            "event_bytes": sum(path.stat().st_size for path in (root / "events").iterdir()),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
