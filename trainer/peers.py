"""The error of a rank whose peers in the job do not answer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PeerLost(RuntimeError):
    """This rank's peers did not answer within trainer.collective_timeout_s, or closed their connections."""


@contextmanager
def waiting_for_peers(doing: str) -> Iterator[None]:
    """Put around a collective and nothing else; raises PeerLost for what torch raises there.

    On GPUs torch may raise nothing: NCCL's watchdog then ends the process, and torchrun the job.
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
