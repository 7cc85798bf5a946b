"""Measure a machine with one GPU in nine minutes; scripts/gpu_hour.sh starts it.

Each step is a process of its own with a time limit. It prints its figures as they come, so one that fails or
hangs loses only those behind. A step that fails does not stop the others, and the exit code is then 1.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from training_data import SHAPES, draw_sequences, flops_of, make_batch, make_model

REPOSITORY = Path(__file__).parents[2]
TOTAL_S = 540.0
TINY = "10m"
"""The shape that a CPU trains."""
LENGTH, SEQUENCES, REPEATS = 1024, 16, 3
"""A training's size: tokens of a sequence, sequences, how often they are trained on after the first time."""
RUN = {
    "tasks": "builtin:arithmetic",
    "rollout.reward": "luck:luck",
    "rollout.tasks_per_iteration": 32,
    "rollout.samples_per_task": 8,
    "rollout.max_tokens": 256,
}
"""Settings of whole iterations."""
SOON = {"engine.args.enforce-eager": True, "trainer.share_prompts": False}
"""Without what is compiled at first: with it the first iteration took 200 s on an H100."""
LUCK = "import random\n\n\ndef luck(task, completion):\n    return random.random()\n"
"""The module of a reward that is drawn by chance: a model of random weights earns no other."""
MEASURED = (
    "seconds",
    "tokens_per_s",
    "train_tokens_per_s",
    "checkpoint_seconds",
    "kl_engine",
    "mismatch_max",
)
"""Keys of metrics.jsonl whose medians are shown."""
ROOM = 0.9
"""The part of the GPU that an announced training may take, as at the start of a run."""
GB = 1e-9


def report(**figures: Any) -> None:
    """Print figures of this step as a line of JSON."""
    print(json.dumps(figures), flush=True)


# The steps, each in a process of its own.


def machine(on_gpu: bool) -> None:
    """Report what is here, how fast it copies, and how fast it multiplies matrices."""
    import torch
    import transformers

    report(python=sys.version.split()[0], torch=torch.__version__, transformers=transformers.__version__)
    size, dtype, device = (8192, torch.bfloat16, "cuda") if on_gpu else (512, torch.float32, "cpu")
    if on_gpu:
        facts = torch.cuda.get_device_properties(0)
        report(gpu=facts.name, memory_gb=round(facts.total_memory * GB, 1), cuda=torch.version.cuda)
        held = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
        there = held.cuda()
        report(to_host_gb_s=round(held.nbytes * GB / seconds_of(lambda: held.copy_(there)), 1))
        report(to_device_gb_s=round(held.nbytes * GB / seconds_of(lambda: there.copy_(held)), 1))
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    report(matrix_tflop_s=round(2e-12 * size**3 / seconds_of(lambda: a @ b), 1))


def kernels(on_gpu: bool) -> None:
    """Report what computes attention here, and why what else there is does not."""
    import torch

    from trainer.model import attention

    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    for kernel in attention.CANDIDATES[device.type]:
        began_s = time.perf_counter()
        reason = attention.failure(kernel, SimpleNamespace(**SHAPES["0.6b"]), 1, device, dtype)
        report(**{kernel.value: reason or f"works, {time.perf_counter() - began_s:.1f} s"})


