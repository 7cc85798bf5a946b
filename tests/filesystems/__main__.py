"""Serve and mount a filesystem in this process's namespaces, and hold it until standard input ends."""

import sys
from pathlib import Path

from tests.filesystems.servers import ADDRESS, FILESYSTEMS, run


def main() -> None:
    kind, folder, *clients = sys.argv[1:]
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{ADDRESS}/24", "dev", "lo")
    for path in clients:
        Path(path).mkdir()
    FILESYSTEMS[kind].mount(Path(folder), [Path(path) for path in clients])
    print("mounted", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
