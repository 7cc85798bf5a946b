"""What a rank says when the others of its job do not answer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeerLost(RuntimeError):
    """This rank waited for its peers in vain (trainer.collective_timeout_s), or one closed its connection."""


@contextmanager
def waiting_for_peers(doing: str) -> Iterator[None]:
    """Around a collective and nothing else: what torch raises there becomes PeerLost.

    On GPUs it may raise nothing: NCCL's watchdog then ends the process, and torchrun the job.
    """
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError):  # this rank's own fault, seen here first
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"a peer is lost: {doing} did not come to an end ({error}); another rank of the job stands still "
            "or is gone, and its own node says which"
        ) from error
