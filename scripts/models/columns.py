"""Try a family in each way: a column takes the directory of a model and returns a cell, or raises why not."""

import json
import socket
import tempfile
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollout.engines.embedded.batch import Generation
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.picture_input import PictureReader
from rollout.trajectory import Picture
from scripts.models.forked import LIMIT_S, Differs, Failed, forked
from scripts.tiny_models import make_batch
from scripts.tiny_seeing_models import IMAGES, has_pictures, make_seeing_batch
from trainer.batch.batch import Batch
from trainer.batch.packing import Bundle, Microbatch, Packing, fill, plan_step
from trainer.model.learner import Learner, build_learner
from trainer.model.pictures import RunPictures
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import train
from trainer.update.step_stats import StepStats

CPU = torch.device("cpu")
CLOSE = 1e-3
"""The largest error of a logprob, or of a gradient's norm as a fraction, that float32's rounding may make."""
RANKS = 2


def rows(directory: Path) -> str:
    """Return how sequences are kept apart in a row; the largest error of a logprob in the batch's rows."""
    learner = _learner(directory, TrainerSettings(share_prompts=False))
    packing = learner.arrangement.packing
    error = _error(learner, _batch(directory), packing)
    rows = learner.arrangement.separation.value if packing.several else "alone"
    return f"{rows}, {_small(error)}".removesuffix(", 0")


def shared_prompts(directory: Path) -> str:
    """Return the largest error of a logprob where prompts are shared; `no` where they are not."""
    learner = _learner(directory, TrainerSettings())
    if not learner.arrangement.packing.pairs_per_token:
        return "no"
    packing = Packing(learner.arrangement.packing.several, 1e6)
    return _small(_error(learner, _batch(directory), packing))


def sharded(directory: Path, **settings: Any) -> str:
    """Take a step with FSDP2 over two processes: the error of the gradient's norm (a fraction) and of the
    loss.
    """
    settings = {"layout": "sharded", **settings}
    alone, together = _steps(directory, {}), _in_ranks(directory, settings)
    errors = [
        abs(b.grad_norm - a.grad_norm) / a.grad_norm + abs(b.loss - a.loss)
        for a, b in zip(alone, together, strict=True)
    ]
    return _small(max(errors))


tensor_parallel = partial(sharded, tensor_parallel_size=2)
context_parallel = partial(sharded, layout="replicated", context_parallel=2)


def lora(directory: Path) -> str:
    """Take a step with adapters of all linear layers, routers excepted: how many modules have one."""
    settings = TrainerSettings(lora=LoraSettings(rank=4))
    learner = _learner(directory, settings)
    (step,) = _train(learner, _batch(directory), settings)
    if not step.grad_norm > 0:
        raise Differs(f"the gradient's norm is {step.grad_norm}")
    return f"{len(learner.parameters) // 2}"


def embedded_engine(directory: Path) -> str:
    """Generate for prompts of two lengths at once: the largest error of its logprobs."""
    engine = EmbeddedEngine(directory, dtype=torch.float64, max_batch=8)
    engine.start()
    reader = PictureReader(directory) if has_pictures(directory) else None
    asked: list[Any] = []
    for prompt, pictures in _shown_prompts(directory):
        shown = [
            (reader.read((directory / IMAGES / picture.digest).read_bytes()), picture.begin)
            for picture in pictures
            if reader
        ]
        generation = Generation(prompt, 2, 24, temperature=1.0, top_p=1.0, stop=(), seed=0, pictures=shown)
        asked.append((prompt, pictures, engine.submit(generation)))
    return _small(
        _largest_error(
            directory,
            (
                ([*prompt, *row.token_ids], row.logprobs, pictures)
                for prompt, pictures, future in asked
                for row in future.result(LIMIT_S)
            ),
        )
    )


def vllm(directory: Path, server: Path) -> str:
    """Generate the same with vLLM, before and after its weights are loaded anew and proved; `server` is the
    socket of scripts.models.vllm_server. The cell says so if vLLM takes transformers' code for the model.
    """
    expanded = _shown_prompts(directory)
    placeholder = PictureReader(directory).placeholder if has_pictures(directory) else 0
    prompts = [_contracted(prompt, pictures, placeholder) for prompt, pictures in expanded]
    shown = [[str(directory / IMAGES / one.digest) for one in pictures] for _, pictures in expanded]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(server))
        with connection.makefile("rw") as lines:
            lines.write(json.dumps({"model": str(directory), "prompts": prompts, "pictures": shown}) + "\n")
            lines.flush()
            answer = json.loads(lines.readline() or '{"failed": "the process died"}')
    if "failed" in answer:
        raise Failed(" ".join(answer["failed"].split()))
    scored: list[tuple[list[int], list[float], Sequence[Picture]]] = []
    for number, prompt, ids, logprobs in answer["rows"]:
        if prompt != expanded[number][0]:
            raise Failed("it puts other tokens in the place of a picture than the processor")
        scored.append(([*prompt, *ids], logprobs, expanded[number][1]))
    error = _small(_largest_error(directory, scored))
    return error if answer["through"] == "vLLM" else rf"{error}\*"


COLUMNS: dict[str, Callable[[Path], str]] = {
    "rows": rows,
    "shared prompts": shared_prompts,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
    "context parallel": context_parallel,
    "LoRA": lora,
    "embedded engine": embedded_engine,
}


def _small(error: float) -> str:
    if not error < CLOSE:
        raise Differs(f"error {error:.1e}")
    return f"{error:.0e}" if error else "0"


