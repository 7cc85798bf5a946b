"""`run verify`: whether all that a run keeps is whole, and whether an iteration comes out the same again.

An iteration is a function of its documents. It is made again in a fork beside the run, which is removed
afterwards; nothing of the run changes, which may be running.
"""

import contextlib
import json
import math
import shlex
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.console.commands.fork import Forked, fork, link_tree
from coordinator.console.views.difference import compare, logprobs_apart, tensor_places, training_parting
from coordinator.console.views.run import Run
from coordinator.directory import published
from coordinator.directory.chain import Chain, read_chain
from coordinator.directory.layout import MASTER, RunDir
from coordinator.journal.control_characters import plain
from coordinator.machine.children import Children
from coordinator.machine.run_command import STARTED_BY, run_command
from coordinator.protocol.phase import ROLLOUT_OF, Phase
from coordinator.protocol.records import EpochRecord
from coordinator.settings.loading import flatten
from coordinator.settings.tree import RunSettings, SettingsError
from coordinator.start.inputs import base_model_dir, engine_of
from coordinator.start.start import last_start
from rollout.engines.model_dir import model_files, policy_digest, weight_files
from rollout.storage import hashing, known_files
from trainer.documents import TrainResult

LOOK_S = 0.2
END_S = 60.0
"""How long nodes may take to end when the iteration is there."""
LOGPROBS_TOLERANCE = 1e-5
"""How far logprobs of samples that are made again on other hardware may lie from the run's, in nats."""
TOLERANCE = 0.1
"""How far weights that are trained again on other hardware may end from the published ones, as a fraction of
the way from the policy before."""
NUMBERS = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "BOOL": "?"},
}
"""Number types of weights, and of buffers beside them, as numpy reads their bits."""


class IterationNotRepeatable(RuntimeError):
    """An iteration could not be made again; the message says why."""


def verify(root: Path, iteration: int | None, files_only: bool) -> int:
    """Print what holds and what does not; return 0 if all does, else 1. SettingsError if there is no run, or
    no checkpoint of `iteration`.
    """
    run = Run(root)
    checkpoints = published.checkpoints(run.run_dir)
    if not checkpoints:
        raise SettingsError(f"--log-path {root}: there is no checkpoint yet, so there is nothing to verify")
    if iteration not in (None, *checkpoints):
        choices = f"there are {', '.join(map(str, checkpoints))}"
        raise SettingsError(f"--iteration {iteration}: {root} has no such checkpoint; {choices}")
    record = last_start(root)
    if record is None:
        raise SettingsError(f"--log-path {root}: no master has started here yet")
    base = base_model_dir(RunSettings.published(record.settings), run.run_dir)
    base_policy = policy_digest(known_files.checksums(base, model_files(base)))
    chain = read_chain(run.run_dir, base_policy, [iteration] if iteration else ())
    print("\n".join(_described(chain)), flush=True)
    if chain.broken or files_only:
        return int(bool(chain.broken))
    try:
        return 0 if _comes_out_again(run, iteration or checkpoints[-1], record, base) else 1
    except IterationNotRepeatable as error:
        print(f"run: {plain(str(error))}", file=sys.stderr)
        return 1


def _described(chain: Chain) -> Iterator[str]:
    holdings = (("checkpoints", chain.checkpoints), ("batches", chain.batches), ("samples", chain.samples))
    counts = ", ".join(f"{name} ({len(numbers)})" for name, numbers in holdings)
    yield f"digests of {counts}: " + ("NOT ALL FIT" if chain.broken else "each fits the next")
    yield from (f"  {problem}" for problem in chain.broken)


def _comes_out_again(run: Run, number: int, record: EpochRecord, base: Path) -> bool:
    """Make an iteration again, print how it compares, and return whether it came out the same: to the bit
    where the machine allows that, else its weights within TOLERANCE.
    """
    run_dir = run.run_dir
    result = published.read_result(run_dir.checkpoint(number))
    manifest = published.read_manifest(run_dir, "train", number)
    words = _as_it_was(result, record.settings)
    samples_differ = False
    if _repeats_samples(record.settings, number, manifest):
        with _fork(run_dir, number) as again:
            _make(again.root, number, ["rl_phase=both", *words])
            repeated = Run(again.root)
            parting = compare(run, repeated, since=number).parting
            if parting is None:
                print(f"iteration {number}, made again here from its samples on: equal bit for bit")
                return True
            noise = logprobs_apart(run.trajectories(number), repeated.trajectories(number))
        samples_differ = parting.phase < Phase.TRAIN_DATA
        is_sampled = parting.phase == ROLLOUT_OF["train"]
        if is_sampled and noise is not None and noise <= LOGPROBS_TOLERANCE:
            samples_differ = False
            print(
                f"iteration {number}, made again here: tokens and rewards are the same, logprobs {noise:.0e} "
                f"apart (up to {LOGPROBS_TOLERANCE:.0e} counts as the same: processors round differently)"
            )
        else:
            phase = f"{parting.phase.value} ({parting.phase.label})"
            print(f"iteration {number}, made again here: other in phase {phase}: {parting.text}")
    if manifest is None:
        print(f"iteration {number} cannot be made again: its samples are not kept")
        return True
    with _fork(run_dir, number) as again:
        for kind in ROLLOUT_OF:
            link_tree(run_dir.trajectories(kind, number), again.trajectories(kind, number), Forked())
        _make(again.root, number, ["rl_phase=update", *words])
        parting = next(training_parting(number, run_dir, again), None)
        if parting is None:
            print(f"iteration {number}, trained again here on its samples: weights equal bit for bit")
            return not samples_differ
        trained_again = again.checkpoint(number)
        distance, way = _distance(
            run_dir.checkpoint(number), trained_again, run_dir.checkpoint(number - 1) if number > 1 else base
        )
    print(
        f"iteration {number}, trained again here on its samples: {parting.text}; the weights lie "
        f"{distance:.1e} from those of the run, on a way of {way:.1e} (up to {TOLERANCE:g} of it counts as "
        "the same)"
    )
    return distance <= TOLERANCE * way and not samples_differ


