"""Compare the collector's generation with a bare client of the same server, and with no server at all.

    .venv-vllm/bin/python scripts/bench/collector.py [--model small|tiny|DIR] [--tokens 64] [--samples 1024]

Prints one JSON line: generated tokens per second of `collector` (rollout.collect, single-turn, a reward that
costs nothing), `bare` (an asyncio client that sends the same requests and decodes the JSON) and `offline`
(vllm.LLM in another process), with 512 samples in flight. They take turns with the same prompts, seeds and
sampling, `--rounds` times; the prefix cache is emptied before each turn. A ratio is the median over the
rounds, `of_best` the ratio of the best turns. `cores_busy_elsewhere`: cores that other programs used
meanwhile. See overhead.py for what the collector costs where the engine costs nothing.
"""

import argparse
import asyncio
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_server import ARGS, ENV, START_TIMEOUT_S, Elsewhere, make_model, need_vllm, parameters_m, start_vllm

from coordinator.machine.children import Children
from coordinator.machine.network import LOOPBACK
from rollout.collect import collect
from rollout.engines.answers import HOST_OF_SOCKET, EngineError, socket_of
from rollout.engines.client import EngineClient, EngineFacts
from rollout.engines.completion import completion_request
from rollout.engines.servers import ON_CPU
from rollout.environments.environment import single_turn
from rollout.origin import Sampling
from rollout.rewards.builtin import Reward
from rollout.settings import RolloutSettings
from rollout.slots import Slot
from rollout.trajectory import Group

IN_FLIGHT = 512
TURN_TIMEOUT_S = 1800.0
NOTHING = Reward("nothing", lambda _task, _completion: 0.0)

Side = Callable[[Sequence[Slot], Sampling], tuple[int, float]]
"""Generates the samples of the slots; returns tokens and seconds."""


def through_collector(url: str, slots: Sequence[Slot], sampling: Sampling) -> tuple[int, float]:
    """Generate as a node does."""
    tokens = 0

    def on_group(group: Group) -> None:
        nonlocal tokens
        tokens += sum(int(sample.loss_mask.sum()) for sample in group.samples)

    async def main() -> float:
        async with EngineClient(url, facts=EngineFacts(is_seeded=False)) as client:
            started_s = time.perf_counter()
            await collect(
                slots,
                client=client,
                environment=single_turn,
                reward=NOTHING,
                sampling=sampling,
                settings=RolloutSettings(concurrency=IN_FLIGHT),
                on_group=on_group,
                stop=threading.Event(),
            )
            return time.perf_counter() - started_s

    seconds = asyncio.run(main())
    return tokens, seconds


