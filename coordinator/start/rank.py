"""Find which rank this process is: from options, else from what schedulers put into the environment. Pure."""

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
    ranks = {name: text.strip() for name in RANK_VARIABLES if (text := environment.get(name, "")).strip()}
    if ranks:
        _refuse_leftovers(ranks, environment)
        variable, text = next(iter(ranks.items()))
        return MASTER if text == "0" else _worker_rank(variable, text)
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
    return int(text) if text.isdecimal() and int(text) > 0 else None


def _refuse_leftovers(ranks: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Raise SettingsError if variables are from two launchers: one was started in the other's environment."""
    values = {name: int(text) if text.isdecimal() else text for name, text in ranks.items()}
    pairs = [f"{name}={ranks[name]}" for name in values]
    world, nodes = environment.get("WORLD_SIZE", ""), nodes_from(environment) or 0
    if len(set(values.values())) > 1:
        conflict = f"{' and '.join(pairs)} name different ranks"
    elif {"RANK", "SLURM_NODEID"} <= ranks.keys() and world.isdecimal() and 0 < int(world) < nodes:
        conflict = f"WORLD_SIZE={world} and {NODES_VARIABLE}={nodes} name different numbers of nodes"
    else:
        return
    raise SettingsError(
        f"{conflict}: one is left over from another launcher; unset it, e.g. `unset RANK WORLD_SIZE`, or "
        "give --master or --worker RANK"
    )


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