def training(on_gpu: bool, shape: str = "", saves: bool = False, **more: Any) -> None:
    """Train a model of random weights; report speed, memory, and seconds to host memory and back.

    `shape`: by default the largest whose announced memory the GPU has. `saves`: write a checkpoint too.
    """
    import torch

    from coordinator.start.estimate import PEAKS
    from trainer.memory import Shape, least_bytes
    from trainer.model.learner import build_learner
    from trainer.settings import TrainerSettings
    from trainer.update.step import train

    device = torch.device("cuda" if on_gpu else "cpu")
    length, count, repeats = (LENGTH, SEQUENCES, REPEATS) if on_gpu else (64, 4, 1)
    more["share_prompts"] = False  # there are none; else flex kernels are compiled, for 40 s
    settings = TrainerSettings(global_batch_size=count // 2, warmup_steps=0, **more)
    with process_group(device) as directory:
        if not shape:
            memory = torch.cuda.get_device_properties(0).total_memory
            needed = {name: least_bytes(Shape.from_tensors(tensors_of(name)), settings, 1) for name in SHAPES}
            shape = max((name for name in SHAPES if needed[name] <= ROOM * memory), key=needed.__getitem__)
        learner = build_learner(make_model(shape, directory / "model", device.type), device, settings)
        adapters = sum(p.numel() for p in learner.parameters.values()) if settings.lora.rank else 0
        announced = least_bytes(Shape.from_tensors(tensors_of(shape), adapters), settings, 1)
        report(shape=shape, attention=str(learner.arrangement), announced_gb=round(announced * GB, 1))
        drawn = argparse.Namespace(shape=shape, tokens=[length] * count, prompt_tokens=8, samples=1)
        batch = make_batch(shape, *draw_sequences(drawn), prompt_tokens=8)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()  # of making the model
        took = [
            seconds_of(lambda: train(learner, batch, settings, max_tokens=length, report=lambda _: None), 1)
            for _ in range(1 + repeats)
        ]
        best_s, first_s = min(took[1:]), took[0]
        report(
            seconds=round(best_s, 3), first_s=round(first_s, 1), tokens_per_s=round(count * length / best_s)
        )
        if on_gpu:
            report(peak_gb=round(torch.cuda.max_memory_allocated() * GB, 1))
            names = [word for word in PEAKS if word in torch.cuda.get_device_name()]
            if names and not adapters:
                flops = flops_of(shape, np.full(count, length))
                report(mfu=round(flops / best_s / PEAKS[names[0]][0], 3))
        away_and_back(learner)
        if saves:
            save(learner, directory / "checkpoint")


def away_and_back(learner: Any) -> None:
    """Report seconds to host memory and back, the first time and the second; no bit may change."""
    import torch

    from rollout.engines.content import content_sum
    from trainer.model.parallel import local_part

    def bits() -> list[int]:
        states = [value for state in learner.optimizer.state.values() for value in state.values()]
        return [content_sum(local_part(tensor)) for tensor in (*learner.parameters.values(), *states)]

    before = bits()
    for time_of in ("first", "then"):
        report(**{f"to_host_{time_of}_s": round(seconds_of(learner.to_host, 1), 2)})
        if torch.cuda.is_available():
            report(left_gb=round(torch.cuda.memory_allocated() * GB, 2))
        report(**{f"to_device_{time_of}_s": round(seconds_of(learner.to_device, 1), 2)})
    if bits() != before:
        raise SystemExit("weights or moments are others after host memory")


def save(learner: Any, directory: Path) -> None:
    """Report seconds and bytes of a checkpoint: weights in bfloat16, and the optimizer's state."""
    import torch

    from rollout.storage.writer import Writer
    from trainer.checkpoint import hub_files, state
    from trainer.checkpoint.outputs import Outputs

    directory.mkdir()
    began_s = time.perf_counter()
    with Writer(directory) as writer:
        hub_files.write_weights(learner, Outputs(writer), torch.bfloat16, directory)
        state.write_pieces(state.pieces(learner), writer)
        size = sum(facts["bytes"] for facts in writer.finish().values())
    report(checkpoint_gb=round(size * GB, 2), checkpoint_s=round(time.perf_counter() - began_s, 2))


def iterations(on_gpu: bool, shape: str = TINY, model: str = "", **settings: Any) -> None:
    """Run whole iterations of one node, with vLLM where it is; report each phase's median seconds after the
    first iteration, tokens/s, and how far the engine's logprobs are from the trainer's.

    `model`: a directory in place of random weights of the shape. Rewards are drawn by chance.
    """
    chosen = {"iterations": 4, "eval.interval": 0, "trainer.warmup_steps": 0, **RUN, **settings}
    chosen |= {} if on_gpu else {"rollout.tasks_per_iteration": 4, "rollout.max_tokens": 16}
    with TemporaryDirectory() as made:
        (Path(made) / "luck.py").write_text(LUCK)
        directory = Path(model) if model else make_model(shape, Path(made) / "model", "cpu")
        run, env = Path(made) / "run", dict(os.environ)
        env["PYTHONPATH"] = f"{Path(__file__).parent / 'older_torch'}:{env['PYTHONPATH']}"
        argv = [sys.executable, "-m", "coordinator.cli", "--model", str(directory), "--log-path", str(run)]
        ended = subprocess.run(
            [*argv, *(f"{name}={value}" for name, value in chosen.items())],
            env=env,
            cwd=made,
            stdout=sys.stderr,
            check=False,
        )
        if ended.returncode:
            for log in sorted(run.glob("logs/*/*.log")):
                print(f"--- {log.name}", log.read_text(errors="replace")[-6000:], sep="\n", file=sys.stderr)
            raise SystemExit(f"the run ended with {ended.returncode}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        told = (run / "events" / "rank_0000.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in told if line]

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    report(
        first_s=lines[0]["seconds"],
        **{name: median([line[name] for line in lines[1:]]) for name in MEASURED},
        **{
            f"{phase}_s": median([line["phase_seconds"][phase] for line in lines[1:]])
            for phase in lines[-1]["phase_seconds"]
        },
    )
    loaded = [event for event in events if event["what"] == "reload" and event["policy"]]
    report(
        load_s=median([event["seconds"] for event in loaded]),
        proof_s=median([event["proof_s"] for event in loaded]),
        probe_differs=max(event["probe_differs"] for event in loaded),
    )


def rehearsal(on_gpu: bool) -> None:
    """Report the peak of the training `replicated` on a GPU that is not there, to the byte."""
    from trainer.settings import TrainerSettings

    settings, env = TrainerSettings(layout="replicated"), dict(os.environ)
    with TemporaryDirectory() as made:
        model = make_model("0.6b" if on_gpu else TINY, Path(made) / "model", "cuda" if on_gpu else "cpu")
        if not on_gpu:  # a build of torch for GPUs has what guard.cpp adds
            import torch

            compiler, env["GUARD"] = shutil.which("g++"), f"{made}/guard.so"
            if compiler is None:
                raise SystemExit("there is no g++")
            headers = f"-I{Path(torch.__file__).parent / 'include'}"
            source = REPOSITORY / "tests" / "dry" / "guard.cpp"
            argv = [compiler, "-shared", "-fPIC", "-std=c++20", headers, str(source), "-o", env["GUARD"]]
            subprocess.run(argv, check=True)
        argv = [sys.executable, "-m", "tests.dry.rehearsal", str(model), "1", settings.model_dump_json()]
        output = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
    report(peak_gb=round(json.loads(output.splitlines()[-1])["peak"] * GB, 1))


def tests(on_gpu: bool) -> None:
    """Run tests/gpu, and report what pytest sums up."""
    argv = ["-m", "pytest", "-q", "-p", "scripts.bench.torch_bridge", "-p", "no:cacheprovider"]
    argv += ["-W", "default", "tests/gpu"]  # another torch may warn of more
    ended = subprocess.run([sys.executable, *argv], stdout=subprocess.PIPE, text=True, check=False)
    print(ended.stdout, file=sys.stderr)
    report(summary=ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else "no output")
    if ended.returncode:
        raise SystemExit("tests/gpu failed")


Step = tuple[Callable[..., None], dict[str, Any], float]
STEPS: dict[str, Step] = {  # what runs, with what, for how many seconds at most
    "machine": (machine, {}, 40),
    "kernels": (kernels, {}, 90),
    "replicated": (training, {"shape": "0.6b", "layout": "replicated", "saves": True}, 90),
    "sharded": (training, {"shape": "0.6b", "layout": "sharded", "saves": True}, 90),
    "compiled": (training, {"shape": "0.6b", "layout": "replicated", "compile": True}, 90),
    "lora": (training, {"shape": "1.7b", "lora": {"rank": 16}}, 90),
    "largest": (training, {"layout": "sharded"}, 120),
    "iterations": (iterations, {"shape": "0.6b", **SOON}, 200),
    "rehearsal": (rehearsal, {}, 60),
    "tests": (tests, {}, 240),
}


@contextlib.contextmanager
def process_group(device: Any) -> Iterator[Path]:
    """Be a process group of one; yields a directory that goes with it."""
    import torch
    import torch.distributed as dist

    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "1"}
    on_gpu = device.type == "cuda"
    with TemporaryDirectory() as made:
        if on_gpu:
            torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"file://{made}/meeting",
            rank=0,
            world_size=1,
            device_id=torch.device("cuda", 0) if on_gpu else None,
        )
        yield Path(made)
        dist.destroy_process_group()


