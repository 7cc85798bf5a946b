"""Let real shared filesystems carry a run of three nodes, each node with a client of its own.

    python scripts/bench/filesystems.py [FILESYSTEM ...] [--dir DIR]

All is on this machine. `run doctor --peers 3` examines the mounts. Then three nodes train the built-in model
for nine iterations, with the default beats and limits. A worker is killed in the second one and the master in
the fourth, and both are started again. The row of a filesystem says when, which version, the seconds of an
iteration in which nothing happened (median of the last four), and what the doctor found. Ends with what the
nodes said if a run does not go through, or if a group was lost. Needs root and the packages of
`tests/filesystems/servers.py`; leaves out what this machine cannot mount, and says why.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # for the tests' mounts, which are not installed

from tests.filesystems import Mounts, unavailable
from tests.filesystems.run import carry, examine
from tests.filesystems.servers import FILESYSTEMS

KILLED = (1, None, 0)
"""The ranks that are killed in iterations 2, 3 and 4."""
ITERATIONS, COUNTED = 9, 4


def version(kind: str) -> str:
    """Return Debian's name and version of a filesystem."""
    package = next(iter(FILESYSTEMS[kind].needs.values()))
    return subprocess.check_output(["dpkg-query", "--show", package], text=True).strip().replace("\t", " ")


def row(kind: str, folder: Path) -> str:
    """Return the row of a filesystem."""
    with Mounts(kind, folder / "fs", 4) as shared:
        began_s = time.monotonic()
        found = examine(shared)
        examined_s = time.monotonic() - began_s
        cluster = carry(shared, folder / "cache", folder, KILLED, ITERATIONS)
        seconds = [line["seconds"] for line in cluster.metrics()[-COUNTED:]]
    unfit = [f"{name}: {check['figure']}" for name, check in found.items() if check["verdict"] != "ok"]
    cells = [kind, time.strftime("%Y-%m-%d"), version(kind), f"{statistics.median(seconds):.2f}"]
    said = f"{len(found) - len(unfit)} of {len(found)} checks ok, {examined_s:.0f} s"
    return f"| {' | '.join(cells)} | {'; '.join([said, *unfit])} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("filesystem", nargs="*", help=f"default: all of {', '.join(FILESYSTEMS)}")
    parser.add_argument(
        "--dir", type=Path, help="on a local disk; default: the directory for temporary files"
    )
    options = parser.parse_args()
    if unknown := set(options.filesystem) - FILESYSTEMS.keys():
        parser.error(f"no such filesystem: {', '.join(unknown)}; there are: {', '.join(FILESYSTEMS)}")
    print(
        "| filesystem | date | version | seconds an iteration | run doctor |\n|---|---|---|---|---|",
        flush=True,
    )
    for kind in options.filesystem or FILESYSTEMS:
        if reason := unavailable(kind):
            print(f"{kind}: {reason}", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(prefix="flagpost-bench-", dir=options.dir) as folder:
            print(row(kind, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
