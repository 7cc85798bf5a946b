"""Announce what a start starts, in a few lines for the master's terminal."""

import shlex
import socket
from itertools import islice
from pathlib import Path

from coordinator.directory.layout import RunDir
from coordinator.machine.cpu_speed import measured_flops
from coordinator.machine.gpus import count_gpus, least_gpu_bytes, list_gpus
from coordinator.machine.oddities import oddities
from coordinator.settings.loading import show
from coordinator.settings.placement import parse_place
from coordinator.settings.tree import RunSettings
from coordinator.start import estimate
from coordinator.start.inputs import Inputs, base_model_dir, engine_of
from coordinator.start.refusals_of_tasks import evaluates
from coordinator.start.start import NodeStart
from rollout.engines.model_dir import tensor_names
from rollout.engines.model_facts import count_active_parameters
from rollout.environment_variables import cores, memory_bytes
from rollout.settings import DEMONSTRATION, GENERATED, PROGRAMS, TINY

MOST_ODD = 3
"""So many lines say what this machine lacks; `run doctor` says all."""

PLACES = ("writes to", "look", "")
"""Titles of the lines that name the run directory, which `run eval` without -o removes at its end."""


def announcement(start: NodeStart, first: int | None) -> list[str]:
    """Return the lines about a start with iteration `first` (None: all are generated), each with its title:
    the model, the engine and why this one, the algorithm, tasks, reward, nodes, where the run writes and
    where to look. With usual names they fit 80 columns beside the prefix of a log line.
    """
    settings, inputs = start.of_run, start.inputs
    gpus = count_gpus()
    texts = {
        "demo": "" if start.overrides else "no settings given: the built-in model learns to add",
        "model": f"{settings.model}, {_count(inputs.parameters)} parameters{_only_sums(settings)}",
        "engine": _engine(settings, inputs, start.run_dir.machine(start.rank)),
        "algorithm": _algorithm(settings),
        "tasks": _tasks(settings, inputs),
        "data": _pass(settings, inputs),
        "samples": _samples(settings, first),
        **_estimate(settings, inputs, gpus),
        "reward": _reward(settings, inputs),
        "nodes": _nodes(settings, gpus),
        "crews": _crews(settings),
        "writes to": str(start.run_dir.root),
        "look": f"run status --watch --log-path {shlex.quote(str(start.run_dir.root))}",
        "": "(run logs and run report take the same --log-path)",
    }
    return [title_text(title, text) for title, text in texts.items() if text] + odd_here()


def title_text(title: str, text: str) -> str:
    """Return one line of an announcement."""
    return f"{title:<10}{text}"


def odd_here() -> list[str]:
    """Return the lines about what this machine lacks, MOST_ODD at most."""
    return [title_text("check", text) for text in islice(oddities(), MOST_ODD)]


def _crews(settings: RunSettings) -> str:
    place = parse_place(settings.cluster.place) if settings.cluster.place else None
    if place is None:
        return ""
    is_one = place["rollout"] == place["train"]
    return f"{' '.join(settings.cluster.place)}, {'one crew, in turns' if is_one else 'at the same time'}"


def _reward(settings: RunSettings, inputs: Inputs) -> str:
    environment = settings.rollout.environment
    if (
        settings.rollout_split == "eval-only" and inputs.eval_tasks is None
    ):  # named sets alone, as of run eval
        of_sets = (f"{each.reward}, environment {each.environment}" for each in settings.eval_sets.values())
        return "; ".join(dict.fromkeys(of_sets))
    if environment == DEMONSTRATION:
        return f"{settings.rollout.scoring}, in evaluations" if inputs.eval_tasks is not None else ""
    if environment.startswith(PROGRAMS):
        return f"of the environment {environment}"
    return f"{settings.rollout.scoring}, environment {environment}"


def _only_sums(settings: RunSettings) -> str:
    """Say of the built-in model that it is of no use for tasks of the user's: --model was forgotten."""
    is_ours = settings.tasks.startswith("builtin:")
    return "" if settings.model != TINY or is_ours else "; it can only add numbers, so give --model"


def _count(number: int) -> str:
    """Write a number of parameters: `0.34 M`, `7.6 B`."""
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def _engine(settings: RunSettings, inputs: Inputs, machine: int) -> str:
    if settings.rl_phase == "update":
        return "none (--rl-phase update)"
    engine, size = engine_of(settings, machine), 0
    if engine.gpus > 1 and inputs.model_files:
        size = engine.replica_gpus(base_model_dir(settings, RunDir(Path())), least_gpu_bytes())
    replica = f", a replica on {_gpus(size)}" if size else ""
    place, number_type = engine.dtype
    computes = f", {number_type}" if place == "engine.args.dtype" else ""
    if computes == ", bfloat16" and not engine.gpus:
        computes += " (so its logprobs differ a little from training's; the correction weighs that)"
    return f"{engine.name}{replica}{computes}"


