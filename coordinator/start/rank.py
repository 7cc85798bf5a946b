"""Which rank this process is: from options, else from what schedulers put into the environment. Pure."""

from collections.abc import Collection, Mapping

from coordinator.directory.layout import MASTER
from coordinator.settings.tree import SettingsError

RANK_VARIABLES = ("RANK", "NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX")
NODES_VARIABLE = "SLURM_NNODES"


def resolve_rank(
    master: bool,
    worker: str | None,
    num_nodes: int,
    environment: Mapping[str, str],
    own_names: Collection[str],
) -> int:
    """Return the rank, 0 for the master; SettingsError if there is none, or two.

    `own_names` are the names and addresses of this host: MASTER_ADDR naming one of them makes it the master.
    """
    if master and worker is not None:
        raise SettingsError(f"--master and --worker {worker} exclude each other; give one of them")
    if master:
        return MASTER
    if worker is not None:
        return _worker_rank("--worker", worker)
    for variable in RANK_VARIABLES:
        if text := environment.get(variable):
            return MASTER if text.strip() == "0" else _worker_rank(variable, text)
    address = environment.get("MASTER_ADDR")
    if address and address in own_names:
        return MASTER
    if num_nodes == 1 and not address:
        return MASTER
    hint = f" (MASTER_ADDR={address} is not this host)" if address else ""
    raise SettingsError(
        f"this node has no role in a run of {num_nodes} nodes{hint}; give --master on one machine and "
        f"--worker RANK on the others, or set {', '.join(RANK_VARIABLES[:-1])} or {RANK_VARIABLES[-1]}"
    )


def nodes_from(environment: Mapping[str, str]) -> int | None:
    """Return the number of nodes that a scheduler says, if one does."""
    text = environment.get(NODES_VARIABLE, "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _worker_rank(source: str, text: str) -> int:
    try:
        rank = int(text)
    except ValueError:
        raise SettingsError(f"{source} {text}: not a rank; give a whole number from 1") from None
    if rank == 0:
        raise SettingsError(f"{source} 0: rank 0 is the master; give --master, or a rank from 1")
    if rank < 0:
        raise SettingsError(
            f"{source} {rank}: outside the range; workers are 1 to the number of nodes minus 1"
        )
    return rank
