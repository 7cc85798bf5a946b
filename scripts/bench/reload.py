"""Measure how long a vLLM server takes to load new weights: in place, and by a restart.

    .venv-vllm/bin/python scripts/bench/reload.py [--models tiny small] [--reloads 9] [--restarts 2]

Prints one JSON line. Both times end with the first completion of the new weights. `reload_s` begins with
EngineAdmin.reload (checkpoint verified, requests drained, caches reset); `restart_s` begins with ending the
process group, and includes the start of the same command. Two models of the same shape take turns. `proof_s`
is what the server takes after a reload to compare the weights that it computes with to the files.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm_server import Elsewhere, Vllm, make_model, need_vllm, parameters_m, start_vllm

from coordinator.machine.children import Children
from rollout.engines.client import EngineClient, Sampling

GRACE_S = 10.0
PROBE = Sampling(max_tokens=1, temperature=0.0)


def first_logprob(server: Vllm) -> float:
    """Return the logprob of one greedy token; other weights give another one."""

    async def main() -> float:
        async with EngineClient(server.url) as client:
            return (await client.generate("1+2=", PROBE))[0].logprobs[0]

    return asyncio.run(main())


def start(children: Children, model: Path) -> Vllm:
    """Start a server, and wait until it answers."""
    server = start_vllm(children, model)
    server.wait_ready()
    return server


def reload(server: Vllm, model: Path) -> Vllm:
    """Load the weights in place."""
    server.admin.reload(model, model.name, like=model)
    return server


def restart(children: Children, server: Vllm, model: Path) -> Vllm:
    """End the server's process group, and start a new server."""
    server.child.stop(GRACE_S)
    return start(children, model)


def seconds_of(change: Callable[[Path], Vllm], model: Path, before: float) -> tuple[float, Vllm, float]:
    """Measure seconds until the first completion of other weights, which must differ from `before`."""
    started_s = time.perf_counter()
    server = change(model)
    after = first_logprob(server)
    seconds = time.perf_counter() - started_s
    if after == before:
        raise SystemExit("the server still answers with the old weights")
    return seconds, server, after


def seconds_to_prove(server: Vllm, model: Path) -> float:
    """Measure seconds until the server has proved by content that it computes with the model."""
    started_s = time.perf_counter()
    server.admin.prove(model)
    return time.perf_counter() - started_s


def measure(name: str, directory: Path, reloads: int, restarts: int) -> dict[str, Any]:
    """Measure one row."""
    models = [make_model(name, directory / f"{name}{seed}", seed) for seed in (0, 1)]
    turn, watch = itertools.cycle(models), Elsewhere()
    reload_s: list[float] = []
    proof_s: list[float] = []
    restart_s: list[float] = []
    with Children() as children:
        server = start(children, next(turn))
        said = first_logprob(server)
        for _ in range(reloads):
            model = next(turn)
            seconds, server, said = seconds_of(partial(reload, server), model, said)
            reload_s.append(seconds)
            proof_s.append(seconds_to_prove(server, model))
        for _ in range(restarts):
            seconds, server, said = seconds_of(partial(restart, children, server), next(turn), said)
            restart_s.append(seconds)
        elsewhere = watch.cores()
    return {
        "model": name,
        "parameters_m": parameters_m(models[0]),
        "reload_s": round(statistics.median(reload_s), 3),
        "reload_s_range": [round(min(reload_s), 3), round(max(reload_s), 3)],
        "proof_s": round(statistics.median(proof_s), 3),
        "proof_s_range": [round(min(proof_s), 3), round(max(proof_s), 3)],
        "restart_s": round(statistics.median(restart_s), 1),
        "restart_s_range": [round(min(restart_s), 1), round(max(restart_s), 1)],
        "cores_busy_elsewhere": elsewhere,
    }


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=["tiny", "small"], default=["tiny", "small"])
    parser.add_argument("--reloads", type=int, default=9)
    parser.add_argument("--restarts", type=int, default=2)
    options = parser.parse_args()
    need_vllm(parser)
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        rows = [measure(name, Path(directory), options.reloads, options.restarts) for name in options.models]
    print(json.dumps({"cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
