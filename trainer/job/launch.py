"""Start the training job and talk to it. Torch-free, and light: each trainer imports it first.

One torchrun job serves every iteration. A node and the trainers it started exchange files in the *spool*, a
directory on the node's own disk that the node makes, with a `pgid/` inside:

    pgid/<process group id>     made for each trainer before it starts (LAUNCHER); the node and its reaper
                                kill these, since torchrun starts a worker in a session of its own, unless it
                                forks it (trainer.job.forks)
    request_000007.json         what to do (TrainRequest); the next one has a higher number
    progress_000007             `DONE TOTAL` of local rank 0, a line whenever one has grown
    full_000007.<local rank>    it waits for space on a full disk (trainer.job.space_waits)
    copied_000007.<local rank>  the new policy is on the node, the checkpoint is still being written: the
                                copy's files with their checksums (JSON), or null if there is no copy
    done_000007.<local rank>    this rank has done it
    failed_000007.<local rank>  this rank has failed and exited; the content is the traceback
    final_000007.<local rank>   the same, and it would fail again in the same way
    bell.<local rank>, bell.node    FIFOs, rung when there is a request, or when a rank has done it or failed

Every file appears whole (temporary name, rename). A trainer exits when the spool vanishes or torchrun dies.
"""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainer.job.doorbell import ring

LAUNCHER = ': > "$0/$$" && exec "$@"'
"""For /bin/sh, with a `pgid/` as $0: name the shell's process group there, then become the program. If the
directory is gone, no node would end the program, and it does not start."""
NODE_BELL = "bell.node"
BACKEND = "flagpost"
"""torchrun's name for `trainer.job.rendezvous`."""
TRACE = "nccl_trace_rank_"
"""The files of NCCL's flight recorder, in the spool, begin so: what each rank was doing."""
POLL_S = 0.25
"""How long a trainer waits for its bell before it looks again."""
WATCH_INTERVAL_S = 0.5


ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""How a user says what torch's allocator does, now and before torch 2.9."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where a user says on which network interfaces ranks meet."""
GPUS = "FLAGPOST_GPUS"
"""How many GPUs the node has counted."""
READ_AT_IMPORT = {
    "LOGLEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "USE_HUB_KERNELS": "NO",  # where `kernels` is installed, transformers would fetch code from the Hub
}
"""Environment variables that libraries read as they are imported."""
FAILED, FINAL = "failed_", "final_"
OF_A_REQUEST = {"request_", "progress_", "full_", "copied_", "done_"}
"""How the names begin that nobody needs once the next phase is asked for."""


class TrainerFailed(RuntimeError):
    """A rank of the training job failed; the message holds its traceback."""

    def __init__(self, text: str, comes_again: bool = False) -> None:
        super().__init__(text)
        self.comes_again = comes_again
        """Whether another attempt would fail in the same way."""


class Request(Protocol):
    """A document with a JSON form; in practice TrainRequest, whose import is slow."""

    def to_json(self) -> bytes:
        """Return the document as JSON bytes."""
        ...


@dataclass(frozen=True)
class Launch:
    """One node's part of a training job over all nodes."""

    num_nodes: int
    node_rank: int
    processes: int
    """Training processes of this node."""
    master_addr: str
    """Address of the first node, which listens there and nowhere else (`rendezvous`)."""
    master_port: int
    interface: str
    """Network interface that routes to the other nodes; gloo and NCCL listen on it alone."""
    spool: Path
    threads: int
    """CPU threads of one process."""
    start_timeout_s: float
    """How long the nodes may take to meet."""
    collective_timeout_s: float
    """A rank fails that waits longer than this for its peers."""
    ranks: tuple[int, ...] | None = None
    """For messages: the cluster's rank of each node, by node rank; default: the node rank itself."""
    python: str = sys.executable
    """What runs the agent and its workers."""
    forks: bool = False
    """Whether the workers are forks of the agent, which has imported what they need (trainer.job.forks)."""
    gpus: int | None = None
    """GPUs of this node as it has counted them for its engine; None: it has not."""


