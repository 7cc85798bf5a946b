"""Where a GPU's tensors go while an engine has the GPU. tests/dry and tests/gpu move whole learners there."""

import pytest
import torch

from trainer.model import host_memory
from trainer.model.host_memory import HostMemory


def test_copies_lie_side_by_side_and_in_the_same_memory_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[int] = []
    monkeypatch.setattr(host_memory, "pin", lambda held: pinned.append(held.nbytes))
    tensors = [
        torch.arange(7, dtype=torch.bfloat16),
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.arange(12.0).reshape(3, 4).T,
        torch.tensor([True, False]),
    ]
    memory, places = HostMemory(), list[list[int]]()
    for count in (len(tensors), 3, len(tensors)):
        memory.begin(tensors[:count])
        copies = [memory._take(tensor).copy_(tensor) for tensor in tensors[:count]]
        assert all(map(torch.equal, copies, tensors))
        places.append([copy.data_ptr() for copy in copies])
    assert places[0] == places[2] and places[1] == places[0][:3]
    assert len(pinned) == 1
    memory.begin([*tensors, torch.zeros(1000)])
    assert len(pinned) == 2 and pinned[1] >= pinned[0] + 4000


def test_tensor_in_host_memory_stays_where_it_is() -> None:
    tensor = torch.ones(3)
    assert HostMemory().copy(tensor) is tensor
