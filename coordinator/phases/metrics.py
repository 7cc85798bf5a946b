"""Phase 13: the metrics line of an iteration; old checkpoints, states and trajectories are removed."""

import json
import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from coordinator.directory import published
from coordinator.keeping.old_checkpoints import retire_checkpoints, verify_last
from coordinator.keeping.old_trajectories import retire_iterations
from coordinator.keeping.trainer_states import retire_states
from coordinator.machine.gpus import count_gpus
from coordinator.node.flags import Payload
from coordinator.node.iteration import Iteration
from coordinator.node.node import Node
from coordinator.phases.eval_sets import by_source
from coordinator.protocol.chunks import measured_weights, paces_of
from coordinator.protocol.phase import Phase, spent_s
from coordinator.settings.tree import RunSettings
from rollout.engines.kinds.choice import engine_kind
from rollout.settings import DEMONSTRATION
from rollout.storage import files
from rollout.storage.lines import append_line
from trainer.statistics import BY_SOURCE

log = logging.getLogger(__name__)

INTERRUPTED_S, INTERRUPTED_FRACTION = 1.0, 0.05
"""An interruption is mentioned if it was longer than both of these."""
DISAGREE = 0.3
"""Where the policy itself has sampled, fewer `effective_samples` than this are no matter of rounding."""
TRAINED = (
    "loss",
    "grad_norm",
    "lr",
    "kl_engine",
    "kl_reference",
    "entropy",
    "clip_fraction",
    "correction_fraction",
    "mismatch_max",
    "effective_samples",
    "age",
    "age_max",
    "packed",
    "padding",
    "margin",
    "preferred",
    "entropy_bonus",
)
"""What training measures, as the trainer names it."""


def report_timings(node: Node, iteration: Iteration) -> Payload:
    """Say for how many seconds this node worked and waited in the iteration; a worker logs it too."""
    work_s, seconds = sum(iteration.work_s.values()), sum(iteration.phase_s.values())
    if not node.is_master:
        log.info("%s", summary_of_node(iteration, work_s, seconds))
    ahead = {"ahead_s": round(iteration.ahead_s, 4)} if iteration.ahead_s else {}
    engine = {} if iteration.engine_s is None else {"engine_s": round(iteration.engine_s, 4)}
    return {"work_s": round(work_s, 4), "wait_s": round(seconds - work_s, 4), **ahead, **engine}


def summary_of_node(iteration: Iteration, work_s: float, seconds: float) -> str:
    """Return the line of one node, without what it has not done:
    `iteration 3 | 42 groups, 336 samples | 1,434 tok/s | 4.1 s | busy 83 %`.
    """
    text, progress = [f"iteration {iteration.number}"], iteration.progress
    if groups := progress.get("done"):
        samples = progress["samples"] or groups * iteration.opened["sampling"]["n"]
        text.append(f"{groups} group{'s'[: groups > 1]}, {samples:,} samples")
    text += [f"{progress['tokens_per_s']:,.0f} tok/s"] if progress.get("tokens_per_s") else []
    return " | ".join([*text, f"{seconds:.1f} s", f"busy {100 * work_s / max(seconds, 1e-9):.0f} %"])


