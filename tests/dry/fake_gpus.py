"""Tensors on GPUs that are not there: they have shapes, types, devices and bytes, but no values.

torch's FakeTensorMode does it, over a process group that is fake too. What a build for CPUs lacks is in
guard.cpp, which is loaded before torch, and in the few lines below. Import this module first, in a process of
its own; GUARD in the environment names the built guard.
"""

import contextlib
import ctypes
import importlib.util
import inspect
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

_spec = importlib.util.find_spec("torch")
assert _spec is not None and _spec.submodule_search_locations
ctypes.CDLL(str(Path(_spec.submodule_search_locations[0]) / "lib" / "libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
if "GUARD" in os.environ:  # a build for GPUs has what it adds
    ctypes.CDLL(os.environ["GUARD"], ctypes.RTLD_GLOBAL)

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed.tensor._sharding_prop as sharding_prop  # noqa: E402
from torch._guards import active_fake_mode  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

MODE = FakeTensorMode(allow_non_fake_inputs=True)


class _Nothing:
    """A stream or an event on which all is done at once."""

    device, stream_id = torch.device("cuda", 0), 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, _name: str) -> Callable[..., Any]:
        return lambda *_, **__: self

    def __enter__(self) -> "_Nothing":
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class Bytes(TorchDispatchMode):
    """Counts the bytes of all tensors on fake GPUs: `now`, and at most, `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.paused = 0
        self._sizes: dict[int, tuple[int, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its parts come one by one
        out = func(*args, **(kwargs or {}))
        if active_fake_mode() is MODE and not self.paused:
            tree_map_only(FakeTensor, self._count, out)
        return out

    def _count(self, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        if tensor.fake_device.type == "cuda" and storage._cdata not in self._sizes:
            gone = weakref.ref(storage, lambda _, key=storage._cdata: self._add(-self._sizes.pop(key)[0]))
            self._sizes[storage._cdata] = storage.nbytes(), gone
            self._add(storage.nbytes())

    def _add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def resized(self, storage: Any) -> None:
        if storage._cdata in self._sizes:
            before, gone = self._sizes[storage._cdata]
            self._sizes[storage._cdata] = storage.nbytes(), gone
            self._add(storage.nbytes() - before)


BYTES = Bytes()


def install() -> None:
    """Give torch what a build for CPUs lacks, and what fake tensors lack: streams, and values."""
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = _Nothing
    cuda.stream = lambda _stream: contextlib.nullcontext()
    cuda.current_device, cuda.device_count = lambda: 0, lambda: 8
    cuda.set_device = cuda.empty_cache = cuda.synchronize = lambda *_: None
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_capability = lambda *_: (9, 0)
    tensor: Any = torch.Tensor
    tensor.record_stream = lambda _self, _stream: None
    tensor.pin_memory = lambda self, *_: self
    tolist, item, getitem, bincount = tensor.tolist, tensor.item, tensor.__getitem__, torch.bincount

    def part(value: Any) -> Any:
        return value._local_tensor if isinstance(value, DTensor) else value

    tensor.tolist = lambda self: (
        np.zeros(tuple(part(self).shape)).tolist() if isinstance(part(self), FakeTensor) else tolist(self)
    )
    tensor.item = lambda self: 0.0 if isinstance(part(self), FakeTensor) else item(self)
    tensor.__getitem__ = lambda self, key: (  # all of them: the most that a mask may choose
        self.reshape(-1)
        if isinstance(self, FakeTensor) and isinstance(key, torch.Tensor) and key.dtype == torch.bool
        else getitem(self, key)
    )
    torch.bincount = lambda x, *args, **more: (  # pyright: ignore[reportAttributeAccessIssue]
        x.new_zeros(64, dtype=torch.int64) if isinstance(x, FakeTensor) else bincount(x, *args, **more)
    )
    _let_be_counted()


def _let_be_counted() -> None:
    # Counting holds weak references to storages, which Module.to would refuse to swap.
    source = inspect.getsource(torch.utils.swap_tensors)
    for name in ("t1", "t2"):
        source = source.replace(f"if weakref.getweakrefs({name}):", "if False:")
    exec(compile(source, "swap_tensors", "exec"), torch.utils.__dict__)
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def resize_(self: Any, size: int) -> None:
        resize(self, size)
        BYTES.resized(self)

    storage.resize_ = resize_
    propagator: Any = sharding_prop.ShardingPropagator
    propagate = propagator._propagate_tensor_meta_non_cached

    def uncounted(self: Any, *args: Any, **more: Any) -> Any:
        BYTES.paused += 1  # it makes tensors of the whole size to see their shapes
        try:
            return propagate(self, *args, **more)
        finally:
            BYTES.paused -= 1

    propagator._propagate_tensor_meta_non_cached = uncounted
