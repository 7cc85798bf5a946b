"""Try every family of decoders that transformers has, and write docs/models.md.

    .venv/bin/python -m scripts.models [--families qwen3,gpt_oss] [--vllm PYTHON] [--page FILE]

For each family a tiny random model is made, with layers of each kind that the family has. In a forked
process with a deadline it is packed, trained in each layout, and served; see COLUMNS. `--vllm`: an
interpreter that has vLLM for CPUs; heads are then 32 wide, which its attention wants. With `--families` the
page is printed, else it is written. Progress goes to stderr.
"""

import argparse
import json
import logging
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers

from rollout.engines.embedded.batch import Generation
from rollout.engines.embedded.engine import TorchEngine
from rollout.engines.model_dir import WeightsError
from scripts.tiny_models import CONTEXT, FAMILIES, WIDTHS, NotTiny, make_batch, make_tiny_model
from trainer.batch.packing import Bundle, Microbatch, Packing, fill, plan_step
from trainer.model.lora import LoraError
from trainer.model.model import Learner, build_learner
from trainer.model.parallel import LayoutError
from trainer.model.token_logprobs import UnsupportedModel
from trainer.settings import LoraSettings, TrainerSettings
from trainer.update.step import StepStats, train

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
CPU = torch.device("cpu")
LIMIT_S = 120.0
"""For one column of one family."""
CLOSE = 1e-3
"""The largest error of a logprob, or of a gradient's norm as a fraction, that float32's rounding may make."""
RANKS = 2


class Differs(ValueError):
    """It runs, and computes something else."""


class Failed(RuntimeError):
    """What another process said before it failed."""


SAY_IT_ALL = (Differs, Failed, LayoutError, LoraError, NotTiny, UnsupportedModel, WeightsError)
"""Errors whose words are enough without their class."""


# The columns: each takes the directory of a model and returns a cell, or raises what the cell then says.


def rows(directory: Path) -> str:
    """Return how sequences are kept apart in a row; the largest error of a logprob in the batch's rows."""
    learner = build_learner(directory, CPU, TrainerSettings(share_prompts=False))
    packing = learner.arrangement.packing
    error = _error(learner, packing)
    return f"{learner.arrangement.apart.value if packing.several else 'one a row'}, {_small(error)}"


def shared_prompts(directory: Path) -> str:
    """Return whether prompts are shared; the largest error of a logprob then."""
    learner = build_learner(directory, CPU, TrainerSettings())
    if not learner.arrangement.packing.pairs_per_token:
        return "no"
    return f"yes, {_small(_error(learner, Packing(learner.arrangement.packing.several, 1e6)))}"


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


def lora(directory: Path) -> str:
    """Take a step with adapters of all linear layers, routers excepted: how many modules have one."""
    settings = TrainerSettings(lora=LoraSettings(rank=4))
    learner = build_learner(directory, CPU, settings)
    (step,) = _train(learner, settings)
    if not step.grad_norm > 0:
        raise Differs(f"the gradient's norm is {step.grad_norm}")
    return f"{len(learner.parameters) // 2} modules"


def embedded_engine(directory: Path) -> str:
    """Generate for prompts of two lengths at once: the largest error of its logprobs."""
    engine = TorchEngine(directory, dtype=torch.float32, max_batch=8)
    engine.start()
    prompts = [make_batch().token_ids[:length].tolist() for length in (16, 5)]
    asked = [
        engine.submit(Generation(prompt, 2, 24, temperature=1.0, top_p=1.0, stop=(), seed=0))
        for prompt in prompts
    ]
    learner = build_learner(directory, CPU, TrainerSettings())
    error = 0.0
    for prompt, future in zip(prompts, asked, strict=True):
        for row in future.result(LIMIT_S):
            scores = _scores(learner, [*prompt, *row.token_ids])[len(prompt) - 1 :]
            error = max(error, float(np.abs(scores - np.array(row.logprobs)).max()))
    return _small(error)