def _gpus(count: int) -> str:
    return f"{count} GPU{'s' if count > 1 else ''}"


def _algorithm(settings: RunSettings) -> str:
    if settings.rollout_split == "eval-only":
        return ""
    if settings.rl_phase == "rollout":
        return "none (--rl-phase rollout)"
    trainer, lora = settings.trainer, settings.trainer.lora.rank
    adapters = f", adapters of rank {lora}" if lora else ""
    adapters += " to a model in 4 bits" if trainer.lora.base_dtype == "nf4" else ""
    rate = f"learning rate {trainer.learning_rate:g}"
    samples = settings.rollout.tasks_per_iteration * settings.rollout.samples_per_task
    sequences = min(trainer.global_batch_size, samples)
    return f"{trainer.algorithm}, {rate}, {sequences} sequences per step{adapters}"


def _tasks(settings: RunSettings, inputs: Inputs) -> str:
    evaluation = "no evaluation"
    unnamed = [("", inputs.eval_tasks, settings.eval.max_tasks)] if inputs.eval_tasks else []
    named = [
        (f" {name}", inputs.eval_sets[name].tasks, eval_set.max_tasks)
        for name, eval_set in settings.eval_sets.items()
    ]
    counts = [f"{min(len(those.tasks), most or 0)}{name}" for name, those, most in (*unnamed, *named)]
    if evaluates(settings) and counts:
        interval = settings.eval.interval if settings.rollout_split is None else 1
        every = "every iteration" if interval == 1 else f"every {interval} iterations"
        evaluation = f"{' + '.join(counts)} to evaluate {every}"
        if settings.rollout_split == "eval-only":
            return f"{' + '.join(counts)} to evaluate"
    return f"{len(inputs.tasks.tasks)} ({settings.tasks}); {evaluation}"


def _pass(settings: RunSettings, inputs: Inputs) -> str:
    """Say how many iterations take each task of a data set once; nothing where tasks are chosen otherwise."""
    rollout, count = settings.rollout, len(inputs.tasks.tasks)
    if settings.rollout_split == "eval-only":
        return ""
    if settings.tasks.startswith(GENERATED) or rollout.task_sampling != "uniform" or rollout.dynamic_sampling:
        return ""
    again = "then they repeat in another order"
    if count < rollout.tasks_per_iteration:
        return f"an iteration takes each task {rollout.tasks_per_iteration / count:.3g} times"
    takes = f"{count / rollout.tasks_per_iteration:.3g} iterations take"
    return f"{'an iteration takes' if takes.startswith('1 ') else takes} each task once; {again}"


def _samples(settings: RunSettings, first: int | None) -> str:
    if settings.rollout_split == "eval-only":
        return ""
    rollout, last = settings.rollout, settings.iterations
    first = first or last
    end = f"from iteration {first} on" if last is None else f"iterations {first} to {last}"
    end = f"iteration {first}" if last == first else end
    size = f"{rollout.tasks_per_iteration} x {rollout.samples_per_task} per iteration"
    return f"{size}, up to {rollout.max_tokens} tokens; {end}"


def _estimate(settings: RunSettings, inputs: Inputs, gpus: int) -> dict[str, str]:
    """Return the needs of an iteration, if it trains a model with files; all machines are taken as alike."""
    if not inputs.model_files or settings.rl_phase == "rollout" or settings.cluster.place:
        return {}
    if settings.trainer.lora.rank == 0:
        disk = {"disk": estimate.disk_text(inputs.trained, inputs.state_bytes, settings, on_gpu=gpus > 0)}
    else:
        disk = {}
    nodes, model_dir = settings.cluster.num_nodes, base_model_dir(settings, RunDir(Path()))
    active = count_active_parameters(model_dir)
    if not gpus:
        return {
            "time": estimate.cpu_time_text(active, settings, nodes, measured_flops()),
            **disk,
        }
    known, _ = list_gpus()
    sizes = [gpu["memory_bytes"] for gpu in known if gpu["memory_bytes"]]
    if not sizes:
        return disk
    tensors = tensor_names(model_dir)
    shapes = {name: shape for name, (_, shape) in tensors.items()}
    count = nodes * gpus
    names = [gpu["name"] for gpu in known]
    return {
        "memory": estimate.memory_text(shapes, settings.trainer, count, min(sizes), nodes, memory_bytes()),
        "time": estimate.time_text(inputs.parameters, settings, count, names, active),
        **disk,
    }


def _nodes(settings: RunSettings, gpus: int) -> str:
    cluster = settings.cluster
    weights = f", weights {show(cluster.rank_weights)}" if cluster.rank_weights else ""
    devices = _gpus(gpus) if gpus else f"{cores()} cores, no GPU"
    return f"{cluster.num_nodes}{weights}; this one, {socket.gethostname()}: {devices}"