def end_iteration(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> None:
    """Write the metrics line, unless a valid one is there, and remove what is no longer kept."""
    if node.run_dir.crew == "rollout":  # the crew that trains writes the line, with what this one measured
        times = json.dumps(_times(node, iteration, payloads)).encode()
        files.publish(node.run_dir.rollout_times(iteration.number), times, durable=False)
        return
    kind = "both" if node.run_dir.crew == "train" else node.settings.kind
    if node.finished.look().last(kind) < iteration.number:
        verify_last(node, iteration)
        line = {**_metrics(node, iteration, payloads), "kind": kind}
        node.watch.look()
        node.check()  # an append is fenced by no name: let nobody get here who was replaced meanwhile
        append_line(node.run_dir.metrics, json.dumps(line))
        before = node.finished.newest  # a master may have died without sending it
        node.sinks.write([line] if before is None else [before, line])
        log.info("%s", summary(line, node.settings.iterations, is_scored(node.settings)))
        if warning := disagreement(line, node.settings):
            log.warning("%s", warning)
    old = [*retire_checkpoints(node, iteration), *retire_states(node.run_dir)]
    node.remover.remove([*old, *retire_iterations(node, iteration)], node.check)


def _metrics(node: Node, iteration: Iteration, payloads: dict[int, Payload]) -> dict[str, Any]:
    run_dir, number = node.run_dir, iteration.number
    train = published.read_manifest(run_dir, "train", number) or {}
    evaluation = published.read_manifest(run_dir, "eval", number) or {}
    trained: dict[str, float] = {}
    if run_dir.checkpoint(number).name in published.names(run_dir.checkpoints):
        trained = published.read_result(run_dir.checkpoint(number)).metrics
    generated: int = train.get("generated", train.get("tokens", 0))
    times = _times(node, iteration, payloads)
    rollout_epoch, idle_s = times["rollout_epoch"], None
    if node.run_dir.crew == "train":
        rollout_times = published.read_json(run_dir.rollout_times(number)) or {}
        rollout_epoch = rollout_times.get("rollout_epoch", 0)
        idle_s = {"rollout": rollout_times.get("idle_seconds", 0.0), "train": times["idle_seconds"]}
        times = _both(rollout_times, times)
    rollout_s = times["phase_seconds"].get(Phase.TRAIN_ROLLOUT.label, 0.0)
    ahead_s = max((payload.get("ahead_s", 0.0) for payload in payloads.values()), default=0.0)
    generated_s = rollout_s + ahead_s - times.get("engine_seconds", 0.0)
    # After a fault the phase may have found groups that took their time in an epoch before.
    is_of_now = bool(train) and all(part["epoch"] == rollout_epoch for part in train["parts"])
    return {
        "iteration": number,
        "kind": node.settings.kind,
        "policy_iteration": _sampler(train or evaluation),
        "reward": train.get("reward"),
        "eval_reward": evaluation.get("reward"),
        "eval_error": evaluation.get("error"),
        "eval_pass_at": evaluation.get("pass_at"),
        **_by_set(evaluation),
        "flat_groups": train.get("flat_groups"),
        **_rewards_by_source(node, iteration, train, evaluation),
        "sample_metrics": train.get("metrics") or None,
        "eval_sample_metrics": evaluation.get("metrics") or None,
        "samples": train.get("samples"),
        "given_up": len(train["given_up"]) if train else None,
        "unfinished": len(train.get("unfinished", ())) if train else None,
        "short": train.get("short"),
        "failed_samples": train.get("failed_samples"),
        "mixed_code": train.get("mixed_code"),
        "tokens_per_s": round(generated / generated_s, 1) if is_of_now and generated_s > 0 else None,
        "train_tokens_per_s": trained.get("tokens_per_s"),
        "checkpoint_seconds": trained.get("checkpoint_seconds"),
        **{name: trained.get(name) for name in TRAINED},
        **_trained_by_source(trained),
        "truncated": train.get("truncated"),
        "length": round(train["tokens"] / train["samples"], 2) if train.get("samples") else None,
        "seconds": times["seconds"],
        "idle_seconds": idle_s,
        "phase_seconds": times["phase_seconds"],
        "wait_seconds": times["wait_seconds"],
        "measured_weights": times["measured_weights"],
        "busy_fraction": times["busy_fraction"],
    }


def _sampler(manifest: Mapping[str, Any]) -> int | None:
    """Return the iteration whose training made the policy that a manifest's samples are of; of those of
    another run, which have other rewards here, the one there.
    """
    return manifest.get("rescored", manifest.get("origin", {})).get("policy_iteration")


def _by_set(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores of the named sets; nothing for an evaluation without any."""
    sets: dict[str, dict[str, Any]] = evaluation.get("sets", {})
    scores = {
        name: {key: value for key, value in entry.items() if key != "slots"} for name, entry in sets.items()
    }
    return {"eval": scores} if scores else {}


def _times(node: Node, iteration: Iteration, payloads: Mapping[int, Payload]) -> dict[str, Any]:
    """Return how long the iteration took this crew, and what its nodes did meanwhile."""
    idle_s, names = node.idle_s, {rank: str(node.run_dir.machine(rank)) for rank in payloads}
    waited_s = {rank: payload["wait_s"] + idle_s for rank, payload in payloads.items()}
    busy = [
        payload["work_s"] / max(payload["work_s"] + waited_s[rank], 1e-9)
        for rank, payload in payloads.items()
    ]
    # The last phase, which verifies the last checkpoint, is no phase of `phase_seconds`: it has not ended.
    ended_s = iteration.phase_begun_s or time.monotonic()
    train = published.read_manifest(node.run_dir, "train", iteration.number) or {}
    rates = measured_weights(paces_of(train.get("paces", {})))
    weights = {str(node.run_dir.machine(rank)): rate for rank, rate in rates.items()}
    return {
        "rollout_epoch": iteration.ended_in.get(Phase.TRAIN_ROLLOUT.label, 0),
        "measured_weights": weights or None,
        "seconds": round(ended_s - iteration.begun_s + idle_s, 3),
        "idle_seconds": round(idle_s, 3),
        "phase_seconds": {name: round(seconds, 4) for name, seconds in iteration.phase_s.items()},
        "wait_seconds": {names[rank]: round(seconds, 4) for rank, seconds in waited_s.items()},
        "busy_fraction": round(sum(busy) / len(busy), 3),
        "nodes": len(payloads),
        # The start of the first node's engine is no part of the speed.
        "engine_seconds": min((p["engine_s"] for p in payloads.values() if "engine_s" in p), default=0.0),
    }


def _both(rollout_times: Mapping[str, Any], own_times: Mapping[str, Any]) -> dict[str, Any]:
    """Put what the rollout crew measured of an iteration beside what the train crew did; the iteration lasts
    as long as the train crew takes for it, waiting included.
    """
    if not rollout_times:
        return dict(own_times)
    waits = Counter[str](rollout_times["wait_seconds"])
    waits.update(own_times["wait_seconds"])  # a machine may have a node in both
    nodes = rollout_times["nodes"] + own_times["nodes"]
    busy = sum(crew["busy_fraction"] * crew["nodes"] for crew in (rollout_times, own_times)) / nodes
    return {
        "measured_weights": rollout_times.get("measured_weights"),
        "seconds": own_times["seconds"],
        "engine_seconds": rollout_times.get("engine_seconds", 0.0),
        "phase_seconds": {**rollout_times["phase_seconds"], **own_times["phase_seconds"]},
        "wait_seconds": dict(waits),
        "busy_fraction": round(busy, 3),
    }


def _rewards_by_source(
    node: Node, iteration: Iteration, train: dict[str, Any], evaluation: dict[str, Any]
) -> dict[str, dict[str, float] | None]:
    opened = published.read_json(node.run_dir.iteration_json(iteration.number)) or {}
    if not opened:
        return {"reward_by_source": None, "eval_reward_by_source": None}
    inputs, field = node.identity.inputs, node.settings.rollout.ratio_field
    drawn: list[int] = opened["tasks"]
    tasks = [inputs.tasks.tasks[index] for index in drawn]
    eval_tasks = inputs.eval_tasks.tasks if inputs.eval_tasks else ()
    rewards: dict[str, float] = evaluation.get("rewards", {})
    if sets := evaluation.get("sets"):  # their slots come behind
        begin = min(entry["slots"][0] for entry in sets.values())
        rewards = {slot: reward for slot, reward in rewards.items() if int(slot) < begin}
    return {
        "reward_by_source": by_source(train.get("rewards", {}), tasks, field),
        "eval_reward_by_source": by_source(rewards, eval_tasks, field),
    }


def _trained_by_source(trained: Mapping[str, float]) -> dict[str, dict[str, float] | None]:
    """Return the values of each source of tasks that training has measured, by the name of the metric; None
    for a metric that it has not.
    """
    measured: dict[str, dict[str, float] | None] = {}
    for name in (f"{statistic}_by_source" for statistic in BY_SOURCE):
        of_sources = {
            key.removeprefix(f"{name}."): trained[key] for key in trained if key.startswith(f"{name}.")
        }
        measured[name] = of_sources or None
    return measured


def _number_types(settings: RunSettings) -> str:
    """Name the number types that engine and trainer compute with, and what chooses them."""
    gpus = count_gpus()
    place, engine = engine_kind(settings.engine, gpus).dtype
    trainer = settings.trainer.rounded_to(gpus > 0)
    trainer += " over a model in nf4" if settings.trainer.lora.base_dtype == "nf4" else ""
    engine = f"{engine or 'a server of yours'} ({place})"
    return (
        f"the engine computes with {engine}, the trainer with {trainer} (trainer.compute_dtype, save_dtype)"
    )


def disagreement(line: Mapping[str, Any], settings: RunSettings) -> str | None:
    """Say that engine and trainer compute different policies, if they do beyond any sound rounding."""
    sound_kl = settings.trainer.sound_kl
    agree = (line.get("effective_samples") or 1.0) >= DISAGREE and (line.get("kl_engine") or 0) <= sound_kl
    if line.get("age_max") != 0 or agree:
        return None
    return (
        f"engine and trainer do not agree on this policy: effective_samples {line['effective_samples']:.2g}, "
        f"kl_engine {line['kl_engine']:.2g}; is it the same model in both? {_number_types(settings)}. "
        "Answers that are forced into a form may do this too"
    )


def is_scored(settings: RunSettings) -> bool:
    """Return whether rewards of the samples say something: each demonstration has 1."""
    return settings.rollout.environment != DEMONSTRATION


def summary(line: dict[str, Any], iterations: int | None, with_reward: bool = True) -> str:
    """`iteration 3/16 | reward 0.61 | eval 0.93 | length 312, 3 % cut | loss 0.0412 | entropy 0.52 |
    1,434 tok/s | 4.1 s | nodes busy 83 %`; without what the iteration has not measured.

    Phases that were broken off, what a process before this one did, and the time until the run went on, are
    in the seconds alone.
    """
    total = f"/{iterations}" if iterations else ""
    text = [f"iteration {line['iteration']}{total}"]
    text += [f"reward {line['reward']:.3f}"] if with_reward and line["reward"] is not None else []
    text += [f"eval {line['eval_reward']:.3f}"] if line["eval_reward"] is not None else []
    sets: dict[str, dict[str, Any]] = line.get("eval") or {}
    # `run eval` has all tasks in sets; the one of --eval-tasks is called like their mean.
    text += [
        f"{name} {scores['reward']:.3f}"
        for name, scores in sets.items()
        if "reward" in scores and name != "eval"
    ]
    pass_at: dict[str, float] = line.get("eval_pass_at") or {}
    text += [f"pass@{k} {value:.3f}" for k, value in pass_at.items() if k != "1"]
    if line.get("length") is not None:
        cut = f", {100 * line['truncated']:.0f} % cut" if line.get("truncated") else ""
        text.append(f"length {line['length']:.0f}{cut}")
    text += [f"loss {line['loss']:.4f}"] if line["loss"] is not None else []
    text += [f"entropy {line['entropy']:.2g}"] if line.get("entropy") is not None else []
    text += [f"{line['tokens_per_s']:,.0f} tok/s"] if line.get("tokens_per_s") else []
    seconds: float = line["seconds"]
    interrupted_s = seconds - spent_s(line["phase_seconds"], line.get("idle_seconds") or {})
    is_worth_saying = interrupted_s > max(INTERRUPTED_S, INTERRUPTED_FRACTION * seconds)
    text_of_it = f", {interrupted_s:.1f} s of them interrupted or before a restart"
    interrupted = text_of_it if is_worth_saying else ""
    busy = f"nodes busy {100 * line['busy_fraction']:.0f} %{' of the rest' if interrupted else ''}"
    is_measured = not interrupted or seconds - interrupted_s > INTERRUPTED_S
    return " | ".join([*text, f"{seconds:.1f} s{interrupted}", *([busy] if is_measured else [])])