def vllm(directory: Path, python: str) -> str:
    """vLLM on a CPU scores the tokens of a prompt: the largest error of its logprobs."""
    token_ids = make_batch().token_ids[:30].tolist()
    script = (
        "import json, sys; from vllm import LLM, SamplingParams\n"
        f"llm = LLM(sys.argv[1], dtype='float32', enforce_eager=True, max_model_len={CONTEXT}, "
        "enable_prefix_caching=False)\n"
        "ids = json.loads(sys.argv[2])\n"
        "out = llm.generate({'prompt_token_ids': ids}, SamplingParams(max_tokens=1, prompt_logprobs=0))\n"
        "found = out[0].prompt_logprobs[1:]\n"
        "print(json.dumps([one[k].logprob for one, k in zip(found, ids[1:])]))\n"
    )
    done = subprocess.run(
        [python, "-c", script, str(directory), json.dumps(token_ids)],
        env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        raise RuntimeError(errors[-1].strip() if errors else done.stderr[-200:])
    learner = build_learner(directory, CPU, TrainerSettings())
    found = np.array(json.loads(done.stdout.splitlines()[-1]))
    return _small(float(np.abs(_scores(learner, token_ids) - found).max()))


COLUMNS: dict[str, Callable[[Path], str]] = {
    "rows": rows,
    "shared prompts": shared_prompts,
    "sharded": sharded,
    "tensor parallel": tensor_parallel,
    "LoRA": lora,
    "embedded engine": embedded_engine,
}


def _small(error: float) -> str:
    if not error < CLOSE:
        raise Differs(f"error {error:.1e}")
    return f"{error:.0e}" if error else "0"


@torch.no_grad()
def _error(learner: Learner, packing: Packing) -> float:
    """Return the largest error of a logprob in the batch's rows, against each sequence on its own."""
    batch = make_batch()

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


@torch.no_grad()
def _scores(learner: Learner, token_ids: list[int]) -> np.ndarray[Any, Any]:
    """Return the learner's logprobs of all tokens but the first."""
    ids = np.array(token_ids)
    nothing = np.zeros(len(ids) - 1, np.float32)
    return learner.logprobs(
        Microbatch(
            token_ids=ids[None],
            position_ids=np.arange(len(ids))[None],
            scored_at=np.arange(len(ids) - 1),
            targets=ids[1:],
            engine_logprobs=nothing,
            advantages=nothing,
            sequences=np.zeros(len(ids) - 1, np.int64),
            tokens=len(ids),
            temperatures=nothing + 1,
        )
    )[0].numpy()


def _train(learner: Learner, settings: TrainerSettings) -> list[StepStats]:
    weights = [1.0] * learner.layout.world_size
    return train(
        learner,
        make_batch(),
        settings,
        max_tokens=40,
        rank_weights=weights,
        report=lambda line: None,
    )


def _steps(directory: Path, settings: dict[str, Any]) -> list[StepStats]:
    chosen = TrainerSettings.model_validate({"max_tokens_per_microbatch": 128, **settings})
    return _train(build_learner(directory, CPU, chosen), chosen)


def _in_ranks(directory: Path, settings: dict[str, Any]) -> list[StepStats]:
    """Return the steps of two forked processes; raises Failed with the words of the one that failed first."""
    said: Any = None
    with tempfile.TemporaryDirectory() as meeting:
        found = [
            _forked(partial(_rank, directory, settings, Path(meeting) / "file", rank))
            for rank in range(RANKS)
        ]
        for pipe, process in found:
            # Less than the column's own deadline, so that no rank outlives this process.
            in_time = pipe.poll(LIMIT_S / 2)
            kind, said = pipe.recv() if in_time else ("failed", f"a rank was not done in {LIMIT_S / 2:.0f} s")
            if kind == "failed":
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


# Processes.


def _forked(work: Callable[[], Any]) -> tuple[Connection, Any]:
    """Do `work` in a forked process, which saves importing torch; its pipe gets ("done" or "failed", _)."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(work, theirs))
    process.start()
    theirs.close()
    return ours, process


def _report(work: Callable[[], Any], pipe: Connection) -> None:
    try:
        pipe.send(("done", work()))
    except Exception as error:  # whatever a family raises is what its cell says
        said = " ".join(str(error).split())
        pipe.send(("failed", said if isinstance(error, SAY_IT_ALL) else f"{type(error).__name__}: {said}"))
    pipe.close()
    os._exit(0)  # threads of an engine, or of a process group whose other rank has failed


def try_column(column: Callable[[Path], str], directory: Path) -> str:
    """Return the cell of a column, from a process of its own that may hang or die."""
    pipe, process = _forked(partial(column, directory))
    try:
        kind, said = pipe.recv() if pipe.poll(LIMIT_S) else ("failed", f"not done within {LIMIT_S:.0f} s")
    except EOFError:
        kind, said = "failed", "the process died"
    process.kill()
    process.join()
    return said if kind == "done" else f"**no**: {said.replace(f'{directory}: ', '')}"


def try_family(family: str, directory: Path, python: str | None) -> dict[str, str] | str:
    """Return the cells of a family by column, or why there is no model to try."""
    wide = {name: 4 * width for name, width in WIDTHS.items()} if python else {}
    pipe, process = _forked(partial(make_tiny_model, family, directory, **wide))
    kind, said = pipe.recv() if pipe.poll(LIMIT_S) else ("failed", "not made in time")
    process.kill()
    process.join()
    if kind == "failed":
        return said
    columns = COLUMNS | ({"vLLM": partial(vllm, python=python)} if python else {})
    cells: dict[str, str] = {}
    for name, column in columns.items():
        cells[name] = try_column(column, directory)
        if "train a causal decoder" in cells[name]:
            return cells[name].removeprefix("**no**: ")
    return cells


def _try_all(
    families: Sequence[str], python: str | None, jobs: int
) -> Iterator[tuple[str, dict[str, str] | str]]:
    """Each family with what try_family returns, as they come; `jobs` at a time."""
    waiting = list(families)
    running: dict[Any, tuple[str, Any, float]] = {}
    with tempfile.TemporaryDirectory(prefix="flagpost-models-") as root:
        while waiting or running:
            while waiting and len(running) < jobs:
                family = waiting.pop(0)
                pipe, process = _forked(partial(try_family, family, Path(root) / family, python))
                running[pipe] = family, process, time.monotonic()
            ready: list[Any] = wait(list(running))
            for pipe in ready:
                family, process, started = running.pop(pipe)
                _kind, found = pipe.recv()
                process.join()
                shutil.rmtree(Path(root) / family, ignore_errors=True)
                took = time.monotonic() - started
                left = len(waiting) + len(running)
                print(f"{family}: {found} ({took:.0f} s); {left} to go", file=sys.stderr)
                yield family, found


# The page.


HEAD = """# Models

Every model type of `AutoModelForCausalLM` in transformers, tried on {day} with {versions}.
`scripts/models.py` writes this page. It makes a tiny random model of each family, in float32 on a CPU, and
tries it in each way; `tests/scripts/test_models.py` tries some of them again. A number is an error that
float32's rounding may make; **no** stands before what went wrong. The page says nothing of speed or of GPUs.

- **rows**: what keeps sequences apart that share a row ([training.md](training.md#batches)): positions, or
  masks, or that there is one a row; and the largest error of a logprob against the sequence on its own.
- **shared prompts**: the same, where the prompt is computed once for several samples.
- **sharded**: an optimizer step with FSDP2 over two processes: the error of the gradient's norm (a fraction)
  and of the loss. **tensor parallel**: the same, with each layer on two processes.
- **LoRA**: a step with adapters on all linear layers but routers of experts; how many modules have one.
- **embedded engine**: it generates for prompts of two lengths at once; the largest difference of its logprobs
  from the trainer's. **vLLM**: the same for the tokens of a prompt, on a CPU, with heads 32 wide.

"""


def page(tried: dict[str, dict[str, str] | str], versions: str) -> str:
    """Return the page's text, from what try_family returned for each family."""
    names = [*COLUMNS, "vLLM"]
    lines = [HEAD.format(day=date.today(), versions=versions).rstrip("\n"), ""]
    lines += [f"| family | {' | '.join(names)} |", f"|{'---|' * (len(names) + 1)}"]
    for family, cells in tried.items():
        if isinstance(cells, dict):
            shown = [_cell(cells.get(name, "not tried")) for name in names]
            lines.append(f"| {family} | {' | '.join(shown)} |")
    lines += ["", "## Not tried, or refused", "", "| family | why |", "|---|---|"]
    lines += [f"| {family} | {_cell(why)} |" for family, why in tried.items() if isinstance(why, str)]
    return "\n".join([*lines, ""])


def _cell(text: str, longest: int = 160) -> str:
    """Return the text for a cell of a table, cut if it is long."""
    plain = re.sub(r"trainer\.tensor_parallel_size=\d+ and \w+: (.*); use 1", r"\1", text)
    plain = plain.replace("|", "/").replace("<", "(").replace(">", ")").replace("\n", " ")
    return plain if len(plain) <= longest else f"{plain[:longest]} ..."


def main() -> None:
    """Try the families and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", help="some of them, separated by commas; default: all")
    parser.add_argument("--vllm", metavar="PYTHON", help="an interpreter that has vLLM for CPUs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="families at a time")
    parser.add_argument("--page", type=Path, default=PAGE)
    options = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    families = options.families.split(",") if options.families else list(FAMILIES)
    tried = dict(_try_all(families, options.vllm, options.jobs))
    made = f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"
    text = page({family: tried[family] for family in families}, made)
    if options.families:
        print(text)
    else:
        options.page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
