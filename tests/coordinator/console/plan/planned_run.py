"""A run whose devices generate and train at known speeds, as its nodes leave it on disk."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.directory.file_names import Beat
from coordinator.directory.layout import FORMAT, RunDir
from coordinator.protocol.placement_records import Placement, publish_devices, publish_placement, run_dirs
from coordinator.protocol.records import claim
from coordinator.settings.loading import build
from coordinator.settings.placement import crews_of, parse_place
from tests.coordinator.examples import record, run_dir_at, write_json

TOKENS = 24_000.0
"""Generated in each iteration."""
LOAD_S, SLEEP_S, START_S, END_S, BATCH_S, SAVE_S = 2.0, 1.0, 0.25, 0.25, 0.5, 1.5
FIRST_S = 100.0
"""How much longer the first iteration takes: engines and trainers start."""


def write_run(
    root: Path,
    devices: Sequence[int],
    rates: Sequence[float],
    train_s: float,
    place: Sequence[str] = (),
    iterations: int = 6,
    gpu_bytes: float = 80e9,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Machines with so many `devices`, each of which generates `rates` tokens a second. Groups are shared out
    by speed, or by the weights that are given. The training takes `train_s`.
    """
    count = len(devices)
    settings = {"cluster.num_nodes": count, **(settings or {})}
    run_dir_at(root)
    write_json(root / "run.json", {"run_id": "plan", "format": FORMAT, "fixed": {}})
    for machine in range(count):
        publish_devices(root, machine, f"node-{machine}", devices[machine])
    publish_placement(root, Placement(count, tuple(place)))
    crews = crews_of(parse_place(place) if place else None, devices)
    at = {run_dir.crew: run_dir for run_dir in run_dirs(root)}
    for run_dir in at.values():
        _begin(run_dir, [place.machine for place in crews[run_dir.crew]], devices, gpu_bytes, settings)
    generator = at.get("rollout") or at["main"]
    generates = {place.machine: len(place.devices) for place in crews[generator.crew]}
    weights = settings.get("cluster.rank_weights") or [
        rates[machine] * generates.get(machine, 0) for machine in range(count)
    ]
    share = {machine: weights[machine] / sum(weights[one] for one in generates) for machine in generates}
    work_s = {machine: TOKENS * share[machine] / (rates[machine] * generates[machine]) for machine in share}
    load_s = LOAD_S if place else 0.0
    rollout_s = max(work_s.values()) + load_s

    told: dict[Path, list[dict[str, Any]]] = {}
    for it in range(1, iterations + 1):
        more_s = FIRST_S if it == 1 else 0.0
        for rank, machine in enumerate(generates):
            spent = (rollout_s + more_s, work_s[machine] + load_s + more_s, load_s)
            _row(told.setdefault(generator.events(rank), []), "train_rollout", it, *spent)
        trainer = at.get("train") or at["main"]
        for rank in range(len(crews[trainer.crew])):
            spent = (train_s + more_s, train_s + more_s, 0.0)
            _row(told.setdefault(trainer.events(rank), []), "training", it, *spent)
        rows = {"iteration_start": START_S, "train_rollout": rollout_s, "train_data": BATCH_S}
        rows |= {"training": train_s + more_s, "checkpoint": SAVE_S, "iteration_end": END_S}
        rows |= {} if place else {"engine_stopped": SLEEP_S, "engine_restarted": LOAD_S}
        line = {"iteration": it, "kind": "both", "seconds": sum(rows.values()), "phase_seconds": rows}
        with generator.metrics.open("a") as file:
            file.write(f"{json.dumps(line)}\n")
        write_json(generator.manifest("train", it), _manifest(share))
    for path, lines in told.items():
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return root


def _begin(
    run_dir: RunDir, machines: Sequence[int], devices: Sequence[int], gpu_bytes: float, settings: Any
) -> None:
    """The record and the heartbeats of a crew."""
    for directory in run_dir.fixed_directories:
        directory.mkdir(parents=True, exist_ok=True)
    claim(run_dir, record(settings=build(settings), members=dict.fromkeys(range(len(machines)), 1)))
    for rank, machine in enumerate(machines):
        gpus = [{"name": "H100", "used_bytes": 1, "total_bytes": gpu_bytes}] * devices[machine]
        said = {"host": f"node-{machine}", "gpu_count": devices[machine], "gpus": gpus}
        write_json(run_dir.entry(Beat(2, rank, 1, 5)), said)


def _row(told: list[dict[str, Any]], row: str, it: int, seconds: float, work_s: float, load_s: float) -> None:
    at_s, mark = told[-1]["t"] if told else 0.0, {"n": 1, "e": 2}
    told.append({"t": at_s, **mark, "what": "begin", "it": it, "row": row})
    if load_s:
        told.append({"t": at_s + load_s, **mark, "what": "reload", "seconds": load_s})
    told.append({"t": at_s + seconds, **mark, "what": "end", "it": it, "row": row, "work_s": work_s})


def _manifest(share: Mapping[int, float]) -> dict[str, Any]:
    """Groups in proportion to what each machine has made."""
    parts = [
        {"rank": rank, "slots": list(range(round(1200 * part)))} for rank, part in enumerate(share.values())
    ]
    return {"tokens": TOKENS, "parts": parts, "given_up": []}


def write_model(directory: Path, parameters: int) -> None:
    """A model of so many parameters, all of them in one layer; the file has holes in their place."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    size = 4 * parameters
    entry = {"dtype": "F32", "shape": [parameters], "data_offsets": [0, size]}
    header = json.dumps({"model.layers.0.weight": entry}).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
