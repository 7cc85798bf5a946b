"""A Ray cluster, and the machines that a run holds of it. This is the only file that imports Ray."""

import contextlib
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from coordinator.console.commands import relay
from coordinator.console.commands.ray_machines import Bundle, Machine, NodeResources, bundles, parse_asked
from coordinator.settings.tree import SettingsError

CONNECT_S = 10.0
SAID_CHARACTERS = 400
"""Characters that are shown of a text of Ray's, which may be pages."""
PLACE_S = 60.0
"""How long other jobs of the cluster may take to free the machines."""
SEEN_S = 10.0
"""How long a file may take until another machine lists it."""
KEEP_CHILDREN = "RAY_kill_child_processes_on_worker_exit"
"""Ray kills children of an actor that ends. A node has to end in order, and its script sees to that."""
NO_RAY = (
    "run launch --ray needs Ray, which is not installed here; install the extra: pip install 'flagpost[ray]'"
)


def connect(address: str) -> Any:
    """Connect this process to a Ray cluster; return the module `ray`. SettingsError says why it cannot."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray: Any = import_module("ray")
    except ImportError:
        raise SettingsError(NO_RAY) from None
    real = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    try:
        refuse_deaf(real)
        if not ray.is_initialized():
            ray.init(real, namespace="flagpost", log_to_driver=False, logging_level="CRITICAL")
    except (OSError, ValueError, RuntimeError, SystemExit) as error:  # the last: Ray gives up
        error_text = _cause(str(error)) or "no answer"
        raise SettingsError(
            f"--ray {address}: {error_text}; start a cluster (ray start --head), or name one: HOST:PORT"
        ) from None
    return ray


def _cause(error_text: str) -> str:
    """Return Ray's error text in one line; of a traceback of its server the last line."""
    begin, traceback, trace = error_text.partition("Traceback (most recent call last)")
    last = trace.strip().splitlines()[-1] if traceback else ""
    return " ".join(f"{begin} {last}".split())[:SAID_CHARACTERS]


def refuse_deaf(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT or ray://HOST:PORT; Ray itself would try for minutes."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    if parts.hostname and parts.port:
        socket.create_connection((parts.hostname, parts.port), timeout=CONNECT_S).close()


def machines(ray: Any) -> list[Machine]:
    """Return the machines of the cluster that are alive."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Machine(
            f"{node['NodeManagerHostname']} {node['NodeManagerAddress']}",
            node["Resources"].get("GPU", 0.0),
            node["Resources"].get("CPU", 0.0),
        )
        for node in alive
    ]


class Cluster:
    """The machines that a placement group holds, one for each rank."""

    def __init__(self, address: str, nodes: int, gpus: str | None, cpus: str | None) -> None:
        self.names = [f"rank {rank}" for rank in range(nodes)]
        self.address = address
        self.down: set[int] = set()
        """Ranks whose machine has died, until they run again."""
        self.ended: dict[int, int] = {}
        """The exit code of each rank that has ended for good."""
        self.root = Path()
        self._asked: NodeResources = parse_asked(nodes, gpus, cpus)
        self._bundles: list[Bundle] = []
        self.relays: list[Any] = []
        """The present actor of each rank."""
        self._group: Any = None
        self._actor: Any = None
        options = {"--gpus-per-node": gpus, "--cpus-per-node": cpus}
        more = [word for option, value in options.items() if value is not None for word in (option, value)]
        self.options = ["--ray", address, "--num-nodes", str(nodes), *more]

    def connect(self, root: Path) -> None:
        """Connect, place all ranks, and see that their machines share the directory."""
        self.ray = connect(self.address)
        self.ray.cloudpickle.register_pickle_by_value(relay)
        self._actor = self.ray.remote(relay.Relay)
        self.root = root
        self._bundles = bundles(machines(self.ray), self._asked, self.address)
        self._group = self.ray.util.placement_group(self._bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(PLACE_S):
            listing = ", ".join(map(str, machines(self.ray)))
            raise SettingsError(
                f"--ray {self.address}: other jobs use the machines ({listing}); {len(self.names)} were not "
                f"free within {PLACE_S:.0f} s; wait, or ask for less (--gpus-per-node, --cpus-per-node)"
            )
        self.relays = [self.new_relay(rank) for rank in range(len(self.names))]
        self._refuse_blind()

    def new_relay(self, rank: int) -> Any:
        """Return a new actor on the machine of a rank; its calls wait while there is no such machine."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundles[rank]
        return self._actor.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            runtime_env={"env_vars": {KEEP_CHILDREN: "false"}},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank
            ),
        ).remote()

    def others_see(self, rank: int, path: str) -> bool:
        """Return whether the machine of another rank lists a file."""
        relays = [self.relays[other] for other in range(len(self.names)) if other not in {rank, *self.down}]
        for answer in [other.sees.remote(path, 0.0) for other in relays]:
            with contextlib.suppress(self.ray.exceptions.RayError):  # it has just died, or does not answer
                if self.ray.get(answer, timeout=SEEN_S):
                    return True
        return False

    def needs(self, rank: int) -> str:
        """Return in words what the machine of a rank must have."""
        return ", ".join(f"{number:g} {name}s" for name, number in self._bundles[rank].items())

    def close(self) -> None:
        """Give the machines back. Actors that are left end, and what they have started ends in order."""
        if self._group is not None:
            with contextlib.suppress(Exception):  # the cluster may be gone
                self.ray.util.remove_placement_group(self._group)
        if hasattr(self, "ray"):
            self.ray.shutdown()

    def _refuse_blind(self) -> None:
        """SettingsError if a machine does not see the directory that the first one writes in."""
        first, *relays = self.relays
        try:
            hosts = self.ray.get([node.host.remote() for node in self.relays], timeout=PLACE_S)
            mark = self.ray.get(first.mark.remote(str(self.root)), timeout=PLACE_S)
            try:
                answers = [node.sees.remote(mark, SEEN_S) for node in relays]
                answered: Any = []
                if answers:  # a mount may hang
                    answered, _ = self.ray.wait(answers, num_returns=len(answers), timeout=2 * SEEN_S)
                answered_yes = [answer in answered and self.ray.get(answer) for answer in answers]
            finally:
                self.ray.get(first.unmark.remote(mark), timeout=PLACE_S)
        except self.ray.exceptions.RayError as error:
            error_text = str(error.__cause__ or error).strip().splitlines()[-1]
            raise SettingsError(
                f"--log-path {self.root}: cannot try it on the machines: {error_text}"
            ) from None
        blind = [f"rank {rank} ({hosts[rank]})" for rank, saw in enumerate(answered_yes, 1) if not saw]
        if blind:
            raise SettingsError(
                f"--log-path {self.root}: {', '.join(blind)} does not see what rank 0 ({hosts[0]}) writes in "
                f"{os.path.dirname(mark)}; mount the shared directory there, at the same path"
            )
