"""Mount BACKING at MOUNTPOINT in the foreground, until it is unmounted."""

import argparse
from pathlib import Path

from mfusepy import FUSE

from tests.faultfs.faults import Control
from tests.faultfs.filesystem import FaultyFilesystem


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faultfs", description=__doc__)
    parser.add_argument("backing", type=Path)
    parser.add_argument("mountpoint")
    parser.add_argument("--control", type=Path, required=True, help="file with the faults, on a local disk")
    arguments = parser.parse_args()
    # The kernel remembers nothing, so that the only stale answers are the ones asked for.
    FUSE(
        FaultyFilesystem(arguments.backing, Control(arguments.control)),
        arguments.mountpoint,
        foreground=True,
        fsname="faultfs",
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        hard_remove=True,
    )


if __name__ == "__main__":
    main()
