"""Run torchrun with Flagpost's own rendezvous: `python -m trainer.job.agent` takes torchrun's arguments.

torchrun itself could find the rendezvous through an entry point. But then every process that imports
torch.distributed.elastic (an engine does) would import the trainer, and an old installation has no entry
point.
"""

import logging
import sys

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException, logger
from torch.distributed.elastic.multiprocessing.tail_log import TailLog
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

from trainer.job.launch import BACKEND
from trainer.job.rendezvous import create


def main() -> int:
    """Run the arguments of torchrun that this process was started with; return the exit status."""
    rendezvous_handler_registry.register(BACKEND, create)
    logger.setLevel(logging.ERROR)
    # torchrun would follow /dev/null for each rank, with two threads that wake ten times a second, and whose
    # start a signal could interrupt with a traceback.
    TailLog.start = _stay
    try:
        run.main()
    except SignalException as end:  # a node ends its job so, also after a success: no traceback
        print(f"[trainer] its node has ended the job ({end.sigval.name})", flush=True)
        return 128 + end.sigval
    return 0


def _stay(self: TailLog) -> TailLog:
    return self


if __name__ == "__main__":
    sys.exit(main())
