"""A program for test_forks: it says what it is, and ends as it is told."""

import json
import os
import signal
import subprocess
import sys
import time


def main() -> int:
    import torch

    said = {
        "argv": sys.argv[1:],
        "colour": os.environ.get("COLOUR"),
        "threads": torch.get_num_threads(),
        "cwd": os.getcwd(),
        "path": sys.path[0],
        "pid": os.getpid(),
        "group": os.getpgid(0),
        "sockets": [fd for fd in os.listdir("/proc/self/fd") if _is_socket(fd)],
        "input": sys.stdin.read(),
    }
    how = sys.argv[1]
    if how == "leave":
        said["left"] = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid
    print(json.dumps(said), flush=True)
    if how == "wait":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
        time.sleep(60)
    if how == "raise":
        raise ValueError("as told")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    return 3


def _is_socket(fd: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
