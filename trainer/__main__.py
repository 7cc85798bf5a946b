"""Run one rank of the training job: `python -m trainer --spool DIR`, as trainer.job.launch starts it."""

import argparse
import os
import signal
import traceback
from pathlib import Path

from rollout.processes.imports import importing
from trainer.job import launch


def main() -> None:
    """Serve requests until the node ends this process."""
    parser = argparse.ArgumentParser(prog="python -m trainer", description=__doc__)
    parser.add_argument("--spool", type=Path, required=True)
    parser.add_argument("--collective-timeout-s", type=float, default=1800.0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork of the agent has the agent's handler
    launch.watch(args.spool)

    import logging

    try:
        with importing():
            from trainer.job.rank import serve  # imports torch, for seconds
    except ImportError:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        launch.report_failure(args.spool, 0, local_rank, traceback.format_exc(), comes_again=True)
        raise

    logging.basicConfig(level=logging.INFO, format="[trainer] %(message)s")
    serve(args.spool, args.collective_timeout_s)


if __name__ == "__main__":
    main()