def argv(launch: Launch) -> list[str]:
    """Return the command of this node's torchrun agent: known nodes, no restarts, nothing redirected."""
    ranks = ":".join(map(str, launch.ranks or range(launch.num_nodes)))
    if launch.forks:  # they are in the agent's process group
        program = ["--start-method", "fork", "--run-path", str(Path(__file__).parents[1] / "__main__.py")]
    else:
        # Not -m: a rank must be named in the spool before Python starts, which may take seconds or hang.
        # torchrun takes $ for the beginning of a name of its own, and $$ for $.
        program = ["--no-python", "/bin/sh", "-c", LAUNCHER.replace("$", "$$"), str(launch.spool / "pgid")]
        program += [launch.python, "-u", "-P", "-m", "trainer"]
    timeout_s = max(1, round(launch.start_timeout_s))
    return [
        launch.python,
        *("-P", "-m", "trainer.job.agent"),
        *("--nnodes", str(launch.num_nodes)),
        *("--nproc-per-node", str(launch.processes)),
        *("--rdzv-backend", BACKEND),
        *("--rdzv-endpoint", f"{launch.master_addr}:{launch.master_port}"),
        *("--rdzv-conf", f"rank={launch.node_rank},ranks={ranks},timeout={timeout_s}"),
        *("--max-restarts", "0"),
        *("--shutdown-timeout", "5"),
        *("--log-dir", os.devnull),
        *program,
        *("--spool", str(launch.spool)),
        *("--collective-timeout-s", str(launch.collective_timeout_s)),
    ]


def environment(launch: Launch) -> dict[str, str]:
    """Return the environment variables that the agent and its workers need, beside this process's own."""
    return {
        "OMP_NUM_THREADS": str(launch.threads),
        # Waiting threads sleep. By default they spin, and where other processes want the cores too (an
        # engine, a second node on this machine) a training step takes ten times as long.
        "OMP_WAIT_POLICY": "passive",
        "GOMP_SPINCOUNT": "1000",  # some microseconds, which sleeping and waking would cost as well
        # NCCL takes a name for the beginning of one, if it has no "=" before it: eth1 is eth10 too.
        **{"GLOO_SOCKET_IFNAME": launch.interface, "NCCL_SOCKET_IFNAME": f"={launch.interface}"},
        **interfaces_of_user(),
        # Rows have many shapes: blocks of fixed sizes would be left with holes that nothing fits.
        "PYTORCH_ALLOC_CONF": next(filter(None, map(os.environ.get, ALLOCATOR)), "expandable_segments:True"),
        **({} if launch.gpus is None else {GPUS: str(launch.gpus)}),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # A collective that hangs on GPUs leaves a trace in the spool, not in /tmp.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(launch.spool / TRACE),
        **READ_AT_IMPORT,
    }


def interfaces_of_user() -> dict[str, str]:
    """Return the user's variables that say which interfaces ranks meet on. One whose names this machine does
    not have is left out, as of a profile that was written for other machines.
    """
    interfaces = [name for _, name in socket.if_nameindex()]
    users: dict[str, str] = {}
    for variable in INTERFACES:
        value = os.environ.get(variable, "")
        is_exact = variable.startswith("GLOO") or value.startswith("=")
        names = value.removeprefix("=").split(",")
        known = [
            name in interfaces if is_exact else any(each.startswith(name) for each in interfaces)
            for name in names
        ]
        if value and (value.startswith("^") or all(known)):
            users[variable] = value
    return users


# The node's side.


def submit(spool: Path, number: int, request: Request) -> None:
    """Ask the job for training phase `number`, higher than any before, which are done."""
    for name in os.listdir(spool):
        kind, _, number_text = name.partition("_")
        if f"{kind}_" in OF_A_REQUEST and number_text[:6] < f"{number:06d}":
            (spool / name).unlink(missing_ok=True)
    _publish(_request_path(spool, number), request.to_json())
    for name in os.listdir(spool):
        if name.startswith("bell.") and name != NODE_BELL:
            ring(spool / name)


def outcome(spool: Path, number: int, processes: int) -> Literal["done"] | None:
    """`done` when all `processes` ranks of this node have done request `number`, None while they work.

    Raises TrainerFailed as soon as a rank has failed at any request. Its text ends with the first failure.
    """
    names = os.listdir(spool)
    failed = [
        spool / name for name in names if name.startswith((FAILED, FINAL)) and not name.endswith(".tmp")
    ]
    if failed:
        # One host's disk and clock, so the times compare. The first failure is the cause of the others.
        failed.sort(key=lambda path: path.stat().st_mtime_ns, reverse=True)
        texts = [f"local rank {path.name.rpartition('.')[2]}: {path.read_text()}" for path in failed]
        comes_again = any(path.name.startswith(FINAL) for path in failed)
        raise TrainerFailed("\n".join(texts).rstrip(), comes_again)
    done = {f"done_{number:06d}.{local_rank}" for local_rank in range(processes)}
    return "done" if done <= set(names) else None


