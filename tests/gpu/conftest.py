"""Tests that need a GPU: skipped without one. `pytest tests/gpu -s` prints what they measure."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip them where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[torch.device]:
    """The first GPU, in a process group of one: gloo for what lies in host memory, NCCL for the rest."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = tmp_path_factory.mktemp("meeting") / "file"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{meeting}", rank=0, world_size=1, device_id=device
    )
    yield device
    dist.destroy_process_group()
