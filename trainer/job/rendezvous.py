"""A static rendezvous for torchrun that listens on one address only: `--rdzv-backend flagpost`.

torchrun's own static rendezvous makes a TCPStore that listens on every interface, and a TCPStore accepts any
client. This one listens only on the address of `--rdzv-endpoint ADDRESS:PORT`, towards the peers.
Workers get that address as MASTER_ADDR and MASTER_PORT and use the agent's store
(TORCHELASTIC_USE_AGENT_STORE), so no worker listens. The port is open while the first node's agent lives:
during training, and with trainer.keep_alive between iterations too.

    --rdzv-conf rank=1,ranks=0:2,timeout=300     this node's place; the nodes' ranks in the cluster, for
                                                 messages; seconds until all nodes must have come

`trainer.job.agent` runs torchrun with this rendezvous.
"""

import socket
import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import (
    DistError,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage], it is documented
)
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from trainer.job.launch import BACKEND

WHERE_TO_LOOK = "its trainer log says why, or a firewall stands between the nodes"


class OneAddressRendezvous(RendezvousHandler):
    """Nodes that are known beforehand, each with its place, meet once at the first node's address."""

    def __init__(
        self, address: str, port: int, place: int, ranks: Sequence[int], run_id: str, timeout_s: float
    ) -> None:
        """`ranks`: the nodes' ranks in the cluster, by place; `place`: this node's."""
        self._address = address
        self._port = port
        self._place = place
        self._ranks = ranks
        self._run_id = run_id
        self._timeout_s = timeout_s

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises RendezvousConnectionError if the port is taken, and RendezvousTimeoutError with the names of
        the nodes that did not come in time.
        """
        deadline_s = time.monotonic() + self._timeout_s
        store = self._open() if self._place == 0 else self._join()
        came = [f"came/{place}" for place in range(len(self._ranks))]
        try:
            store.set(came[self._place], "")
            store.wait(came, timedelta(seconds=max(1.0, deadline_s - time.monotonic())))
        except DistError as error:
            raise RendezvousTimeoutError(self._who_is_missing(store, came)) from error
        return RendezvousInfo(
            store, self._place, len(self._ranks), RendezvousStoreInfo(self._address, self._port)
        )

    def _open(self) -> TCPStore:
        """Make the store, on the first node."""
        # Without SO_REUSEADDR: no other process may share the port.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            try:
                listener.bind((self._address, self._port))
                listener.listen()
            except OSError as error:
                raise RendezvousConnectionError(
                    f"cannot listen on {self._address}:{self._port} for training: {error.strerror}; the port "
                    "was free when it was chosen, so another attempt, which takes another one, may do"
                ) from error
            return self._store(listener.detach())

    def _join(self) -> TCPStore:
        try:
            return self._store(None)
        except DistError as error:
            raise RendezvousTimeoutError(
                f"rank {self._ranks[0]} did not open {self._address}:{self._port} for training within "
                f"{self._timeout_s:.0f} s (trainer.start_timeout_s); {WHERE_TO_LOOK}"
            ) from error

    def _store(self, listener: int | None) -> TCPStore:
        return TCPStore(
            self._address,
            self._port,
            len(self._ranks),
            is_master=listener is not None,
            timeout=timedelta(seconds=self._timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _who_is_missing(self, store: TCPStore, came: Sequence[str]) -> str:
        try:
            missing = [rank for rank, key in zip(self._ranks, came, strict=True) if not store.check([key])]
        except DistError:
            return f"rank {self._ranks[0]} opened {self._address}:{self._port} for training, and has left"
        names = ", ".join(f"rank {rank}" for rank in missing)
        return (
            f"{names} did not come to the training job at {self._address}:{self._port} within "
            f"{self._timeout_s:.0f} s (trainer.start_timeout_s); {WHERE_TO_LOOK}"
        )

    # The rest of torchrun's interface, for a rendezvous that happens once and is never reopened.

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store that the first agent serves."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous."""
        return BACKEND

    def get_run_id(self) -> str:
        """torchrun's --rdzv-id."""
        return self._run_id

    def is_closed(self) -> bool:
        """It never is."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """No node joins later."""
        return 0

    def shutdown(self) -> bool:
        """Do nothing: the store ends with the agent, when the workers no longer need it."""
        return True


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make the rendezvous from torchrun's arguments; raises ValueError if they do not describe one."""
    address, port = parse_rendezvous_endpoint(params.endpoint, 0)
    place, ranks = params.get_as_int("rank"), [int(rank) for rank in params.get("ranks", "").split(":")]
    timeout_s = params.get_as_int("timeout")
    if not port or place is None or timeout_s is None or len(ranks) != params.max_nodes:
        raise ValueError(
            f"--rdzv-backend {BACKEND} needs --rdzv-endpoint ADDRESS:PORT, not {params.endpoint!r}, and "
            f"--rdzv-conf rank=N,ranks=R:R:...,timeout=SECONDS with {params.max_nodes} ranks, "
            f"not {params.config}"
        )
    return OneAddressRendezvous(address, port, place, ranks, params.run_id, timeout_s)