def copied(spool: Path, number: int, processes: int) -> Mapping[str, Any] | None:
    """Return the files of the new policy's copy on this node once all `processes` ranks have said that it is
    there; empty if the node gets none. None until then.
    """
    names = {f"copied_{number:06d}.{local_rank}" for local_rank in range(processes)}
    if not names <= set(os.listdir(spool)):
        return None
    return json.loads((spool / f"copied_{number:06d}.0").read_bytes()) or {}


def progress(spool: Path, number: int) -> tuple[int, int]:
    """Return how far this node's local rank 0 is in request `number`: (parts done, parts in all).

    Both only grow. They stand still while one part is done: loading the policy, passing a microbatch through
    the model, writing the checkpoint, or waiting for peers (`collective_timeout_s` at most). (0, 0) while the
    job starts.
    """
    try:
        lines = (spool / f"progress_{number:06d}").read_text()
    except FileNotFoundError:
        return 0, 0
    *_, done, total = ["0", "0", *lines[: lines.rfind("\n") + 1].split()]
    return int(done), int(total)


# A trainer's side.


def watch(spool: Path) -> None:
    """Start a thread that ends this process, whatever it does, once torchrun or the spool is gone."""
    parent = os.getppid()

    def wait_for_the_end() -> None:
        pause = threading.Event()
        while os.getppid() == parent and spool.exists():
            pause.wait(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="watch", daemon=True).start()


def bell(spool: Path, local_rank: int) -> Path:
    """Return the bell that is rung when there is a request for this rank."""
    return spool / f"bell.{local_rank}"


def next_request(spool: Path, after: int, wait: Callable[[float], None] | None = None) -> tuple[int, bytes]:
    """Wait for the first request above number `after`; returns its number and its JSON.

    `wait` takes seconds, and may return sooner; by default it sleeps. There is no deadline: `watch` ends the
    process with its node.
    """
    while True:
        numbers = [_request_number(name) for name in os.listdir(spool)]
        waiting = [number for number in numbers if number is not None and number > after]
        if waiting:
            number = min(waiting)
            return number, _request_path(spool, number).read_bytes()
        (wait or time.sleep)(POLL_S)


def report_progress(spool: Path, number: int, done: int, total: int) -> None:
    """Write that local rank 0 has done `done` of `total` parts of request `number`."""
    # Appended: ext4 writes a new file under an old name to the disk, which takes a millisecond.
    with (spool / f"progress_{number:06d}").open("a") as stream:
        stream.write(f"{done} {total}\n")


def report_done(spool: Path, number: int, local_rank: int) -> None:
    """Write that this rank has done request `number`."""
    _publish(spool / f"done_{number:06d}.{local_rank}", b"")
    ring(spool / NODE_BELL)


def report_copied(spool: Path, number: int, local_rank: int, copy: Mapping[str, Any] | None) -> None:
    """Write that the new policy of request `number` is on the node as far as this rank has to do with it;
    `copy`: its files with their size and sha256, None if the node has none.
    """
    _publish(spool / f"copied_{number:06d}.{local_rank}", json.dumps(copy).encode())
    ring(spool / NODE_BELL)


def report_failure(spool: Path, number: int, local_rank: int, text: str, comes_again: bool = False) -> None:
    """Write that this rank failed at request `number` (0: before the first one)."""
    _publish(spool / f"{FINAL if comes_again else FAILED}{number:06d}.{local_rank}", text.encode())
    ring(spool / NODE_BELL)


def _request_path(spool: Path, number: int) -> Path:
    return spool / f"request_{number:06d}.json"


def _request_number(name: str) -> int | None:
    """Return the number in a request's name, None for any other name."""
    digits = name.removeprefix("request_").removesuffix(".json")
    return int(digits) if name == f"request_{digits}.json" and digits.isdecimal() else None


def _publish(path: Path, data: bytes) -> None:
    """Make `path` appear whole. The spool does not outlive the node, so nothing is fsynced."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
