"""Measure what the collector costs: samples per second on one core, with an engine that answers at once.

    python scripts/bench/overhead.py [--samples 100000]

Prints one JSON line; needs no vLLM. A separate process measures each row, on one core, with the engine on
another core (where the system lets a process choose): groups of `n` samples of `tokens` tokens, 256 samples
in flight, single-turn, a reward that costs nothing. `samples_per_cpu_s`, samples per CPU second of the
collector, is the figure to read where other programs run (`cores_busy_elsewhere`). `server_samples_per_s`:
samples that the same core gets from the engine without parsing the answers. `memory_mb`: resident memory by
number of samples. Groups are dropped when they finish, or written as parts to a temporary directory
(`parts`); the memory then holds the groups of the next part, and grows with the rate.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from vllm_server import Elsewhere

from coordinator.directory.layout import RunDir
from coordinator.directory.parts import PartWriter
from rollout.collect import collect
from rollout.engines.client import EngineClient
from rollout.environments.environment import single_turn
from rollout.origin import Code, Origin, Sampling
from rollout.rewards.builtin import Reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import Group

CONCURRENCY = 256
ORIGIN = Origin("policy", 0, Sampling(), Code("reward", ""), Code("single_turn", ""))
FIRST_ROW_TIMEOUT_S = 600.0
ROWS = [(1, 16, False), (1, 64, False), (1, 256, False), (8, 64, False), (8, 256, False), (8, 64, True)]
"""(n, tokens, parts)."""
MEMORY_AT = (0.1, 0.5, 1.0)
"""Fractions of the samples after which the memory is measured."""
NOTHING = Reward("nothing", lambda _task, _completion: 0.0)


@contextmanager
def instant_server(n: int, tokens: int, core: list[int]) -> Iterator[int]:
    """Start an engine that answers at once; yield its port."""
    program = Path(__file__).with_name("instant_server.py")
    argv = [sys.executable, str(program), str(n), str(tokens), *map(str, core)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.communicate()


class Drain(asyncio.Protocol):
    """One connection that repeats its request, and only counts the bytes of the answers."""

    request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 256\r\n\r\n" + bytes(256)

    def __init__(self, requests: Iterator[int], over: Callable[[], None]) -> None:
        self._requests = requests
        self._over = over
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def data_received(self, data: bytes) -> None:
        if not self._missing:
            head = data.index(b"\r\n\r\n")
            self._missing = head + 4 + int(data[data.rindex(b" ", 0, head) : head])
        self._missing -= len(data)
        if not self._missing:
            self._ask()

    def _ask(self) -> None:
        if next(self._requests, None) is None:
            self._over()
        else:
            self._transport.write(self.request)


async def drain(port: int, requests: int, connections: int) -> float:
    """Measure the seconds of `requests`, without parsing the answers."""
    loop = asyncio.get_running_loop()
    left, ended, done = iter(range(requests)), [], asyncio.Event()

    def over() -> None:
        ended.append(None)
        if len(ended) == connections:
            done.set()

    started_s = time.perf_counter()
    for _ in range(connections):
        await loop.create_connection(lambda: Drain(left, over), "127.0.0.1", port)
    await done.wait()
    return time.perf_counter() - started_s


async def collect_all(
    port: int, samples: int, n: int, tokens: int, on_group: Callable[[Group], None]
) -> None:
    """Run the collector as a node does."""
    tasks = [{"id": str(k), "prompt": f"What is {k} plus {2 * k}? " * 2} for k in range(64)]
    slots = [Slot(slot, tasks[slot % len(tasks)], slot) for slot in range(samples // n)]
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        await collect(
            slots,
            client=client,
            environment=single_turn,
            reward=NOTHING,
            sampling=Sampling(n=n, max_tokens=tokens),
            settings=RolloutSettings(concurrency=CONCURRENCY),
            on_group=on_group,
            stop=threading.Event(),
        )


async def flushing(writer: PartWriter, collecting: Coroutine[Any, Any, None]) -> None:
    """Write parts meanwhile, as a node does."""

    async def flush() -> None:
        while True:
            await asyncio.sleep(RolloutSettings().part_interval_s)
            await asyncio.to_thread(writer.flush)

    task = asyncio.create_task(flush())
    await collecting
    task.cancel()


def measure(samples: int, n: int, tokens: int, parts: bool) -> dict[str, Any]:
    """Measure one row in this process."""
    cores = _tie_to_one_core()
    with instant_server(n, tokens, cores[1:2]) as port, tempfile.TemporaryDirectory() as directory:
        requests, connections = samples // n, min(samples // n, max(1, CONCURRENCY // n))
        ceiling_s = asyncio.run(drain(port, max(requests // 10, connections), connections))
        run_dir, memory_mb = RunDir(Path(directory)), dict[int, float]()
        run_dir.trajectories("train", 1).mkdir(parents=True)
        writer = PartWriter(run_dir, "train", 1, 0, 1, ORIGIN)
        done, look_at = 0, {round(part * requests) for part in MEMORY_AT}

        def on_group(group: Group) -> None:
            nonlocal done
            done += 1
            if parts:
                writer.add(group)
            if done in look_at:
                memory_mb[done * n] = round(psutil.Process().memory_info().rss / 1e6, 1)

        watch, started_s, started_cpu_s = Elsewhere(), time.perf_counter(), time.process_time()
        asyncio.run(flushing(writer, collect_all(port, samples, n, tokens, on_group)))
        writer.flush()
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        elsewhere = watch.cores()
        if done != requests:
            raise SystemExit(f"{done} groups were handed over, {requests} were asked for")
    return {
        "n": n,
        "tokens": tokens,
        "parts": parts,
        "samples": samples,
        "samples_per_s": round(samples / seconds),
        "samples_per_cpu_s": round(samples / cpu_s),
        "server_samples_per_s": round(max(requests // 10, connections) * n / ceiling_s),
        "memory_mb": memory_mb,
        "cores_busy_elsewhere": elsewhere,
    }


def _tie_to_one_core() -> list[int]:
    """Stay on one core; return it and another one, or nothing where a process cannot choose."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])
    return cores


def main() -> None:
    """Measure every row in a separate process, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--row", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(measure(options.samples, *ROWS[options.row])))
        return
    rows = []
    for row in range(len(ROWS)):
        argv = [sys.executable, __file__, "--samples", str(options.samples), "--row", str(row)]
        made = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=FIRST_ROW_TIMEOUT_S)
        rows.append(json.loads(made.stdout))
    print(json.dumps({"cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
