"""Host memory to which a GPU's tensors go while an engine has the GPU, kept from one time to the next."""

import contextlib
import logging
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.model.parallel import local_part

logger = logging.getLogger(__name__)
ALIGNED = 64
"""Bytes, as torch's own allocators align."""


class HostMemory:
    """One stretch of bytes, large enough for all that has ever been there at the same time.

    Fresh memory costs a page fault for each 4 KiB, 2 GB/s in place of 26; and a GPU copies to pinned memory
    alone at the speed of the bus.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._taken = 0

    def begin(self, tensors: Iterable[Tensor]) -> None:
        """Make room for copies of `tensors`; copies from before are given up."""
        self._taken, size = 0, sum(_aligned(local_part(tensor).nbytes) for tensor in tensors)
        if size > len(self._bytes):
            self._bytes = self._bytes.new_empty(0)  # before there are two
            self._bytes = self._bytes.new_empty(size)
            pin(self._bytes)

    def copy(self, tensor: Tensor) -> Tensor:
        """Begin to copy a GPU's tensor, or this rank's part of it; one in host memory stays where it is."""
        local = local_part(tensor).detach()
        if local.device.type == "cpu":
            return tensor
        copied = self._take(local).copy_(local, non_blocking=True)
        if not isinstance(tensor, DTensor):
            return copied
        names, context = tensor.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names} | {"_local_tensor": copied}
        return DTensor.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())

    def _take(self, like: Tensor) -> Tensor:
        pinned = self._bytes[self._taken : self._taken + like.nbytes].view(like.dtype).view(like.shape)
        self._taken += _aligned(like.nbytes)
        return pinned


def pin(memory: Tensor) -> None:
    """Have CUDA pin memory that there is already: torch's own would take up to twice the bytes."""
    cuda: Any = torch.cuda.cudart()
    at = memory.data_ptr()
    if error := int(cuda.cudaHostRegister(at, memory.nbytes, 0)):
        logger.info("%.1f GB of host memory are not pinned (CUDA error %d)", memory.nbytes / 1e9, error)
        with contextlib.suppress(RuntimeError):  # CUDA would report it again, of the next kernel
            torch.ones(1, device="cuda")
    else:
        weakref.finalize(memory, cuda.cudaHostUnregister, at)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
