"""Measure how long an engine takes to load new weights: in place, and by a restart.

    .venv-vllm/bin/python scripts/bench/reload.py [--models tiny small] [--reloads 9] [--restarts 2]
    .venv/bin/python scripts/bench/reload.py --embedded [--parameters 1e8] [--dtype float64]

Prints one JSON line. `reload_s` begins with EngineAdmin.reload (checkpoint verified, requests drained, caches
reset); `restart_s` begins with ending the process group, and includes the start of the same command. With
vLLM both end with the first completion of the new weights, with the embedded engine when the server answers.
Two models of the same shape take turns. `proof_s` is what the server takes after a reload to compare the
weights that it computes with to the files. Of the embedded engine also `copy_s`: what this process takes to
read the same files, which are in memory, and to copy their tensors into tensors of the engine's dtype.
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

from coordinator.machine.children import Child, Children
from rollout.engines.admin import EngineAdmin
from rollout.engines.answers import UNIX
from rollout.engines.client import EngineClient
from rollout.engines.servers import server_command
from rollout.origin import Sampling
from rollout.settings import EngineSettings

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


# ---- the embedded engine


def start_embedded(children: Children, settings: EngineSettings, model: Path) -> tuple[Child, EngineAdmin]:
    """Start a server, and wait until it answers."""
    socket = children.spool / f"{model.name}-{time.monotonic_ns()}.sock"
    server = server_command(settings, model, socket, gpus=0)
    child = children.start("engine", server.argv, env=server.env)
    admin = EngineAdmin(f"{UNIX}{socket}")
    admin.wait_healthy(120.0, lambda: child.poll() is None)
    return child, admin


def timed(act: Callable[[], Any]) -> float:
    """Return how many seconds a call takes."""
    started_s = time.perf_counter()
    act()
    return time.perf_counter() - started_s


def make_models(directory: Path, parameters: float) -> tuple[list[Path], int]:
    """Make two random models of the same shape, as the trainer writes them: with sums of their content.
    Returns them, and how many parameters each has.
    """
    import torch
    from large import make_model as make_large
    from safetensors.torch import load_file, save_file
    from transformers.utils.logging import disable_progress_bar

    from rollout.engines.admin import CONTENT
    from rollout.engines.content import content_document, content_sum

    disable_progress_bar()
    models = [directory / "first", directory / "second"]
    made = make_large(models[0], parameters)
    models[1].mkdir()
    for file in models[0].iterdir():
        (models[1] / file.name).write_bytes(file.read_bytes())
    for number, model in enumerate(models):
        weights = model / "model.safetensors"
        tensors = {name: tensor + number / 64 for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
        sums = {name: content_sum(tensor) for name, tensor in tensors.items()}
        (model / CONTENT).write_bytes(content_document(sums, torch.bfloat16))
    return models, made


def seconds_to_copy(model: Path, dtype: str) -> Callable[[], float]:
    """Return a function that measures how long the files take into tensors that are there already."""
    import torch
    from safetensors import safe_open

    weights = model / "model.safetensors"

    def copy() -> None:
        with safe_open(weights, "pt") as opened:
            for name, tensor in held.items():
                tensor.copy_(opened.get_tensor(name))

    with safe_open(weights, "pt") as opened:
        held = {name: opened.get_tensor(name).to(getattr(torch, dtype)) for name in opened.keys()}  # noqa: SIM118
    return partial(timed, copy)


def measure_embedded(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the embedded engine: two models of the same shape take turns."""
    (models, made), watch = make_models(directory, options.parameters), Elsewhere()
    copy, settings = (
        seconds_to_copy(models[0], options.dtype),
        EngineSettings(kind="torch", dtype=options.dtype),
    )
    copy_s: list[float] = []
    reload_s: list[float] = []
    proof_s: list[float] = []
    restart_s: list[float] = []
    with Children() as children:
        child, admin = start_embedded(children, settings, models[0])
        admin.prove()
        for model in itertools.islice(itertools.cycle(reversed(models)), options.reloads):
            copy_s.append(copy())
            reload_s.append(timed(partial(admin.reload, model, model.name)))
            proof_s.append(timed(partial(admin.prove, model)))
        for model in itertools.islice(itertools.cycle(models), options.restarts):
            child.kill()
            started_s = time.perf_counter()
            child, admin = start_embedded(children, settings, model)
            restart_s.append(time.perf_counter() - started_s)
        elsewhere = watch.cores()
    both_s = [a + b for a, b in zip(reload_s, proof_s, strict=True)]
    times = {"copy_s": copy_s, "reload_s": reload_s, "proof_s": proof_s, "restart_s": restart_s}
    ratios = {"reload_to_copy": reload_s, "reload_and_proof_to_copy": both_s}
    return {
        "engine": "embedded",
        "dtype": options.dtype,
        "parameters_m": round(made / 1e6, 1),
        **{name: round(statistics.median(seconds), 3) for name, seconds in times.items()},
        **{f"{name}_range": [round(min(of), 3), round(max(of), 3)] for name, of in times.items()},
        **{
            name: round(statistics.median(x / y for x, y in zip(of, copy_s, strict=True)), 2)
            for name, of in ratios.items()
        },
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
    parser.add_argument("--embedded", action="store_true", help="measure the embedded engine, not vLLM")
    parser.add_argument("--parameters", type=float, default=1e8)
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float64")
    options = parser.parse_args()
    if not options.embedded:
        need_vllm(parser)
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        if options.embedded:
            rows = [measure_embedded(Path(directory), options)]
        else:
            rows = [
                measure(name, Path(directory), options.reloads, options.restarts) for name in options.models
            ]
    print(json.dumps({"cores": os.cpu_count(), "rows": rows}))


if __name__ == "__main__":
    main()