def seconds_of(function: Callable[[], object], times: int = 3) -> float:
    """Return the least seconds of some calls, until the GPU has done them."""
    import torch

    least = float("inf")
    for _ in range(times):
        began_s = time.perf_counter()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        least = min(least, time.perf_counter() - began_s)
    return least


def tensors_of(shape: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, by name."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape], tie_word_embeddings=True))
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


# The parent, which imports no torch.


def run_step(name: str, device: str, limit_s: float, logs: Path) -> dict[str, Any]:
    """Run a step in a process group of its own, which ends with its time; return its figures."""
    began_s, out, log = time.monotonic(), logs / f"{name}.out", logs / f"{name}.log"
    argv = [sys.executable, __file__, "--step", name, "--device", device]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}  # other processes may want the cores too
    env["PYTHONPATH"] = f"{REPOSITORY}:{env.get('PYTHONPATH', '')}"
    with (
        TemporaryDirectory(ignore_cleanup_errors=True) as made,  # a step that is killed removes nothing
        out.open("wb") as stdout,
        log.open("wb") as stderr,
    ):
        env["TMPDIR"] = made
        child = subprocess.Popen(
            argv, cwd=REPOSITORY, env=env, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
            error = "" if code == 0 else last_line(log) or f"exit code {code}"
        except subprocess.TimeoutExpired:
            error = f"not done after {limit_s:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    figures: dict[str, Any] = {}
    for line in out.read_text().splitlines():
        if line.startswith("{"):
            figures |= json.loads(line)
    return {"error": error, "wall_s": round(time.monotonic() - began_s, 1), **figures}


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return one row of Markdown for each step."""
    rows = ["| step | seconds | figures |", "|---|---|---|"]
    for name, result in results.items():
        figures = [f"{key} {value}" for key, value in result.items() if key not in {"error", "wall_s"}]
        failed = [f"**{result['error']}**"] if result["error"] else []
        rows.append(f"| {name} | {result['wall_s']} | {', '.join([*failed, *figures])} |")
    return "\n".join(rows)


def main() -> None:
    """Run the steps, and write the figures after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where nvidia-smi is")
    parser.add_argument("--out", type=Path, default=Path("gpu_hour"), help="a directory for figures and logs")
    parser.add_argument("--steps", nargs="+", choices=[*STEPS], default=[*STEPS])
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="of all steps together")
    parser.add_argument("--step", choices=[*STEPS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    device: str = options.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    if options.step:
        import_module("scripts.bench.torch_bridge")
        function, arguments, _ = STEPS[options.step]
        on_cpu = {"shape": TINY} if device == "cpu" and function in (training, iterations) else {}
        function(device == "cuda", **arguments | on_cpu)
        return
    ends_s, results = time.monotonic() + options.seconds, dict[str, dict[str, Any]]()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.steps:
        left_s = ends_s - time.monotonic()  # a CPU may take all of it
        limit_s = max(0.0, min(STEPS[name][2], left_s) if device == "cuda" else left_s)
        results[name] = run_step(name, device, limit_s, options.out)
        (options.out / "gpu_hour.json").write_text(json.dumps({"device": device, "steps": results}, indent=1))
        print(table({name: results[name]}).splitlines()[-1], flush=True)
    (options.out / "gpu_hour.md").write_text(f"{table(results)}\n")
    sys.exit(any(result["error"] for result in results.values()))


if __name__ == "__main__":
    main()