def _batch(directory: Path) -> Batch:
    return make_seeing_batch(directory) if has_pictures(directory) else make_batch()


def _learner(directory: Path, settings: TrainerSettings) -> Learner:
    learner = build_learner(directory, CPU, settings)
    if has_pictures(directory):
        learner.see(RunPictures(directory, directory / IMAGES), settings.share_prompts)
    return learner


@torch.no_grad()
def _error(learner: Learner, batch: Batch, packing: Packing) -> float:
    """Return the largest error of a logprob in the batch's rows, against each sequence on its own."""

    def by_token(microbatches: list[Microbatch]) -> dict[tuple[int, float], float]:
        scores: dict[tuple[int, float], float] = {}
        for one in microbatches:
            keys = zip(one.targets.tolist(), one.engine_logprobs.tolist(), strict=True)
            scores |= dict(zip(keys, learner.logprobs(one)[0].tolist(), strict=True))
        return scores

    ones = [Bundle([k], int(tokens)) for k, tokens in enumerate(batch.input_tokens)]
    wanted = by_token([fill(batch, [[one]]) for one in ones])
    found = by_token(plan_step(batch, range(len(batch)), [1.0], 0, 400, packing))
    return max(abs(wanted[key] - found[key]) for key in wanted)


def _prompts() -> list[list[int]]:
    return [make_batch().token_ids[:length].tolist() for length in (16, 5)]


def _contracted(prompt: list[int], pictures: Sequence[Picture], placeholder: int) -> list[int]:
    """Return a prompt with a single token in the place of each picture."""
    bounds = [0, *(bound for picture in pictures for bound in (picture.begin, picture.end)), len(prompt)]
    texts = [prompt[begin:end] for begin, end in zip(bounds[::2], bounds[1::2], strict=True)]
    return [*texts[0], *(token for text in texts[1:] for token in (placeholder, *text))]


def _shown_prompts(directory: Path) -> list[tuple[list[int], Sequence[Picture]]]:
    """Return prompts with the pictures in them."""
    if not has_pictures(directory):
        return [(prompt, ()) for prompt in _prompts()]
    batch = make_seeing_batch(directory)
    firsts = range(0, len(batch), len(batch) // 3)
    starts = [int(batch.offsets[k]) for k in firsts]
    lengths = [int(batch.loss_mask[start:].argmax()) for start in starts]
    return [
        (batch.token_ids[start : start + length].tolist(), batch.pictures[k])
        for k, start, length in zip(firsts, starts, lengths, strict=True)
    ]


def _largest_error(
    directory: Path, rows: Iterable[tuple[list[int], list[float], Sequence[Picture]]]
) -> float:
    """Return the largest error of an engine's logprobs, from the tokens of each row, the logprobs of its
    last ones, and its pictures.
    """
    learner = _learner(directory, TrainerSettings())
    errors = [
        np.abs(_scores(learner, token_ids, len(logprobs), pictures) - np.array(logprobs)).max()
        for token_ids, logprobs, pictures in rows
    ]
    return float(max(errors))


@torch.no_grad()
def _scores(
    learner: Learner, token_ids: list[int], count: int, pictures: Sequence[Picture]
) -> np.ndarray[Any, Any]:
    """Return the learner's logprobs of the last tokens."""
    ids = np.array(token_ids)
    nothing = np.zeros(count, np.float32)
    return learner.logprobs(
        Microbatch(
            token_ids=ids[None],
            position_ids=np.arange(len(ids))[None],
            scored_at=np.arange(len(ids) - 1 - count, len(ids) - 1),
            targets=ids[-count:],
            engine_logprobs=nothing,
            advantages=nothing,
            sequences=np.zeros(count, np.int64),
            tokens=len(ids),
            temperatures=nothing + 1,
            pictures=[(p.digest, p.begin, p.end - p.begin) for p in pictures] if learner.pictures else None,
        )
    )[0].numpy()


def _train(learner: Learner, batch: Batch, settings: TrainerSettings) -> list[StepStats]:
    weights = [1.0] * learner.layout.world_size
    return train(
        learner,
        batch,
        settings,
        max_tokens=40,
        rank_weights=weights,
        report=lambda line: None,
    )


def _steps(directory: Path, settings: dict[str, Any]) -> list[StepStats]:
    chosen = TrainerSettings.model_validate({"max_tokens_per_microbatch": 128, **settings})
    return _train(_learner(directory, chosen), _batch(directory), chosen)


def _in_ranks(directory: Path, settings: dict[str, Any]) -> list[StepStats]:
    """Return the steps of two forked processes; raises Failed with the words of the one that failed first."""
    said: Any = None
    with tempfile.TemporaryDirectory() as meeting:
        found = [
            forked(partial(_rank, directory, settings, Path(meeting) / "file", rank)) for rank in range(RANKS)
        ]
        for pipe, process in found:
            # Less than the column's own deadline, so that no rank outlives this process.
            in_time = pipe.poll(LIMIT_S / 2)
            done, said = pipe.recv() if in_time else (False, f"a rank was not done in {LIMIT_S / 2:.0f} s")
            if not done:
                for _pipe, other in found:
                    other.kill()
                raise Failed(said)
            process.join()
    return said


def _rank(directory: Path, settings: dict[str, Any], meeting: Path, rank: int) -> list[StepStats]:
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=limit
    )
    return _steps(directory, settings)