def bare(url: str, slots: Sequence[Slot], sampling: Sampling) -> tuple[int, float]:
    """Generate with the least that a client can do."""
    import aiohttp

    bodies = iter([request(slot, sampling) for slot in slots])
    path = socket_of(url)
    host = HOST_OF_SOCKET if path else url

    async def ask(session: aiohttp.ClientSession) -> int:
        tokens = 0
        for body in bodies:
            async with session.post(f"{host}/v1/completions", json=body) as response:
                choices = (await response.json())["choices"]
            tokens += sum(len(choice["token_ids"]) for choice in choices)
        return tokens

    async def main() -> tuple[int, float]:
        timeout = aiohttp.ClientTimeout(total=TURN_TIMEOUT_S)
        async with aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(path, limit=0) if path else aiohttp.TCPConnector(limit=0),
            timeout=timeout,
            raise_for_status=True,
        ) as session:
            started_s = time.perf_counter()
            asked = await asyncio.gather(*(ask(session) for _ in range(IN_FLIGHT // sampling.n)))
            return sum(asked), time.perf_counter() - started_s

    return asyncio.run(main())


def request(slot: Slot, sampling: Sampling) -> dict[str, Any]:
    """Return the request that the collector sends for a slot."""
    return completion_request(slot.prompt, sampling)


class Offline:
    """vllm.LLM in another process, asked line by line over a socket."""

    def __init__(self, children: Children, model: Path) -> None:
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            argv = [sys.executable, __file__, "--model", str(model), "--offline", str(port)]
            env = {**ENV, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
            self._child = children.start("offline", argv, env=env)
            give_up_s = time.monotonic() + START_TIMEOUT_S
            listener.settimeout(1.0)
            while True:
                try:
                    connection, _ = listener.accept()  # it connects after loading the model
                    break
                except TimeoutError:
                    if self._child.poll() is not None or time.monotonic() > give_up_s:
                        raise SystemExit(f"vllm.LLM did not start:\n{self._child.tail(30)}") from None
        connection.settimeout(TURN_TIMEOUT_S)
        self._file = connection.makefile("rw")

    def __call__(self, slots: Sequence[Slot], sampling: Sampling) -> tuple[int, float]:
        print(json.dumps([request(slot, sampling) for slot in slots]), file=self._file, flush=True)
        if not (line := self._file.readline()):
            raise SystemExit(f"vllm.LLM is gone:\n{self._child.tail(30)}")
        tokens, seconds = json.loads(line)
        return tokens, seconds


def serve_offline(model: Path, port: int) -> None:
    """Answer for Offline: a list of requests per line; tokens and seconds as the answer."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(
        str(model),
        generation_config="vllm",
        logprobs_mode="processed_logprobs",
        kv_cache_memory_bytes=ON_CPU["kv-cache-memory-bytes"],
        **ARGS,
    )
    file = socket.create_connection((LOOPBACK, port)).makefile("rw")
    names = ("n", "max_tokens", "temperature", "top_p", "seed", "logprobs")
    for line in file:
        requests = json.loads(line)
        if not llm.reset_prefix_cache():
            raise SystemExit("the prefix cache was not reset")
        params = [SamplingParams(**{name: body[name] for name in names}) for body in requests]
        started_s = time.perf_counter()
        outputs = llm.generate([body["prompt"] for body in requests], params, use_tqdm=False)
        seconds = time.perf_counter() - started_s
        tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
        print(json.dumps([tokens, seconds]), file=file, flush=True)


def slots_of(samples: int, n: int) -> list[Slot]:
    """Make a different prompt of about 40 tokens for each group, and a seed for each sample."""
    prompts = [f"{k}. What is {7 * k % 991} plus {11 * k % 997}, please?" for k in range(samples // n)]
    return [Slot(k, {"id": str(k), "prompt": prompt}, seed=1_000_003 * k) for k, prompt in enumerate(prompts)]


def compare(sides: dict[str, Side], samples: int, n: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Measure one row: the sides take turns; another one begins each round. The first turns do not count."""
    slots, sampling = slots_of(samples, n), Sampling(n=n, max_tokens=tokens)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    cpu_ms: dict[str, list[float]] = {name: [] for name in sides}
    elsewhere: list[float] = []
    for turn in range(-1, rounds):
        names = [*sides][max(turn, 0) % len(sides) :] + [*sides][: max(turn, 0) % len(sides)]
        for name in names:
            watch, cpu_s = Elsewhere(), time.process_time()
            made, seconds = sides[name](slots[: IN_FLIGHT // n] if turn < 0 else slots, sampling)
            if turn >= 0:
                rates[name].append(made / seconds)
                cpu_ms[name].append(1000 * (time.process_time() - cpu_s) / samples)
                elsewhere.append(watch.cores())
                print(f"n={n} {name}: {made} tokens, {seconds:.2f} s, {elsewhere[-1]}", file=sys.stderr)
    row: dict[str, Any] = {"n": n, "samples": samples, "cores_busy_elsewhere": statistics.median(elsewhere)}
    for name, found in rates.items():
        row[f"{name}_tokens_per_s"] = {"median": round(statistics.median(found)), "best": round(max(found))}
    for name in sides.keys() & {"collector", "bare"}:
        row[f"{name}_client_cpu_ms_per_sample"] = round(statistics.median(cpu_ms[name]), 3)
    for other in [name for name in sides if name != "collector"]:
        ratios = [a / b for a, b in zip(rates["collector"], rates[other], strict=True)]
        row[f"collector_of_{other}"] = {
            "median": round(statistics.median(ratios), 3),
            "of_best": round(max(rates["collector"]) / max(rates[other]), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    return row


def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Measure all rows and return the line."""
    model = Path(options.model)
    if options.model in ("tiny", "small"):
        model = make_model(options.model, directory / options.model)
    with Children() as children:
        server = start_vllm(children, model)
        server.wait_ready()

        def emptied(side: Callable[[str, Sequence[Slot], Sampling], tuple[int, float]]) -> Side:
            def turn(slots: Sequence[Slot], sampling: Sampling) -> tuple[int, float]:
                server.admin.reset_prefix_cache()
                return side(server.url, slots, sampling)

            return turn

        sides: dict[str, Side] = {"collector": emptied(through_collector), "bare": emptied(bare)}
        if not options.no_offline:
            sides["offline"] = Offline(children, model)
        try:
            rows = [compare(sides, options.samples, n, options.tokens, options.rounds) for n in options.n]
        except (EngineError, OSError) as error:
            raise SystemExit(f"{error}\n{server.child.tail(60)}") from error
    return {
        "cores": os.cpu_count(),
        "vllm": metadata.version(metadata.packages_distributions()["vllm"][0]),
        "model": options.model,
        "parameters_m": parameters_m(model),
        "max_tokens": options.tokens,
        "rounds": options.rounds,
        "rows": rows,
    }


def main() -> None:
    """Read the options, measure, and print the line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small", help="tiny or small, made for it, or a directory")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--n", type=int, nargs="+", default=[8, 1], help="samples of a group")
    parser.add_argument("--no-offline", action="store_true", help="only collector and bare")
    parser.add_argument("--offline", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    need_vllm(parser)
    if options.offline:
        serve_offline(Path(options.model), options.offline)
        return
    with tempfile.TemporaryDirectory(prefix="flagpost-bench-") as directory:
        print(json.dumps(run(options, Path(directory))))


if __name__ == "__main__":
    main()
