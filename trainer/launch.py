"""Starting the training job and talking to it. Torch-free, and light: each trainer imports it first.

One torchrun job serves every iteration. A node and the trainers it started talk through the *spool*, a
directory on the node's own disk that the node makes, with a `pgid/` inside:

    pgid/<process group id>     made by each trainer before anything else: what the node and its keeper must
    kill,
                                since torchrun starts every worker in a session of its own
    request_000007.json         what to do (trainer.request.TrainRequest), or {"exit": true}; numbers only
    grow done_000007.<local rank>    this rank has done it failed_000007.<local rank>  this rank could not;
    its content is the traceback, and the rank has exited

Every file appears whole (temporary name, rename). A trainer exits when the spool vanishes or torchrun dies.
"""

import json
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

POLL_MIN_S = 0.001
POLL_MAX_S = 0.05
WATCH_INTERVAL_S = 0.5


class TrainerFailed(RuntimeError):
    """A rank of the training job failed; the message holds its traceback."""


class Request(Protocol):
    """Anything that has a JSON form; TrainRequest in practice."""

    def to_json(self) -> bytes:
        """The document as JSON bytes."""
        ...


@dataclass(frozen=True)
class Launch:
    """One node's part of a training job over all nodes."""

    num_nodes: int
    node_rank: int
    processes: int
    """Training processes of this node."""
    master_addr: str
    master_port: int
    interface: str
    """Network interface that routes to the other nodes; gloo and NCCL listen on it alone."""
    spool: Path
    threads: int
    """CPU threads of one process."""
    start_timeout_s: float
    """The nodes must have met by then."""
    collective_timeout_s: float


def argv(launch: Launch) -> list[str]:
    """The command of this node's torchrun agent: static rendezvous, no restarts, nothing redirected."""
    return [
        sys.executable,
        *("-m", "torch.distributed.run"),
        *("--nnodes", str(launch.num_nodes)),
        *("--node-rank", str(launch.node_rank)),
        *("--nproc-per-node", str(launch.processes)),
        *("--master-addr", launch.master_addr),
        *("--master-port", str(launch.master_port)),
        *("--max-restarts", "0"),
        *("--rdzv-conf", f"timeout={max(1, round(launch.start_timeout_s))}"),
        *("--shutdown-timeout", "5"),
        *("--log-dir", os.devnull),
        *("-m", "trainer"),
        *("--spool", str(launch.spool)),
        *("--collective-timeout-s", str(launch.collective_timeout_s)),
    ]


def environment(launch: Launch) -> dict[str, str]:
    """What the agent and its workers need beside this process's environment."""
    return {
        "OMP_NUM_THREADS": str(launch.threads),
        # Waiting threads sleep. By default they spin, and where other processes want the cores too (an
        # engine, a second node on this machine) a training step takes ten times as long.
        "OMP_WAIT_POLICY": "passive",
        "GLOO_SOCKET_IFNAME": launch.interface,
        "NCCL_SOCKET_IFNAME": launch.interface,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # A collective that hangs on GPUs leaves a trace, beside the requests rather than in /tmp.
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_TEMP_FILE": str(launch.spool / "nccl_trace_rank_"),
        "LOGLEVEL": "ERROR",
        "TOKENIZERS_PARALLELISM": "false",
    }


# The node's side.


def submit(spool: Path, number: int, request: Request) -> None:
    """Ask the job for training phase `number`, higher than any before."""
    _publish(_request_path(spool, number), request.to_json())


def dismiss(spool: Path, number: int) -> None:
    """Ask the job to end after what it does now; it exits with 0."""
    _publish(_request_path(spool, number), json.dumps({"exit": True}).encode())


def outcome(spool: Path, number: int, processes: int) -> Literal["done"] | None:
    """`done` when all `processes` ranks of this node have done request `number`, None while they work.

    Raises TrainerFailed as soon as a rank has failed at anything.
    """
    names = os.listdir(spool)
    failed = sorted(name for name in names if name.startswith("failed_") and not name.endswith(".tmp"))
    if failed:
        texts = [f"local rank {name.rpartition('.')[2]}: {(spool / name).read_text()}" for name in failed]
        raise TrainerFailed("\n".join(texts).rstrip())
    done = {f"done_{number:06d}.{local_rank}" for local_rank in range(processes)}
    return "done" if done <= set(names) else None


# A trainer's side.


def register(spool: Path) -> None:
    """Name this process's group in the spool, or exit: without a spool nobody would end this process."""
    try:
        os.close(os.open(spool / "pgid" / str(os.getpgid(0)), os.O_CREAT | os.O_WRONLY, 0o644))
    except FileNotFoundError:
        raise SystemExit(f"{spool}/pgid is gone: the node that started this trainer has ended") from None


def watch(spool: Path) -> None:
    """End this process, from a thread and whatever it does, once torchrun or the spool is gone."""
    parent = os.getppid()

    def wait_for_the_end() -> None:
        pause = threading.Event()
        while os.getppid() == parent and spool.exists():
            pause.wait(WATCH_INTERVAL_S)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="watch", daemon=True).start()


def next_request(spool: Path, after: int) -> tuple[int, bytes | None]:
    """Wait for the first request above number `after`: its number and JSON, None for the wish to exit.

    The wait has no deadline of its own: `watch` ends it with the node.
    """
    started = time.monotonic()
    while True:
        numbers = [_request_number(name) for name in os.listdir(spool)]
        waiting = [number for number in numbers if number is not None and number > after]
        if waiting:
            number = min(waiting)
            data = _request_path(spool, number).read_bytes()
            return number, None if json.loads(data).get("exit") is True else data
        time.sleep(min(POLL_MAX_S, max(POLL_MIN_S, 0.05 * (time.monotonic() - started))))


def report_done(spool: Path, number: int, local_rank: int) -> None:
    """Say that this rank has done request `number`."""
    _publish(spool / f"done_{number:06d}.{local_rank}", b"")


def report_failure(spool: Path, number: int, local_rank: int, text: str) -> None:
    """Say that this rank failed at request `number` (0: before the first one)."""
    _publish(spool / f"failed_{number:06d}.{local_rank}", text.encode())


def _request_path(spool: Path, number: int) -> Path:
    return spool / f"request_{number:06d}.json"


def _request_number(name: str) -> int | None:
    """The number in a request's name, None for any other name."""
    digits = name.removeprefix("request_").removesuffix(".json")
    return int(digits) if name == f"request_{digits}.json" and digits.isdecimal() else None


def _publish(path: Path, data: bytes) -> None:
    """Make `path` appear whole. Nothing here outlives the node, so nothing is fsynced."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