def _repeats_samples(settings: dict[str, Any], number: int, manifest: dict[str, Any] | None) -> bool:
    """Return whether the iteration can come out the same from its samples on: they are of the policy before
    it, by an engine that repeats them.
    """
    if manifest is None or "rescored" in manifest or manifest["origin"]["policy_iteration"] != number - 1:
        return False
    return engine_of(RunSettings.published(settings), MASTER).repeats_samples


def _as_it_was(result: TrainResult, settings: dict[str, Any]) -> list[str]:
    """Return, as words of `run`, the settings with which the iteration was trained where the last start had
    others, and nothing that leaves this machine.
    """
    trained = dict(flatten({"trainer": result.settings.model_dump(mode="json")}))
    started = dict(flatten({"trainer": settings["trainer"]}))
    if started["trainer.layout"] == "auto":  # then machines choose it
        del trained["trainer.layout"]
    words = [
        f"{key}={json.dumps(value)}" for key, value in trained.items() if started.get(key, value) != value
    ]
    words += [] if result.iterations is None else [f"iterations={result.iterations}"]
    return ["metrics.sinks=[]", *words]


@contextlib.contextmanager
def _fork(run_dir: RunDir, number: int) -> Generator[RunDir]:
    """Make a fork of the run that begins with the iteration, beside the run; remove it at the end."""
    root = run_dir.root
    try:
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=f".{root.name}.verify.") as temporary:
            again = RunDir(Path(temporary) / root.name)
            fork(root, number, again.root)
            yield again
    except OSError as error:
        raise SettingsError(
            f"no place to make iteration {number} again: {error}; leave that out by --files-only"
        ) from None


def _make(root: Path, number: int, words: list[str]) -> None:
    """Run the nodes of a fork on this machine until the iteration is finished; their lines of it go to
    stderr. Raises IterationNotRepeatable if they end before.
    """

    def is_finished() -> bool:
        return any(line["iteration"] == number for line in published.metrics_lines(RunDir(root)))

    def show(line: str) -> None:
        if f" it {number} " in line and not is_finished():
            print(plain(line), file=sys.stderr)

    argv = [*run_command("local", "--log-path", str(root), "--reset-settings", "cluster.place"), *words]
    with Children() as children:
        environment = {STARTED_BY: shlex.join(["run", *sys.argv[1:]])}
        nodes = children.start("nodes", argv, env=environment, echo=show)
        while nodes.poll() is None and not is_finished():
            time.sleep(LOOK_S)
        nodes.terminate()
        nodes.wait(END_S)
    if not is_finished():
        raise IterationNotRepeatable(
            f"iteration {number} could not be made again: {_reason(nodes.tail().splitlines())}"
        )


def _reason(lines: list[str]) -> str:
    """Return the last of the lines of a run that says why it has ended, if there is one, else the last."""
    errors = [line for line in lines if "error: " in line or line.startswith("run: ")]
    return next(reversed(errors or lines), "").removeprefix("run: ")


def _distance(first: Path, second: Path, before: Path) -> tuple[float, float]:
    """Return how far two models lie from each other, and the first one from the model before it, as norms
    over all weights. Tensors that the model before lacks count whole, as adapters at their start.
    """
    distance = way = 0.0
    second_places, begun = _places(second), _places(before)
    for name, place in _places(first).items():
        values = _array(*place)
        distance += (
            float(np.sum((values - _array(*second_places[name])) ** 2)) if name in second_places else math.inf
        )
        way += float(np.sum((values - _array(*begun[name])) ** 2 if name in begun else values**2))
    return math.sqrt(distance), math.sqrt(way)


def _places(directory: Path) -> dict[str, tuple[Path, str, int, int]]:
    return {
        name: (directory / file, dtype, begin, end)
        for file in weight_files(directory)
        for name, (dtype, _, begin, end) in tensor_places(directory / file).items()
    }


def _array(path: Path, dtype: str, begin: int, end: int) -> NDArray[np.float64]:
    bits = np.frombuffer(b"".join(hashing.pieces(path, begin, end)), dtype=NUMBERS[dtype])
    if dtype == "BF16":  # the upper half of a float32
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)
