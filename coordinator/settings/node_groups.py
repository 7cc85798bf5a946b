"""Machines that differ: `[cluster.groups.NAME]` gives the engines and trainers of some nodes an environment,
or a Python, of their own.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BeforeValidator, Field

from coordinator.settings.number_ranges import parse_ranges
from rollout.engines.kinds.choice import VARIABLES
from rollout.settings import NAME
from rollout.settings_tree import Settings

DEVICES = "CUDA_VISIBLE_DEVICES"
_OWN = """
    GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME OMP_NUM_THREADS TORCH_NCCL_ASYNC_ERROR_HANDLING
    TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_FR_BUFFER_SIZE TORCH_FR_DUMP_TEMP_FILE LOGLEVEL
    TOKENIZERS_PARALLELISM USE_HUB_KERNELS
    RANK LOCAL_RANK GROUP_RANK ROLE_RANK ROLE_NAME WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE
    ROLE_WORLD_SIZE MASTER_ADDR MASTER_PORT FLAGPOST_GPUS PYTORCH_ALLOC_CONF
"""
OWN = frozenset(_OWN.split()) | VARIABLES
"""Variables that an engine (rollout.engines.kinds), a training job (trainer.job.launch) or torchrun sets,
whatever a group says. torchrun has more, which begin with TORCHELASTIC_.
"""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def _ranks_text(value: Any) -> Any:
    """Return `2,4-7` as it is; also for 2 and [2, 4], which `nodes=2` and `nodes=2,4` become."""
    items: Sequence[Any] = [value]
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
    is_text = all(type(item) in {int, str} for item in items)
    return ",".join(map(str, items)) if is_text else cast("Any", value)


def _texts(table: Any) -> Any:
    """Take a whole number for its digits: `NCCL_DEBUG = 1`."""
    if not isinstance(table, Mapping):
        return table
    items = cast("Mapping[str, Any]", table)
    return {key: str(value) if type(value) is int else value for key, value in items.items()}


class GroupSettings(Settings):
    """Nodes whose engines and trainers are started in another way than those of the other nodes. NAME is any
    name.
    """

    nodes: Annotated[str, BeforeValidator(_ranks_text)]
    """Their ranks, e.g. `2,4-7`, as in --worker; 0 is the master. No rank is in two groups."""
    env: Annotated[dict[str, str], BeforeValidator(_texts)] = Field(default={})
    """Environment variables, over those of the node. Not those that flagpost sets itself, and no secrets."""
    python: Annotated[str, Field(min_length=1)] | None = None
    """The Python that starts them, with the same flagpost; an absolute path, or a name in PATH. null: the
    node's own."""

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of `nodes`."""
        return frozenset(parse_ranges(self.nodes, "ranks"))

    @property
    def program(self) -> str | None:
        """The path of `python` on this machine; if nothing is there, as it was given."""
        return self.python and (shutil.which(self.python, path=self.env.get("PATH")) or self.python)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield each setting of the group that is wrong in itself, with its value, and why."""
        try:
            parse_ranges(self.nodes, "ranks")
        except ValueError as error:
            yield f"nodes={self.nodes}", str(error)
        for name in self.env:
            if name == DEVICES:
                yield f"env.{name}", "a node counts its GPUs by it: export it there before you type `run`"
            elif name in OWN or name.startswith("TORCHELASTIC_"):
                yield f"env.{name}", "flagpost sets this itself; leave it out"
            elif not _VARIABLE.fullmatch(name):
                yield f"env.{name}", "this is not a name of a variable; use letters, digits and _"
        if self.python is not None and Path(self.python).name != self.python and self.python[0] != "/":
            yield f"python={self.python}", "give an absolute path: nodes start in different directories"


Groups = dict[str, GroupSettings]


def refuse_misfits(groups: Mapping[str, GroupSettings]) -> None:
    """Raise ValueError, with the setting, for what is wrong in a group, and for a rank in two of them."""
    group_of: dict[int, str] = {}
    for name, group in groups.items():
        if not NAME.fullmatch(name):
            raise ValueError(f"cluster.groups.{name}: name a group with letters, digits, _ and - only")
        for setting, why in group.problems():
            raise ValueError(f"cluster.groups.{name}.{setting}: {why}")
        for rank in sorted(group.ranks):
            if rank in group_of:
                raise ValueError(
                    f"cluster.groups.{name}.nodes={group.nodes}: rank {rank} is in the group "
                    f"{group_of[rank]} too; leave it out of one"
                )
            group_of[rank] = name


def refuse_absent(groups: Mapping[str, GroupSettings], num_nodes: int) -> None:
    """Raise ValueError for a rank that a run of `num_nodes` machines does not have."""
    for name, group in groups.items():
        if (last := max(group.ranks)) >= num_nodes:
            raise ValueError(
                f"cluster.groups.{name}.nodes={group.nodes}: there is no rank {last} with --num-nodes "
                f"{num_nodes}; the last one is {num_nodes - 1}"
            )
